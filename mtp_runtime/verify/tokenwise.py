"""Token-by-token verification (Leviathan et al., arXiv 2211.17192), for one-hot and for real draft probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from mtp_runtime.verify.batch import DraftBatch, Noise, Verdict, emit, prefix
from mtp_runtime.verify.recover import draw_one_hot, draw_residual, residual_tiles


def passes(p: Tensor, q: Tensor | float, accept: Tensor) -> Tensor:
    """The acceptance rule p / q >= U, bool [T], written without the division.

    p, q: the draft's probability under target and drafter. U may be 0, and then p = 0 must still be rejected, hence
    p > 0. A draft its own drafter calls impossible (q = 0) is rejected too.
    """
    if isinstance(q, float):  # one-hot drafts: q is 1
        return (p > 0) & (p >= accept)
    return (p > 0) & (p >= accept * q) & (q > 0)


def draft_chances(batch: DraftBatch, probs: Tensor, draft_probs: Tensor | None) -> tuple[Tensor, Tensor | float]:
    """p [T] and q [T] of the drafts themselves; p is 0 at placeholders, q is 1 for one-hot drafts."""
    p = torch.where(batch.tokens < 0, 0.0, probs[batch.draft_rows, batch.columns])
    return p, 1.0 if draft_probs is None else draft_probs.gather(1, batch.columns[:, None])[:, 0]


def verify_tokenwise(batch: DraftBatch, probs: Tensor, draft_probs: Tensor | None, noise: Noise) -> Verdict:
    """Accept draft x when p(x) / q(x) >= U; recover from max(p - q, 0) at the first rejection.

    probs: [R, V] p after every sampling constraint, float, used as scratch memory; draft_probs: [T, V] q, or None for
    one-hot drafts.
    """
    p, q = draft_chances(batch, probs, draft_probs)
    accepted = prefix(batch, passes(p, q, noise.accept))
    if draft_probs is None or not batch.total:
        return emit(batch, accepted, draw_one_hot(batch, probs, accepted, noise.pick))
    tiles = residual_tiles(batch, probs, draft_probs)
    return emit(batch, accepted, draw_residual(batch, probs, draft_probs, accepted, noise.pick, None, tiles))
