"""Where the tokens that a step samples stand in their sequences: the numbers of a request with a seed depend on it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Sampling:
    """The step that is sampled now: a process has one runner, and it samples one step at a time.

    verified: yields [R] int64, the position of the token that each row of logits predicts, in a step with drafts;
    sampled: yields [B] int64, of the token that the plain sampler samples for each request: in a step with drafts the
    bonus token. Both None outside a step, and where the runner does not say.
    """

    verified: Callable[[], Tensor] | None = None
    sampled: Callable[[], Tensor] | None = None


def replace_sample(original: Any) -> Any:
    """For `NPUModelRunner._sample`: notes the positions while it runs."""

    @functools.wraps(original)
    def _sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        # With prefill context parallelism a worker's positions are those of its own part of the tokens.
        if getattr(self, "pcp_size", 1) == 1:
            _note(self, spec_decode_metadata)
        try:
            return original(self, logits, spec_decode_metadata)
        finally:
            Sampling.verified = Sampling.sampled = None

    return _sample


def _note(runner: Any, metadata: Any) -> None:
    def of(rows: Tensor) -> Tensor:
        positions = getattr(runner.positions, "gpu", runner.positions)
        return positions[rows].long() + 1

    if metadata is None:
        Sampling.sampled = lambda: of(runner.query_start_loc.gpu[1 : runner.input_batch.num_reqs + 1].long() - 1)
        return
    Sampling.verified = lambda: of(metadata.logits_indices)
    Sampling.sampled = lambda: of(metadata.logits_indices[metadata.bonus_logits_indices])


def drawn_positions(counts: list[int], generators: dict[int, torch.Generator], device: torch.device) -> Tensor:
    """[R] int64, numbers to use where positions are not known: each seeded request's own generator draws its rows'."""
    rows = torch.zeros(sum(counts) + len(counts), dtype=torch.int64, device=device)
    for request, generator in generators.items():
        first = sum(counts[:request]) + request
        rows[first : first + counts[request] + 1].random_(generator=generator)
    return rows
