"""The verdicts of the engine benchmark, without an engine."""

from __future__ import annotations

import pytest

from loadtests import bench_engine as bench

GOOD = {0: (40.0, 40.0), 1: (50.0, 25.0), 3: (60.0, 20.0)}
"""K -> ITL and TPOT, ms."""


def rounds(figures: dict[int, tuple[float, float]]) -> dict[bench.Arm, list[bench.Round]]:
    return {arm: [bench.Round(*figures[arm.k], 1.0, 0.9 if arm.k else None)] * 5 for arm in bench.ARMS}


def verdicts(figures: dict[int, tuple[float, float]]) -> dict[str, bool]:
    return bench.verdicts(bench.report(rounds(figures)))


def test_each_target_has_its_verdict() -> None:
    found = verdicts(GOOD)
    assert len(found) == len(bench.TARGETS) == 4
    assert all(found.values())
    assert "step cost K=1: 1.250, at most 1.35: met" in found
    assert "TPOT gain K=3: 2.000, at least 1.6: met" in found


@pytest.mark.parametrize(
    ("k", "figures", "missed"),
    [
        (1, (54.4, 25.0), "step cost K=1: 1.360, at most 1.35: MISSED"),
        (3, (64.4, 20.0), "step cost K=3: 1.610, at most 1.6: MISSED"),
        (1, (50.0, 30.0), "TPOT gain K=1: 1.333, at least 1.35: MISSED"),
        (3, (60.0, 25.5), "TPOT gain K=3: 1.569, at least 1.6: MISSED"),
    ],
)
def test_a_missed_target_is_named(k: int, figures: tuple[float, float], missed: str) -> None:
    found = verdicts({**GOOD, k: figures})
    assert [line for line, met in found.items() if not met] == [missed]


@pytest.mark.parametrize(
    ("arguments", "missed", "code"),
    [([], False, 0), ([], True, 0), (["--strict"], False, 0), (["--strict"], True, 1)],
)
def test_only_strict_fails_a_missed_target(
    arguments: list[str], missed: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {**GOOD, 1: (80.0, 40.0)} if missed else GOOD
    monkeypatch.setattr(bench, "measure", lambda _: rounds(figures))
    assert bench.main(arguments) == code
    printed = capsys.readouterr().out
    assert ("MISSED" in printed) == missed
    assert "not a measurement" not in printed


def test_a_short_run_is_called_no_measurement(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "measure", lambda _: rounds(GOOD))
    assert bench.main(["--rounds", "4"]) == 0
    assert capsys.readouterr().out.endswith("fewer than 5 rounds: not a measurement\n")


@pytest.mark.parametrize("arguments", [["--rounds", "4", "--strict"], ["--rounds", "0"]])
def test_a_short_run_cannot_be_strict(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        bench.parse_args(arguments)
    assert stop.value.code == 2
    assert "--" in capsys.readouterr().err
