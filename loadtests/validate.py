"""`make validate`: load through the router of a running cluster, judged, reported.

    python -m loadtests.validate --cluster local [--users 4] [--requests 24] [--duration 300]

Reads `.local/clusters/CLUSTER/{plan.json,secrets/api_key}`, writes `reports/validate-TIME.{json,md}` there.
Nothing else may use the cluster meanwhile: the engines' counters are compared token by token.
Exit code: 0 all checks passed, 1 a check failed, 2 the run could not be done.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loadtests import report as reports
from mtp_runtime.metrics.plan import Plan, PlanError, read_plan
from mtp_runtime.metrics.promapi import Prometheus, PrometheusError
from mtp_runtime.metrics.scrape import Samples

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {"users": 64, "requests": 10_000, "duration": 3600, "max_tokens": 4096}
STOP_TIMEOUT_S = 120  # streams in flight when the time is up may end
COUNTERS_SETTLE_S = 0.5  # an engine counts a request right after it sent the last event


class ValidationError(RuntimeError):
    """The run could not be done at all."""


def run(folder: Path, settings: reports.Settings) -> tuple[reports.Report, Path]:
    """Validate the cluster whose state is in `folder`; returns the report and its Markdown file."""
    plan = read_plan(folder / "plan.json")
    key_file = folder / "secrets" / "api_key"
    if not key_file.is_file():
        raise ValidationError(f"{key_file}: no API key; deploy the cluster first (make deploy CLUSTER={plan.cluster})")
    now = datetime.now(UTC)
    stem = f"validate-{now:%Y%m%dT%H%M%SZ}"
    target = folder / "reports"
    target.mkdir(parents=True, exist_ok=True)
    before = _counters(plan, time.time())
    started = time.monotonic()
    records = _run_locust(folder, settings, target / f"{stem}.locust.json", target / f"{stem}.log")
    seconds = time.monotonic() - started
    after = _counters(plan, time.time() + COUNTERS_SETTLE_S)
    around = {
        engine.instance: reports.Around(engine.role, before[engine.instance], after[engine.instance])
        for engine in plan.decoding
    }
    report = reports.build(plan, settings, f"{now:%Y-%m-%d %H:%M:%S} UTC", seconds, records, around)
    _, page = reports.write(report, records, target, stem)
    return report, page


def _counters(plan: Plan, newer_than: float) -> dict[str, Samples]:
    """Every decoding engine's series, from a scrape after `newer_than`."""
    prometheus = Prometheus(plan.prometheus)
    wait_s = 4.0 * plan.scrape_interval_s + 10.0
    return {
        engine.instance: prometheus.engine_counters(engine.instance, newer_than, wait_s) for engine in plan.decoding
    }


def _run_locust(folder: Path, settings: reports.Settings, result: Path, log: Path) -> list[reports.Record]:
    command = [
        *(sys.executable, "-m", "locust", "-f", str(ROOT / "loadtests" / "locustfile.py")),
        *("--headless", "--only-summary", "--exit-code-on-error", "0"),
        *("--users", str(settings.users), "--spawn-rate", str(settings.users)),
        *("--run-time", f"{settings.duration_s}s", "--stop-timeout", str(STOP_TIMEOUT_S)),
        *("--plan", str(folder / "plan.json"), "--api-key-file", str(folder / "secrets" / "api_key")),
        *("--max-requests", str(settings.requests), "--max-tokens", str(settings.max_tokens)),
        *("--temperature", str(settings.temperature), "--result", str(result)),
    ]
    limit_s = settings.duration_s + STOP_TIMEOUT_S + 60
    with log.open("w", encoding="utf-8") as output:
        try:
            code = subprocess.run(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=limit_s, check=False
            ).returncode
        except subprocess.TimeoutExpired as error:
            raise ValidationError(f"locust did not end within {limit_s} s; see {log}") from error
    if code != 0 or not result.is_file():
        last = log.read_text(encoding="utf-8").rstrip().rpartition("\n")[2]
        raise ValidationError(f"locust ended with exit code {code}: {last}; see {log}")
    records: list[reports.Record] = json.loads(result.read_text(encoding="utf-8"))
    result.unlink()  # the report has the records
    return records


def show(report: reports.Report, page: Path, console: Console) -> None:
    """Print the figures and the checks."""
    figures = Table(title=f"Validation of {report.cluster}", show_header=False)
    for label, value in reports.rows(report):
        figures.add_row(label, value)
    console.print(figures)
    checks = Table("Check", "Result", "Detail")
    for check in report.checks:
        checks.add_row(check.name, "[green]ok[/]" if check.ok else "[bold red]FAILED[/]", check.detail)
    console.print(checks)
    for problem, count in report.failures.items():
        console.print(f"{count} x {problem}", style="red", markup=False)
    console.print(f"Report: {page}", markup=False, soft_wrap=True)


def _bounded(name: str) -> type[int]:
    """An argparse type: a whole number from 1 to the limit of `name`."""

    def convert(text: str) -> int:
        value = int(text)
        if not 1 <= value <= LIMITS[name]:
            raise argparse.ArgumentTypeError(f"must lie between 1 and {LIMITS[name]}, not {value}")
        return value

    convert.__name__ = name
    return convert  # type: ignore[return-value]


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="validate", description="Load a running cluster and judge every answer.")
    parser.add_argument("--cluster", required=True, help="name of a deployed cluster")
    parser.add_argument("--clusters-dir", type=Path, default=ROOT / ".local" / "clusters", help="state of clusters")
    parser.add_argument("--users", type=_bounded("users"), default=4, help="concurrent users")
    parser.add_argument("--requests", type=_bounded("requests"), help="requests of the whole run (default 24)")
    parser.add_argument("--duration", type=_bounded("duration"), help="seconds the run may take (default 300)")
    parser.add_argument("--max-tokens", type=_bounded("max_tokens"), default=64, help="max_tokens of each request")
    parser.add_argument("--temperature", type=float, default=0.0, help="sampling temperature")
    return parser.parse_args(argv)


def settings_of(args: argparse.Namespace) -> reports.Settings:
    """A given duration alone means: as many requests as fit into it."""
    requests = args.requests or (24 if args.duration is None else LIMITS["requests"])
    return reports.Settings(args.users, requests, args.duration or 300, args.max_tokens, args.temperature)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        report, page = run(args.clusters_dir / args.cluster, settings_of(args))
    except (PlanError, PrometheusError, ValidationError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(report, page, Console())
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
