"""The one token a request draws itself: recovered where a draft was rejected, bonus where none was.

With draft probabilities q the recovered token follows max(p - q, 0); without them q is one-hot at the draft, so it
follows p with the draft zeroed (max(p - 1, 0), as it is sometimes written, would be zero everywhere).

A token is drawn by inverting the cumulative sum in two levels: over tiles of TILE tokens, then inside one tile. That
needs one uniform number a request and one reading pass, where an exponential race needs V random numbers a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from mtp_runtime.verify.batch import DraftBatch

TILE = 512
CHUNK = 1 << 18
"""Elements worked on at a time where a temporary is needed: small enough for a core's cache, so that the temporary
costs neither memory nor a pass."""

_BELOW_ONE = 1 - 2**-53


def tile_sums(weights: Tensor) -> Tensor:
    """[N, ceil(V / TILE)] from weights [N, V]."""
    whole = weights.shape[1] // TILE * TILE
    sums = weights[:, :whole].unflatten(1, (whole // TILE, TILE)).sum(-1)
    if whole == weights.shape[1]:
        return sums
    return torch.cat((sums, weights[:, whole:].sum(-1, keepdim=True)), dim=1)


def residual_tiles(batch: DraftBatch, probs: Tensor, draft_probs: Tensor, scale: Tensor) -> Tensor:
    """Tile sums [T, ceil(V / TILE)] of max(scale p - q, 0) at every draft; scale: [T]."""
    rows = batch.draft_rows
    parts = []
    for columns in _chunks(batch.total, probs.shape[1]):
        rest = probs[:, columns].index_select(0, rows).mul_(scale[:, None]).sub_(draft_probs[:, columns]).clamp_(min=0)
        parts.append(tile_sums(rest))
    return torch.cat(parts, dim=1)


def _chunks(rows: int, vocab: int) -> Iterator[slice]:
    step = max(CHUNK // max(rows, 1) // TILE, 1) * TILE
    for begin in range(0, vocab, step):
        yield slice(begin, min(begin + step, vocab))


def invert(tiles: Tensor, fraction: Tensor, vocab: int, weights_at: Callable[[Tensor], Tensor]) -> Tensor:
    """[N] int64: the token at `fraction` [N] of the total weight; never one of weight 0 unless all are.

    tiles: [N, M] tile sums; weights_at: columns [N, TILE] int64 -> the weights there [N, TILE], as summed in tiles.
    """
    tile, inside = _search(tiles.double(), fraction)
    columns = tile[:, None] * TILE + torch.arange(TILE, device=tiles.device)
    exists = columns < vocab
    weights = torch.where(exists, weights_at(columns.clamp(max=vocab - 1)), 0)
    place, _ = _search(weights.double(), inside)
    return (tile * TILE + place).clamp_(max=vocab - 1)


def _search(weights: Tensor, fraction: Tensor) -> tuple[Tensor, Tensor]:
    """[N] the first index whose cumulative sum exceeds fraction of the total, and how far [0, 1) inside its weight."""
    sums = weights.cumsum(1)
    point = fraction.clamp(max=_BELOW_ONE)[:, None] * sums[:, -1:]
    index = torch.searchsorted(sums, point, right=True).clamp_(max=weights.shape[1] - 1)
    own = weights.gather(1, index)
    return index[:, 0], ((point - (sums.gather(1, index) - own)) / own).nan_to_num_(0.0).clamp_(0, _BELOW_ONE)[:, 0]


def draw(probs: Tensor, fraction: Tensor) -> Tensor:
    """[N] int64: one token of each row of probs [N, V], in proportion."""
    return invert(tile_sums(probs), fraction, probs.shape[1], lambda columns: probs.gather(1, columns))


def draw_one_hot(batch: DraftBatch, probs: Tensor, accepted: Tensor, fraction: Tensor) -> Tensor:
    """[B] int64: recovered or bonus tokens for one-hot drafts.

    probs: [R, V]; changed: each draft's own probability becomes 0, exactly, so that no difference of sums is needed.
    """
    if batch.total:
        columns = batch.tokens.clamp(min=0).long()
        kept = torch.where(batch.tokens < 0, probs[batch.draft_rows, columns], 0.0)
        probs.index_put_((batch.draft_rows, columns), kept.to(probs.dtype))
    row = batch.first_row + accepted
    tiles = tile_sums(probs)[row]
    token = invert(tiles, fraction, probs.shape[1], lambda columns: probs[row[:, None], columns])
    if not batch.total:
        return token
    # Nothing left beside the draft: it was certain, and only rounding let it be rejected.
    alone = (tiles.sum(1) <= 0) & (accepted < batch.counts)
    return torch.where(alone, batch.tokens[batch.at(accepted)].long().clamp(min=0), token)


def draw_residual(
    batch: DraftBatch,
    probs: Tensor,
    draft_probs: Tensor,
    accepted: Tensor,
    fraction: Tensor,
    scale: Tensor,
    tiles: Tensor,
) -> Tensor:
    """[B] int64: recovered or bonus tokens for drafts with probabilities.

    probs: [R, V] p; draft_probs: [T, V] q; scale: [T] factor on p at each draft (1 token by token); tiles:
    `residual_tiles` of the same. Where the residual is empty through rounding, p itself is drawn from.
    """
    row, draft = batch.first_row + accepted, batch.at(accepted)
    rest = tiles[draft]
    rejected = (accepted < batch.counts) & (batch.tokens[draft] >= 0) & (rest.sum(1) > 0)

    def weights_at(columns: Tensor) -> Tensor:
        p = probs[row[:, None], columns]
        q = draft_probs[draft[:, None], columns]
        return torch.where(rejected[:, None], (p * scale[draft][:, None] - q).clamp(min=0), p)

    chosen = torch.where(rejected[:, None], rest, tile_sums(probs)[row])
    return invert(chosen, fraction, probs.shape[1], weights_at)
