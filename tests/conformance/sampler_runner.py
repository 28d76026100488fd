"""Requests that decode to their end through the real `NPUModelRunner._sample`, with and without drafts.

The runner itself is a stand-in: it holds what `_sample` reads, filled as the real one fills it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from types import SimpleNamespace

import torch
from sampler_edge import make_sampler, sampling, step
from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

VOCAB = 50
LOGITS = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2))
"""Of the target after each token. Flat enough that two different random numbers seldom yield one token."""


@dataclass
class Request:
    """seed: None for none; drafts: how many at each length of its text; temperature 0 is greedy; generator: its own."""

    seed: int | None
    drafts: Callable[[int], int]
    temperature: float = 1.0
    text: list[int] = field(default_factory=lambda: [1, 2, 3])
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if self.seed is not None:
            self.generator = torch.Generator().manual_seed(self.seed)


def none(length: int) -> int:
    return 0


def decode(requests: list[Request], length: int) -> list[list[int]]:
    """The texts, all of at least this length, cut to it. Drafts are the target's best tokens."""
    runner = SimpleNamespace(sampler=None, rejection_sampler=make_sampler(), pcp_size=1)
    runner.sampler = runner.rejection_sampler.sampler
    while min(len(one.text) for one in requests) < length:
        _step(runner, requests)
    return [one.text[:length] for one in requests]


def _step(runner: SimpleNamespace, requests: list[Request]) -> None:
    counts = [one.drafts(len(one.text)) for one in requests]
    rows: list[int] = []
    positions: list[int] = []
    for one, count in zip(requests, counts, strict=True):
        known = [one.text[-1]]
        for _ in range(count):
            known.append(int(LOGITS[known[-1]].argmax()))
        rows += known
        positions += range(len(one.text) - 1, len(one.text) + count)
    starts = torch.tensor([0, *accumulate(count + 1 for count in counts)])
    is_first = torch.zeros(len(rows), dtype=torch.bool).index_fill(0, starts[:-1], True)
    metadata = step(torch.tensor(rows)[~is_first], counts) if any(counts) else None
    generators = {i: one.generator for i, one in enumerate(requests) if one.generator is not None}
    runner.positions = torch.tensor(positions)
    runner.query_start_loc = SimpleNamespace(gpu=starts.int())
    runner.input_batch = SimpleNamespace(
        update_async_output_token_ids=lambda: None,
        sampling_metadata=sampling(torch.tensor([one.temperature for one in requests]), generators=generators),
        num_reqs=len(requests),
    )
    found = NPUModelRunner._sample(runner, LOGITS[rows], metadata).sampled_token_ids
    for one, row in zip(requests, found.tolist(), strict=True):
        one.text += [token for token in row if token >= 0]
