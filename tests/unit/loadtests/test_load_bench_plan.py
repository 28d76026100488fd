"""The steps that the planning benchmark times, and its verdicts; nothing is timed here."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest

from loadtests import bench_plan as bench
from mtp_runtime.graphs.planner import Graph

ROW = bench.Row("plan", "full", 256, 1, 256, 20.0, 10.0, 90.0)


@pytest.mark.parametrize("requests", bench.REQUESTS)
@pytest.mark.parametrize("k", bench.K)
def test_a_full_step_has_no_padding_and_a_fresh_one_the_most(requests: int, k: int) -> None:
    full, fresh = (bench.planned(requests, k, step) for step in bench.STEPS)
    assert full.graph == Graph(requests, k + 1)
    assert full.tokens == full.graph.tokens == full.actual_seq_lengths[-1]
    assert fresh.graph.slots > requests == fresh.requests == fresh.tokens
    assert fresh.actual_seq_lengths[-1] == fresh.graph.tokens
    assert max(b - a for a, b in pairwise([0, *fresh.actual_seq_lengths])) <= 16
    assert fresh.actual_seq_lengths_kv.count(0) == fresh.graph.slots - requests


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "met"),
        ({"median_us": 50.0, "max_us": 900.0}, "met"),
        ({"median_us": 50.1}, "MISSED: over 50"),
        ({"median_us": 50.1, "requests": 64}, "-"),
        ({"median_us": 50.1, "what": "rules"}, "-"),
    ],
)
def test_only_a_plan_of_256_requests_has_an_aim(changes: dict[str, object], verdict: str) -> None:
    assert dataclasses.replace(ROW, **changes).verdict == verdict


def test_a_sample_is_of_as_many_calls_as_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [0.0], []

    def call() -> None:
        calls.append(1)
        now[0] += bench.SAMPLE_S / 20

    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    found = bench.samples(call, seconds=0.0)
    assert found == pytest.approx([bench.SAMPLE_S / 20 * 1e6] * 5)
    assert len(calls) == pytest.approx(2 + 5 * 20, abs=5)
    assert len(bench.samples(call, seconds=10 * bench.SAMPLE_S)) == pytest.approx(10, abs=1)


def test_sizes_are_those_of_the_models() -> None:
    assert [(size.requests, size.blocks, size.hidden_size) for size in bench.SIZES] == [(16, 65, 128), (256, 313, 7168)]
