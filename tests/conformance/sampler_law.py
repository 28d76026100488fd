"""Distributions through the real class's forward, for the statistics of `tests/unit/verify`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from sampler_edge import sampling, step
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "verify"))

from verify_statistics import Chain, Method, Step, chain

from mtp_runtime.verify import Verdict

AT_ONCE = 512
"""Requests in a call: the package's functions work on [tokens, requests]."""
TEMPERATURE = 0.7
AGREE = chain([[0.5, 0.5], [0.1, 0.9]], [[0.5, 0.5], [0.5, 0.5]], [1, 1])
"""A drafter that always says 1 meets p = .5, .9, .9, ...: the first draft must be kept in half of the cases."""
FILTERED = chain(
    [[0.3, 0.7, 0.0, 0.0], [0.0, 0.6, 0.4, 0.0], [0.8, 0.0, 0.0, 0.2], [0.0, 0.5, 0.0, 0.5]],
    [[0.25] * 4] * 4,
    [1, 2, 0, 3],
)
"""What top-k 3 and top-p 0.9 leave of four tokens, the two others having the `tail`."""


def filtered_logits(target: Tensor, tail: tuple[float, float]) -> Tensor:
    """Logits [R, 4] whose probabilities are `tail` for the two tokens that target [R, 4] excludes, in order, and
    target's in proportion for the others."""
    probs = target * (1 - sum(tail))
    gone = (target == 0).nonzero()[:, 1].view(-1, 2)
    return probs.scatter(1, gone, torch.tensor(tail).expand(len(probs), 2).to(probs.dtype)).log()


def by_forward(
    sampler: Any, temperature: Tensor | float = TEMPERATURE, logits: Any = torch.log, **limits: Any
) -> Method:
    """A method of `play`: the real forward, AT_ONCE requests at a time.

    logits: rows of target probabilities [R, V] -> logits, before the temperature, which is multiplied in. limits:
    fields of SamplingMetadata, one value for all requests.
    """

    def method(one: Step) -> Verdict:
        counts = one.batch.counts.tolist()
        rows = logits(one.target) * temperature
        parts, draft, row = [], 0, 0
        for begin in range(0, len(counts), AT_ONCE):
            own = counts[begin : begin + AT_ONCE]
            total, size = sum(own), len(own)
            fields = {name: torch.full((size,), value) for name, value in limits.items()}
            q = None if one.draft_probs is None else one.draft_probs[draft : draft + total]
            # A q that is no number marks a placeholder's row, which nothing may read.
            found = sampler(
                step(one.batch.tokens[draft : draft + total], own),
                q,
                rows[row : row + total + size],
                sampling(torch.full((size,), float(temperature)), **fields),
            ).sampled_token_ids
            width = one.batch.width + 1 - found.shape[1]
            parts.append(torch.nn.functional.pad(found, (0, width), value=-1))
            draft, row = draft + total, row + total + size
        tokens = torch.cat(parts)
        return Verdict(tokens, (tokens >= 0).sum(1) - 1)

    return method


__all__ = ["AGREE", "AT_ONCE", "FILTERED", "TEMPERATURE", "Chain", "by_forward", "filtered_logits"]
