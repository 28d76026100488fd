"""Token-by-token verification (Leviathan et al., arXiv 2211.17192), for one-hot and for real draft probabilities."""

from __future__ import annotations

import torch

from mtp_runtime.verify.batch import DraftBatch, Noise, Verdict, accepted_prefix, emit, row_after_prefix
from mtp_runtime.verify.recover import race, residual


def passes(p: torch.Tensor, q: torch.Tensor | float, uniform: torch.Tensor) -> torch.Tensor:
    """The acceptance rule p / q >= U, bool [T], written without the division.

    p, q: the draft's probability under target and drafter. U may be 0, and then p = 0 must still be rejected, hence p
    > 0. A draft its own drafter calls impossible (q = 0) is rejected too.
    """
    return (p > 0) & (p >= uniform * q) & (torch.as_tensor(q, device=p.device) > 0)


def verify_tokenwise(
    batch: DraftBatch, target: torch.Tensor, draft_probs: torch.Tensor | None, noise: Noise
) -> Verdict:
    """Accept draft x when p(x) / q(x) >= U; recover from max(p - q, 0) at the first rejection.

    target: [T, V] p after every sampling constraint; draft_probs: [T, V] q, or None for one-hot drafts.
    """
    if batch.width == 0:
        return emit(batch, accepted_prefix(batch, batch.tokens >= 0), batch.bonus)
    column = batch.tokens.clamp(min=0).long()[:, None]
    p = target.gather(1, column)[:, 0]
    q = 1.0 if draft_probs is None else draft_probs.gather(1, column)[:, 0]
    accepted = accepted_prefix(batch, passes(p, q, noise.uniform) & (batch.tokens >= 0))
    row = row_after_prefix(batch, accepted)
    weights = residual(target[row], batch.tokens[row], None if draft_probs is None else draft_probs[row])
    return emit(batch, accepted, race(weights, noise.race))
