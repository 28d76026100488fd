"""Verification against tokens known before: the kernel form of `mtp_runtime.verify.exact`. One program a request."""

import triton
import triton.language as tl
from torch import Tensor

from mtp_runtime.verify.batch import DraftBatch, Verdict
from mtp_runtime.verify.triton.drafts import drafts_of, emit, inputs, outputs, places
from mtp_runtime.verify.triton.recover import at


@triton.jit(do_not_specialize=["width"])
def exact_kernel(tokens, cumulative, chosen, out, accepted, width, PLACES: tl.constexpr):
    request = tl.program_id(0)
    place = tl.arange(0, PLACES)
    start, count, drafts = drafts_of(tokens, cumulative, request, PLACES)
    wanted = tl.load(chosen + start + request + place, mask=place <= count, other=0).to(tl.int32)
    hit = (drafts >= 0) & (drafts == wanted)
    taken = tl.min(tl.where(hit, PLACES, place), axis=0)
    emit(out, accepted, request, width, drafts, taken, at(wanted, place, taken), PLACES)


def verify_exact(batch: DraftBatch, chosen: Tensor) -> Verdict:
    """As `mtp_runtime.verify.exact.verify_exact`."""
    verdict = outputs(batch)
    if batch.size:
        exact_kernel[(batch.size,)](
            *inputs(batch), chosen.contiguous(), verdict.tokens, verdict.accepted, batch.width, PLACES=places(batch)
        )
    return verdict
