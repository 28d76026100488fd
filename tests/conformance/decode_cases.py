"""Decode steps of one MLA layer, for two packages: the same weights, queries and latents on both sides.

Imports torch and our planner alone, so that it runs beside vllm-ascend and beside the CPU engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtp_runtime.graphs.planner import Graph, Plan, plan

HEADS, LATENT, ROPE, NOPE, VALUE = 8, 512, 64, 128, 128
SCALE = (NOPE + ROPE) ** -0.5
DTYPE = torch.bfloat16
SPARE_BLOCKS = 3
"""Blocks of the cache that no request owns."""
GARBAGE = 1e4
"""What they, and the unused end of each last block, hold: a read of it shows in any result."""


@dataclass(frozen=True)
class Case:
    """tokens, kv: of each real request; slots: of the graph; width: K + 1."""

    tokens: tuple[int, ...]
    kv: tuple[int, ...]
    slots: int
    width: int

    @property
    def plan(self) -> Plan:
        return plan(self.tokens, self.kv, Graph(self.slots, self.width))


CASES = {
    "K=1, every request with its draft": Case((2, 2, 2, 2), (2, 17, 128, 300), 4, 2),
    "K=1, sixteen fresh requests, two slack slots": Case((1,) * 16, tuple(range(1, 130, 8))[:16], 18, 2),
    "K=1, ragged, slack": Case((2, 1, 2, 1), (129, 1, 256, 33), 6, 2),
    "K=2, ragged, slack": Case((3, 1, 2, 3), (3, 140, 257, 64), 6, 3),
    "K=3, every request with its drafts": Case((4, 4, 4), (4, 131, 260), 3, 4),
    "K=3, ragged, slack": Case((1, 4, 2, 3, 1), (1, 128, 2, 389, 77), 9, 4),
}


@dataclass(frozen=True)
class Numbers:
    """weight [HEADS * (NOPE + VALUE), LATENT], kv_b_proj's; query [tokens, HEADS, NOPE + ROPE], rope applied;
    latents: [kv, LATENT + ROPE] of each request, rope applied. All DTYPE."""

    weight: Tensor
    query: Tensor
    latents: list[Tensor]


def numbers(case: Case) -> Numbers:
    """The same in every process."""
    source = torch.Generator().manual_seed(1 + sum(case.kv) * case.width)

    def normal(*shape: int, size: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=source) * size).to(DTYPE)

    weight = normal(HEADS * (NOPE + VALUE), LATENT, size=LATENT**-0.5)
    # Latents large enough that scores differ and a wrong mask shows.
    return Numbers(weight, normal(sum(case.tokens), HEADS, NOPE + ROPE), [normal(n, LATENT + ROPE) for n in case.kv])


def paged(latents: list[Tensor], block_size: int, shuffle: int) -> tuple[Tensor, Tensor]:
    """A cache [blocks, block_size, LATENT + ROPE] and its block table [requests, P] int32.

    shuffle: which order the blocks lie in. Everything that no request owns is GARBAGE.
    """
    counts = [-(-len(one) // block_size) for one in latents]
    total = sum(counts) + SPARE_BLOCKS
    order = torch.randperm(total, generator=torch.Generator().manual_seed(shuffle)).tolist()
    cache = torch.full((total, block_size, LATENT + ROPE), GARBAGE, dtype=DTYPE)
    table = torch.zeros(len(latents), max(counts), dtype=torch.int32)
    for row, (count, latent) in enumerate(zip(counts, latents, strict=True)):
        for column in range(count):
            block = table[row, column] = order.pop()
            part = latent[column * block_size : (column + 1) * block_size]
            cache[block, : len(part)] = part
    return cache, table


def truth(case: Case, found: Numbers) -> Tensor:
    """[tokens, HEADS * VALUE] float64: keys and values of every head written out, nothing absorbed, one token at a
    time."""
    weight = found.weight.double().view(HEADS, NOPE + VALUE, LATENT)
    rows, first = [], 0
    for count, kv, latent in zip(case.tokens, case.kv, found.latents, strict=True):
        exact = latent.double()
        keys = torch.einsum("hdl,sl->hsd", weight[:, :NOPE], exact[:, :LATENT])
        keys = torch.cat((keys, exact[:, LATENT:].expand(HEADS, -1, -1)), dim=-1)
        values = torch.einsum("hdl,sl->hsd", weight[:, NOPE:], exact[:, :LATENT])
        for token in range(count):
            seen = kv - count + 1 + token
            scores = torch.einsum("hd,hsd->hs", found.query[first + token].double(), keys[:, :seen]) * SCALE
            rows.append(torch.einsum("hs,hsd->hd", scores.softmax(-1), values[:, :seen]).flatten())
        first += count
    return torch.stack(rows)
