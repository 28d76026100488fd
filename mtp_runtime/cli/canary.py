"""`mtpctl canary CLUSTER`: one completion through the front, and the counters that must have moved with it.

Green means: a request without the key is refused; a completion of 32 tokens and more came back; the draft counters
moved if, and only if, MTP is on; with MTP on, our verification and our decode attention were called; with P/D, the
prefill server took part and decode pulled its KV. A deployment is done when this is green.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mtp_runtime.cli.deployed import Deployed
from mtp_runtime.metrics import engine_stats, names
from mtp_runtime.metrics.plan import Engine
from mtp_runtime.metrics.scrape import Samples, ScrapeError, fetch
from mtp_runtime.model import prompts

MIN_TOKENS = 32
MAX_TOKENS = 64
REQUEST_TIMEOUT_S = 120.0
# An engine publishes a request's counters shortly after its answer.
SETTLE_S = 10.0
# Text the tiny model knows, and longer than one block of the KV cache: decode must have something to pull.
PROMPT = prompts.completion(0)
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold; `log` is the file to read when it does not."""

    name: str
    ok: bool
    detail: str
    log: str | None = None


@dataclass(slots=True)
class Report:
    """What the canary saw. Rates are of the canary's own requests; None when MTP is off or nothing was measured."""

    cluster: str
    mtp: str
    checks: list[Check] = field(default_factory=list)
    tokens: int = 0
    acceptance_rate: float | None = None
    acceptance_length: float | None = None
    tpot_seconds: float | None = None

    @property
    def green(self) -> bool:
        return bool(self.checks) and all(check.ok for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        return {"green": self.green, **asdict(self)}


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and body of one HTTP exchange; status 0 when there was none."""

    status: int
    body: str


def call(url: str, key: str | None, body: dict[str, Any] | None = None, timeout_s: float = REQUEST_TIMEOUT_S) -> Answer:
    """GET, or POST when there is a body."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = json.dumps(body).encode() if body is not None else None
    try:
        with _OPENER.open(urllib.request.Request(url, data, headers), timeout=timeout_s) as response:
            return Answer(response.status, response.read().decode("utf-8", "replace"))
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.read().decode("utf-8", "replace"))
    except (OSError, ValueError) as error:
        return Answer(0, str(error))


def run(deployed: Deployed) -> Report:
    """Sends the canary and judges it. Never raises for a sick cluster: every trouble is a red check."""
    plan = deployed.plan
    report = Report(plan.cluster, f"on, K = {plan.k}" if plan.mtp_enabled else "off")
    front = f"http://{plan.front}"
    report.checks.append(_key_check(front, deployed))
    dead = [engine for engine in plan.engines if call(f"{engine.url}/health", None, timeout_s=10).status != 200]
    report.checks += [
        Check("engine", False, f"{engine.instance} does not answer on {engine.url}", deployed.log(engine.instance))
        for engine in dead
    ]
    before = _scrape(plan.engines)
    answer = call(f"{front}/v1/completions", deployed.key(), _request(deployed.model))
    report.checks.append(_completion_check(answer, report, dead, deployed))
    if report.checks[-1].ok:
        after = _settled(plan.engines, before, deployed)
        report.mtp += ", paused: the active K is 0" if plan.mtp_enabled and _paused(plan.decoding, after) else ""
        report.checks += _counter_checks(deployed, before, after)
        _measure(report, deployed, before, after)
    return report


def _request(model: str) -> dict[str, Any]:
    return {"model": model, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}


def _key_check(front: str, deployed: Deployed) -> Check:
    status = call(f"{front}/v1/models", None, timeout_s=10).status
    detail = "a request without the key got " + (f"HTTP {status}" if status else "no answer")
    return Check("key", status == 401, detail, deployed.log("front"))


def _completion_check(answer: Answer, report: Report, dead: list[Engine], deployed: Deployed) -> Check:
    try:
        report.tokens = int(json.loads(answer.body)["usage"]["completion_tokens"]) if answer.status == 200 else 0
    except (ValueError, KeyError, TypeError):
        report.tokens = 0
    # An error that an engine raised stands in decode's log; with a dead engine, that one says why.
    suspect = dead[0].instance if dead else deployed.plan.decoding[0].instance if answer.status else "router"
    detail = f"HTTP {answer.status}, {report.tokens} tokens, at least {MIN_TOKENS} wanted"
    if answer.status != 200:
        detail += f": {answer.body.strip()[:300]}"
    return Check("completion", report.tokens >= MIN_TOKENS, detail, deployed.log(suspect))


def _scrape(engines: tuple[Engine, ...]) -> dict[str, Samples | None]:
    """The metrics of each engine by instance name, None where they cannot be read."""
    found: dict[str, Samples | None] = {}
    for engine in engines:
        try:
            found[engine.instance] = fetch(engine.metrics_url, 10.0)
        except ScrapeError:
            found[engine.instance] = None
    return found


def _moved(
    engines: tuple[Engine, ...], before: dict[str, Samples | None], after: dict[str, Samples | None], name: str
) -> float:
    """How far a counter moved, summed over engines; a missing series counts as 0."""
    total = 0.0
    for engine in engines:
        old, new = before[engine.instance], after[engine.instance]
        if new is not None:
            total += (new.total(name) or 0.0) - ((old.total(name) if old else None) or 0.0)
    return total


def _settled(
    engines: tuple[Engine, ...], before: dict[str, Samples | None], deployed: Deployed
) -> dict[str, Samples | None]:
    """A scrape in which the canary's request is counted as finished, or the last one before patience ends."""
    end = time.monotonic() + SETTLE_S
    while True:
        after = _scrape(engines)
        done = _moved(deployed.plan.decoding, before, after, names.REQUEST_SUCCESS) >= 1
        if done or time.monotonic() > end:
            return after
        time.sleep(0.2)


def _paused(engines: tuple[Engine, ...], after: dict[str, Samples | None]) -> bool:
    """Whether `mtpctl active-k CLUSTER 0` keeps every one of these engines from drafting."""
    found = [after[engine.instance] for engine in engines]
    return all(samples is not None and samples.total(names.PLUGIN_ACTIVE_K) == 0 for samples in found)


def _counter_checks(
    deployed: Deployed, before: dict[str, Samples | None], after: dict[str, Samples | None]
) -> list[Check]:
    plan = deployed.plan
    log = deployed.log(plan.decoding[0].instance)

    def moved(engines: tuple[Engine, ...]) -> Callable[[str], float]:
        return lambda name: _moved(engines, before, after, name)

    decode, prefill = moved(plan.decoding), tuple(engine for engine in plan.engines if engine.role == "prefill")
    drafts = decode(names.SPEC_DRAFTS)
    state = "off" if not plan.mtp_enabled else "paused (active K is 0)" if _paused(plan.decoding, after) else "on"
    checks = [
        Check(
            "drafts", (drafts > 0) == (state == "on"), f"MTP is {state} and {drafts:.0f} draft steps were counted", log
        )
    ]
    if state == "on":
        steps, verify = decode(names.PLUGIN_ENGINE_DRAFT_STEPS), decode(names.PLUGIN_VERIFY_CALLS)
        attention = decode(names.PLUGIN_ATTENTION_DRAFT_STEPS)
        # Every step with drafts went through both; beside other traffic the three are read at slightly other times.
        alone = decode(names.REQUEST_SUCCESS) == 1
        ours = steps > 0 and verify > 0 and attention > 0 and (not alone or steps == verify == attention)
        detail = (
            f"of {steps:.0f} steps with drafts our verification took {verify:.0f}, our decode attention {attention:.0f}"
        )
        checks.append(Check("plugin", ours, detail, log))
    if prefill:
        transfers = decode(f"{names.NIXL_XFER_TIME}_count")
        requests = moved(prefill)(names.REQUEST_SUCCESS)
        detail = f"prefill served {requests:.0f} requests, decode pulled KV {transfers:.0f} times"
        checks.append(Check("kv-transfer", transfers >= 1 and requests >= 1, detail, log))
    return checks


def _measure(
    report: Report, deployed: Deployed, before: dict[str, Samples | None], after: dict[str, Samples | None]
) -> None:
    """Acceptance and TPOT of the canary: differences of the decoding engines' counters."""
    decoding = deployed.plan.decoding
    seconds = _moved(decoding, before, after, f"{names.TIME_PER_OUTPUT_TOKEN}_sum")
    requests = _moved(decoding, before, after, f"{names.TIME_PER_OUTPUT_TOKEN}_count")
    report.tpot_seconds = seconds / requests if requests > 0 else None
    for engine in decoding:
        old, new = before[engine.instance], after[engine.instance]
        counts = engine_stats.draft_counts(new) if new else None
        if counts is None:
            continue
        window = counts.since(engine_stats.draft_counts(old) if old else None)
        if window.drafts > 0:
            report.acceptance_rate, report.acceptance_length = window.rate, window.length


def summary(report: Report, deployed: Deployed) -> list[tuple[str, str]]:
    """The rows of the closing table: where things are, how MTP does, what to do next."""
    plan, name = deployed.plan, deployed.plan.cluster

    def number(value: float | None, text: str) -> str:
        return "-" if value is None else text.format(value)

    return [
        ("API", f"http://{plan.front}/v1  (model {deployed.model})"),
        ("API key", f".local/clusters/{name}/secrets/api_key"),
        ("Prometheus", f"http://{plan.prometheus}"),
        ("exporter", f"http://{plan.exporter}/metrics"),
        ("MTP", report.mtp),
        ("canary", f"{report.tokens} tokens"),
        ("acceptance rate", number(report.acceptance_rate, "{:.1%}")),
        ("acceptance length", number(report.acceptance_length, "{:.2f} tokens a step")),
        ("TPOT", number(report.tpot_seconds and report.tpot_seconds * 1000, "{:.1f} ms")),
        ("next", "make status, make validate, make logs"),
        ("", f"make mtp CLUSTER={name} K=0|1|2|3, make destroy CLUSTER={name}"),
    ]


def write_report(report: Report, folder: Path) -> None:
    """Keeps the last canary beside the other reports."""
    if folder.is_dir():
        (folder / "canary.json").write_text(json.dumps(report.as_dict(), indent=2) + "\n", encoding="utf-8")
