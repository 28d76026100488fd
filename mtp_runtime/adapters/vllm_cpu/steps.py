"""What the engine scheduled for the step that runs now, seen independently of our own parts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Step:
    """The step that runs in this process: one engine core is one process, and it runs one step at a time.

    draft_rows: query tokens of the requests that carry drafts (drafts + 1 each); 0 in a step without drafts and in
    dummy runs.
    next_position: yields [B] int64, where the token after the one sampled last stands; None before any was. Few steps
    ask, so it is worked out when asked for, which must be before the next step begins.
    depth: drafts proposed since then.
    """

    draft_rows = 0
    runner: Any = None
    next_position: Callable[[], Tensor] | None = None
    depth = 0


def entering(runner: Any, scheduler_output: Any) -> bool:
    """Note the drafts of the step that this runner begins now; whether it has any."""
    # A request near its token limit may be listed with no draft at all.
    drafts = [len(tokens) for tokens in scheduler_output.scheduled_spec_decode_tokens.values() if tokens]
    Step.draft_rows = sum(drafts) + len(drafts)
    Step.runner = runner
    return bool(drafts)


def row_positions(query_rows: Tensor | None = None) -> Tensor:
    """[R] int64: the position in its sequence of the token that each row of logits predicts.

    query_rows: [R] the query token behind each row; None for a step without drafts, where it is each request's last.
    Zeros in a dummy run before the first step, where nothing depends on them.
    """
    runner = Step.runner
    if runner is None:
        return torch.zeros(0 if query_rows is None else len(query_rows), dtype=torch.int64)
    if query_rows is None:
        query_rows = runner.query_start_loc.gpu[1 : runner.input_batch.num_reqs + 1] - 1
    return runner.positions[query_rows].long() + 1


def sampled(next_position: Callable[[], Tensor]) -> None:
    """Note that a step was sampled; drafts follow, the first at next_position() [B]."""
    Step.next_position, Step.depth = functools.cache(next_position), 0


def deeper() -> int:
    """Note that drafts of the next depth are proposed; returns the depth, 0 first."""
    Step.depth += 1
    return Step.depth - 1


def draft_positions(depth: int) -> Tensor:
    """[B] int64: where the drafts of a depth stand."""
    if Step.next_position is None:
        raise RuntimeError("drafts are asked for before anything was sampled")
    return Step.next_position() + depth
