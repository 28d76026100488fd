"""Verification where the target's token is known before the draft is looked at: accept while the draft equals it.

Two cases share the rule. Greedy: the token is the argmax. Keyed: the token was sampled from the target with random
numbers that depend on seed and position alone (`keyed.py`); a draft then changes only how fast the tokens come, never
which (drafter-invariant speculative decoding, arXiv 2408.07978). A one-hot draft x is accepted with probability p(x),
as often as token by token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtp_runtime.verify.batch import PLACEHOLDER, DraftBatch, Verdict, emit, prefix


def verify_exact(batch: DraftBatch, chosen: Tensor) -> Verdict:
    """chosen: [R] integer, the target's token of every row, bonus rows too."""
    if not batch.even:
        accepted = prefix(batch, batch.tokens == chosen[batch.draft_rows])
        return emit(batch, accepted, chosen[batch.first_row + accepted])
    # Accepted drafts equal the chosen tokens, so the output is the chosen row up to the first mismatch.
    rows = chosen.view(batch.size, batch.width + 1)
    hits = (rows[:, :-1] == batch.tokens.view(batch.size, batch.width)).cumprod(1)
    tokens = rows.to(torch.int32, copy=True)
    tokens[:, 1:].masked_fill_(hits == 0, PLACEHOLDER)
    return Verdict(tokens, hits.sum(1))


def verify_greedy(batch: DraftBatch, logits: Tensor) -> Verdict:
    """Greedy verification of logits [R, V]: one argmax pass and a few small operations."""
    return verify_exact(batch, torch.argmax(logits, dim=-1))
