"""The token sampled where a draft was rejected.

With draft probabilities q the residual is max(p - q, 0); without them q is one-hot at the draft, so the residual is p
with the draft zeroed (max(p - 1, 0), as it is sometimes written, would be zero everywhere).
"""

from __future__ import annotations

import torch


def residual(
    target: torch.Tensor, tokens: torch.Tensor, draft_probs: torch.Tensor | None, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Unnormalised distribution [R, V] of the recovered token.

    target: [R, V] p at the rejected draft; tokens: [R] the draft (a negative one is a placeholder: nothing is taken
    away);
    draft_probs: [R, V] q or None (one-hot); scale: [R] factor on p (block verification), 1 when None.
    One-hot needs no scale: it only changes the norm.
    """
    if draft_probs is None:
        column = tokens.clamp(min=0).long()[:, None]
        keep = torch.where(tokens[:, None] < 0, target.gather(1, column), 0.0)
        return target.scatter(1, column, keep)
    scaled = target if scale is None else target * scale[:, None]
    rest = (scaled - draft_probs).clamp_(min=0)
    return torch.where(tokens[:, None] < 0, target, rest)


def race(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Sample [R] tokens in proportion to weights [R, V] with noise [R, V] ~ exponential(1) (the exponential race).

    Tokens of weight 0 never win while any weight is positive.
    """
    return (weights / noise).argmax(dim=1)
