"""Do two samples of token sequences come from one distribution? For every test that has to ask.

Pearson's two-sample chi-square over whole sequences, sequences seen less often than RARE in both together pooled into
one cell.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

RARE = 10
ALPHA = 1e-4


@dataclass(frozen=True)
class Comparison:
    """statistic: chi-square; freedom: its degrees; p: probability of a larger one when nothing differs; cells: pairs of
    counts."""

    statistic: float
    freedom: int
    p: float
    cells: list[tuple[int, int]]

    def detectable(self, power: float = 0.9) -> float:
        """The difference this test finds with probability `power`, as Cohen's w of one sample from their mean.

        By the normal approximation to the noncentral chi-square; w^2 = sum over cells of (share - mean)^2 / mean.
        """
        size = sum(a for a, _ in self.cells)
        critical = _chi_square_quantile(1 - ALPHA, self.freedom)
        low, high = 0.0, 1e4
        while high - low > 1e-6:
            mean = (low + high) / 2
            spread = math.sqrt(2 * (self.freedom + 2 * mean))
            found = 0.5 * math.erfc((critical - self.freedom - mean) / spread / math.sqrt(2))
            low, high = (mean, high) if found < power else (low, mean)
        return math.sqrt(high / (2 * size))


def compare(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> Comparison:
    """Two samples of the same size. Raises ValueError where nothing is seen often enough to compare."""
    first, second = (Counter(map(tuple, sample)) for sample in (one, other))
    common = [key for key in first | second if first[key] + second[key] >= RARE]
    cells = [(first[key], second[key]) for key in common]
    rest = (len(one) - sum(a for a, _ in cells), len(other) - sum(b for _, b in cells))
    cells += [rest] if sum(rest) else []
    if len(cells) < 2:
        raise ValueError(f"one cell only, {len(one)} and {len(other)} sequences: nothing to compare")
    statistic = sum((a - b) ** 2 / (a + b) for a, b in cells)
    freedom = len(cells) - 1
    return Comparison(statistic, freedom, _chi_square_tail(statistic, freedom), cells)


def same_distribution(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> Comparison:
    """Assert it at level ALPHA; returns the comparison."""
    found = compare(one, other)
    assert found.p > ALPHA, found
    return found


def _chi_square_tail(statistic: float, freedom: int) -> float:
    """Probability of a larger value, Wilson and Hilferty's approximation."""
    return 0.5 * math.erfc(_wilson_hilferty(statistic, freedom) / math.sqrt(2))


def _chi_square_quantile(share: float, freedom: int) -> float:
    low, high = 0.0, 100.0 * freedom + 1000
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if _chi_square_tail(middle, freedom) > 1 - share else (low, middle)
    return high


def _wilson_hilferty(statistic: float, freedom: int) -> float:
    return float(((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom)))
