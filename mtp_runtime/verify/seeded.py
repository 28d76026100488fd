"""Random numbers of a step's requests: those with a seed of their own, and those of a worker for all others.

A request's seed arrives as a generator, as engines keep it. Engines advance it with every draw, so that what a seed
yields depends on how many drafts were tried before; here only the seed itself is read, and the numbers are a function
of it and of a position (`keyed`).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from mtp_runtime.verify import keyed
from mtp_runtime.verify.batch import DraftBatch, to_rows

Generators = dict[int, torch.Generator]
"""Request -> its generator, for the requests with a seed."""


@cache
def worker_generator(stream: int, device: torch.device) -> torch.Generator:
    """This worker's generator for requests without a seed, one a stream (see `verify.keyed`).

    vLLM seeds every worker of a group alike; a generator that one purpose alone draws from stays alike in all of them.
    Streams must not resemble each other, nor torch's own generator: a draft drawn with the number that later decides
    about it would be accepted too often.
    """
    words = keyed.words(torch.tensor(torch.initial_seed() % (1 << 63)), torch.tensor(0), stream)
    return torch.Generator(device).manual_seed((int(words[0]) << 31) ^ int(words[1]))


def key(generator: torch.Generator) -> int:
    """The seed as a signed 64-bit number: the same bits as the unsigned one that torch reports."""
    return (generator.initial_seed() + (1 << 63)) % (1 << 64) - (1 << 63)


def keys(generators: Generators, device: torch.device) -> tuple[Tensor, Tensor]:
    """(requests [S] int64, their seeds [S] int64): which requests have a seed of their own."""
    requests = torch.tensor(list(generators), dtype=torch.int64, device=device)
    return requests, torch.tensor([key(g) for g in generators.values()], dtype=torch.int64, device=device)


def race_seeded(
    probs: Tensor, counts: list[int], generators: Generators, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample every target row of the requests with a seed.

    probs [R, V], counts drafts of each request (on the host: shapes need no device), positions [R]. Returns (requests
    [S], their rows [N], the tokens [N]).
    """
    requests = torch.tensor(list(generators), dtype=torch.int64, device=probs.device)
    rows: list[int] = []
    seeds: list[int] = []
    for request, generator in generators.items():
        first = sum(counts[:request]) + request
        rows += range(first, first + counts[request] + 1)
        seeds += [key(generator)] * (counts[request] + 1)
    index, row_keys = (torch.tensor(part, dtype=torch.int64, device=probs.device) for part in (rows, seeds))
    return requests, index, keyed.race(probs[index], row_keys, positions[index])


def enter_seeded(
    batch: DraftBatch,
    seeded: tuple[Tensor, Tensor, Tensor],
    greedy: Tensor | None,
    chosen: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(chosen [R], exact [B]) with the tokens of `race_seeded` entered; a greedy request with a seed stays greedy."""
    requests, rows, tokens = seeded
    if greedy is None or chosen is None:
        chosen = tokens.new_zeros(batch.total + batch.size)
        greedy = torch.zeros(batch.size, dtype=torch.bool, device=tokens.device)
    kept = torch.where(to_rows(batch, greedy)[rows], chosen[rows].long(), tokens)
    return chosen.long().index_put_((rows,), kept), greedy.index_fill(0, requests, True)
