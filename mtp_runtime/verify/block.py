"""Block verification (Sun et al., arXiv 2403.10444, algorithm 2): joint over the block, lossless, never worse than
tokenwise.

The gain needs real draft probabilities: with one-hot drafts it accepts exactly as often as token by token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtp_runtime.verify.batch import DraftBatch, Noise, Verdict, emit
from mtp_runtime.verify.recover import draw_one_hot, draw_residual, residual_tiles
from mtp_runtime.verify.tokenwise import draft_chances


def prefix_weights(ratio: Tensor) -> Tensor:
    """w_1..w_K [B, K] of w_i = min(w_{i-1} r_i, 1), w_0 = 1, for ratio [B, K] float64 r_i = p(x_i) / q(x_i).

    In logarithms this walk, kept below 0, is the sum so far minus its highest point so far: no loop over positions.
    """
    walk = ratio.log().cumsum(1)
    return (walk - walk.cummax(1).values.clamp(min=0)).exp()


def block_chances(batch: DraftBatch, probs: Tensor, draft_probs: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """(h_1..h_K [B, K] float64, w before each draft [T], tile sums of the residual at each draft or None).

    S_i = sum over v of max(w_i p_{i+1}(v) - q_{i+1}(v), 0); h_i = S_i / (S_i + 1 - w_i) before the last draft and
    h_n = w_n at it. A placeholder ends the block: h is 0 from there on.
    """
    p, q = draft_chances(batch, probs, draft_probs)
    # In float64: p / q of a draft with a very small q would be infinite in float32.
    ratio = p.double() if isinstance(q, float) else torch.where(q > 0, p.double() / q, 0.0)
    live = batch.rectangle(batch.tokens >= 0, False).int().cumprod(1)  # nothing after a placeholder counts
    weight = prefix_weights(batch.rectangle(ratio, 0.0)) * live  # [B, K], w_1..w_K
    before = torch.cat((torch.ones_like(weight[:, :1]), weight[:, :-1]), dim=1)  # w_0..w_{K-1}
    scale = batch.flat(before).to(p.dtype)
    if draft_probs is None:
        tiles, rest = None, scale * (1 - p)
    else:
        tiles = residual_tiles(batch, probs, draft_probs, scale)
        rest = tiles.sum(1)
    following = batch.rectangle(rest, 0.0).roll(-1, dims=1).double()  # S_1..S_K; the last is not used
    chance = following / (following + 1 - weight).clamp(min=1e-30)
    last = torch.arange(1, batch.width + 1, device=p.device) == live.sum(1, keepdim=True)
    return torch.where(weight > 0, torch.where(last, weight, chance), 0.0), scale, tiles


def verify_block(batch: DraftBatch, probs: Tensor, draft_probs: Tensor | None, noise: Noise) -> Verdict:
    """Accept the longest prefix i with U_i < h_i; shapes as in `verify_tokenwise`.

    The recovered token comes from max(w_i p_{i+1} - q_{i+1}, 0).
    """
    if not batch.total:
        nothing = batch.counts.clone()
        return emit(batch, nothing, draw_one_hot(batch, probs, nothing, noise.pick))
    chance, scale, tiles = block_chances(batch, probs, draft_probs)
    place = torch.arange(1, batch.width + 1, device=chance.device)
    accepted = torch.where(batch.rectangle(noise.accept, 1.0) < chance, place, 0).amax(1)
    if draft_probs is None or tiles is None:
        return emit(batch, accepted, draw_one_hot(batch, probs, accepted, noise.pick))
    return emit(batch, accepted, draw_residual(batch, probs, draft_probs, accepted, noise.pick, scale, tiles))
