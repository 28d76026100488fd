"""Slack or placeholder: the crossover, from both sides and on it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_runtime.graphs.slots import PLACEHOLDER, SLACK, SlotsError, slots_for
from mtp_runtime.graphs.strategy import choose_padding, decode_steps, expected_acceptance_length


def tokens_of(steps: float, acceptance_length: float) -> float:
    """The answer that takes so many decode steps."""
    return 1 + (steps - 1) * acceptance_length


@pytest.mark.parametrize(
    ("steps", "padding", "rows"),
    [(2, SLACK, 8), (3.9, SLACK, 16 / 3.9), (4, PLACEHOLDER, 4), (4.1, PLACEHOLDER, 16 / 4.1)],
)
def test_at_the_crossover_and_on_both_sides(steps: float, padding: str, rows: float) -> None:
    found = choose_padding(16, 1, tokens_of(steps, 2.0), 2.0)
    assert (found.padding, found.slack_rows, found.crossover_steps) == (padding, 4, 4.0)
    assert found.placeholder_rows == pytest.approx(rows)


def test_it_says_why() -> None:
    found = choose_padding(16, 1, 7.0, 2.0)
    assert (
        found.why
        == "a request lives for 4.0 steps, crossover 4.0: token-rows a step are 4 with slack, 4.0 with placeholders"
    )


@pytest.mark.parametrize(("k", "limit"), [(1, 7.0), (2, 13 / 3), (3, 3.0), (7, 1.0)])
def test_the_crossover_reaches_its_limit_where_no_slot_is_rounded_up(k: int, limit: float) -> None:
    crossover = choose_padding(15 - k, k).crossover_steps
    assert crossover == pytest.approx(limit)


@given(st.integers(1, 2000), st.integers(1, 14), st.floats(1, 1e6), st.floats(0, 1))
def test_the_choice_is_the_cheaper_one(requests: int, k: int, answer: float, accepted: float) -> None:
    found = choose_padding(requests, k, answer, 1 + accepted * k)
    assert found.slack_rows is not None and found.crossover_steps is not None
    assert found.slack_rows == slots_for(requests, k).slack_slots * (k + 1)
    assert found.crossover_steps <= (15 - k) / (k + 1) * (1 + 1e-12)
    assert (found.padding == SLACK) == (found.slack_rows < found.placeholder_rows)
    steps = decode_steps(answer, 1 + accepted * k, k)
    assert math.isclose(steps, found.crossover_steps) or (found.padding == SLACK) == (steps < found.crossover_steps)


@given(st.integers(1, 2000), st.integers(8, 15), st.floats(1, 1e6))
def test_from_eight_drafts_on_slack_never_pays(requests: int, k: int, answer: float) -> None:
    assert choose_padding(requests, k, answer).padding == PLACEHOLDER


def test_where_slack_is_impossible_placeholder_it_is() -> None:
    found = choose_padding(16, 15, 1.0)
    assert found == (PLACEHOLDER, "K = 15: no number of slack slots is enough", None, 240.0, None)


def test_the_expected_workload_takes_placeholders() -> None:
    assert all(choose_padding(16, k).padding == PLACEHOLDER for k in range(1, 16))


def test_expected_acceptance() -> None:
    assert expected_acceptance_length(1) == pytest.approx(1.85)
    assert expected_acceptance_length(2) == pytest.approx(1 + 0.85 + 0.85**2)
    assert all(1 < expected_acceptance_length(k) < k + 1 for k in range(1, 16))


def test_the_first_step_yields_one_token() -> None:
    assert decode_steps(1, 1.85, 1) == 1
    assert decode_steps(256, 2.0, 1) == 128.5


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((16, 0), "K = 0: without drafts"),
        ((16, -1), "K = -1"),
        ((16, 16), "K = 16"),
        ((0, 1), "0 requests"),
        ((0, 15), "0 requests"),
        ((16, 1, 0.5), "answers of 0.5 tokens"),
        ((16, 1, math.nan), "answers of nan tokens"),
        ((16, 1, 256, 0.0), "acceptance length 0"),
        ((16, 1, 256, 2.1), "acceptance length 2.1"),
        ((16, 1, 256, math.nan), "acceptance length nan"),
    ],
)
def test_what_cannot_be_chosen_is_named(arguments: tuple[int, ...], says: str) -> None:
    with pytest.raises(SlotsError, match=says):
        choose_padding(*arguments)
