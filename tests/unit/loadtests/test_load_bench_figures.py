"""Arithmetic of the engine benchmark, from steps to ratios."""

from __future__ import annotations

import pytest

from loadtests import bench_figures as figures
from loadtests.bench_arms import Arm, Engine
from loadtests.bench_figures import Answer, Round


def answer(step_ms: list[float], *tokens: list[int]) -> Answer:
    return Answer([ms / 1e3 for ms in step_ms], list(tokens), [[] for _ in tokens])


def one(itl: float, tpot: float) -> Round:
    return Round(itl, tpot, 1e3 / tpot, itl / tpot, None)


def test_one_request_counts_from_its_second_step_on() -> None:
    found = figures.summarise([answer([900, 30, 40, 50], [1, 2, 1, 2])], drafts=1)
    assert found.itl_ms == pytest.approx(40)
    assert found.tpot_ms == pytest.approx(120 / 5)
    assert found.tokens_per_second == pytest.approx(1e3 / (120 / 5))
    assert found.tokens_per_step == pytest.approx(5 / 3)
    assert found.acceptance == pytest.approx(1 / 2)  # the last step may have been cut short


def test_without_drafts_there_is_no_acceptance() -> None:
    assert figures.summarise([answer([900, 30, 40], [1, 1, 1])], drafts=0).acceptance is None


def test_requests_count_together_while_all_of_them_decode() -> None:
    batch = answer([900, 800, 50, 70, 20, 10], [1, 0, 2, 2, 0, 0], [0, 1, 1, 2, 1, 2])
    assert figures.window(batch) == range(2, 4)
    found = figures.summarise([batch], drafts=1)
    assert found.itl_ms == pytest.approx(60)
    assert found.tokens_per_second == pytest.approx(7 / 0.120)
    assert found.tpot_ms == pytest.approx(120 * 2 / 7)
    assert found.tokens_per_step == pytest.approx(7 / 4)
    # Of the request that ends, only its first step; of the other both.
    assert found.acceptance == pytest.approx((1 + 0 + 1) / 3)


def test_batches_of_a_round_are_pooled() -> None:
    found = figures.summarise([answer([9, 10, 10], [1, 1, 1]), answer([9, 40], [1, 3])], drafts=3)
    assert found.itl_ms == pytest.approx(10)
    assert found.tpot_ms == pytest.approx(60 / 5)
    assert found.tokens_per_step == pytest.approx(5 / 3)
    assert found.acceptance == 0


def test_counts_of_a_round_are_summed() -> None:
    first, second = answer([9, 10], [1, 1]), answer([9, 10], [1, 1])
    first.decode_steps, first.replays, second.decode_steps, second.no_graph = 5, 4, 7, 2
    found = figures.summarise([first, second], drafts=0)
    assert (found.decode_steps, found.replays, found.draft_replays, found.no_graph) == (12, 4, 0, 2)


@pytest.mark.parametrize(
    ("tokens", "why"),
    [([[1, 1], [0, 0]], "no token at all"), ([[1, 1, 0], [0, 0, 1]], "no step"), ([[1]], "no step")],
)
def test_nothing_to_measure_is_an_error(tokens: list[list[int]], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        figures.window(answer([1.0] * len(tokens[0]), *tokens))


def test_ratios_are_taken_within_a_round() -> None:
    base, arm = Arm(Engine(0)), Arm(Engine(1))
    found = figures.report({base: [one(40, 40), one(80, 80)], arm: [one(50, 25), one(160, 80)]})
    assert found[arm.name]["step_cost"] == {"median": pytest.approx(1.625), "min": 1.25, "max": 2.0}
    assert found[arm.name]["gain"] == {"median": pytest.approx(1.3), "min": 1.0, "max": pytest.approx(1.6)}
    assert found[base.name]["gain"] == {"median": 1.0, "min": 1.0, "max": 1.0}


def test_ratios_refer_to_the_same_mode_and_load() -> None:
    arms = {
        Arm(Engine(0)): 40.0,
        Arm(Engine(0, "full")): 20.0,
        Arm(Engine(1)): 32.0,
        Arm(Engine(1, "full")): 10.0,
        Arm(Engine(1, attention="batch_expansion")): 64.0,
        Arm(Engine(0), 4): 60.0,
        Arm(Engine(1), 4): 30.0,
        Arm(Engine(1, "full"), 4): 30.0,
    }
    found = figures.report({arm: [one(tpot, tpot)] for arm, tpot in arms.items()})
    ratios = {
        name: tuple(entry[what]["median"] if what in entry else None for what in ("gain", "over_eager"))
        for name, entry in found.items()
    }
    assert ratios == {
        "K=0 eager": (1.0, 1.0),
        "K=0 full": (1.0, 2.0),
        "K=1 eager": (1.25, 1.0),
        "K=1 full placeholder": (2.0, 3.2),
        "K=1 eager batch_expansion": (0.625, 0.5),
        "K=0 eager, 4 at once": (1.0, 1.0),
        "K=1 eager, 4 at once": (2.0, 1.0),
        "K=1 full placeholder, 4 at once": (None, 1.0),
    }


def test_whole_graphs_stand_beside_the_article() -> None:
    rounds = {Arm(Engine(0)): [one(40, 40)], Arm(Engine(0, "full")): [one(20, 20)], Arm(Engine(1)): [one(40, 20)]}
    lines = figures.beside_published(figures.report(rounds))
    assert lines[0] == "TPOT eager / full, K=0: 2.00 [2.00-2.00]; the MTP article: 247.6 -> 106.5 ms, 2.32"
    assert len(lines) == 2
    assert "absolute times do not compare" in lines[1]
    assert figures.beside_published(figures.report({Arm(Engine(0)): [one(40, 40)]})) == []


def test_eager_decode_steps_are_those_that_were_no_replay() -> None:
    eager, full = Arm(Engine(0)), Arm(Engine(1, "full"))
    rounds = {eager: [one(40, 40)], full: [Round(40, 20, 50, 2, 1.0, 10, 8, 9, 3), Round(40, 20, 50, 2, 1.0, 10, 9)]}
    heading, line = figures.step_lines(figures.report(rounds), rounds)
    assert heading.split()[:2] == ["arm", "decode"]
    assert line.split() == ["K=1", "full", "placeholder", "20", "17", "3", "9", "3"]
    assert figures.step_lines(figures.report({eager: [one(40, 40)]}), [eager]) == []


def test_what_graphs_cost_at_the_start_is_told() -> None:
    starts = {
        "K=0 eager": {"start_s": 3.0, "recording_s": None, "recording_mb": None, "rss_mb": 660.0},
        "K=1 full": {"start_s": 7.0, "recording_s": 3.25, "recording_mb": 45.04, "rss_mb": 724.9},
    }
    _, eager, full = figures.engine_lines(starts)
    assert eager.split() == ["K=0", "eager", "3.0", "-", "-", "660.0"]
    assert full.split() == ["K=1", "full", "7.0", "3.2", "45.0", "724.9"]


def test_a_figure_that_was_not_measured_is_a_dash() -> None:
    table = figures.report({Arm(Engine(0)): [one(40, 40)], Arm(Engine(1, "full")): [one(40, 20)]})
    heading, eager, full = figures.table_lines(table, ("itl_ms", "over_eager", "gain", "acceptance"))
    assert heading.split() == ["arm", "ITL,", "ms", "gain", "over", "eager", "TND", "gain", "over", "K=0"]
    assert eager.split()[2:] == ["40.000", "[40.000-40.000]", *["1.000", "[1.000-1.000]"] * 2]
    assert full.split()[3:] == ["40.000", "[40.000-40.000]", "-", "-"]
