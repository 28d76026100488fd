"""Figures of the engine benchmark: from the steps of an arm to ratios, tables and verdicts. Plain data."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from loadtests.bench_arms import Arm, Engine, Target
from mtp_runtime.graphs.slots import PLACEHOLDER

HEADINGS: Final = {
    "itl_ms": "ITL, ms",
    "tpot_ms": "TPOT, ms",
    "tokens_per_second": "tokens/s",
    "step_cost": "step cost",
    "acceptance": "acceptance",
    "acceptance_length": "AL",
    "gain": "gain over K=0",
    "over_eager": "gain over eager TND",
}
PUBLISHED: Final = (
    (Arm(Engine(0, "full")), 247.6, 106.5),
    (Arm(Engine(1, "full", PLACEHOLDER)), 192.8, 82.75),
)
"""TPOT of the MTP article, eager and in a whole graph (aclgraph), ms."""
COUNTS: Final = ("decode_steps", "replays", "draft_replays", "no_graph")


@dataclass(slots=True)
class Answer:
    """What an engine did with requests that came together.

    step_s [S]: seconds of each step. tokens [R][S]: tokens that each request got from each step. token_ids [R].
    decode_steps: those after the last prefill, and what the plugin counted in them (stock counts nothing): replays,
    steps of the target in a static graph; draft_replays, passes of the drafter in one; no_graph, steps and passes that
    fit no graph where there are graphs.
    """

    step_s: list[float]
    tokens: list[list[int]]
    token_ids: list[list[int]]
    decode_steps: int = 0
    replays: int = 0
    draft_replays: int = 0
    no_graph: int = 0


@dataclass(slots=True)
class Round:
    """One arm in one round, over all prompts."""

    itl_ms: float
    tpot_ms: float
    tokens_per_second: float
    tokens_per_step: float
    acceptance: float | None
    decode_steps: int = 0
    replays: int = 0
    draft_replays: int = 0
    no_graph: int = 0


def window(answer: Answer) -> range:
    """The steps in which every request decodes: after the last prefill, to the first request's end.

    Raises ValueError where there are none.
    """
    busy = [[step for step, tokens in enumerate(row) if tokens] for row in answer.tokens]
    if not all(busy):
        raise ValueError("a request got no token at all")
    steps = range(max(row[0] for row in busy) + 1, min(row[-1] for row in busy) + 1)
    if not steps:
        raise ValueError("no step in which every request decodes: ask for more tokens")
    return steps


def summarise(answers: Sequence[Answer], drafts: int) -> Round:
    """Figures of one arm in one round, from the steps of `window`. drafts: K in force.

    TPOT is one request's; tokens a second are those of all requests together.
    """
    times: list[float] = []
    counts: list[int] = []
    whole: list[int] = []
    share_s = 0.0
    for answer in answers:
        steps = window(answer)
        times += answer.step_s[steps.start : steps.stop]
        share_s += sum(answer.step_s[steps.start : steps.stop]) * len(answer.tokens)
        for row in answer.tokens:
            counts += row[steps.start : steps.stop]
            # The last step of a request may be cut short by its token limit: no acceptance from it.
            last = max(step for step, tokens in enumerate(row) if tokens)
            whole += row[steps.start : min(steps.stop, last)]
    total = sum(counts)
    return Round(
        itl_ms=statistics.median(times) * 1e3,
        tpot_ms=share_s * 1e3 / total,
        tokens_per_second=total / sum(times),
        tokens_per_step=total / len(counts),
        acceptance=sum(n - 1 for n in whole) / (drafts * len(whole)) if drafts and whole else None,
        **{name: sum(getattr(answer, name) for answer in answers) for name in COUNTS},
    )


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median and range."""
    values = list(values)
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def report(rounds: dict[Arm, list[Round]]) -> dict[str, dict[str, Any]]:
    """Arm -> its figures; ratios are taken within a round and then summarised, where what they refer to was measured.

    step_cost and gain refer to the arm without MTP, over_eager to the one that is eager in TND.
    """
    table: dict[str, dict[str, Any]] = {}
    for arm, own in rounds.items():
        entry: dict[str, Any] = {
            "itl_ms": spread(r.itl_ms for r in own),
            "tpot_ms": spread(r.tpot_ms for r in own),
            "tokens_per_second": spread(r.tokens_per_second for r in own),
            "acceptance_length": spread(r.tokens_per_step for r in own),
        }
        if base := rounds.get(arm.without_mtp()):
            entry["step_cost"] = spread(r.itl_ms / b.itl_ms for r, b in zip(own, base, strict=True))
            entry["gain"] = spread(b.tpot_ms / r.tpot_ms for r, b in zip(own, base, strict=True))
        if eager := rounds.get(arm.eager()):
            entry["over_eager"] = spread(e.tpot_ms / r.tpot_ms for r, e in zip(own, eager, strict=True))
        if found := [r.acceptance for r in own if r.acceptance is not None]:
            entry["acceptance"] = spread(found)
        entry |= {name: sum(getattr(r, name) for r in own) for name in COUNTS}
        table[arm.name] = entry
    return table


def table_lines(table: dict[str, dict[str, Any]], columns: Sequence[str]) -> list[str]:
    """The table: median and range of each figure; those that no arm has are left out."""
    columns = [column for column in columns if any(column in entry for entry in table.values())]
    rows = [["arm", *(HEADINGS[column] for column in columns)]]
    for name, entry in table.items():
        found = [entry.get(column) for column in columns]
        rows.append([name, *(f"{v['median']:.3f} [{v['min']:.3f}-{v['max']:.3f}]" if v else "-" for v in found)])
    return aligned(rows)


def step_lines(table: dict[str, dict[str, Any]], arms: Iterable[Arm]) -> list[str]:
    """How many decode steps were replays, for the arms with graphs; of all rounds together."""
    rows = [["arm", "decode steps", "replayed", "eager", "drafter passes replayed", "steps and passes without a graph"]]
    for arm in arms:
        if arm.engine.mode == "eager":
            continue
        steps, replays, draft_replays, no_graph = (table[arm.name][name] for name in COUNTS)
        rows.append([arm.name, *map(str, (steps, replays, steps - replays, draft_replays, no_graph))])
    return aligned(rows) if len(rows) > 1 else []


def engine_lines(starts: dict[str, dict[str, Any]]) -> list[str]:
    """What each engine took to start, and its graphs of that."""
    rows = [["engine", "start, s", "of that its graphs, s", "their memory, MB", "all memory, MB"]]
    for name, found in starts.items():
        figures = (found["start_s"], found["recording_s"], found["recording_mb"], found["rss_mb"])
        rows.append([name, *(f"{value:.1f}" if value is not None else "-" for value in figures)])
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]


def beside_published(table: dict[str, dict[str, Any]]) -> list[str]:
    """What a whole graph gains over eager, beside the MTP article's figures."""
    lines = []
    for arm, eager, full in PUBLISHED:
        if found := table.get(arm.name, {}).get("over_eager"):
            here = f"{found['median']:.2f} [{found['min']:.2f}-{found['max']:.2f}]"
            article = f"{eager} -> {full} ms, {eager / full:.2f}"
            lines.append(f"TPOT eager / full, K={arm.engine.k}: {here}; the MTP article: {article}")
    if lines:
        lines.append("The article's model and machine are others: absolute times do not compare, ratios with care.")
    return lines


def verdicts(table: dict[str, dict[str, Any]], targets: Iterable[Target]) -> dict[str, bool]:
    """One line for each target, and whether it is met."""
    medians = [(target, table[target.arm.name][target.figure]["median"]) for target in targets]
    return {target.line(value): target.met(value) for target, value in medians}
