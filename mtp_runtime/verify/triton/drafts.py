"""A request's drafts, and its row of the output, as vectors of PLACES positions: the kernel form of
`mtp_runtime.verify.batch`. PLACES is a power of two above the width: the recovered or bonus token has a place too.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtp_runtime.verify.batch import DraftBatch, Verdict
from mtp_runtime.verify.triton.recover import row_of

LARGEST = tl.constexpr(1 - 2.0**-24)
"""The largest float32 below 1: rounding U up to 1 would reject a certain draft."""


def inputs(batch: DraftBatch) -> tuple[Tensor, Tensor]:
    """The drafts and their counts as a kernel reads them: without gaps."""
    return batch.tokens.contiguous(), batch.cumulative.contiguous()


def outputs(batch: DraftBatch) -> Verdict:
    """Memory for what a kernel writes."""
    device = batch.tokens.device
    tokens = torch.empty(batch.size, batch.width + 1, dtype=torch.int32, device=device)
    return Verdict(tokens, torch.empty(batch.size, dtype=torch.int64, device=device))


def places(batch: DraftBatch) -> int:
    """PLACES."""
    return triton.next_power_of_2(batch.width + 1)


@triton.jit
def drafts_of(tokens, cumulative, request, PLACES: tl.constexpr):
    """The first draft of a request, how many it has, and they themselves: -1 where there is none."""
    before = tl.load(cumulative + tl.maximum(request - 1, 0)).to(tl.int32)
    start = tl.where(request > 0, before, 0)
    count = tl.load(cumulative + request).to(tl.int32) - start
    place = tl.arange(0, PLACES)
    return start, count, tl.load(tokens + start + place, mask=place < count, other=-1).to(tl.int32)


@triton.jit
def chances(
    drafts,
    start,
    count,
    total,
    request,
    probs,
    draft_probs,
    PLACES: tl.constexpr,
    HAS_Q: tl.constexpr,
    VOCAB: tl.constexpr,
):
    """p and q of the drafts themselves: p is 0 where there is no draft, q is 1 for one-hot drafts."""
    place = tl.arange(0, PLACES)
    live = drafts >= 0
    column = tl.where(live, drafts, 0)
    # Rows are kept inside the tensors: Ascend's compiler reads scattered addresses before it applies the mask.
    row = start + request + tl.minimum(place, count)
    p = tl.load(row_of(probs, row, VOCAB) + column, mask=live, other=0.0).to(tl.float32)
    if HAS_Q:
        draft = tl.minimum(start + place, total - 1)
        q = tl.load(row_of(draft_probs, draft, VOCAB) + column, mask=live, other=0.0).to(tl.float32)
    else:
        q = tl.full((PLACES,), 1.0, tl.float32)
    return p, q


@triton.jit
def numbers_of(accept, start, count, PLACES: tl.constexpr):
    """U of each draft, below 1."""
    place = tl.arange(0, PLACES)
    return tl.minimum(tl.load(accept + start + place, mask=place < count, other=0.0), LARGEST)


@triton.jit
def emit(out, accepted, request, width, drafts, taken, token, PLACES: tl.constexpr):
    """A request's output: `taken` drafts, then the token, then -1."""
    place = tl.arange(0, PLACES)
    row = tl.where(place < taken, drafts, tl.where(place == taken, token, -1))
    tl.store(out + request * (width + 1) + place, row, mask=place <= width)
    tl.store(accepted + request, taken.to(tl.int64))
