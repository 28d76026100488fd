"""The CPU engine's side of the decode layer: FOLDER/engine.pt gets name -> [tokens, HEADS * VALUE] of every case.

Runs with the CPU engine's Python: vLLM's own splitting of kv_b_proj and value projection, our backend's decode between
them, blocks of 16 as that engine has them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from decode_cases import CASES, DTYPE, HEADS, LATENT, NOPE, ROPE, SCALE, VALUE, Case, numbers, paged
from vllm.model_executor.layers.attention.mla_attention import MLAAttention, split_kv_b_proj
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from mtp_runtime.adapters.vllm_cpu.attention import MtpMLAImpl, SegmentsMetadata

BLOCK_SIZE = 16


def decode(case: Case) -> torch.Tensor:
    """One step of the real requests, as the engine runs it: no padding slots."""
    found = numbers(case)
    cache, table = paged(found.latents, BLOCK_SIZE, shuffle=2)
    projection = torch.nn.Module()
    projection.weight = torch.nn.Parameter(found.weight, requires_grad=False)
    projection.quant_method = UnquantizedLinearMethod()
    to_keys, to_values = split_kv_b_proj(projection, DTYPE, LATENT, HEADS, NOPE, VALUE)
    sizes = {"kv_lora_rank": LATENT, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE}
    layer = MtpMLAImpl(
        HEADS, LATENT + ROPE, SCALE, 1, None, None, "auto", None, "decoder", None,
        q_lora_rank=None, qk_head_dim=NOPE + ROPE, kv_b_proj=projection, **sizes,
    )  # fmt: skip
    nope, rope = found.query.split([NOPE, ROPE], dim=-1)
    query = torch.bmm(nope.transpose(0, 1), to_keys.permute(1, 2, 0)).transpose(0, 1).contiguous()
    ends = list(torch.tensor(case.tokens).cumsum(0).tolist())
    lengths = torch.tensor(case.kv, dtype=torch.int32)
    step = SegmentsMetadata(table, lengths, None, actual_seq_lengths=ends, actual_seq_lengths_kv=list(case.kv))
    latent, _ = layer.forward_mqa((query, rope.contiguous()), cache, SimpleNamespace(decode=step), None)
    out = found.query.new_empty(len(found.query), HEADS * VALUE)
    plain = dict.fromkeys(
        ("is_aiter_triton_fp4_bmm_enabled", "is_aiter_triton_fp8_bmm_enabled", "is_amx_bmm_enabled"), False
    )
    owner = SimpleNamespace(num_heads=HEADS, W_UV=to_values.transpose(0, 1), **sizes, **plain)
    MLAAttention._v_up_proj(owner, latent, out)
    return out


if __name__ == "__main__":
    torch.save({name: decode(case) for name, case in CASES.items()}, Path(sys.argv[1]) / "engine.pt")
