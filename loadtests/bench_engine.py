"""An engine with and without MTP, in every mode and under load: `make bench-engine`.

Engines in processes of their own that stay while their group is measured; its arms take turns, prompt by prompt in
every round, so that whatever else the machine does hits them alike. Figures are per round, then median and range.

  cost      step cost and gain of one request, and against stock vLLM; with targets
  modes     eager, piecewise, whole graphs with placeholders and with slack; TND, batch expansion, chunked prefill
  load      K = 0 to 3 with 1, 4 and 16 requests at once in 16 slots
  active-k  K = 1 loaded and switched off

All from the steps in which every request decodes: the prefill and the end, when some have finished, are left out.

  ITL   time between two steps, ms
  TPOT  that time over the tokens of one request, ms; tokens/s are those of all requests together
  AL    tokens of a request a step
  step cost  ITL with MTP / ITL without;  gain  TPOT without / TPOT with, each within one round and in the same mode

Each target gets a line that says met or MISSED. The exit code is 0 all the same, and 1 for a missed one with --strict.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadtests.bench_arms import PARTS, Arm, Engine, Group, Part
from loadtests.bench_figures import (
    Answer,
    Round,
    beside_published,
    engine_lines,
    report,
    step_lines,
    summarise,
    table_lines,
    verdicts,
)
from loadtests.bench_process import EngineProcess

DEFAULT_MODEL = "mtp_runtime/model/weights"
ENOUGH_ROUNDS = 5
"""With fewer, median and range say nothing."""
WARM_UP_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Settings:
    """What a part is measured with: its own defaults where the command line says nothing."""

    model: str
    rounds: int
    prompts: int
    tokens: int
    length: int
    temperature: float


@dataclass(slots=True)
class Measured:
    """One group: what its engines told at their start, and the rounds of its arms."""

    group: Group
    starts: dict[str, dict[str, Any]]
    rounds: dict[Arm, list[Round]]


def settings(options: argparse.Namespace, part: Part) -> Settings:
    """See Settings."""
    return Settings(
        options.model,
        options.rounds,
        part.prompts if options.prompts is None else options.prompts,
        part.tokens if options.tokens is None else options.tokens,
        part.length if options.length is None else options.length,
        options.temperature,
    )


def prompts(model: str, count: int) -> list[list[int]]:
    """Held-out text of the model's own language, as token ids; random ids where the model has no tokenizer."""
    folder = Path(model)
    if not (folder / "tokenizer.json").exists():
        vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
        generator = random.Random(0)
        return [[generator.randrange(2, vocab) for _ in range(40)] for _ in range(count)]
    from tokenizers import Tokenizer

    from mtp_runtime.model.heldout import prompts as held_out

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [list(prompt.ids) for prompt in held_out(tokenizer, count)]


def measure(group: Group, asked: Settings) -> Measured:
    """Run all rounds; warns where greedy tokens differ between arms.

    Raises ValueError where prompt and answer exceed the engines' length, RuntimeError when an engine dies.
    """
    texts = prompts(asked.model, asked.prompts * max(group.at_once))
    if (longest := max(map(len, texts)) + asked.tokens) > asked.length:
        raise ValueError(f"{longest} tokens of a prompt and its answer, max_model_len is {asked.length}")
    engines: dict[Engine, EngineProcess] = {}

    def ask(arm: Arm, batch: int, tokens: int) -> Answer:
        own = texts[batch * arm.at_once : (batch + 1) * arm.at_once]
        return engines[arm.engine].ask(arm, own, tokens, asked.temperature)

    try:
        for engine in group.engines:  # one after the other: starts in parallel only slow each other down
            engines[engine] = EngineProcess(engine, asked.model, asked.length)
            print(f"engine {engine.name} is up", file=sys.stderr)
        for arm in group.arms:
            ask(arm, 0, min(asked.tokens, WARM_UP_TOKENS))
        rounds: dict[Arm, list[Round]] = {arm: [] for arm in group.arms}
        for number in range(asked.rounds):
            for at_once in group.at_once:
                arms = [arm for arm in group.arms if arm.at_once == at_once]
                answers: dict[Arm, list[Answer]] = {arm: [] for arm in arms}
                for batch in range(asked.prompts):
                    turn = (number + batch) % len(arms)
                    for arm in arms[turn:] + arms[:turn]:
                        answers[arm].append(ask(arm, batch, asked.tokens))
                for arm, own in answers.items():
                    rounds[arm].append(summarise(own, arm.drafts))
                if not asked.temperature:
                    _warn_of_differences(answers)
            print(f"round {number + 1} of {asked.rounds} done", file=sys.stderr)
        return Measured(group, {engine.name: process.start for engine, process in engines.items()}, rounds)
    finally:
        for process in engines.values():
            process.close()


def _warn_of_differences(answers: dict[Arm, list[Answer]]) -> None:
    base, *others = answers
    expected = [ids for answer in answers[base] for ids in answer.token_ids]
    for arm in others:
        found = [ids for answer in answers[arm] for ids in answer.token_ids]
        different = sum(a != b for a, b in zip(found, expected, strict=True))
        if different:
            text = f"warning: {arm.name}: greedy tokens of {different} of {len(found)} prompts differ from {base.name}"
            print(text, file=sys.stderr)


def too_few(rounds: int) -> str | None:
    """What to say of a run that is too short to be believed, whatever its verdicts."""
    return None if rounds >= ENOUGH_ROUNDS else f"fewer than {ENOUGH_ROUNDS} rounds: not a measurement"


def show(part: Part, measured: Measured, table: dict[str, dict[str, Any]]) -> None:
    """Print one group."""
    lines = [f"\n{part.title}: {measured.group.title}", *table_lines(table, part.columns)]
    published = beside_published(table) if "over_eager" in part.columns else []
    for more in (step_lines(table, measured.group.arms), engine_lines(measured.starts), published):
        lines += ["", *more] if more else []
    kernels = {start["kernel"] for start in measured.starts.values()} - {None}
    print("\n".join([*lines, *(f"TND attention: {kernel}" for kernel in sorted(kernels))]), flush=True)


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    """Options; --strict is refused where there is nothing to be strict about."""
    parser = argparse.ArgumentParser(prog="bench_engine", description=__doc__.splitlines()[0])
    parser.add_argument("--part", nargs="+", choices=PARTS, default=["cost"], help="what to measure (default: cost)")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="model folder")
    parser.add_argument(
        "--rounds", type=int, default=ENOUGH_ROUNDS, help=f"{ENOUGH_ROUNDS} and more make a measurement"
    )
    parser.add_argument("--prompts", type=int, help="prompts a round, for each request at once (default: the part's)")
    parser.add_argument("--tokens", type=int, help="tokens a prompt (default: the part's)")
    parser.add_argument("--length", type=int, help="max_model_len of the engines (default: the part's)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", metavar="FILE", help="write all figures there, - for standard output")
    parser.add_argument("--strict", action="store_true", help="exit 1 when a target is missed")
    options = parser.parse_args(arguments)
    options.part = list(dict.fromkeys(options.part))
    for name, least in (("rounds", 1), ("prompts", 1), ("tokens", 8)):
        if (value := getattr(options, name)) is not None and value < least:
            parser.error(f"--{name} must be at least {least}")
    if options.strict and (why := too_few(options.rounds)):
        parser.error(f"--strict: {why}")
    if options.strict and not any(PARTS[name].targets for name in options.part):
        parser.error(f"--strict: no target in {', '.join(options.part)}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Entry point; exit code 1 when a target is missed and --strict is on."""
    options = parse_args(arguments)
    given = shlex.join(sys.argv[1:] if arguments is None else arguments)
    command = "make bench-engine" + (f" ARGS={shlex.quote(given)}" if given else "")
    quiet = options.json == "-"
    if not quiet:
        print(command)
    found: dict[str, Any] = {"command": command, "options": vars(options), "parts": {}, "verdicts": {}}
    for name in options.part:
        part, asked = PARTS[name], settings(options, PARTS[name])
        groups = []
        for group in part.groups:
            measured = measure(group, asked)
            table = report(measured.rounds)
            # A part with targets has one group.
            found["verdicts"] |= verdicts(table, part.targets)
            groups.append({"title": group.title, "engines": measured.starts, "arms": table, "rounds": _raw(measured)})
            if not quiet:
                show(part, measured, table)
        found["parts"][name] = {"settings": asdict(asked), "groups": groups}
    found["doubt"] = too_few(options.rounds)
    if options.json:
        text = json.dumps(found, indent=2)
        if quiet:
            print(text)
        else:
            Path(options.json).write_text(text + "\n")
    if not quiet:
        print("\n".join(["", *found["verdicts"], *([found["doubt"]] if found["doubt"] else [])]))
    return int(options.strict and not all(found["verdicts"].values()))


def _raw(measured: Measured) -> dict[str, list[dict[str, Any]]]:
    return {arm.name: [asdict(r) for r in own] for arm, own in measured.rounds.items()}


if __name__ == "__main__":
    sys.exit(main())
