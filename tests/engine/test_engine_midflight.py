"""Requests that are aborted, preempted, or end inside a run of drafts: the tokens stay those without MTP."""

from __future__ import annotations

import pytest
from graph_arms import OFF
from greedy_answers_equal import assert_equal
from midflight_asks import ABORTED, PREEMPTED, stops

pytestmark = pytest.mark.engine

midflight = pytest.mark.parametrize("name", ["full-tnd-slack-k3", "piecewise-batch_expansion-slack-k3"])


@midflight
def test_aborts_leave_nothing_behind(engines, name: str) -> None:
    """vLLM#39012: three of ten aborted between steps with drafts; the id of one is used again in the same step, that
    of another a step later."""
    found, off = engines[name]["midflight"]["aborted"], engines[OFF]["reference"]["mixed"]
    asked = {f"r{number}": number for number in range(10)} | ABORTED
    expected = {request: off.tokens[number] for request, number in asked.items() if number is not None}
    gaps = [off.gaps[number] for number in asked.values() if number is not None]
    assert found.keys() == expected.keys()
    assert_equal(list(expected.values()), gaps, [found[request] for request in expected], name)
    assert all(len(tokens) == len(off.tokens[0]) for tokens in found.values())


@midflight
def test_a_preempted_request_goes_on_where_it_was(engines, name: str) -> None:
    """vLLM#49620: no token is lost, none is stale."""
    found, off = engines[name]["midflight"]["preempted"], engines[OFF]["reference"]["mixed"]
    assert found.preemptions > 1
    expected, gaps = ([part[number] for number in PREEMPTED] for part in (off.tokens, off.gaps))
    assert_equal(expected, gaps, found.tokens, name)
    assert [len(tokens) for tokens in found.tokens] == [len(tokens) for tokens in expected]


@midflight
def test_a_stop_token_ends_an_answer_inside_a_run(engines, name: str) -> None:
    """Whatever was accepted behind it is dropped."""
    found, off = engines[name]["midflight"]["stopped"], engines[OFF]["reference"]["mixed"]
    expected = []
    for number, tokens in enumerate(off.tokens[: len(found.tokens)]):
        ends = [place for place, token in enumerate(tokens) if token in stops(number)]
        expected.append(tokens[: ends[0] + 1] if ends else tokens)
    assert_equal(expected, off.gaps[: len(expected)], found.tokens, name)
    assert [len(tokens) for tokens in found.tokens] == [len(tokens) for tokens in expected]
    assert len({len(tokens) % 4 for tokens in found.tokens}) == 4, "not at every place of a run"


@midflight
def test_the_end_of_the_text_ends_an_answer(engines, name: str) -> None:
    found, off = engines[name]["midflight"]["end"], engines[OFF]["reference"]["end"]
    assert_equal(off.tokens, off.gaps, found.tokens, name)
    assert [len(tokens) for tokens in found.tokens] == [len(tokens) for tokens in off.tokens]
    assert found.reasons == off.reasons and found.reasons.count("stop") > 8


@midflight
def test_the_longest_context_ends_an_answer(engines, name: str) -> None:
    """No draft reaches past max_model_len, and no request ends before it."""
    found, off = engines[name]["midflight"]["limited"], engines[OFF]["reference"]["limited"]
    assert_equal(off.tokens, off.gaps, found.tokens, name)
    assert [len(tokens) for tokens in found.tokens] == [len(tokens) for tokens in off.tokens]
    assert found.reasons == off.reasons


@midflight
def test_a_request_near_its_limit_keeps_nobody_from_drafting(engines, name: str) -> None:
    """vLLM#43547, vLLM#40589, va#7364: vLLM leaves out the drafter for the whole batch, and counts drafts that never
    were. Here every step drafts: K passes each, and no draft of zeros is verified."""
    answer = engines[name]["midflight"]["limited"]
    steps, drafter = answer.seen.steps, answer.seen.forwards["drafter"]
    assert drafter + answer.ours["graph_draft_replays"] == 3 * len(steps)


@midflight
def test_nothing_of_all_that_lasts(engines, name: str) -> None:
    found, off = engines[name]["midflight"]["after"].tokens, engines[OFF]["reference"]["mixed"]
    assert_equal(off.tokens[: len(found)], off.gaps[: len(found)], found, name)
