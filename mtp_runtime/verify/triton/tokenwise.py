"""Token-by-token verification: the kernel form of `mtp_runtime.verify.tokenwise`. One program does all of a request."""

import triton
import triton.language as tl
from torch import Tensor

from mtp_runtime.verify.batch import DraftBatch, Noise, Verdict
from mtp_runtime.verify.triton.drafts import chances, drafts_of, emit, inputs, numbers_of, outputs, places
from mtp_runtime.verify.triton.recover import TILE, at, draw, halves, row_of, tiling


@triton.jit(do_not_specialize=["total", "width"])
def tokenwise_kernel(
    tokens,
    cumulative,
    probs,
    draft_probs,
    accept,
    high,
    low,
    out,
    accepted,
    total,
    width,
    PLACES: tl.constexpr,
    HAS_Q: tl.constexpr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    request = tl.program_id(0)
    place = tl.arange(0, PLACES)
    start, count, drafts = drafts_of(tokens, cumulative, request, PLACES)
    p, q = chances(drafts, start, count, total, request, probs, draft_probs, PLACES, HAS_Q, VOCAB)
    hit = (p > 0) & (q > 0) & (p >= numbers_of(accept, start, count, PLACES) * q)
    taken = tl.min(tl.where(hit, PLACES, place), axis=0)

    token = at(drafts, place, taken)  # -1 past the last draft
    p_row = row_of(probs, start + request + taken, VOCAB)
    q_row = p_row
    if HAS_Q:
        q_row = row_of(draft_probs, tl.minimum(start + taken, total - 1), VOCAB)
    last = draw(p_row, q_row, token, 1.0, tl.load(high + request), tl.load(low + request), HAS_Q, VOCAB, TILE, TILES)
    emit(out, accepted, request, width, drafts, taken, last, PLACES)


def verify_tokenwise(
    batch: DraftBatch, probs: Tensor, draft_probs: Tensor | None, noise: Noise, tile: int = TILE
) -> Verdict:
    """As `mtp_runtime.verify.tokenwise.verify_tokenwise`; probs keep their values."""
    verdict = outputs(batch)
    if not batch.size:
        return verdict
    q = draft_probs.contiguous() if draft_probs is not None and batch.total else None
    tokenwise_kernel[(batch.size,)](
        *inputs(batch),
        probs.contiguous(),
        q,
        noise.accept.float(),
        *halves(noise.pick),
        verdict.tokens,
        verdict.accepted,
        batch.total,
        batch.width,
        PLACES=places(batch),
        HAS_Q=q is not None,
        **tiling(probs.shape[1], tile),
    )
    return verdict
