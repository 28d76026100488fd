"""The real MLA layer of vllm-ascend on CPU: its constructor, its weights, `_forward_decode` in its forward context."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cpu_edge
import torch
import vllm_ascend.ops  # noqa: F401  before mla_v1, which alone is a circular import
from decode_cases import HEADS, LATENT, NOPE, ROPE, SCALE, VALUE, Case, Numbers, paged
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm_ascend.attention.attention_mask import AttentionMaskBuilder
from vllm_ascend.attention.attention_v1 import AscendAttentionState
from vllm_ascend.attention.mla_v1 import AscendMLADecodeMetadata, AscendMLAImpl, AscendMLAMetadata

BLOCK_SIZE = 128
MODEL = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": 64,
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
}


@functools.cache
def configuration() -> VllmConfig:
    """A small DeepSeek with its MTP layer, through the real platform."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        drafts = {"method": "mtp", "num_speculative_tokens": 3}
        arguments = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            max_model_len=4096,
            max_num_seqs=16,
            block_size=BLOCK_SIZE,
            speculative_config=drafts,
        )
        return arguments.create_engine_config()


def layer(weight: Tensor, heads: int = HEADS) -> AscendMLAImpl:
    """The real class and what it makes of kv_b_proj [heads * (NOPE + VALUE), LATENT]; q_b_proj is the identity."""
    cpu_edge.put()
    projection = torch.nn.Module()
    projection.weight = torch.nn.Parameter(weight, requires_grad=False)
    projection.quant_method = UnquantizedLinearMethod()
    with set_current_vllm_config(configuration()):
        made = AscendMLAImpl(
            heads, LATENT + ROPE, SCALE, 1, None, None, "auto", None, "decoder", None,
            q_lora_rank=MODEL["q_lora_rank"], kv_lora_rank=LATENT, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE,
            qk_head_dim=NOPE + ROPE, v_head_dim=VALUE, rotary_emb=None, q_b_proj=lambda query: (query,),
            kv_b_proj=projection, o_proj=None, layer_name="model.layers.0.self_attn",
        )  # fmt: skip
        made.process_weights_after_loading(weight.dtype)
    return made


def metadata(ends: Sequence[int], lengths: Sequence[int], table: Tensor) -> AscendMLAMetadata:
    """The real dataclasses, with the real mask; of a decode step and nothing else."""
    decode = AscendMLADecodeMetadata(
        input_positions=torch.zeros(ends[-1], dtype=torch.int64),
        block_table=table,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        max_seq_lens=max(lengths),
        seq_lens_list=list(lengths),
        actual_seq_lengths_q=list(ends),
        attn_mask=AttentionMaskBuilder(torch.device("cpu")).get_splitfuse_attn_mask(),
    )
    starts = torch.tensor([0, *ends])
    return AscendMLAMetadata(
        num_actual_tokens_pcp_padded=ends[-1],
        num_actual_tokens=ends[-1],
        slot_mapping=torch.full((ends[-1],), -1),
        query_start_loc=starts,
        seq_lens=decode.seq_lens,
        seq_lens_cpu=decode.seq_lens,
        block_tables=table,
        num_decodes=len(ends),
        num_decode_tokens=ends[-1],
        num_prefills=0,
        attn_state=AscendAttentionState.SpecDecoding,
        decode=decode,
    )


def step(case: Case, found: Numbers, shuffle: int) -> tuple[Tensor, Tensor, Tensor, AscendMLAMetadata]:
    """Padded queries [T, heads, 192], the two caches [blocks, 128, 1, D], the metadata, by our plan and with padding
    as our planner's buffers have it: cleared table rows, queries of zeros."""
    plan = case.plan
    cache, rows = paged(found.latents, BLOCK_SIZE, shuffle)
    table = torch.zeros(plan.graph.slots, rows.shape[1], dtype=torch.int32)
    table[: len(rows)] = rows
    query = found.query.new_zeros(plan.graph.tokens, *found.query.shape[1:])
    query[: plan.tokens] = found.query
    latent, rope = (part.contiguous() for part in cache.unsqueeze(2).split([LATENT, ROPE], dim=-1))
    return query, latent, rope, metadata(plan.actual_seq_lengths, plan.actual_seq_lengths_kv, table)


def forward(made: AscendMLAImpl, query: Tensor, latent: Tensor, rope: Tensor, meta: Any, **context: Any) -> Tensor:
    """[T, heads * VALUE]: absorption, attention and value projection of the real class, in its forward context."""
    with set_forward_context(meta, configuration()):
        for name, value in {"capturing": False, "is_draft_model": False, **context}.items():
            setattr(get_forward_context(), name, value)
        absorbed, position = made._q_proj_and_k_up_proj(query.flatten(1))
        return made._forward_decode(absorbed, position, latent, rope, BLOCK_SIZE, meta)
