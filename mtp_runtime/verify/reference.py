"""The readable form: one request, plain Python, a line for each line of the papers. The fast forms are tested against
it.

p[i][v], q[i][v]: target and draft probability of token v at draft position i (q None = one-hot at the draft).
uniform[i] in [0, 1); race[v] > 0 decides the recovered token (exponential race). Each returns the emitted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

Matrix = Sequence[Sequence[float]]


def greedy(drafts: Sequence[int], argmax: Sequence[int], bonus: int) -> list[int]:
    """Accept while draft == argmax; the mismatch yields the argmax, all accepted yields the bonus token."""
    out: list[int] = []
    for draft, best in zip(drafts, argmax, strict=True):
        out.append(best)
        if draft != best:
            return out
    return [*out, bonus]


def tokenwise(
    drafts: Sequence[int], p: Matrix, q: Matrix | None, uniform: Sequence[float], race: Sequence[float], bonus: int
) -> list[int]:
    """Accept x when p(x) / q(x) >= U (never when p(x) = 0); recover from max(p - q, 0)."""
    out: list[int] = []
    for i, x in enumerate(drafts):
        ratio = 0.0 if x < 0 else _ratio(p[i][x], q[i][x] if q else 1.0)
        if ratio > 0 and ratio >= uniform[i]:
            out.append(x)
            continue
        return [*out, _recover(p[i], _draft(q, i, x, len(p[i])), 1.0, race)]
    return [*out, bonus]


def block(
    drafts: Sequence[int], p: Matrix, q: Matrix | None, uniform: Sequence[float], race: Sequence[float], bonus: int
) -> list[int]:
    """arXiv 2403.10444, algorithm 2: the longest prefix i whose U_i lies below h_i. Without placeholders."""
    count, weights, taken = len(drafts), [1.0], 0
    for i, x in enumerate(drafts):
        weights.append(min(weights[-1] * _ratio(p[i][x], q[i][x] if q else 1.0), 1.0))
        chance = weights[-1]
        if i + 1 < count:
            following = _draft(q, i + 1, drafts[i + 1], len(p[i]))
            rest = sum(max(weights[-1] * a - b, 0.0) for a, b in zip(p[i + 1], following, strict=True))
            chance = rest / (rest + 1 - weights[-1]) if rest > 0 else 0.0
        if uniform[i] < chance:
            taken = i + 1
    out = list(drafts[:taken])
    if taken == count:
        return [*out, bonus]
    # One-hot: the scale only changes the norm, so it is left out, which also keeps the float arithmetic simple.
    scale = weights[taken] if q else 1.0
    return [*out, _recover(p[taken], _draft(q, taken, drafts[taken], len(p[taken])), scale, race)]


def _ratio(p: float, q: float) -> float:
    return p / q if q > 0 else 0.0


def _draft(q: Matrix | None, i: int, x: int, vocab: int) -> Sequence[float]:
    """q at position i; one-hot at x without draft probabilities, all zero for a placeholder."""
    if q is not None and x >= 0:
        return q[i]
    return [1.0 if v == x else 0.0 for v in range(vocab)]


def _recover(p: Sequence[float], q: Sequence[float], scale: float, race: Sequence[float]) -> int:
    weights = [max(scale * a - b, 0.0) / e for a, b, e in zip(p, q, race, strict=True)]
    return weights.index(max(weights))
