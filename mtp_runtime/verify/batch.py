"""What verification works on: the drafts of one step, ragged over requests, as plain tensors.

B requests, the b-th with n_b drafts (0..K, ragged), T = sum of n_b, V tokens in the vocabulary. Per-draft tensors are
flat in request order: request b owns rows ``starts[b] .. starts[b] + n_b``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PLACEHOLDER = -1
"""As a draft: a padding draft that must be rejected for certain. As an output: no token."""


@dataclass(slots=True)
class DraftBatch:
    """The drafts of one step.

    tokens: [T] integer, the draft tokens; PLACEHOLDER marks padding.
    counts: length B, drafts of each request.
    bonus:  [B] integer, the token the target yields when every draft of the request is accepted.
    Raises ValueError when the shapes do not fit together.
    """

    tokens: torch.Tensor
    counts: list[int]
    bonus: torch.Tensor

    def __post_init__(self) -> None:
        if self.tokens.dim() != 1 or self.tokens.shape[0] != sum(self.counts):
            raise ValueError(f"drafts {tuple(self.tokens.shape)} do not match counts that sum to {sum(self.counts)}")
        if self.bonus.dim() != 1 or self.bonus.shape[0] != len(self.counts):
            raise ValueError(f"bonus {tuple(self.bonus.shape)} does not match {len(self.counts)} requests")

    @property
    def width(self) -> int:
        """Most drafts of any request."""
        return max(self.counts, default=0)

    def padded_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rectangular view of the ragged rows.

        Returns (rows [B, width] int64: flat row of each position, clamped where there is none; real [B, width] bool).
        """
        device = self.tokens.device
        counts = torch.tensor(self.counts, dtype=torch.int64, device=device)
        starts = counts.cumsum(0) - counts
        position = torch.arange(self.width, device=device)
        real = position < counts[:, None]
        rows = (starts[:, None] + position).clamp_(max=max(self.tokens.shape[0] - 1, 0))
        return rows, real


@dataclass(slots=True)
class Noise:
    """The random numbers of one step, drawn by the caller so that verification itself is a pure function.

    uniform: [T] float in [0, 1), one a draft.
    race:    [B, V] float > 0, exponential(1), for the one token a request may have to recover.
    """

    uniform: torch.Tensor
    race: torch.Tensor


@dataclass(slots=True)
class Verdict:
    """What a step emits.

    tokens:   [B, width + 1] int32: accepted drafts, then the recovered or bonus token, then PLACEHOLDER.
    accepted: [B] int64, drafts accepted of each request.
    """

    tokens: torch.Tensor
    accepted: torch.Tensor


def emit(batch: DraftBatch, accepted: torch.Tensor, replacement: torch.Tensor) -> Verdict:
    """Lay out the output.

    accepted: [B] int64, length of the accepted prefix; replacement: [B], the token after it where a draft was rejected.
    The bonus token follows only a fully accepted request.
    """
    rows, _ = batch.padded_rows()
    size, width = len(batch.counts), batch.width
    tokens = torch.full((size, width + 1), PLACEHOLDER, dtype=torch.int32, device=batch.tokens.device)
    position = torch.arange(width, device=tokens.device)
    if width:
        tokens[:, :width] = torch.where(position < accepted[:, None], batch.tokens[rows].int(), PLACEHOLDER)
    counts = torch.tensor(batch.counts, device=tokens.device)
    last = torch.where(accepted == counts, batch.bonus.to(replacement.dtype), replacement)
    tokens.scatter_(1, accepted[:, None], last[:, None].int())
    return Verdict(tokens, accepted)


def accepted_prefix(batch: DraftBatch, passed: torch.Tensor) -> torch.Tensor:
    """[B] int64: how many leading drafts passed, given passed [T] bool for every draft on its own."""
    if batch.width == 0:
        return torch.zeros(len(batch.counts), dtype=torch.int64, device=batch.tokens.device)
    rows, real = batch.padded_rows()
    return (passed[rows] & real).long().cumprod(1).sum(1)


def row_after_prefix(batch: DraftBatch, accepted: torch.Tensor) -> torch.Tensor:
    """[B] int64: the flat row of the first rejected draft (of some valid row where none was rejected)."""
    counts = torch.tensor(batch.counts, dtype=torch.int64, device=accepted.device)
    starts = counts.cumsum(0) - counts
    return (starts + accepted).clamp_(max=max(batch.tokens.shape[0] - 1, 0))


def expand_to_tokens(x: torch.Tensor, cumulative: torch.Tensor, replace_from: float, replace_to: float) -> torch.Tensor:
    """[T] from [B]: each request's value for each of its drafts, replace_from read as replace_to.

    cumulative: [B], drafts up to and including each request.
    """
    if replace_from != replace_to:
        x = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    counts = torch.diff(cumulative, prepend=cumulative.new_zeros(1))
    return x.repeat_interleave(counts)
