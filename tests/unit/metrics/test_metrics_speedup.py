"""Formulas: the published figures, the identities between them, and refusal of impossible input."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_runtime.metrics import speedup

seconds = st.floats(1e-6, 1e3)
ks = st.integers(1, 15)


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, list[int]]:
    """K and the accepted length of each of some draft steps, as a verifier would yield them."""
    k = draw(ks)
    return k, draw(st.lists(st.integers(0, k), min_size=1, max_size=50))


@pytest.mark.parametrize(
    ("itl_without_ms", "itl_with_ms", "rate", "tpot_ms", "gain", "cost"),
    [
        (247.6, 356.7, 0.85, 192.8, 1.284, 1.441),
        (106.5, 153.1, 0.85, 82.75, 1.287, 1.438),
        (68.37, 95.49, 0.856, 51.46, 1.33, 1.397),
    ],
    ids=["eager", "aclgraph", "large-ep"],
)
def test_published_figures(
    itl_without_ms: float, itl_with_ms: float, rate: float, tpot_ms: float, gain: float, cost: float
) -> None:
    length = 1 + rate  # K = 1
    assert itl_with_ms / length == pytest.approx(tpot_ms, rel=1e-3)
    measured_cost = speedup.step_cost(itl_with_ms / 1e3, itl_without_ms / 1e3)
    assert measured_cost == pytest.approx(cost, abs=1e-3)
    assert speedup.gain(length, measured_cost) == pytest.approx(gain, abs=2e-3)


@given(runs())
def test_counts_agree_with_step_by_step_truth(run: tuple[int, list[int]]) -> None:
    k, steps = run
    drafts, accepted = len(steps), sum(steps)
    per_position = [sum(step > position for step in steps) for position in range(k)]
    assert speedup.acceptance_length(accepted, drafts) == pytest.approx(sum(1 + step for step in steps) / drafts)
    rate = speedup.acceptance_rate(accepted, drafts * k)
    assert 1 + k * rate == pytest.approx(speedup.acceptance_length(accepted, drafts))
    positions = speedup.position_rates(per_position, drafts)
    assert len(positions) == k
    assert 1 + sum(positions) == pytest.approx(speedup.acceptance_length(accepted, drafts))
    assert positions == sorted(positions, reverse=True)


@given(itl_with=seconds, itl_without=seconds, length=st.floats(1.0, 16.0))
def test_gain_is_the_ratio_of_the_tpots(itl_with: float, itl_without: float, length: float) -> None:
    tpot_with, tpot_without = itl_with / length, itl_without
    gain = speedup.gain(length, speedup.step_cost(itl_with, itl_without))
    assert gain == pytest.approx(tpot_without / tpot_with)


@given(st.lists(seconds, min_size=1, max_size=20), st.integers(0, 20))
def test_one_token_requests_do_not_thin_the_mean(tpots: list[float], one_token: int) -> None:
    total = math.fsum(tpots)  # vLLM adds 0 for each request of one token
    assert speedup.mean_tpot(total, len(tpots) + one_token, one_token) == pytest.approx(total / len(tpots))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: speedup.acceptance_rate(0, 0), "draft tokens must be > 0"),
        (lambda: speedup.acceptance_rate(3, 2), "between 0 and the draft tokens"),
        (lambda: speedup.acceptance_rate(-1, 2), "between 0 and the draft tokens"),
        (lambda: speedup.acceptance_rate(math.nan, 2), "between 0 and the draft tokens"),
        (lambda: speedup.acceptance_length(1, 0), "draft steps must be > 0"),
        (lambda: speedup.acceptance_length(-1, 1), "accepted tokens must be >= 0"),
        (lambda: speedup.position_rates([5, 6], 5), "position 1"),
        (lambda: speedup.mean_tpot(1.0, 2, 2), "two tokens or more"),
        (lambda: speedup.mean_tpot(-1.0, 2), "sum of TPOT"),
        (lambda: speedup.step_cost(1, 0), "ITL without MTP"),
        (lambda: speedup.gain(0.5, 1), "acceptance length"),
        (lambda: speedup.gain(1, 0), "step cost"),
    ],
)
def test_impossible_input_is_refused_by_name(call, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=words):
        call()
