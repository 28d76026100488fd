"""The engine benchmark's options, turns and verdicts, with engines that only pretend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtests import bench_engine as bench
from loadtests.bench_arms import COST, PARTS, Arm, Engine, Group
from loadtests.bench_figures import Answer, Round, report

GOOD = {0: (40.0, 40.0), 1: (50.0, 25.0), 3: (60.0, 20.0)}
"""K -> ITL and TPOT, ms."""
START = {"start_s": 5.0, "recording_s": None, "recording_mb": None, "rss_mb": 700.0, "kernel": None}


class Pretender:
    """An engine that yields one token a step to each request; what it was asked, over all of them, in `asked`."""

    asked: list[tuple[Arm, list[list[int]], int]]
    open: list[Engine]
    dies_at: int | None = None

    def __init__(self, engine: Engine, model: str, length: int) -> None:
        self.engine, self.start = engine, dict(START)
        Pretender.open.append(engine)

    def ask(self, arm: Arm, prompts: list[list[int]], tokens: int, temperature: float) -> Answer:
        assert arm.engine == self.engine
        assert len(prompts) == arm.at_once
        Pretender.asked.append((arm, prompts, tokens))
        if len(Pretender.asked) == Pretender.dies_at:
            raise RuntimeError("the engine died")
        rows = [[1] * tokens for _ in prompts]
        return Answer([0.04] * tokens, rows, [[0] * tokens for _ in prompts], tokens - 1)

    def close(self) -> None:
        Pretender.open.remove(self.engine)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> type[Pretender]:
    monkeypatch.setattr(bench, "EngineProcess", Pretender)
    monkeypatch.setattr(bench, "prompts", lambda model, count: [[number] * 10 for number in range(count)])
    monkeypatch.setattr(Pretender, "asked", [], raising=False)
    monkeypatch.setattr(Pretender, "open", [], raising=False)
    return Pretender


def settings(**changes: Any) -> bench.Settings:
    return bench.Settings(
        **{"model": "", "rounds": 2, "prompts": 2, "tokens": 8, "length": 64, "temperature": 0.0} | changes
    )


def rounds(figures: dict[int, tuple[float, float]], count: int = 5) -> dict[Arm, list[Round]]:
    arms = COST.groups[0].arms
    return {arm: [Round(*figures[arm.drafts], 25.0, 1.0, 0.9 if arm.drafts else None)] * count for arm in arms}


def pretend(monkeypatch: pytest.MonkeyPatch, figures: dict[int, tuple[float, float]]) -> None:
    def measure(group: Group, asked: bench.Settings) -> bench.Measured:
        return bench.Measured(group, {engine.name: dict(START) for engine in group.engines}, rounds(figures))

    monkeypatch.setattr(bench, "measure", measure)


def verdicts(figures: dict[int, tuple[float, float]]) -> dict[str, bool]:
    return bench.verdicts(report(rounds(figures)), COST.targets)


def test_each_target_has_its_verdict() -> None:
    found = verdicts(GOOD)
    assert len(found) == len(COST.targets) == 4
    assert all(found.values())
    assert "step cost K=1 eager: 1.250, at most 1.35: met" in found
    assert "TPOT gain K=3 eager: 2.000, at least 1.6: met" in found


@pytest.mark.parametrize(
    ("k", "figures", "missed"),
    [
        (1, (54.4, 25.0), "step cost K=1 eager: 1.360, at most 1.35: MISSED"),
        (3, (64.4, 20.0), "step cost K=3 eager: 1.610, at most 1.6: MISSED"),
        (1, (50.0, 30.0), "TPOT gain K=1 eager: 1.333, at least 1.35: MISSED"),
        (3, (60.0, 25.5), "TPOT gain K=3 eager: 1.569, at least 1.6: MISSED"),
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
    pretend(monkeypatch, {**GOOD, 1: (80.0, 40.0)} if missed else GOOD)
    assert bench.main(arguments) == code
    printed = capsys.readouterr().out
    assert ("MISSED" in printed) == missed
    assert "not a measurement" not in printed
    assert printed.splitlines()[0] == "make bench-engine" + " ARGS=--strict" * bool(arguments)


def test_a_short_run_is_called_no_measurement(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, GOOD)
    assert bench.main(["--rounds", "4"]) == 0
    assert capsys.readouterr().out.endswith("fewer than 5 rounds: not a measurement\n")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--rounds", "4", "--strict"], "fewer than 5 rounds"),
        (["--rounds", "0"], "--rounds"),
        (["--prompts", "0"], "--prompts"),
        (["--tokens", "7"], "--tokens"),
        (["--part", "modes", "load", "--strict"], "no target in modes, load"),
        (["--part", "all"], "--part"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        bench.parse_args(arguments)
    assert stop.value.code == 2
    assert named in capsys.readouterr().err


def test_a_part_has_defaults_of_its_own() -> None:
    assert bench.parse_args([]).part == ["cost"]
    options = bench.parse_args(["--part", "load", "cost", "load", "--tokens", "20"])
    assert options.part == ["load", "cost"]
    for name in options.part:
        asked = bench.settings(options, PARTS[name])
        assert (asked.tokens, asked.prompts, asked.length) == (20, PARTS[name].prompts, PARTS[name].length)


def test_arms_take_turns_with_the_same_prompts(engines: type[Pretender]) -> None:
    first, second = Engine(0, slots=2), Engine(1, slots=2)
    group = Group("two", (Arm(first), Arm(second), Arm(first, 2), Arm(second, 2)))
    found = bench.measure(group, settings())
    warm_up, timed = engines.asked[:4], engines.asked[4:]
    assert [arm for arm, _, _ in warm_up] == list(group.arms)
    order = [arm.engine.k for arm, _, _ in timed]
    assert order == [0, 1, 1, 0] * 2 + [1, 0, 0, 1] * 2
    texts = [[prompt[0] for prompt in prompts] for arm, prompts, _ in timed if arm.engine == first]
    assert texts == [[0], [1], [0, 1], [2, 3]] * 2
    assert texts == [[prompt[0] for prompt in prompts] for arm, prompts, _ in timed if arm.engine == second]
    assert {arm: len(own) for arm, own in found.rounds.items()} == dict.fromkeys(group.arms, 2)
    assert found.rounds[Arm(first, 2)][0].tokens_per_second == pytest.approx(2 * 25)
    assert found.starts.keys() == {"K=0 eager", "K=1 eager"}
    assert engines.open == []


def test_when_an_engine_dies_the_others_are_ended(engines: type[Pretender], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "dies_at", 3)
    with pytest.raises(RuntimeError, match="died"):
        bench.measure(COST.groups[0], settings())
    assert engines.open == []


def test_a_prompt_that_does_not_fit_is_named(engines: type[Pretender]) -> None:
    with pytest.raises(ValueError, match="18 tokens of a prompt and its answer, max_model_len is 17"):
        bench.measure(COST.groups[0], settings(length=17))
    assert engines.asked == []


def test_tokens_that_differ_are_told(
    engines: type[Pretender], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = Pretender.ask

    def ask(self: Pretender, arm: Arm, *args: Any) -> Answer:
        answer = honest(self, arm, *args)
        return Answer(answer.step_s, answer.tokens, [[arm.drafts]]) if arm.drafts == 3 else answer

    monkeypatch.setattr(Pretender, "ask", ask)
    group = Group("two", (Arm(Engine(0)), Arm(Engine(1)), Arm(Engine(3))))
    bench.measure(group, settings(rounds=1, prompts=1))
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert warnings == ["warning: K=3 eager: greedy tokens of 1 of 1 prompts differ from K=0 eager"]
    bench.measure(group, settings(rounds=1, prompts=1, temperature=1.0))
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("name", PARTS)
def test_every_part_prints_and_writes_its_figures(
    name: str, engines: type[Pretender], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    assert bench.main(["--part", name, "--rounds", "5", "--json", str(file)]) == 0
    printed, found = capsys.readouterr().out, json.loads(file.read_text())
    assert f"--part {name} --rounds 5" in found["command"] == printed.splitlines()[0]
    part = PARTS[name]
    assert len(found["verdicts"]) == len(part.targets)
    assert printed.count("MISSED") == sum(not met for met in found["verdicts"].values())
    for group, written in zip(part.groups, found["parts"][name]["groups"], strict=True):
        assert written["arms"].keys() == written["rounds"].keys() == {arm.name for arm in group.arms}
        assert written["engines"].keys() == {engine.name for engine in group.engines}
        assert all(any(line.startswith(arm.name) for line in printed.splitlines()) for arm in group.arms)
    assert ("the MTP article: 247.6 -> 106.5 ms, 2.32" in printed) == (name == "modes")


def test_json_on_standard_output_stands_alone(engines: type[Pretender], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--rounds", "1", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parts"]["cost"]["settings"]["tokens"] == COST.tokens
    assert found["doubt"] == "fewer than 5 rounds: not a measurement"
