"""DeepSeek-V3 in plain torch, for training and as the independent reference of the engines.

Source: the DeepSeek-V3 report (arXiv 2412.19437) and its published configuration. Parameter names are those of the
published checkpoints, so that a state dict is a checkpoint. Shapes: B sequences of T tokens, C hidden units, H heads.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 128  # queries that attention takes at a time


@dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv 2309.00071) as DeepSeek-V3 uses it; lengths in tokens."""

    factor: float = 8.0
    original_max_position_embeddings: int = 1024
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0


@dataclass(frozen=True)
class Config:
    """Architecture; the names are those of DeepSeek-V3's config.json."""

    vocab_size: int = 1024
    hidden_size: int = 128
    num_hidden_layers: int = 20
    num_attention_heads: int = 2
    q_lora_rank: int = 64
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 64
    v_head_dim: int = 64
    intermediate_size: int = 256
    moe_intermediate_size: int = 64
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    n_shared_experts: int = 1
    n_group: int = 4
    topk_group: int = 2
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 1
    num_nextn_predict_layers: int = 1
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 8192
    bos_token_id: int = 0
    eos_token_id: int = 1
    yarn: Yarn = field(default_factory=Yarn)

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def to_hf(self) -> dict[str, Any]:
        """The config.json that transformers and vLLM read."""
        own = asdict(self)
        yarn = own.pop("yarn")
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            **own,
            "num_key_value_heads": self.num_attention_heads,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "moe_layer_freq": 1,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "tie_word_embeddings": False,
            "rope_interleave": True,
            "rope_scaling": {"type": "yarn", "rope_type": "yarn", **yarn},
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }

    @staticmethod
    def from_hf(folder: Path) -> Config:
        """Read a config.json written by `to_hf`."""
        raw = json.loads((folder / "config.json").read_text())
        names = set(Config.__dataclass_fields__) - {"yarn"}
        yarn = {k: raw["rope_scaling"][k] for k in Yarn.__dataclass_fields__}
        return replace(Config(), **{k: raw[k] for k in names}, yarn=Yarn(**yarn))


def rope_table(config: Config, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin, each [length, rope_dim / 2], of YaRN's frequencies (its cos/sin factor is 1: mscale == all_dim)."""
    y, dim, base = config.yarn, config.qk_rope_head_dim, config.rope_theta
    freq = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)

    def turn(rotations: float) -> float:
        return dim * math.log(y.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(turn(y.beta_fast)), 0), min(math.ceil(turn(y.beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    freq = freq / y.factor * ramp + freq * (1 - ramp)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * freq
    return angles.cos(), angles.sin()


def softmax_scale(config: Config) -> float:
    """1 / sqrt(qk_head_dim), times YaRN's mscale squared."""
    mscale = 0.1 * config.yarn.mscale_all_dim * math.log(config.yarn.factor) + 1.0
    return mscale * mscale / math.sqrt(config.qk_head_dim)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate interleaved pairs of the last axis; cos and sin broadcast to [..., rope_dim / 2]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def _linear(n_in: int, n_out: int) -> nn.Linear:
    return nn.Linear(n_in, n_out, bias=False)


class Attention(nn.Module):
    """Multi-head latent attention, in its un-absorbed form."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c, heads = c, c.num_attention_heads
        self.q_a_proj = _linear(c.hidden_size, c.q_lora_rank)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.rms_norm_eps)
        self.q_b_proj = _linear(c.q_lora_rank, heads * c.qk_head_dim)
        self.kv_a_proj_with_mqa = _linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.rms_norm_eps)
        self.kv_b_proj = _linear(c.kv_lora_rank, heads * (c.qk_nope_head_dim + c.v_head_dim))
        self.o_proj = _linear(heads * c.v_head_dim, c.hidden_size)
        self.scale = softmax_scale(c)

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, C] -> q, k [B, H, T, qk_head_dim] and v [B, H, T, v_head_dim]."""
        c, (b, t, _) = self.c, x.shape
        cos, sin = rope
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(b, t, c.num_attention_heads, -1).transpose(1, 2)
        q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(b, t, c.num_attention_heads, -1).transpose(1, 2)
        k_nope, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], -1)
        k_rope = rotate(k_rope, cos, sin)[:, None].expand(-1, c.num_attention_heads, -1, -1)
        return torch.cat((q_nope, rotate(q_rope, cos, sin)), -1), torch.cat((k_nope, k_rope), -1), v

    def output(self, heads: Tensor) -> Tensor:
        return self.o_proj(heads.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = self.project(x, rope)
        # In chunks of queries, so that most of what the causal mask hides is never computed.
        chunks = []
        for start in range(0, x.shape[1], CHUNK):
            part = q[:, :, start : start + CHUNK]
            end = start + part.shape[2]
            scores = part @ k[:, :, :end].transpose(-1, -2) * self.scale
            hidden = torch.ones(part.shape[2], end, dtype=torch.bool).triu(start + 1)
            chunks.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v[:, :, :end])
        return self.output(torch.cat(chunks, 2))


class MLP(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = _linear(size, inner), _linear(size, inner), _linear(inner, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    """noaux_tc: sigmoid scores, a bias that only steers the choice, group-limited top-k, normalised weights."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.weight = nn.Parameter(torch.empty(c.n_routed_experts, c.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(c.n_routed_experts))
        self.load = torch.zeros(c.n_routed_experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, C] -> expert ids and weights, both [N, top-k]."""
        c = self.c
        scores = F.linear(x, self.weight).sigmoid()
        steered = (scores + self.e_score_correction_bias).detach()
        groups = steered.view(-1, c.n_group, c.n_routed_experts // c.n_group)
        best = groups.topk(2, -1).values.sum(-1).topk(c.topk_group, -1).indices
        allowed = torch.zeros_like(groups[..., 0]).scatter_(1, best, 1.0)
        masked = groups.masked_fill(allowed[..., None] == 0, float("-inf")).flatten(1)
        ids = masked.topk(c.num_experts_per_tok, -1).indices
        weights = scores.gather(1, ids)
        if self.training:
            self.load = torch.bincount(ids.flatten(), minlength=c.n_routed_experts).float()
        return ids, weights / weights.sum(-1, keepdim=True) * c.routed_scaling_factor


class MoE(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate = Gate(c)
        self.experts = nn.ModuleList(MLP(c.hidden_size, c.moe_intermediate_size) for _ in range(c.n_routed_experts))
        self.shared_experts = MLP(c.hidden_size, c.moe_intermediate_size * c.n_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        ids, weights = self.gate(flat)
        out = self.shared_experts(flat)
        for index, expert in enumerate(self.experts):
            rows, slot = (ids == index).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, slot, None])
        return out.view_as(x)


class Layer(nn.Module):
    def __init__(self, c: Config, dense: bool) -> None:
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c.hidden_size, c.intermediate_size) if dense else MoE(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope)
        return x + self.mlp(self.post_attention_layernorm(x))
