"""Static graphs in a real engine: the tokens of an engine without MTP in every mode, and every step accounted for.

The engines are those of `graph_arms`: all pairs of graph mode, attention, padding and K here, every combination with
`make test-full`. Each is asked for one request, a full batch of 16, 24 that join and leave, a burst and seeded ones.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from graph_arms import EAGER, FULL, MORE_BURSTS, OFF, PAIRWISE, PIECEWISE, SMALL, every_combination, pairs
from graph_asks import Answer
from graph_watch import Replay
from greedy_answers_equal import assert_equal

from mtp_runtime.graphs.slots import SLACK

pytestmark = pytest.mark.engine

HERE = [one.name for one in [*PAIRWISE, *MORE_BURSTS]]
SLOT = 16
"""Tokens that a slot takes, padding or not."""

matrix = pytest.mark.parametrize(
    "name",
    [
        *HERE,
        SMALL,
        *(pytest.param(one.name, marks=pytest.mark.full) for one in every_combination() if one.name not in HERE),
    ],
)


def test_the_engines_cover_every_pair_of_values() -> None:
    everything = every_combination()
    assert set(PAIRWISE) <= set(everything)
    assert set().union(*map(pairs, PAIRWISE)) == set().union(*map(pairs, everything))


@matrix
def test_greedy_tokens_equal_those_without_mtp(engines, name: str) -> None:
    """One request, a batch, requests that join and leave, and 16 of one token each in one step."""
    off, on = engines[OFF]["reference"], engines[name]["matrix"]
    for run, expected in (("batch", off["mixed"]), ("joining", off["mixed"]), ("burst", off["burst"])):
        found = on[run].tokens
        assert_equal(expected.tokens[: len(found)], expected.gaps[: len(found)], found, f"{name}, {run}")
    assert_equal(off["mixed"].tokens[1:2], off["mixed"].gaps[1:2], on["alone"].tokens, f"{name}, alone")
    assert [len(tokens) for tokens in on["batch"].tokens] == [len(tokens) for tokens in off["mixed"].tokens[:16]]


@matrix
def test_seeded_tokens_are_the_same_in_every_mode(engines, name: str) -> None:
    """Against eager execution with K = 1. Without MTP the sampler is vLLM's, whose seeds mean something else."""
    expected = engines["eager-batch_expansion-placeholder-k1"]["matrix"]["seeded"].tokens
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    assert engines[name]["matrix"]["seeded"].tokens == expected


@matrix
def test_every_step_runs_in_a_graph_or_is_counted(engines, name: str) -> None:
    """va#7144, va#7460, va#8392, va#3597, vLLM#37865: a step that fits a graph runs in it, in all passes of the target
    and of the drafter; any other runs eagerly and is counted. Counted at the model's Python as well."""
    arm = engines.arms[name]
    for run, answer in engines[name]["matrix"].items():
        seen, ours, steps = answer.seen, answer.ours, answer.seen.steps
        graphs = (ours["graph_replays"], ours["graph_draft_replays"], ours["graph_eager_steps"])
        first, later = _replayed(arm.graph_mode, arm.slots(), arm.k, steps)
        eager = sum(_decodes(step, arm.k) for step in steps) - first if arm.graph_mode == FULL else 0
        # The drafter's first pass has the shape of the target's step; the later ones have one token a request.
        assert graphs == (first, first + (arm.k - 1) * later, 2 * eager), run
        assert seen.forwards["target"] == len(steps) - first, run
        assert seen.forwards["drafter"] == arm.k * len(steps) - graphs[1], run
        assert len(seen.replays) == graphs[0] + graphs[1], run
        if arm.graph_mode == FULL and arm.padding == SLACK and arm.capture_slots is None:
            assert eager == 0, run


def _decodes(step: list[int], k: int) -> bool:
    return max(step) <= k + 1


def _replayed(mode: str, slots: list[int], k: int, steps: list[list[int]]) -> tuple[int, int]:
    """Of these steps, how many replay a graph, and after how many the drafter's later depths do."""
    if mode == EAGER:
        return 0, 0
    if mode == PIECEWISE:
        return sum(sum(step) <= max(slots) * (k + 1) for step in steps), len(steps)
    return sum(_decodes(step, k) and any(_fits(step, count, k + 1) for count in slots) for step in steps), len(steps)


def _fits(step: list[int], slots: int, width: int) -> bool:
    """Whether the tokens left over fit into the free slots: a slot takes 16."""
    free = slots - len(step)
    return free >= 0 and slots * width - sum(step) <= SLOT * free


@pytest.mark.parametrize("name", HERE)
def test_the_requests_make_ragged_steps(engines, name: str) -> None:
    """Else the comparison would show little: requests with fewer tokens than K + 1 among others. With placeholders
    those are prompts of 2 to K tokens."""
    arm = engines.arms[name]
    ragged = [step for step in engines[name]["matrix"]["joining"].seen.steps if len(set(step)) > 1]
    assert ragged
    if arm.padding == SLACK:
        assert any(_decodes(step, arm.k) for step in ragged)


@pytest.mark.parametrize("name", [name for name in HERE if name.startswith(FULL)])
def test_the_operator_gets_the_lists_it_takes(engines, name: str) -> None:
    """va#6524, va#10878, va#14236, TRT-LLM#17240: in every replay the last prefix sum is the graph's tokens, a slot has
    1 to 16, padding has no KV; the drafter's first pass has the target's lists, and each depth after it its own, with
    one token and one KV entry more for each request."""
    k = engines.arms[name].k
    for answer in engines[name]["matrix"].values():
        for replay in answer.seen.replays:
            sizes = [end - start for start, end in zip([0, *replay.ends], replay.ends, strict=False)]
            assert replay.ends[-1] == replay.slots * replay.width
            assert len(sizes) == len(replay.kv) == replay.slots
            assert all(1 <= size <= SLOT for size in sizes)
            real = sum(kv > 0 for kv in replay.kv)
            assert all(replay.kv[:real]) and not any(replay.kv[real:])
        for target, passes in _steps_in_graphs(answer, k):
            assert (passes[0].ends, passes[0].kv) == (target.ends, target.kv)
            assert [one.part for one in passes] == ["first", *["later"] * (k - 1)]
            for before, after in pairwise(passes[1:]):
                assert after.kv == [kv + (kv > 0) for kv in before.kv]
                assert after.ends == before.ends


def _steps_in_graphs(answer: Answer, k: int) -> list[tuple[Replay, list[Replay]]]:
    """(target's replay, the drafter's K) of each step that ran in graphs."""
    replays = answer.seen.replays
    starts = [place for place, replay in enumerate(replays) if replay.part == "target"]
    return [(replays[place], replays[place + 1 : place + 1 + k]) for place in starts]


def test_more_tokens_than_the_largest_graph_run_eagerly(engines) -> None:
    """va#8392, va#3597: graphs of 1, 2 and 4 slots for 16 requests. What was counted is checked above."""
    answers = engines[SMALL]["matrix"]
    assert answers["batch"].ours["graph_eager_steps"] > 0
    assert answers["batch"].ours["graph_replays"] > 0
    assert answers["alone"].ours["graph_eager_steps"] == 0
