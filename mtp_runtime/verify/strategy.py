"""Which verification runs: one table, so that a method is a row here and not a branch elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mtp_runtime.verify.batch import DraftBatch, Noise, Verdict
from mtp_runtime.verify.block import verify_block
from mtp_runtime.verify.exact import verify_exact
from mtp_runtime.verify.tokenwise import verify_tokenwise

Verify = Callable[[DraftBatch, Tensor, Tensor | None, Noise], Verdict]

STRATEGIES: dict[str, Verify] = {"tokenwise": verify_tokenwise, "block": verify_block}
"""Method -> function, the names as in `mtp_runtime.choice`."""


def verify_mixed(
    batch: DraftBatch,
    chosen: Tensor,
    exact: Tensor,
    probs: Tensor,
    draft_probs: Tensor | None,
    noise: Noise,
    verify: Verify,
) -> Verdict:
    """A batch in which some requests' tokens are known before (greedy, seeded: exact [B] bool, their chosen [R]).

    The others go through `verify`; each request gets the verdict of its own method.
    """
    known = verify_exact(batch, chosen)
    drawn = verify(batch, probs, draft_probs, noise)
    tokens = torch.where(exact[:, None], known.tokens, drawn.tokens)
    return Verdict(tokens, torch.where(exact, known.accepted, drawn.accepted))
