"""Turns the records of a run and the counters around it into checks, a JSON file, a Markdown file and a table.

Pure but for `write`. Times are seconds inside; tables show milliseconds.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mtp_runtime.metrics import engine_stats, names
from mtp_runtime.metrics.engine_stats import DraftCounts
from mtp_runtime.metrics.plan import Plan
from mtp_runtime.metrics.scrape import Samples

Record = Mapping[str, Any]  # a `locustfile.Record` as read back from JSON


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold; `detail` has the numbers either way."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Settings:
    """What was asked for."""

    users: int
    requests: int
    duration_s: int
    max_tokens: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Around:
    """One decoding engine's series in Prometheus before and after the run."""

    role: str
    before: Samples
    after: Samples

    def delta(self, name: str) -> float | None:
        """Growth of a counter; None when the engine has no such counter. A counter born in between started at 0."""
        after = self.after.total(name)
        return None if after is None else after - (self.before.total(name) or 0.0)


@dataclass(frozen=True, slots=True)
class Report:
    """A whole validation run."""

    cluster: str
    started: str
    seconds: float
    mtp: dict[str, Any]
    settings: Settings
    summary: dict[str, Any]
    checks: list[Check]
    failures: dict[str, int]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)


def build(
    plan: Plan,
    settings: Settings,
    started: str,
    seconds: float,
    records: Sequence[Record],
    around: Mapping[str, Around],
) -> Report:
    """Judge a run. `around` is keyed by engine instance, decoding engines only."""
    drafts = drafts_of(around)
    return Report(
        cluster=plan.cluster,
        started=started,
        seconds=seconds,
        mtp={"enabled": plan.mtp_enabled, "k": plan.k},
        settings=settings,
        summary=_summary(records, seconds, drafts),
        checks=[
            *_request_checks(settings, records, seconds),
            _tokens_check(records, around),
            _mtp_check(plan, around, drafts),
            *_transfer_check(records, around),
        ],
        failures=dict(Counter(record["problem"] for record in records if record["problem"])),
    )


def drafts_of(around: Mapping[str, Around]) -> DraftCounts | None:
    """Draft counts of the run over all decoding engines; None when none of them has such counters."""
    per_engine = []
    for pair in around.values():
        after = engine_stats.draft_counts(pair.after)
        if after is not None:
            per_engine.append(after.since(engine_stats.draft_counts(pair.before)))
    if not per_engine:
        return None
    return DraftCounts(
        sum(counts.drafts for counts in per_engine),
        sum(counts.draft_tokens for counts in per_engine),
        sum(counts.accepted for counts in per_engine),
        tuple(sum(values) for values in zip_longest(*(c.per_position for c in per_engine), fillvalue=0.0)),
    )


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of the values do not exceed (nearest rank)."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _summary(records: Sequence[Record], seconds: float, drafts: DraftCounts | None) -> dict[str, Any]:
    tokens = sum(record["tokens"] for record in records)
    summary: dict[str, Any] = {
        "requests": len(records),
        "failed": sum(record["problem"] is not None for record in records),
        "tokens": tokens,
        "tokens_per_second": tokens / seconds if seconds > 0 else None,
    }
    good = [record for record in records if record["problem"] is None]
    for name in ("ttft_s", "tpot_s", "total_s"):
        values = [record[name] for record in good if record[name] is not None]
        summary[name] = {"p50": quantile(values, 0.5), "p95": quantile(values, 0.95)}
    if drafts is not None and drafts.drafts > 0:
        summary["acceptance_rate"] = drafts.rate
        summary["acceptance_length"] = drafts.length
        summary["acceptance_rate_position"] = drafts.position_rates
    return summary


def _request_checks(settings: Settings, records: Sequence[Record], seconds: float) -> list[Check]:
    failed = [record for record in records if record["problem"] is not None]
    # A run may also end because its time is up; then it has sent fewer requests than it was allowed.
    complete = len(records) == settings.requests or seconds >= settings.duration_s
    kinds = {record["kind"] for record in records}
    return [
        Check("requests sent", bool(records) and complete, f"{len(records)} of {settings.requests}"),
        Check("chat and completions", kinds == {"chat", "completion"}, ", ".join(sorted(kinds)) or "none"),
        Check("no failed request", not failed, f"{len(failed)} failed of {len(records)}"),
    ]


def _tokens_check(records: Sequence[Record], around: Mapping[str, Around]) -> Check:
    """Tokens that reached the clients equal the growth of the engines' own counters in Prometheus."""
    name = "tokens equal Prometheus"
    seen = sum(record["tokens"] for record in records)
    deltas = {instance: pair.delta(names.GENERATION_TOKENS) for instance, pair in around.items()}
    missing = sorted(instance for instance, delta in deltas.items() if delta is None)
    if missing:
        return Check(name, False, f"no {names.GENERATION_TOKENS} for {', '.join(missing)}")
    restarted = sorted(instance for instance, delta in deltas.items() if delta is not None and delta < 0)
    if restarted:
        return Check(name, False, f"restarted during the run: {', '.join(restarted)}")
    counted = sum(delta for delta in deltas.values() if delta is not None)
    return Check(name, counted == seen, f"{seen} received, {counted:.0f} counted by the engines")


def paused(pair: Around) -> bool:
    """Whether the engine's active K was 0 all the time (`mtpctl active-k`)."""
    return all(samples.total(names.PLUGIN_ACTIVE_K) == 0 for samples in (pair.before, pair.after))


def _mtp_check(plan: Plan, around: Mapping[str, Around], drafts: DraftCounts | None) -> Check:
    """Draft counters move if, and only if, MTP is on."""
    name = "drafts match the MTP switch"
    if not plan.mtp_enabled:
        return Check(name, drafts is None, "MTP off" if drafts is None else "MTP is off, but draft counters exist")
    silent = [
        instance
        for instance, pair in around.items()
        if not pair.delta(names.SPEC_DRAFTS) and pair.delta(names.GENERATION_TOKENS) and not paused(pair)
    ]
    if around and all(map(paused, around.values())):
        return Check(name, drafts is None or drafts.drafts == 0, "MTP is on, its active K is 0")
    if drafts is None or silent:
        return Check(name, False, f"MTP is on, but no drafts on {', '.join(silent) or 'any engine'}")
    return Check(name, drafts.drafts > 0, f"{drafts.drafts:.0f} draft steps, {drafts.accepted:.0f} tokens accepted")


def _transfer_check(records: Sequence[Record], around: Mapping[str, Around]) -> list[Check]:
    """With NIXL every request moves its KV cache once; a router that skips it makes decode compute the prompt again."""
    name = f"{names.NIXL_XFER_TIME}_count"
    decode = [pair for pair in around.values() if pair.role == "decode"]
    deltas = [delta for pair in decode if (delta := pair.delta(name)) is not None]
    if not decode or (not deltas and all(pair.after.total(names.NIXL_FAILED_TRANSFERS) is None for pair in decode)):
        return []  # no P/D, or another connector, which has no such counter
    good = sum(record["problem"] is None for record in records)
    return [Check("one KV transfer a request", sum(deltas) == good, f"{sum(deltas):.0f} transfers, {good} requests")]


def rows(report: Report) -> list[tuple[str, str]]:
    """The figures of the short table, label and value."""
    summary = report.summary
    mtp = f"on, K={report.mtp['k']}" if report.mtp["enabled"] else "off"
    table = [
        ("Cluster", report.cluster),
        ("MTP", mtp),
        ("Requests", f"{summary['requests']} ({summary['failed']} failed), {report.settings.users} users"),
        ("Tokens", f"{summary['tokens']} ({_number(summary['tokens_per_second'])} tokens/s)"),
        ("TTFT p50 / p95", _milliseconds(summary["ttft_s"])),
        ("TPOT p50 / p95", _milliseconds(summary["tpot_s"])),
    ]
    if "acceptance_rate" in summary:
        positions = ", ".join(f"{value:.1%}" for value in summary["acceptance_rate_position"])
        table.append(("Acceptance rate", f"{summary['acceptance_rate']:.1%} (by position: {positions})"))
        table.append(("Acceptance length", f"{summary['acceptance_length']:.2f} tokens a step"))
    return table


def to_markdown(report: Report) -> str:
    """The report as a page."""
    verdict = "passed" if report.ok else "FAILED"
    lines = [f"# Validation of {report.cluster}: {verdict}", "", f"Started {report.started}."]
    lines += ["", "| | |", "|---|---|", *(f"| {label} | {value} |" for label, value in rows(report))]
    lines += ["", "| check | result | detail |", "|---|---|---|"]
    lines += [f"| {check.name} | {'ok' if check.ok else 'FAILED'} | {check.detail} |" for check in report.checks]
    if report.failures:
        lines += ["", "## Failed requests", ""]
        lines += [f"- {count} x {problem}" for problem, count in report.failures.items()]
    return "\n".join(lines) + "\n"


def to_json(report: Report, records: Sequence[Record]) -> str:
    """Everything, the single records too."""
    return json.dumps(asdict(report) | {"ok": report.ok, "records": list(records)}, indent=1) + "\n"


def write(report: Report, records: Sequence[Record], folder: Path, stem: str) -> tuple[Path, Path]:
    """Write FOLDER/STEM.json and FOLDER/STEM.md; returns both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    data, page = folder / f"{stem}.json", folder / f"{stem}.md"
    data.write_text(to_json(report, records), encoding="utf-8")
    page.write_text(to_markdown(report), encoding="utf-8")
    return data, page


def _milliseconds(quantiles: Mapping[str, float | None]) -> str:
    return " / ".join("-" if value is None else f"{value * 1000:.1f}" for value in quantiles.values()) + " ms"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
