"""Which verification runs: one table, so that a method is a row here and not a branch elsewhere.

Where Triton has the device its kernels run, elsewhere the torch forms: the same results, to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from mtp_runtime.verify.batch import DraftBatch, Noise, Verdict
from mtp_runtime.verify.block import verify_block
from mtp_runtime.verify.exact import verify_exact
from mtp_runtime.verify.tokenwise import verify_tokenwise
from mtp_runtime.verify.triton import available

Verify = Callable[[DraftBatch, Tensor, Tensor | None, Noise], Verdict]


def kernels(device: torch.device) -> ModuleType | None:
    """The Triton forms where they run on a device, else None. Only then is Triton imported."""
    return import_module("mtp_runtime.verify.triton.forms") if available(device) else None


def _on_device(method: str, form: Verify) -> Verify:
    def verify(batch: DraftBatch, probs: Tensor, draft_probs: Tensor | None, noise: Noise) -> Verdict:
        forms = kernels(probs.device)
        return (forms.METHODS[method] if forms else form)(batch, probs, draft_probs, noise)

    return verify


STRATEGIES: dict[str, Verify] = {
    "tokenwise": _on_device("tokenwise", verify_tokenwise),
    "block": _on_device("block", verify_block),
}
"""Method -> function, the names as in `mtp_runtime.choice`."""


def verify_known(batch: DraftBatch, chosen: Tensor) -> Verdict:
    """`verify_exact` in the form for the device."""
    forms = kernels(chosen.device)
    return (forms.verify_exact if forms else verify_exact)(batch, chosen)


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
    known = verify_known(batch, chosen)
    drawn = verify(batch, probs, draft_probs, noise)
    tokens = torch.where(exact[:, None], known.tokens, drawn.tokens)
    return Verdict(tokens, torch.where(exact, known.accepted, drawn.accepted))
