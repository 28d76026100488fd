"""The readable form: one request, plain Python, a line for each line of the papers. The fast forms are tested against
it.

p[i][v], q[i][v]: target and draft probability of token v at draft position i (q None = one-hot at the draft); p has one
row more, for the bonus token. accept[i], pick in [0, 1). Negative drafts are placeholders: rejected for certain, and
the token in their place is an ordinary one of the target. Each returns the emitted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

Row = Sequence[float]
Matrix = Sequence[Row]


def exact(drafts: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """Accept while draft == chosen (argmax, or sampled before); the mismatch or the bonus row yields chosen."""
    out: list[int] = []
    for draft, best in zip([*drafts, None], chosen, strict=True):
        out.append(best)
        if draft != best:
            break
    return out


def tokenwise(drafts: Sequence[int], p: Matrix, q: Matrix | None, accept: Row, pick: float) -> list[int]:
    """Accept x when p(x) / q(x) >= U (never when p(x) = 0); recover from max(p - q, 0)."""
    out: list[int] = []
    for i, x in enumerate(drafts):
        if x < 0:
            return [*out, _draw(p[i], pick)]
        ratio = _ratio(p[i][x], q[i][x] if q else 1.0)
        if ratio <= 0 or ratio < accept[i]:
            return [*out, _recover(p[i], q[i] if q else _one_hot(x, p[i]), 1.0, pick)]
        out.append(x)
    return [*out, _draw(p[len(drafts)], pick)]


def block(drafts: Sequence[int], p: Matrix, q: Matrix | None, accept: Row, pick: float) -> list[int]:
    """arXiv 2403.10444, algorithm 2: the longest prefix i whose U_i lies below h_i. A placeholder ends the block."""
    count = next((i for i, x in enumerate(drafts) if x < 0), len(drafts))
    weights, taken = [1.0], 0
    for i in range(count):
        x = drafts[i]
        weights.append(min(weights[-1] * _ratio(p[i][x], q[i][x] if q else 1.0), 1.0))
        chance = weights[-1]
        if i + 1 < count:
            following = q[i + 1] if q else _one_hot(drafts[i + 1], p[i])
            rest = sum(max(weights[-1] * a - b, 0.0) for a, b in zip(p[i + 1], following, strict=True))
            chance = rest / (rest + 1 - weights[-1]) if rest > 0 else 0.0
        if accept[i] < chance:
            taken = i + 1
    out = list(drafts[:taken])
    if taken == count:
        return [*out, _draw(p[taken], pick)]
    # One-hot: the scale only changes the norm, so it is left out, which also keeps the float arithmetic simple.
    own = q[taken] if q else _one_hot(drafts[taken], p[taken])
    return [*out, _recover(p[taken], own, weights[taken] if q else 1.0, pick)]


def _ratio(p: float, q: float) -> float:
    return p / q if q > 0 else 0.0


def _one_hot(x: int, like: Row) -> Row:
    return [1.0 if v == x else 0.0 for v in range(len(like))]


def _recover(p: Row, q: Row, scale: float, pick: float) -> int:
    weights = [max(scale * a - b, 0.0) for a, b in zip(p, q, strict=True)]
    return _draw(weights if sum(weights) > 0 else p, pick)


def _draw(weights: Row, pick: float) -> int:
    """The first token whose cumulative weight exceeds pick of the total."""
    point, total = pick * sum(weights), 0.0
    for token, weight in enumerate(weights):
        total += weight
        if total > point:
            return token
    return max(token for token, weight in enumerate(weights) if weight > 0)
