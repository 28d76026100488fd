"""Greedy answers that must be equal: a token that differs is a near tie of the float32 logits, and is reported."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

NEAR_TIE = 1e-4  # as in the live tests: float32 sums differ with the number of rows in a step
NEAR_TIES_ALLOWED = 1


def differences(
    expected: Sequence[Sequence[int]], gaps: Sequence[Sequence[float]], found: Sequence[Sequence[int]]
) -> tuple[list[tuple[int, int, float]], list[tuple[int, int, float]]]:
    """Near ties and wrong tokens, each (request, place, gap): the first difference of each request, if any.

    expected may go on where an answer ends. gaps: how far the two best log-probabilities of `expected` lie apart.
    """
    ties, wrong = [], []
    for number, (right, apart, answer) in enumerate(zip(expected, gaps, found, strict=True)):
        pairs = enumerate(zip_longest(right[: len(answer)], answer))
        place = next((place for place, (one, other) in pairs if one != other), None)
        if place is not None:
            gap = apart[place] if place < len(apart) else float("inf")
            (ties if gap <= NEAR_TIE else wrong).append((number, place, gap))
    return ties, wrong


def assert_equal(
    expected: Sequence[Sequence[int]], gaps: Sequence[Sequence[float]], found: Sequence[Sequence[int]], what: str
) -> None:
    """Every answer is a beginning of what was expected."""
    ties, wrong = differences(expected, gaps, found)
    if ties:
        print(f"{what}: near ties (request, place, gap): {ties}")
    assert wrong == [], what
    assert len(ties) <= NEAR_TIES_ALLOWED, what
