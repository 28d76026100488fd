"""Planning, the operator's rules and padding, without an engine: the last table of `make bench-core`.

Microseconds of Python and torch that a decode step spends before its graph runs; the median of samples of many calls
each, and their range. One thread.

  plan   `choose` among the graphs of a server, then `plan`; with and without slack slots
  rules  the checks of the attention call in TND layout, every published rule, the description of the call included
  pad    the step into a graph's buffers: the tiny model's sizes and DeepSeek-V3's (7168 hidden, 40000 tokens of context
         in blocks of 128); `drafter` copies hidden states too

`full`: every request has K + 1 tokens, nothing is padded (placeholder). `fresh`: every request has one token, and slack
slots take the rest: the most padding there is.

Aim: a plan for 256 requests in at most 50 microseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from mtp_runtime.graphs.planner import Graph, Plan, PlanError, choose, plan
from mtp_runtime.graphs.slots import PLACEHOLDER, SLACK, graph_slots

REQUESTS = (16, 64, 256)
K = (1, 3)
STEPS = ("full", "fresh")
AIM_US = 50.0
AIM_REQUESTS = 256
SAMPLE_S = 2e-3
"""Calls of one sample take about so long: the clock's own cost is nothing beside it."""
CONTEXT = 1000
"""KV length of the requests."""

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Size:
    """A model and its server, as far as padding sees them. blocks: columns of the block table."""

    name: str
    requests: int
    blocks: int
    hidden_size: int
    dtype: str


SIZES = (
    Size("tiny", 16, 1024 // 16 + 1, 128, "float32"),
    Size("DeepSeek-V3", 256, -(-40_000 // 128), 7168, "bfloat16"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement, microseconds a call."""

    what: str
    step: str
    requests: int
    k: int
    slots: int
    median_us: float
    min_us: float
    max_us: float

    @property
    def verdict(self) -> str:
        """met or MISSED where there is an aim, else a dash."""
        if not (self.what == "plan" and self.requests == AIM_REQUESTS):
            return "-"
        return "met" if self.median_us <= AIM_US else f"MISSED: over {AIM_US:g}"


def graphs(requests: int, k: int, step: str) -> list[Graph]:
    """What such a server captures, for the padding that the step needs."""
    return [Graph(slots, k + 1) for slots in graph_slots(requests, k, SLACK if step == "fresh" else PLACEHOLDER)]


def step_tokens(requests: int, k: int, step: str) -> list[int]:
    """Query tokens of each request."""
    return [1 if step == "fresh" else k + 1] * requests


def planned(requests: int, k: int, step: str) -> Plan:
    """The plan of that step."""
    return plan_step(step_tokens(requests, k, step), [CONTEXT] * requests, graphs(requests, k, step))


def plan_step(tokens: list[int], kv: list[int], captured: list[Graph]) -> Plan:
    """What an engine does before each decode step. Raises PlanError where no graph holds the step."""
    graph = choose(len(tokens), sum(tokens), captured)
    if graph is None:
        raise PlanError("no graph holds the step", "capture one that does")
    return plan(tokens, kv, graph)


def samples(call: Call, seconds: float) -> list[float]:
    """Microseconds a call, of at least 5 samples and for at least so many seconds."""
    call()
    begin = time.perf_counter()
    call()
    number = max(1, int(SAMPLE_S / max(time.perf_counter() - begin, 1e-9)))
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < 5 or time.perf_counter() < end:
        begin = time.perf_counter()
        for _ in range(number):
            call()
        found.append((time.perf_counter() - begin) / number * 1e6)
    return found


def row(what: str, step: str, k: int, made: Plan, call: Call, seconds: float) -> Row:
    """Time a call of a step."""
    found = samples(call, seconds)
    return Row(what, step, made.requests, k, made.graph.slots, statistics.median(found), min(found), max(found))


def plan_rows(seconds: float, largest: int) -> Iterator[Row]:
    """`choose` and `plan`."""
    for requests, k, step in _shapes(largest):
        tokens, kv, captured = step_tokens(requests, k, step), [CONTEXT] * requests, graphs(requests, k, step)
        call = partial(plan_step, tokens, kv, captured)
        yield row("plan", step, k, call(), call, seconds)


def rule_rows(seconds: float, largest: int) -> Iterator[Row]:
    """The checks of one attention call of DeepSeek-V3, 128 heads."""
    import torch

    from mtp_runtime.attention.call import FiaCall
    from mtp_runtime.attention.constraints import enforce
    from mtp_runtime.attention.mask import causal_mask

    def check(*tensors: torch.Tensor, **arguments: Any) -> None:
        enforce(FiaCall.from_tensors(*tensors, **arguments))

    mask = causal_mask(torch.int8)
    for requests, k, step in _shapes(largest):
        made = planned(requests, k, step)
        tokens, slots, blocks = made.graph.tokens, made.graph.slots, requests * (CONTEXT // 128 + 1)
        query, rope, key, key_rope = (
            torch.empty(shape, dtype=torch.bfloat16, device="meta")
            for shape in ((tokens, 128, 512), (tokens, 128, 64), (blocks, 1, 128, 512), (blocks, 1, 128, 64))
        )
        arguments = {
            "query_rope": rope,
            "key_rope": key_rope,
            "atten_mask": mask,
            "actual_seq_lengths": made.actual_seq_lengths,
            "actual_seq_lengths_kv": made.actual_seq_lengths_kv,
            "block_table": torch.zeros(slots, SIZES[-1].blocks, dtype=torch.int32),
            "num_heads": 128,
            "num_key_value_heads": 1,
            "input_layout": "TND",
            "sparse_mode": 3,
            "block_size": 128,
        }
        call = partial(check, query, key, key, **arguments)
        yield row("rules", step, k, made, call, seconds)


def pad_rows(seconds: float, largest: int) -> Iterator[Row]:
    """`pad`, with K = 1."""
    import torch

    from mtp_runtime.graphs.padding import StepBuffers, StepInputs, pad

    for size in SIZES:
        if size.requests > largest:
            continue
        dtype = getattr(torch, size.dtype)
        for step in STEPS:
            made = planned(size.requests, 1, step)
            for hidden in (None, size.hidden_size):
                buffers = StepBuffers.make(made.graph, size.blocks, hidden_size=hidden, dtype=dtype)
                inputs = StepInputs(
                    torch.zeros(made.tokens, dtype=torch.int32),
                    torch.zeros(made.tokens, dtype=torch.int64),
                    torch.zeros(made.tokens, dtype=torch.int64),
                    torch.zeros(made.requests, size.blocks, dtype=torch.int32),
                    None if hidden is None else torch.zeros(made.tokens, hidden, dtype=dtype),
                )
                what = f"pad {size.name}" + (" drafter" if hidden else "")
                yield row(what, step, 1, made, partial(pad, buffers, made, inputs), seconds)


def _shapes(largest: int) -> Iterator[tuple[int, int, str]]:
    return ((r, k, step) for r in REQUESTS if r <= largest for k in K for step in STEPS)


def show(seconds: float, largest: int, as_json: bool) -> None:
    """Measure and print, row by row."""
    if not as_json:
        print(f"{'what':>24} {'step':>6} {'requests':>8} {'K':>2} {'slots':>5} {'us':>8} {'range':>18}  aim")
    for rows in (plan_rows, rule_rows, pad_rows):
        for found in rows(seconds, largest):
            if as_json:
                print(json.dumps({**asdict(found), "verdict": found.verdict}), flush=True)
                continue
            shape = f"{found.requests:>8} {found.k:>2} {found.slots:>5}"
            spread = f"[{found.min_us:.1f}-{found.max_us:.1f}]"
            print(
                f"{found.what:>24} {found.step:>6} {shape} {found.median_us:>8.1f} {spread:>18}  {found.verdict}",
                flush=True,
            )


def main(arguments: list[str] | None = None) -> int:
    """Entry point of this table alone."""
    parser = argparse.ArgumentParser(prog="bench_plan", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.5, help="at least so long a row (and at least 5 samples)")
    parser.add_argument("--largest", type=int, default=256, help="most requests")
    parser.add_argument("--json", action="store_true", help="one JSON line a row")
    options = parser.parse_args(arguments)
    import torch

    torch.set_num_threads(1)
    show(options.seconds, options.largest, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
