"""The one token a request draws itself: recovered where a draft was rejected, bonus where none was.

With draft probabilities q the recovered token follows max(p - q, 0); without them q is one-hot at the draft, so it
follows p with the draft zeroed (max(p - 1, 0), as it is sometimes written, would be zero everywhere).

A token is drawn by inverting the cumulative sum in two levels: over tiles of TILE tokens, then inside one tile. That
needs one uniform number a request and one reading pass, where an exponential race needs V random numbers a request.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mtp_runtime.verify.batch import DraftBatch
from mtp_runtime.verify.chunks import chunks

TILE = 256
_BELOW_ONE = 1 - 2**-53


def tile_sums(weights: Tensor) -> Tensor:
    """[N, ceil(V / TILE)] from weights [N, V]."""
    whole = weights.shape[1] // TILE * TILE
    sums = weights[:, :whole].unflatten(1, (whole // TILE, TILE)).sum(-1)
    if whole == weights.shape[1]:
        return sums
    return torch.cat((sums, weights[:, whole:].sum(-1, keepdim=True)), dim=1)


def residual_tiles(batch: DraftBatch, probs: Tensor, draft_probs: Tensor, scale: Tensor | None = None) -> Tensor:
    """Tile sums [T, ceil(V / TILE)] of max(scale p - q, 0) at every draft; scale: [T], 1 when None."""
    parts = []
    for columns in chunks(batch.total, probs.shape[1], TILE):
        p, q = batch.draft_part(probs[:, columns]), draft_probs[:, columns].view(*batch.lying, -1)
        rest = (p - q if scale is None else torch.mul(p, scale.view(*batch.lying, 1)).sub_(q)).clamp_(min=0)
        parts.append(tile_sums(rest.flatten(0, -2)))
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def invert(
    tiles: Tensor, fraction: Tensor, vocab: int, weights_at: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """([N] int64 the token at `fraction` [N] of the total weight, [N] the total).

    A token of weight 0 is drawn only where all are 0. tiles: [N, M] tile sums; weights_at: columns [N, TILE] int64 ->
    the weights there [N, TILE], as summed in tiles.
    """
    sums = tiles.double().cumsum(1)
    point = fraction[:, None] * sums[:, -1:]
    tile = torch.searchsorted(sums, point, right=True).clamp_(max=tiles.shape[1] - 1)
    # How far inside the tile, as a share of it: its own sum may differ in the last bits from that of its weights.
    inside = ((point - sums.gather(1, tile)) / tiles.gather(1, tile) + 1).clamp_(0, _BELOW_ONE)
    columns = tile * TILE + torch.arange(TILE, device=tiles.device)
    if vocab % TILE:
        weights = torch.where(columns < vocab, weights_at(columns.clamp(max=vocab - 1)), 0)
    else:
        weights = weights_at(columns)
    within = weights.double().cumsum(1)
    place = torch.searchsorted(within, inside * within[:, -1:], right=True)
    return (tile * TILE + place).clamp_(max=vocab - 1)[:, 0], sums[:, -1]


def draw(probs: Tensor, fraction: Tensor) -> Tensor:
    """[N] int64: one token of each row of probs [N, V], in proportion."""
    return invert(tile_sums(probs), fraction, probs.shape[1], lambda columns: probs.gather(1, columns))[0]


def draw_one_hot(batch: DraftBatch, probs: Tensor, accepted: Tensor, fraction: Tensor) -> Tensor:
    """[B] int64: recovered or bonus tokens for one-hot drafts.

    probs: [R, V]; changed: each draft's own probability becomes 0, exactly, so that no difference of sums is needed.
    """
    if batch.total:
        where = (batch.draft_rows, batch.columns)
        probs.index_put_(where, torch.where(batch.tokens < 0, probs[where], 0.0))
    row = batch.first_row + accepted
    tiles = tile_sums(probs)[row]
    token, total = invert(tiles, fraction, probs.shape[1], lambda columns: probs[row[:, None], columns])
    if not batch.total:
        return token
    # Nothing left beside the draft: it was certain, and only rounding let it be rejected.
    return torch.where(total > 0, token, batch.columns[batch.at(accepted)])


def draw_residual(
    batch: DraftBatch,
    probs: Tensor,
    draft_probs: Tensor,
    accepted: Tensor,
    fraction: Tensor,
    scale: Tensor | None,
    tiles: Tensor,
) -> Tensor:
    """[B] int64: recovered or bonus tokens for drafts with probabilities.

    probs: [R, V] p; draft_probs: [T, V] q; scale: [T] factor on p at each draft, 1 when None; tiles:
    `residual_tiles` of the same. Where the residual is empty through rounding, p itself is drawn from.
    """
    row, draft = batch.first_row + accepted, batch.at(accepted)
    rest = tiles[draft]
    rejected = (accepted < batch.counts) & (batch.tokens[draft] >= 0) & (rest.sum(1) > 0)

    def weights_at(columns: Tensor) -> Tensor:
        p = probs[row[:, None], columns]
        q = draft_probs[draft[:, None], columns]
        scaled = p if scale is None else p * scale[draft][:, None]
        return torch.where(rejected[:, None], (scaled - q).clamp(min=0), p)

    chosen = torch.where(rejected[:, None], rest, tile_sums(probs)[row])
    return invert(chosen, fraction, probs.shape[1], weights_at)[0]
