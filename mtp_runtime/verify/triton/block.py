"""Block verification: the kernel form of `mtp_runtime.verify.block`. One program a request; with draft probabilities
one program a draft first sums what the prefix before it leaves of its row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtp_runtime.verify.batch import DraftBatch, Noise, Verdict
from mtp_runtime.verify.triton.drafts import chances, drafts_of, emit, inputs, numbers_of, outputs, places
from mtp_runtime.verify.triton.recover import TILE, at, draw, halves, row_of, tiling, weights_at


@triton.jit
def prefixes(drafts, p, q, count, PLACES: tl.constexpr):
    """At places 0, 1, ...: w_1, w_2, ... of w_i = min(w_{i-1} p_i / q_i, 1), and S_1, S_2, ... for one-hot drafts,
    S_i = w_i (1 - p_{i+1}). Also how many drafts stand before the first placeholder; from there on w = 0, as p is.
    """
    place = tl.arange(0, PLACES)
    # 1e30 is as good as infinity and never makes 0 x infinity.
    ratio = tl.where(q > 0, tl.minimum(p / tl.where(q > 0, q, 1.0), 1e30), 0.0)
    weights = tl.full((PLACES,), 0.0, tl.float32)
    following = tl.full((PLACES,), 0.0, tl.float32)
    weight = 1.0
    for i in range(count):
        following = tl.where(place == i - 1, weight * (1.0 - at(p, place, i)), following)
        weight = tl.minimum(weight * at(ratio, place, i), 1.0)
        weights = tl.where(place == i, weight, weights)
    return weights, following, tl.min(tl.where(drafts >= 0, PLACES, place), axis=0)


@triton.jit(do_not_specialize=["total"])
def residual_kernel(
    tokens,
    cumulative,
    probs,
    draft_probs,
    left,
    total,
    PLACES: tl.constexpr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
):
    """left [T]: at each draft but a request's first, the sum over the vocabulary of max(w p - q, 0), w of those before.

    Left as it was from a placeholder on.
    """
    request = tl.program_id(0)
    own = tl.program_id(1) + 1
    start, count, drafts = drafts_of(tokens, cumulative, request, PLACES)
    p, q = chances(drafts, start, count, total, request, probs, draft_probs, PLACES, True, VOCAB)
    weights, _following, standing = prefixes(drafts, p, q, count, PLACES)
    if own < standing:
        scale = at(weights, tl.arange(0, PLACES), own - 1)
        p_row = row_of(probs, start + request + own, VOCAB)
        q_row = row_of(draft_probs, start + own, VOCAB)
        sums = tl.full((TILE,), 0.0, tl.float32)
        for tile in range((VOCAB + TILE - 1) // TILE):
            _full, rest = weights_at(p_row, q_row, tile, -1, scale, True, VOCAB, TILE)
            sums += rest
        tl.store(left + start + own, tl.sum(sums, axis=0))


@triton.jit(do_not_specialize=["total", "width"])
def block_kernel(
    tokens,
    cumulative,
    probs,
    draft_probs,
    left,
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
    weights, following, standing = prefixes(drafts, p, q, count, PLACES)
    if HAS_Q:
        following = tl.load(left + start + 1 + place, mask=place < standing - 1, other=0.0)
    chance = following / tl.maximum(following + 1.0 - weights, 1e-30)
    chance = tl.where(place == standing - 1, weights, chance)
    hit = (weights > 0) & (numbers_of(accept, start, count, PLACES) < chance)
    taken = tl.max(tl.where(hit, place + 1, 0), axis=0)

    token = at(drafts, place, taken)  # -1 past the last draft
    scale = tl.where(taken > 0, at(weights, place, taken - 1), 1.0)
    p_row = row_of(probs, start + request + taken, VOCAB)
    q_row = p_row
    if HAS_Q:
        q_row = row_of(draft_probs, tl.minimum(start + taken, total - 1), VOCAB)
    last = draw(p_row, q_row, token, scale, tl.load(high + request), tl.load(low + request), HAS_Q, VOCAB, TILE, TILES)
    emit(out, accepted, request, width, drafts, taken, last, PLACES)


def verify_block(
    batch: DraftBatch, probs: Tensor, draft_probs: Tensor | None, noise: Noise, tile: int = TILE
) -> Verdict:
    """As `mtp_runtime.verify.block.verify_block`; probs keep their values."""
    verdict = outputs(batch)
    if not batch.size:
        return verdict
    sizes = {"PLACES": places(batch), **tiling(probs.shape[1], tile)}
    rows, left = (probs.contiguous(), None), None
    if draft_probs is not None and batch.total:
        rows = (probs.contiguous(), draft_probs.contiguous())
        left = torch.empty(batch.total, dtype=torch.float32, device=probs.device)
    if left is not None and batch.width > 1:
        residual_kernel[(batch.size, batch.width - 1)](
            *inputs(batch), *rows, left, batch.total, sizes["PLACES"], sizes["VOCAB"], sizes["TILE"]
        )
    block_kernel[(batch.size,)](
        *inputs(batch),
        *rows,
        left,
        noise.accept.float(),
        *halves(noise.pick),
        verdict.tokens,
        verdict.accepted,
        batch.total,
        batch.width,
        HAS_Q=left is not None,
        **sizes,
    )
    return verdict
