"""Greedy completions of many prompts at once by the float32 reference, over a preallocated KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mtp_runtime.model import tokenizer as tok
from mtp_runtime.model.arch import rope_table
from mtp_runtime.model.mtp_layer import DeepseekV3


class _Cache:
    """Keys and values of every main layer for B rows of at most `length` tokens."""

    def __init__(self, model: DeepseekV3, rows: int, length: int) -> None:
        c = model.c
        self.keys = torch.zeros(c.num_hidden_layers, rows, c.num_attention_heads, length, c.qk_head_dim)
        self.values = torch.zeros(c.num_hidden_layers, rows, c.num_attention_heads, length, c.v_head_dim)


def _step(model: DeepseekV3, cache: _Cache, tokens: Tensor, real: Tensor, start: int) -> Tensor:
    """Next tokens [B] after tokens [B, T] at places start.. of the cache; real [B, length] hides padding."""
    end = start + tokens.shape[1]
    rope = tuple(table[start:end] for table in rope_table(model.c, end))
    places = torch.arange(end)
    visible = (places[None, :] <= places[start:, None]) & real[:, None, :end]
    # A padding place sees itself, so that no row of the softmax is empty.
    visible = (visible | (places[None, :] == places[start:, None]))[:, None]
    x = model.model.embed_tokens(tokens)
    for index, layer in enumerate(model.model.layers[:-1]):
        attention = layer.self_attn
        q, k, v = attention.project(layer.input_layernorm(x), rope)
        keys, values = cache.keys[index, :, :, :end], cache.values[index, :, :, :end]
        keys[:, :, start:], values[:, :, start:] = k, v
        scores = (q @ keys.transpose(-1, -2) * attention.scale).masked_fill(~visible, float("-inf"))
        x = x + attention.output(scores.softmax(-1) @ values)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.lm_head(model.model.norm(x[:, -1])).argmax(-1)


@torch.inference_mode()
def complete(
    model: DeepseekV3,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    progress: Callable[[Iterable[int]], Iterable[Any]] = iter,
) -> list[list[int]]:
    """Greedy completions of at most `new_tokens` tokens, cut after EOS.

    Prompts are padded on the left: rotary positions are relative, so the shift changes nothing.
    """
    longest = max(map(len, prompts))
    tokens = torch.full((len(prompts), longest + new_tokens), tok.EOS_ID)
    real = torch.ones_like(tokens, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) : longest] = torch.tensor(list(prompt))
        real[row, : longest - len(prompt)] = False
    cache = _Cache(model, *tokens.shape)
    tokens[:, longest] = _step(model, cache, tokens[:, :longest], real, 0)
    for place in progress(range(longest, longest + new_tokens - 1)):
        tokens[:, place + 1] = _step(model, cache, tokens[:, place : place + 1], real, place)
    rows = [row[longest:].tolist() for row in tokens]
    return [row[: row.index(tok.EOS_ID) + 1] if tok.EOS_ID in row else row for row in rows]
