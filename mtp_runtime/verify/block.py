"""Block verification (Sun et al., arXiv 2403.10444, algorithm 2): joint over the block, lossless, never worse than
tokenwise.

The gain needs real draft probabilities: with one-hot drafts it accepts exactly as often as token by token.
"""

from __future__ import annotations

import torch

from mtp_runtime.verify.batch import DraftBatch, Noise, Verdict, emit, row_after_prefix
from mtp_runtime.verify.recover import race, residual


def verify_block(batch: DraftBatch, target: torch.Tensor, draft_probs: torch.Tensor | None, noise: Noise) -> Verdict:
    """Accept the longest prefix i with U_i <= h_i; shapes as in `verify_tokenwise`.

    w_0 = 1, w_i = min(w_{i-1} p(x_i) / q(x_i), 1); S_i = sum over v of max(w_i p_{i+1}(v) - q_{i+1}(v), 0);
    h_i = S_i / (S_i + 1 - w_i) before the last draft and h_n = w_n at it. The recovered token comes from
    max(w_i p_{i+1} - q_{i+1}, 0).
    """
    size, width = len(batch.counts), batch.width
    accepted = torch.zeros(size, dtype=torch.int64, device=batch.tokens.device)
    if width == 0:
        return emit(batch, accepted, batch.bonus)
    rows, real = batch.padded_rows()
    real = real & (batch.tokens[rows] >= 0).long().cumprod(1).bool()  # nothing after a placeholder counts
    column = batch.tokens.clamp(min=0).long()[:, None]
    p = target.gather(1, column)[:, 0]
    q = torch.ones_like(p) if draft_probs is None else draft_probs.gather(1, column)[:, 0]
    ratio = torch.where(q > 0, p / q, 0.0)
    weight = torch.ones(size, dtype=p.dtype, device=p.device)
    scale = weight.clone()  # w at the accepted prefix
    ends = real.sum(1)
    for i in range(width):
        weight = torch.where(real[:, i], (weight * ratio[rows[:, i]]).clamp(max=1), 0.0)
        following = rows[:, min(i + 1, width - 1)]
        rest = residual(
            target[following], batch.tokens[following], None if draft_probs is None else draft_probs[following], weight
        ).sum(1)
        if draft_probs is None:  # sum of max(w p - onehot, 0); the residual there is unscaled
            rest = weight * rest
        chance = torch.where(ends == i + 1, weight, rest / (rest + 1 - weight).clamp(min=1e-30))
        hit = real[:, i] & (weight > 0) & (noise.uniform[rows[:, i]] < chance)
        accepted = torch.where(hit, i + 1, accepted)
        scale = torch.where(hit, weight, scale)
    row = row_after_prefix(batch, accepted)
    weights = residual(target[row], batch.tokens[row], None if draft_probs is None else draft_probs[row], scale)
    return emit(batch, accepted, race(weights, noise.race))
