"""What verification works on: the drafts of one step, ragged over requests, as plain tensors.

B requests, the b-th with n_b drafts (0..width, ragged), T = sum of n_b, V tokens in the vocabulary. Per-draft tensors
are flat in request order. Target rows are R = T + B: the rows of a request's drafts, then its bonus row, request after
request. Every shape follows from T, B and width, which the host knows: nothing here waits for a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

PLACEHOLDER = -1
"""As a draft: padding that is rejected for certain. As an output: no token."""


@dataclass
class DraftBatch:
    """The drafts of one step.

    tokens:     [T] integer, the draft tokens; PLACEHOLDER marks padding.
    cumulative: [B] integer, drafts up to and including each request.
    width:      most drafts of any request (a bound is enough, at the price of wider outputs).
    Raises ValueError when the shapes cannot fit together.
    """

    tokens: Tensor
    cumulative: Tensor
    width: int

    def __post_init__(self) -> None:
        if self.tokens.dim() != 1 or self.cumulative.dim() != 1:
            raise ValueError(f"drafts {tuple(self.tokens.shape)}, counts {tuple(self.cumulative.shape)}: need [T], [B]")
        if self.total > self.size * self.width:
            raise ValueError(f"{self.total} drafts do not fit {self.size} requests of at most {self.width} drafts each")

    @classmethod
    def of(cls, tokens: Tensor, counts: list[int]) -> DraftBatch:
        """From the drafts of each request, counted on the host. Raises ValueError when they do not add up."""
        if tokens.shape[0] != sum(counts):
            raise ValueError(f"{tokens.shape[0]} drafts do not match counts that sum to {sum(counts)}")
        cumulative = torch.tensor(counts, dtype=torch.int64, device=tokens.device).cumsum(0)
        return cls(tokens, cumulative, max(counts, default=0))

    @property
    def total(self) -> int:
        """T."""
        return self.tokens.shape[0]

    @property
    def size(self) -> int:
        """B."""
        return self.cumulative.shape[0]

    @property
    def even(self) -> bool:
        """Whether every request has exactly `width` drafts: then ragged tensors are rectangular as they lie."""
        return self.total == self.size * self.width

    @cached_property
    def _requests(self) -> Tensor:
        return torch.arange(self.size, device=self.tokens.device)

    @cached_property
    def columns(self) -> Tensor:
        """[T] int64, the drafts as indices into the vocabulary; 0 for a placeholder."""
        return self.tokens.clamp(min=0).long()

    @cached_property
    def counts(self) -> Tensor:
        """[B] int64, drafts of each request."""
        if self.even:
            return self._requests.new_full((self.size,), self.width)
        return torch.diff(self.cumulative.long(), prepend=self.cumulative.new_zeros(1, dtype=torch.int64))

    @cached_property
    def starts(self) -> Tensor:
        """[B] int64, the first draft of each request."""
        return self._requests * self.width if self.even else self.cumulative.long() - self.counts

    @cached_property
    def first_row(self) -> Tensor:
        """[B] int64, the first target row of each request; after `a` accepted drafts row `first_row + a` decides."""
        return self._requests * (self.width + 1) if self.even else self.starts + self._requests

    @cached_property
    def owner(self) -> Tensor:
        """[T] int64, the request of each draft."""
        place = torch.arange(self.total, device=self.tokens.device)
        return torch.searchsorted(self.cumulative.long(), place, right=True)

    @cached_property
    def position(self) -> Tensor:
        """[T] int64, the place of each draft among its request's."""
        return torch.arange(self.total, device=self.tokens.device) - self.starts[self.owner]

    @cached_property
    def draft_rows(self) -> Tensor:
        """[T] int64, the target row of each draft: one bonus row lies before it for every earlier request."""
        if self.even:
            rows = torch.arange(self.total + self.size, device=self.tokens.device)
            return rows.view(self.size, self.width + 1)[:, : self.width].reshape(-1)
        return torch.arange(self.total, device=self.tokens.device) + self.owner

    @property
    def lying(self) -> tuple[int, ...]:
        """How drafts lie in `draft_part`: (B, width) for an even batch, else (T,)."""
        return (self.size, self.width) if self.even else (self.total,)

    def draft_part(self, rows: Tensor) -> Tensor:
        """The rows [R, N] of drafts, without bonus rows: a view [B, width, N] of an even batch, else a copy [T, N]."""
        if self.even:
            return rows.unflatten(0, (self.size, self.width + 1))[:, : self.width]
        return rows.index_select(0, self.draft_rows)

    @cached_property
    def _index(self) -> tuple[Tensor, Tensor]:
        position = torch.arange(self.width, device=self.tokens.device)
        index = (self.starts[:, None] + position).clamp_(max=max(self.total - 1, 0))
        return index, position < self.counts[:, None]

    def rectangle(self, values: Tensor, fill: float) -> Tensor:
        """[B, width] from per-draft values [T], `fill` where a request has no draft."""
        if self.even:
            return values.view(self.size, self.width)
        if not self.total:
            return values.new_full((self.size, self.width), fill)
        index, real = self._index
        return torch.where(real, values[index], fill)

    def flat(self, values: Tensor) -> Tensor:
        """[T] from [B, width]: the inverse of `rectangle`."""
        return values.reshape(-1) if self.even else values[self.owner, self.position]

    def at(self, accepted: Tensor) -> Tensor:
        """[B] int64: the draft after an accepted prefix (some valid draft where all were accepted)."""
        return (self.starts + accepted).clamp_(max=max(self.total - 1, 0))


@dataclass(slots=True)
class Noise:
    """The random numbers of one step, drawn by the caller so that verification itself is a pure function.

    accept: [T] float64 in [0, 1), one a draft.
    pick:   [B] float64 in [0, 1), one a request, for the one token it draws itself (recovered or bonus).
    """

    accept: Tensor
    pick: Tensor

    @classmethod
    def drawn(cls, batch: DraftBatch, generator: torch.Generator) -> Noise:
        """From a generator on the batch's device; alike in all workers that drew alike from it before.

        float64: in float32 an exact 0 is likely enough to matter, and V tokens need more than 24 bits.
        """
        total = batch.total
        numbers = torch.rand(total + batch.size, generator=generator, dtype=torch.float64, device=batch.tokens.device)
        return cls(numbers[:total], numbers[total:])


@dataclass(slots=True)
class Verdict:
    """What a step emits.

    tokens:   [B, width + 1] int32: accepted drafts, then the recovered or bonus token, then PLACEHOLDER.
    accepted: [B] int64, drafts accepted of each request.
    """

    tokens: Tensor
    accepted: Tensor


def prefix(batch: DraftBatch, passed: Tensor) -> Tensor:
    """[B] int64: how many leading drafts passed, given passed [T] bool for every draft on its own."""
    return batch.rectangle(passed, False).cumprod(1).sum(1)


def emit(batch: DraftBatch, accepted: Tensor, last: Tensor) -> Verdict:
    """Lay out the output: accepted [B] drafts, then last [B], the recovered or bonus token of each request."""
    place = torch.arange(batch.width + 1, device=last.device) - accepted[:, None]
    drafts = torch.nn.functional.pad(batch.rectangle(batch.tokens, PLACEHOLDER), (0, 1), value=PLACEHOLDER)
    tokens = torch.where(place < 0, drafts, torch.where(place == 0, last[:, None], PLACEHOLDER))
    return Verdict(tokens.int(), accepted)


def to_rows(batch: DraftBatch, values: Tensor) -> Tensor:
    """[R, ...] from [B, ...]: each request's value for each of its target rows."""
    if batch.even:
        return values.repeat_interleave(batch.width + 1, dim=0, output_size=batch.total + batch.size)
    rows = torch.arange(batch.total + batch.size, device=values.device)
    bonus = batch.cumulative.long() + torch.arange(batch.size, device=values.device)
    return values[torch.searchsorted(bonus, rows)]
