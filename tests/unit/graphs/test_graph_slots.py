"""Slack slots: the formula against the condition it comes from, and the lists of graphs."""

import math
import pickle
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_runtime.graphs.slots import (
    MAX_SEGMENT,
    PLACEHOLDER,
    SLACK,
    Slots,
    SlotsError,
    draft_slots,
    graph_slots,
    slots_for,
    whole_sizes,
)

REQUESTS = st.integers(1, 5000)
SLACK_K = st.integers(0, 14)


def worst_step_fits(requests: int, k: int, slack: int) -> bool:
    """R requests of one token each: what is left over fits into the slack slots."""
    return (requests + slack) * (k + 1) - requests <= MAX_SEGMENT * slack


def test_the_example() -> None:
    assert slots_for(16, 1) == Slots(16, 1, slack_slots=2, slots=18, tokens=36, overhead=0.125)


@given(REQUESTS, SLACK_K)
def test_slack_is_the_smallest_that_holds_the_worst_step(requests: int, k: int) -> None:
    found = slots_for(requests, k)
    assert worst_step_fits(requests, k, found.slack_slots)
    assert found.slack_slots == 0 or not worst_step_fits(requests, k, found.slack_slots - 1)
    assert (found.slots, found.tokens) == (requests + found.slack_slots, (requests + found.slack_slots) * (k + 1))
    assert found.overhead == found.slack_slots / requests


@pytest.mark.parametrize(("k", "overhead"), [(1, 0.125), (2, 0.1875), (3, 0.25), (7, 0.875), (14, 14.0)])
def test_overhead_at_16_requests(k: int, overhead: float) -> None:
    assert slots_for(16, k).overhead == overhead


@pytest.mark.parametrize(("requests", "k"), [(127, 1), (128, 1), (239, 1), (14, 2), (9, 3)])
def test_the_published_rule_is_too_small_where_ours_is_not(requests: int, k: int) -> None:
    published = math.ceil(requests / 16) + math.ceil(requests * (k + 1) / 256)
    assert not worst_step_fits(requests, k, published)
    assert slots_for(requests, k).slack_slots > published


def test_without_drafts_no_slack_is_needed() -> None:
    assert slots_for(16, 0) == Slots(16, 0, slack_slots=0, slots=16, tokens=16, overhead=0.0)


@pytest.mark.parametrize(
    ("requests", "k", "says"),
    [
        (16, 15, ["K = 15", "K <= 14", "placeholder", "piecewise or eager"]),
        (1, 15, ["K = 15"]),
        (16, 16, ["K = 16", "1 to 16 tokens", "14 with slack", "15 with placeholder", "eager"]),
        (16, 10**6, ["K = 1000000"]),
        (16, -1, ["K = -1"]),
        (0, 1, ["0 requests", "1 request or more"]),
        (-4, 1, ["-4 requests"]),
    ],
)
def test_impossible_says_what_would_work(requests: int, k: int, says: list[str]) -> None:
    with pytest.raises(SlotsError) as refused:
        slots_for(requests, k)
    assert all(text in str(refused.value) for text in says), str(refused.value)


def test_an_error_survives_the_way_between_processes() -> None:
    error = SlotsError("K = 15", "use K <= 14")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.what, again.remedy, str(again)) == (
        SlotsError,
        error.what,
        error.remedy,
        "K = 15; use K <= 14",
    )


@pytest.mark.parametrize(
    ("requests", "k", "padding", "slots"),
    [
        (16, 1, SLACK, [1, 2, 4, 8, 18]),
        (16, 1, PLACEHOLDER, [1, 2, 4, 8, 16]),
        (6, 3, SLACK, [1, 2, 4, 8]),
        (6, 3, PLACEHOLDER, [1, 2, 4, 6]),
        (1, 1, SLACK, [2]),
        (1, 15, PLACEHOLDER, [1]),
        (2, 2, SLACK, [1, 3]),
        (4, 0, SLACK, [1, 2, 4]),
    ],
)
def test_graphs_of_a_server(requests: int, k: int, padding: str, slots: list[int]) -> None:
    assert graph_slots(requests, k, padding) == slots


@given(REQUESTS, SLACK_K, st.sampled_from([SLACK, PLACEHOLDER]))
def test_graphs_ascend_and_only_the_last_holds_the_full_batch(requests: int, k: int, padding: str) -> None:
    found = graph_slots(requests, k, padding)
    assert found == sorted(set(found))
    assert found[-1] == (requests if padding == PLACEHOLDER else slots_for(requests, k).slots)
    assert all(n < requests and n & (n - 1) == 0 for n in found[:-1])
    assert all(2 * n >= following for n, following in pairwise(found[:-1]))
    assert len(found) == 1 or 2 * found[-2] >= requests


def test_graphs_that_cannot_be() -> None:
    with pytest.raises(SlotsError, match="K <= 14"):
        graph_slots(16, 15, SLACK)
    with pytest.raises(SlotsError, match=r"1 to 16 tokens"):
        graph_slots(16, 16, PLACEHOLDER)
    with pytest.raises(SlotsError, match="'auto' is unknown; use one of slack, placeholder"):
        graph_slots(16, 1, "auto")
    with pytest.raises(SlotsError, match="0 requests"):
        graph_slots(0, 1, PLACEHOLDER)


def test_graphs_of_the_drafter() -> None:
    assert [draft_slots(n) for n in (1, 2, 3, 16, 17)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4, 8, 16],
        [1, 2, 4, 8, 16, 17],
    ]
    with pytest.raises(SlotsError, match="0 requests"):
        draft_slots(0)


def test_sizes_that_were_lost_elsewhere() -> None:
    """vLLM#37865: of a largest size 42 at K = 2 the engine made 40, which it then rounded up and left out."""
    assert whole_sizes([1, 2, 4, 8, 16, 24, 32, 40], 14, 2) == [3, 6, 9, 18, 24, 33, 42]
    assert whole_sizes([36], 16, 1) == [32]  # more than a full batch: kept for no step


@given(st.lists(st.integers(1, 600), min_size=1), REQUESTS, SLACK_K)
def test_whole_sizes_hold_what_the_given_ones_held(given_sizes: list[int], requests: int, k: int) -> None:
    found = whole_sizes(given_sizes, requests, k)
    assert all(size % (k + 1) == 0 and 0 < size <= requests * (k + 1) for size in found)
    assert found[-1] >= min(max(given_sizes), requests * (k + 1))
    assert whole_sizes(found, requests, k) == found
