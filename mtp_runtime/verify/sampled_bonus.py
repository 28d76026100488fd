"""Verification where the bonus tokens are sampled already, and the target's rows are those of drafts alone.

Some engines sample the bonus token of every request before they verify. A bonus row then is certain: its whole
probability lies on one column, and the token that was sampled is entered at the end. So every method, in torch and in
Triton, works as it is.

Columns need not be tokens: an engine that splits the vocabulary over its workers gathers only the best candidates of
each, with the token of every column beside them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mtp_runtime.verify.batch import PLACEHOLDER, DraftBatch, Verdict, emit
from mtp_runtime.verify.strategy import verify_known


def chosen_rows(batch: DraftBatch, best: Tensor, bonus: Tensor) -> Tensor:
    """[R], for `verify_exact`, from the target's token of every draft row, best [T], and the bonus tokens [B]."""
    if batch.even:
        return torch.cat((best.view(batch.size, batch.width), bonus[:, None]), 1).flatten()
    rows = best.new_empty(batch.total + batch.size)
    rows[batch.draft_rows] = best
    rows[batch.first_row + batch.counts] = bonus.to(best.dtype)
    return rows


def exact_tokens(batch: DraftBatch, best: Tensor, bonus: Tensor) -> Tensor:
    """[B, width + 1] int32, the tokens of `verify_exact`; best [T], bonus [B].

    With one draft each it is so little work that the number of operations is what a small batch waits for.
    """
    if batch.even and batch.width == 1:
        return torch.stack((best, torch.where(best == batch.tokens, bonus, PLACEHOLDER)), 1).int()
    return verify_known(batch, chosen_rows(batch, best, bonus)).tokens


def certain_rows(batch: DraftBatch, probs: Tensor) -> Tensor:
    """[R, C] from probs [T, C]: bonus rows have column 0 for certain."""
    rows = probs.new_empty(batch.total + batch.size, probs.shape[1])
    if batch.even:
        by_request = rows.view(batch.size, batch.width + 1, -1)
        by_request[:, :-1] = probs.view(batch.size, batch.width, -1)
        certain = by_request[:, -1]
        certain.zero_()[:, 0] = 1
        return rows
    rows[batch.draft_rows] = probs
    certain = probs.new_zeros(batch.size, probs.shape[1])
    certain[:, 0] = 1
    rows[batch.first_row + batch.counts] = certain
    return rows


def as_columns(batch: DraftBatch, ids: Tensor | None) -> DraftBatch:
    """The batch with each draft as its column among ids [T, C], the tokens of the columns (None: they are tokens).

    A draft that is no candidate has probability 0. It becomes a placeholder, which is the same for one-hot drafts:
    rejected for certain, and the token in its place is an ordinary one.
    """
    if ids is None:
        return batch
    hits = ids == batch.tokens[:, None]
    return replace(batch, tokens=torch.where(hits.any(1), hits.int().argmax(1), PLACEHOLDER))


def as_tokens(batch: DraftBatch, verdict: Verdict, ids: Tensor | None, bonus: Tensor) -> Verdict:
    """The verdict on `certain_rows` and `as_columns`, in tokens and with the bonus tokens [B] in it.

    batch: with the drafts as tokens. At least one draft.
    """
    last = verdict.tokens.gather(1, verdict.accepted[:, None])[:, 0].long()
    if ids is not None:
        last = ids[batch.at(verdict.accepted), last]
    return emit(batch, verdict.accepted, torch.where(verdict.accepted == batch.counts, bonus.to(last.dtype), last))
