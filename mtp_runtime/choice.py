"""Which verification decides about drafts, and why: the rule alone, so that the configuration can say it without torch.

`mtpctl render` announces with it what the engine's plugin will run; both must read the same rule.
"""

from __future__ import annotations

from typing import Final, NamedTuple

METHODS: Final = ("tokenwise", "block")
CHOICES: Final = ("auto", *METHODS)
# How the drafter picks a token: its best one, or one drawn from its probabilities, which verification then sees.
GREEDY, PROBABILISTIC = "greedy", "probabilistic"
# How K + 1 tokens of a request are verified in one decode step (the three ways of the MTP article).
TND, BATCH_EXPANSION, CHUNKED_PREFILL = "tnd", "batch_expansion", "chunked_prefill"
ATTENTIONS: Final = (TND, BATCH_EXPANSION, CHUNKED_PREFILL)
# With one draft a step there is no block: the two methods decide alike.
MIN_BLOCK_K: Final = 2


class Choice(NamedTuple):
    """method: one of METHODS; why: half a sentence for people."""

    method: str
    why: str


def choose_method(verification: str, has_draft_probs: bool, k: int) -> Choice:
    """What runs for `verification` (one of CHOICES) with K drafts a step.

    has_draft_probs: drafts are drawn from probabilities that verification sees (draft_sampling: probabilistic). Without
    them a draft is accepted with its target probability by either method, so block can gain nothing.
    Raises ValueError for an unknown name and for K < 1, where there is nothing to verify.
    """
    if verification not in CHOICES:
        raise ValueError(f"verification {verification!r} is unknown: use one of {', '.join(CHOICES)}")
    if k < 1:
        raise ValueError(f"K = {k}: without drafts nothing is verified")
    if verification != "auto":
        return Choice(verification, "asked for by mtp.verification" + _no_gain(verification, has_draft_probs, k))
    if not has_draft_probs:
        return Choice("tokenwise", "auto: without draft probabilities (mtp.draft_sampling: greedy) block gains nothing")
    if k < MIN_BLOCK_K:
        return Choice("tokenwise", f"auto: with K = {k} draft a step block gains nothing")
    return Choice("block", f"auto: with draft probabilities and K = {k} block accepts at least as many drafts")


def _no_gain(method: str, has_draft_probs: bool, k: int) -> str:
    """A remark when an explicit choice of block cannot pay."""
    if method == "block" and (not has_draft_probs or k < MIN_BLOCK_K):
        return "; it gains nothing without draft probabilities and K of 2 or more"
    return ""
