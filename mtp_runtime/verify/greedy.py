"""Greedy verification: accept while the draft is the target's argmax."""

from __future__ import annotations

import torch

from mtp_runtime.verify.batch import DraftBatch, Verdict, accepted_prefix, emit, row_after_prefix


def verify_greedy(batch: DraftBatch, target_argmax: torch.Tensor) -> Verdict:
    """Accept while draft == argmax(target); the first mismatch yields the argmax, all accepted yields the bonus token.

    target_argmax: [T] integer, the target's best token at every draft. No randomness.
    """
    accepted = accepted_prefix(batch, batch.tokens == target_argmax)
    if batch.width == 0:
        return emit(batch, accepted, batch.bonus)
    return emit(batch, accepted, target_argmax[row_after_prefix(batch, accepted)])
