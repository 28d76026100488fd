"""Propose K drafts a request with one MTP layer.

The first pass takes all tokens of the target's step, rejected ones too, so that its shape does not depend on what was
accepted; the drafts then start at each request's last accepted token. Every further depth takes one token a request
through the same layer and its one KV cache, with positions, slots and KV lengths made anew from the position. Rejected
tokens leave stale KV behind their request's end, which the next step overwrites before anything reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mtp_runtime.graphs.padding import NO_SLOT


@dataclass
class DraftStep:
    """One pass of the MTP layer. T tokens of B requests.

    input_ids [T] int32: for each position, the token *after* it; positions [T] int64; hidden_states [T, H]: the
    target's, or those of the depth before; slot_mapping [T] int64; block_table [B, P] int32; ends: prefix sums of the
    requests' tokens; kv: their KV lengths, these tokens included.
    """

    input_ids: Tensor
    positions: Tensor
    hidden_states: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    ends: list[int]
    kv: list[int]


class Drafter(Protocol):
    """An MTP layer in some engine."""

    def run(self, step: DraftStep, depth: int) -> tuple[Tensor, Tensor]:
        """[T, H] twice: what the head reads, and what the next depth takes as hidden states."""

    def pick(self, hidden_states: Tensor) -> Tensor:
        """Drafts [B] from [B, H]."""


def prepare(
    target: DraftStep,
    next_token_ids: Tensor,
    last: Tensor,
) -> DraftStep:
    """The first pass: the target's own step with its tokens shifted by one.

    target: the step as the target ran it, with its hidden states; next_token_ids [B]: what was sampled; last [B]: index
    of each request's last accepted token among the T.
    """
    shifted = target.input_ids.roll(-1)
    shifted[last.long()] = next_token_ids.to(shifted.dtype)
    return DraftStep(
        shifted,
        target.positions,
        target.hidden_states,
        target.slot_mapping,
        target.block_table,
        target.ends,
        target.kv,
    )


def deepen(
    drafts: Tensor, hidden_states: Tensor, positions: Tensor, block_table: Tensor, block_size: int, max_len: int
) -> DraftStep:
    """The pass of the next depth: one token a request.

    drafts [B], hidden_states [B, H]: of the depth before; positions [B]: where the depth before stood. Past max_len a
    draft has no place: it is computed at position 0 without writing KV, and no scheduler takes it.
    """
    following = positions + 1
    inside = following < max_len
    place = torch.where(inside, following, 0)
    blocks = block_table.gather(1, (place // block_size)[:, None])[:, 0].long()
    slots = torch.where(inside, blocks * block_size + place % block_size, NO_SLOT)
    kv = (place + 1).tolist()
    return DraftStep(drafts.int(), place, hidden_states, slots, block_table, list(range(1, len(kv) + 1)), kv)


def propose(drafter: Drafter, step: DraftStep, last: Tensor, k: int, block_size: int, max_len: int) -> list[Tensor]:
    """K drafts a request, one tensor [B] a depth. k >= 1; step and last as `prepare` makes and takes them."""
    logit_states, states = drafter.run(step, 0)
    last = last.long()
    positions = step.positions[last]
    drafts = [drafter.pick(logit_states[last])]
    states = states[last]
    for depth in range(1, k):
        deeper = deepen(drafts[-1], states, positions, step.block_table, block_size, max_len)
        logit_states, states = drafter.run(deeper, depth)
        drafts.append(drafter.pick(logit_states))
        positions = positions + 1
    return drafts
