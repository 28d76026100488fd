"""Which verification runs: one table, so that a method is a row here and not a branch elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mtp_runtime.verify.batch import DraftBatch, Noise, Verdict
from mtp_runtime.verify.block import verify_block
from mtp_runtime.verify.greedy import verify_greedy
from mtp_runtime.verify.tokenwise import verify_tokenwise

Verify = Callable[[DraftBatch, torch.Tensor, torch.Tensor | None, Noise], Verdict]

STRATEGIES: dict[str, Verify] = {"tokenwise": verify_tokenwise, "block": verify_block}
CHOICES = ("auto", *STRATEGIES)


def choose(verification: str, has_draft_probs: bool) -> Verify:
    """The method for a step. `auto`: block where real draft probabilities make it gain, else tokenwise.

    Raises ValueError for an unknown name.
    """
    if verification not in CHOICES:
        raise ValueError(f"verification {verification!r} is unknown: use one of {', '.join(CHOICES)}")
    if verification == "auto":
        verification = "block" if has_draft_probs else "tokenwise"
    return STRATEGIES[verification]


def verify_mixed(
    batch: DraftBatch,
    greedy: torch.Tensor,
    target_argmax: torch.Tensor,
    target: torch.Tensor,
    draft_probs: torch.Tensor | None,
    noise: Noise,
    verify: Verify,
) -> Verdict:
    """A batch of greedy and stochastic requests; greedy: [B] bool. Each request gets the verdict of its own method."""
    exact = verify_greedy(batch, target_argmax)
    drawn = verify(batch, target, draft_probs, noise)
    tokens = torch.where(greedy[:, None], exact.tokens, drawn.tokens)
    return Verdict(tokens, torch.where(greedy, exact.accepted, drawn.accepted))
