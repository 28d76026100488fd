"""Step cost and TPOT with and without MTP: `make bench-engine`.

One in-process engine an arm, each in a process of its own that stays for the whole benchmark; the arms take turns,
prompt by prompt in every round, so that whatever else the machine does hits them alike. Figures are per round, then
median and range.

  ITL   time between two steps of the request (the first, which holds the prefill, left out), ms
  TPOT  the same time over the tokens it yielded, ms
  step cost  ITL with MTP / ITL without;  gain  TPOT without / TPOT with, each within one round

Each target gets a line that says met or MISSED. The exit code is 0 all the same, and 1 for a missed one with --strict.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mtp_runtime.config.engines import cpu_env

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_MODEL = "mtp_runtime/model/weights"
ENOUGH_ROUNDS = 5
"""With fewer, median and range say nothing."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One engine: K drafts, with our plugin or stock vLLM."""

    k: int
    plugin: bool = True

    @property
    def name(self) -> str:
        """As printed."""
        return f"K={self.k}{'' if self.plugin else ' stock'}"


@dataclass(frozen=True, slots=True)
class Target:
    """What the median of a figure of one arm must reach: `at_most` a limit, else at least it."""

    figure: str
    arm: Arm
    at_most: bool
    limit: float

    def line(self, value: float) -> str:
        """The verdict as printed."""
        title = {"step_cost": "step cost", "gain": "TPOT gain"}[self.figure]
        words = f"at {'most' if self.at_most else 'least'} {self.limit}"
        return f"{title} {self.arm.name}: {value:.3f}, {words}: {'met' if self.met(value) else 'MISSED'}"

    def met(self, value: float) -> bool:
        return value <= self.limit if self.at_most else value >= self.limit


BASELINE = Arm(0)
ARMS = (BASELINE, Arm(1), Arm(3), Arm(1, plugin=False), Arm(3, plugin=False))
TARGETS = (
    Target("step_cost", Arm(1), at_most=True, limit=1.35),
    Target("step_cost", Arm(3), at_most=True, limit=1.6),
    Target("gain", Arm(1), at_most=False, limit=1.35),
    Target("gain", Arm(3), at_most=False, limit=1.6),
)


@dataclass(slots=True)
class Round:
    """One arm in one round, over all prompts."""

    itl_ms: float
    tpot_ms: float
    tokens_per_step: float
    acceptance: float | None


class Worker:
    """An engine process, driven by one JSON line a request. Raises RuntimeError when it dies."""

    def __init__(self, arm: Arm, options: argparse.Namespace) -> None:
        self.counters = tempfile.TemporaryDirectory()  # of the plugin; the engine is killed in the end
        env = {
            **os.environ,
            **cpu_env(str(ROOT)),
            "MTP_RUNTIME_COUNTERS_DIR": self.counters.name,
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        if not arm.plugin:
            env["VLLM_PLUGINS"] = ""
        command = [
            sys.executable,
            "-m",
            "loadtests.bench_engine_worker",
            options.model,
            str(arm.k),
            str(options.length),
        ]
        self.arm = arm
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()  # ready

    def ask(self, prompt: list[int], tokens: int, temperature: float) -> dict[str, Any]:
        """Generate; the answer has step_s, tokens_per_step and the token ids."""
        assert self.process.stdin is not None
        request = {"prompt": prompt, "tokens": tokens, "temperature": temperature}
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("BENCH "):
                return json.loads(line.removeprefix("BENCH "))
        raise RuntimeError(f"the engine of arm {self.arm.name} died, exit code {self.process.wait()}")

    def close(self) -> None:
        """End this process and wait for it."""
        self.process.kill()
        self.process.wait()
        self.counters.cleanup()


def prompts(options: argparse.Namespace) -> list[list[int]]:
    """Held-out text of the model's own language, as token ids; random ids where the model has no tokenizer."""
    folder = Path(options.model)
    if not (folder / "tokenizer.json").exists():
        vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
        generator = random.Random(0)
        return [[generator.randrange(2, vocab) for _ in range(40)] for _ in range(options.prompts)]
    from tokenizers import Tokenizer

    from mtp_runtime.model.heldout import prompts as held_out

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [list(prompt.ids) for prompt in held_out(tokenizer, options.prompts)]


def summarise(answers: list[dict[str, Any]], k: int) -> Round:
    """Figures of one arm in one round. The first step of each prompt is its prefill and is left out."""
    steps = [t for a in answers for t in a["step_s"][1:]]
    counts = [n for a in answers for n in a["tokens_per_step"][1:]]
    total_ms = sum(steps) * 1e3
    # The last step of a request may be cut short by its token limit: no acceptance from it.
    whole = [n for a in answers for n in a["tokens_per_step"][1:-1]]
    acceptance = sum(n - 1 for n in whole) / (k * len(whole)) if k and whole else None
    return Round(statistics.median(steps) * 1e3, total_ms / sum(counts), sum(counts) / len(counts), acceptance)


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median and range."""
    values = list(values)
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def report(rounds: dict[Arm, list[Round]]) -> dict[str, Any]:
    """All figures; ratios are taken within a round and then summarised."""
    table = {}
    base = rounds[BASELINE]
    for arm, own in rounds.items():
        entry: dict[str, Any] = {
            "itl_ms": spread(r.itl_ms for r in own),
            "tpot_ms": spread(r.tpot_ms for r in own),
            "acceptance_length": spread(r.tokens_per_step for r in own),
            "step_cost": spread(r.itl_ms / b.itl_ms for r, b in zip(own, base, strict=True)),
            "gain": spread(b.tpot_ms / r.tpot_ms for r, b in zip(own, base, strict=True)),
        }
        if arm.k:
            entry["acceptance"] = spread(r.acceptance for r in own if r.acceptance is not None)
        table[arm.name] = entry
    return table


def show(table: dict[str, Any]) -> None:
    """Print the table."""
    columns = ("itl_ms", "tpot_ms", "step_cost", "acceptance", "acceptance_length", "gain")
    print(f"{'arm':<12}" + "".join(f"{c:>24}" for c in columns))
    for name, entry in table.items():
        cells = []
        for column in columns:
            v = entry.get(column)
            cells.append(f"{v['median']:.3f} [{v['min']:.3f}-{v['max']:.3f}]" if v else "-")
        print(f"{name:<12}" + "".join(f"{c:>24}" for c in cells))


def verdicts(table: dict[str, Any]) -> dict[str, bool]:
    """One line for each target, and whether it is met."""
    medians = [(target, table[target.arm.name][target.figure]["median"]) for target in TARGETS]
    return {target.line(value): target.met(value) for target, value in medians}


def too_few(rounds: int) -> str | None:
    """What to say of a run that is too short to be believed, whatever its verdicts."""
    return None if rounds >= ENOUGH_ROUNDS else f"fewer than {ENOUGH_ROUNDS} rounds: not a measurement"


def measure(options: argparse.Namespace) -> dict[Arm, list[Round]]:
    """Run all rounds; warns where greedy tokens differ between arms. Raises RuntimeError when an engine dies."""
    texts = prompts(options)
    workers: list[Worker] = []
    try:
        for arm in ARMS:  # one after the other: starts in parallel only slow each other down
            workers.append(Worker(arm, options))
            workers[-1].ask(texts[0], min(options.tokens, 16), options.temperature)
            print(f"arm {arm.name} is up", file=sys.stderr)
        rounds: dict[Arm, list[Round]] = {arm: [] for arm in ARMS}
        for number in range(options.rounds):
            answers: dict[Arm, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
            for index, text in enumerate(texts):
                turn = (number + index) % len(workers)
                for worker in workers[turn:] + workers[:turn]:
                    answers[worker.arm].append(worker.ask(text, options.tokens, options.temperature))
            for arm in ARMS:
                rounds[arm].append(summarise(answers[arm], arm.k))
            _compare(answers, options.temperature)
            print(f"round {number + 1} of {options.rounds} done", file=sys.stderr)
        return rounds
    finally:
        for worker in workers:
            worker.close()


def _compare(answers: dict[Arm, list[dict[str, Any]]], temperature: float) -> None:
    if temperature:
        return
    for arm, own in answers.items():
        different = sum(a["token_ids"] != b["token_ids"] for a, b in zip(own, answers[BASELINE], strict=True))
        if different:
            text = f"warning: {arm.name}: greedy tokens of {different} of {len(own)} prompts differ from K=0"
            print(text, file=sys.stderr)


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    """Options; --strict is refused where there is nothing to be strict about."""
    parser = argparse.ArgumentParser(prog="bench_engine", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL, help="model folder")
    parser.add_argument(
        "--rounds", type=int, default=ENOUGH_ROUNDS, help=f"{ENOUGH_ROUNDS} and more make a measurement"
    )
    parser.add_argument("--prompts", type=int, default=6, help="prompts a round")
    parser.add_argument("--tokens", type=int, default=96, help="tokens a prompt")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--length", type=int, default=1024, help="max_model_len of the engines")
    parser.add_argument("--json", metavar="FILE", help="write all figures there, - for standard output")
    parser.add_argument("--strict", action="store_true", help="exit 1 when a target is missed")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if options.strict and (why := too_few(options.rounds)):
        parser.error(f"--strict: {why}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Entry point; exit code 1 when a target is missed and --strict is on."""
    options = parse_args(arguments)
    rounds = measure(options)
    table = report(rounds)
    judged, doubt = verdicts(table), too_few(options.rounds)
    if options.json:
        found = {"options": vars(options), "arms": table, "verdicts": judged, "doubt": doubt, "rounds": _raw(rounds)}
        text = json.dumps(found, indent=2)
        if options.json == "-":
            print(text)
        else:
            Path(options.json).write_text(text + "\n")
    if options.json != "-":
        show(table)
        print("\n".join([*judged, *([doubt] if doubt else [])]))
    return int(options.strict and not all(judged.values()))


def _raw(rounds: dict[Arm, list[Round]]) -> dict[str, list[dict[str, Any]]]:
    return {arm.name: [asdict(r) for r in own] for arm, own in rounds.items()}


if __name__ == "__main__":
    sys.exit(main())
