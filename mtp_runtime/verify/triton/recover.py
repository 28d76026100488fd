"""The one token a request draws itself: the kernel form of `mtp_runtime.verify.recover`, for one request a program."""

import triton
import triton.language as tl
from torch import Tensor

TILE = 2048
"""Tokens worked on at a time: some ten float32 vectors of this length live at once, within Ascend's 96 KiB."""


def tiling(vocab: int, tile: int) -> dict[str, int]:
    """The compile-time sizes of `draw`."""
    return {"VOCAB": vocab, "TILE": tile, "TILES": triton.next_power_of_2(triton.cdiv(vocab, tile))}


def halves(fraction: Tensor) -> tuple[Tensor, Tensor]:
    """float64 [B] in [0, 1) as two float32 [B] with the same sum to 2^-48."""
    high = fraction.float()
    return high, (fraction - high).float()


@triton.jit
def row_of(matrix, row, VOCAB: tl.constexpr):
    """Where a row begins, in 64 bits: rows x vocabulary may pass 2^31."""
    return matrix + row.to(tl.int64) * VOCAB


@triton.jit
def at(values, index, place):
    """The element of a vector whose index is `place`, 0 where there is none."""
    return tl.sum(tl.where(index == place, values, 0), axis=0)


@triton.jit
def weights_at(p_row, q_row, tile, token, scale, HAS_Q: tl.constexpr, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Of one tile: p, and max(scale p - q, 0), or p without the token for one-hot drafts; 0 past the vocabulary."""
    column = tile * TILE + tl.arange(0, TILE)
    p = tl.load(p_row + column, mask=column < VOCAB, other=0.0).to(tl.float32)
    if HAS_Q:
        q = tl.load(q_row + column, mask=column < VOCAB, other=0.0).to(tl.float32)
        rest = tl.maximum(p * scale - q, 0.0)
    else:
        rest = tl.where(column == token, 0.0, p)
    return p, rest


@triton.jit
def first_place(weights, beyond, SIZE: tl.constexpr):
    """The first place of positive weight where `beyond` holds, else the last of positive weight.

    `beyond` alone could choose a weight of 0: a parallel sum may step by a rounding error where nothing is added.
    """
    place = tl.arange(0, SIZE)
    first = tl.min(tl.where((weights > 0) & beyond, place, SIZE), axis=0)
    return tl.minimum(first, tl.max(tl.where(weights > 0, place, 0), axis=0))


@triton.jit
def draw(
    p_row,
    q_row,
    token,
    scale,
    high,
    low,
    HAS_Q: tl.constexpr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """The token at the fraction high + low of the total weight.

    The weights are p where no draft was rejected (token < 0) or rounding left nothing beside it, else what is left:
    see `weights_at`. One pass over the row for the tiles' sums, then one tile again.
    """
    index = tl.arange(0, TILES)
    full = tl.full((TILES,), 0.0, tl.float32)
    left = tl.full((TILES,), 0.0, tl.float32)
    for tile in range((VOCAB + TILE - 1) // TILE):
        p, rest = weights_at(p_row, q_row, tile, token, scale, HAS_Q, VOCAB, TILE)
        full = tl.where(index == tile, tl.sum(p, axis=0), full)
        left = tl.where(index == tile, tl.sum(rest, axis=0), left)
    recovers = (token >= 0) & (tl.sum(left, axis=0) > 0)
    tiles = tl.where(recovers, left, full)
    sums = tl.cumsum(tiles, axis=0)
    total = tl.maximum(at(sums, index, TILES - 1), 1e-30)
    # Both sides in parts of the total and `high` taken off first: near the point that is exact, so `low` still counts.
    chosen = first_place(tiles, sums / total - high > low, TILES)
    inside = (high - at(sums, index, chosen - 1) / total + low) * total
    p, rest = weights_at(p_row, q_row, chosen, token, scale, HAS_Q, VOCAB, TILE)
    weights = tl.where(recovers, rest, p)
    return chosen * TILE + first_place(weights, tl.cumsum(weights, axis=0) > inside, TILE)
