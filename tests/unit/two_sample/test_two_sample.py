"""The two-sample test itself: silent on equal samples, loud on different ones, honest about what it can see."""

from __future__ import annotations

import random

import pytest
from two_sample import ALPHA, compare, same_distribution

SHARES = {(1, 2): 0.4, (1, 3): 0.3, (2, 2): 0.2, (4, 4): 0.1}


def draw(shares: dict[tuple[int, int], float], size: int, seed: int) -> list[tuple[int, int]]:
    return random.Random(seed).choices(list(shares), list(shares.values()), k=size)


def test_equal_distributions_pass_and_p_values_are_spread() -> None:
    found = [compare(draw(SHARES, 500, seed), draw(SHARES, 500, seed + 1000)).p for seed in range(200)]
    assert min(found) > ALPHA
    assert 0.35 < sum(p < 0.5 for p in found) / len(found) < 0.65


def test_a_difference_of_the_stated_size_is_found_as_often_as_stated() -> None:
    size = 500
    stated = compare(draw(SHARES, size, 1), draw(SHARES, size, 2)).detectable(0.9)
    # Move weight so that each sample lies `stated` (Cohen's w) from their mean: w^2 = 2 d^2 / 0.3 for two cells of 0.3.
    d = stated * (0.3 / 2) ** 0.5
    low = {(0, 0): 0.3 - d, (0, 1): 0.3 + d, (0, 2): 0.2, (0, 3): 0.2}
    high = {(0, 0): 0.3 + d, (0, 1): 0.3 - d, (0, 2): 0.2, (0, 3): 0.2}
    hits = sum(compare(draw(low, size, seed), draw(high, size, seed + 1000)).p < ALPHA for seed in range(200))
    assert 0.8 < hits / 200 < 0.98


def test_another_distribution_fails_and_nothing_to_compare_is_an_error() -> None:
    with pytest.raises(AssertionError):
        same_distribution(draw(SHARES, 400, 1), [(9, 9)] * 400)
    with pytest.raises(ValueError, match="nothing to compare"):
        compare([(1, 1)] * 50, [(1, 1)] * 50)
