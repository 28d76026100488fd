"""The seed's case: a decode node gets many requests with one token each in one step, and its graph has slack for them.

Without P/D prompts of one token do the same; with P/D the KV of whole prompts comes over a connector, and one token of
each is left to compute.
"""

from __future__ import annotations

import pytest
from graph_arms import DECODE, OFF, Combination, arms
from graph_prompts import SEATS
from greedy_answers_equal import assert_equal

from mtp_runtime.graphs.slots import PLACEHOLDER, SLACK, slots_for

pytestmark = pytest.mark.engine

SEED = {1: [*range(1, 17), 26, 36]}
"""K -> prefix sums in the seed's own example: 16 requests, 18 slots, 36 tokens."""
BURSTS = {
    (padding, k): Combination("full", attention, padding, k).name
    for padding, k, attention in [(p, k, "tnd") for p in (SLACK, PLACEHOLDER) for k in (1, 3)]
    + [(SLACK, 2, "tnd"), (PLACEHOLDER, 2, "batch_expansion")]
}
decode = pytest.mark.parametrize("one", DECODE, ids=lambda one: one.name)


def test_the_engines_are_there() -> None:
    assert set(BURSTS.values()) <= set(arms("")), BURSTS


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_burst_of_single_tokens_fills_the_slack_slots(engines, k: int) -> None:
    """va#5472, va#16109, va#10973: D's first step without drafts runs in the graph."""
    burst = engines[BURSTS[SLACK, k]]["matrix"]["burst"]
    target = burst.seen.replays[0]
    slots = slots_for(SEATS, k).slots
    assert burst.seen.steps[0] == [1] * SEATS
    assert (target.part, target.slots) == ("target", slots)
    assert target.ends[:SEATS] == list(range(1, SEATS + 1))
    assert target.ends[-1] == slots * (k + 1)
    assert target.kv == [1] * SEATS + [0] * (slots - SEATS)
    assert target.ends == SEED.get(k, target.ends)
    assert burst.ours["graph_eager_steps"] == 0


@pytest.mark.parametrize("k", [1, 2, 3])
def test_without_slack_a_burst_runs_eagerly_and_is_counted(engines, k: int) -> None:
    """vLLM gives placeholders to a request that joins others or brings KV, not to the first ones of an idle engine:
    their step fits no graph without slack."""
    burst = engines[BURSTS[PLACEHOLDER, k]]["matrix"]["burst"]
    assert burst.seen.steps[0] == [1] * SEATS
    assert burst.ours["graph_eager_steps"] == 2  # the target's step and the drafter's first pass
    assert burst.ours["graph_replays"] == len(burst.seen.steps) - 1


@decode
def test_a_handed_over_batch_answers_as_one_engine(engines, one: Combination) -> None:
    """The KV of 16 prompts from another engine (P, K = 1); D's own cache is spoiled before. SGLang#7927, SGLang#7242:
    as many drafts are accepted at each depth as where the prompts were computed, so the drafter's KV came too."""
    off, found = engines[OFF]["reference"]["handed over"], engines[one.name]["handed_over"]
    here, there = found["here"], found["from P"]
    assert_equal(off.tokens, off.gaps, there.tokens, one.name)
    assert there.tokens == here.tokens
    assert min(here.seen.steps[0]) > 16
    assert (there.accepted, there.drafts) == (here.accepted, here.drafts)
    assert sum(there.accepted) > there.drafts / 2


@decode
def test_placeholders_stay_within_the_longest_context(engines, one: Combination) -> None:
    """va#9688: a request handed over with room for two tokens. K = 1 has a place for its placeholder, K = 3 has not."""
    off, found = engines[OFF]["reference"]["handed over late"], engines[one.name]["handed_over"]["late from P"]
    assert_equal(off.tokens, off.gaps, found.tokens, one.name)
    assert (found.reasons, [len(tokens) for tokens in found.tokens]) == (["length"], [2])
    assert found.seen.steps[0] == [2 if (one.padding, one.k) == (PLACEHOLDER, 1) else 1]


@decode
def test_the_first_step_of_a_handed_over_batch_runs_in_the_graph(engines, one: Combination) -> None:
    """va#5472, va#16109, va#10973: with slack one token a request, as in the seed; with placeholders K + 1."""
    answer = engines[one.name]["handed_over"]["from P"]
    first, ours = answer.seen.replays[0], answer.ours
    tokens = 1 if one.padding == SLACK else one.k + 1
    assert answer.seen.steps[0] == [tokens] * SEATS
    assert first.ends[:SEATS] == list(range(tokens, SEATS * tokens + 1, tokens))
    assert first.kv[:SEATS] == [16 * (1 + number % 4) + tokens for number in range(SEATS)]
    assert ours["graph_eager_steps"] == 0
    assert answer.seen.forwards == {"target": 0, "drafter": 0}
    assert ours["graph_replays"] == len(answer.seen.steps)
    assert ours["verify_placeholder_steps"] == (0 if one.padding == SLACK else SEATS)
