"""Prometheus exporter of the MTP figures of a cluster.

    python -m mtp_runtime.metrics.exporter --plan PLAN.json [--host HOST --port PORT]

Reads the /metrics of every engine that decodes (roles decode and single) when it is scraped itself, and derives
acceptance rate, acceptance length, acceptance per position and TPOT from vLLM's counters. The figures cover the
*lifetime of the engine's server*: stateless, equal to the formulas on the raw counters, right after one request.
Windows are Prometheus' work (`rate()` of the raw counters, as the dashboard does).

A figure without data has no series: none of them for prefill, no acceptance with MTP off or before the first draft,
no TPOT before the first finished request of two tokens, nothing but `mtp_exporter_engine_up 0` for a dead engine.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mtp_runtime.metrics import engine_stats, names
from mtp_runtime.metrics.plan import Engine, PlanError, read_plan
from mtp_runtime.metrics.scrape import Samples, ScrapeError, fetch

LOG = logging.getLogger("mtp_exporter")
# Below Prometheus' own scrape timeout, above the length of a CPU engine's longest prefill step.
ENGINE_TIMEOUT_S = 4.0
MAX_PARALLEL_SCRAPES = 16
_LABELS = (names.LABEL_ROLE, names.LABEL_INSTANCE)


class MtpCollector(Collector):
    """Scrapes the engines at collection time and yields the derived metrics."""

    def __init__(self, engines: Sequence[Engine], timeout_s: float = ENGINE_TIMEOUT_S) -> None:
        self._engines = [engine for engine in engines if engine.decodes]
        self._timeout_s = timeout_s
        self._failures = dict.fromkeys((engine.instance for engine in self._engines), 0)
        self._lock = threading.Lock()

    def _scrape(self, engine: Engine) -> Samples | None:
        try:
            return fetch(engine.metrics_url, self._timeout_s)
        except ScrapeError as error:
            LOG.warning("engine %s: scrape failed: %s", engine.instance, error)
            with self._lock:
                self._failures[engine.instance] += 1
            return None

    def collect(self) -> Iterator[Metric]:
        with ThreadPoolExecutor(max_workers=min(MAX_PARALLEL_SCRAPES, max(1, len(self._engines)))) as pool:
            scrapes = list(pool.map(self._scrape, self._engines))
        up = GaugeMetricFamily(names.ENGINE_UP, "1 when the engine's /metrics could be read just now.", labels=_LABELS)
        failures = CounterMetricFamily(
            names.SCRAPE_FAILURES, "Failed reads of an engine's /metrics since the exporter started.", labels=_LABELS
        )
        figures = _Figures()
        for engine, samples in zip(self._engines, scrapes, strict=True):
            labels = [engine.role, engine.instance]
            up.add_metric(labels, 0.0 if samples is None else 1.0)
            failures.add_metric(labels, self._failures[engine.instance])
            if samples is not None:
                figures.add(labels, samples)
        yield up
        yield failures
        yield from figures.families()


class _Figures:
    """The metric families of the derived figures, filled engine by engine."""

    def __init__(self) -> None:
        since = "since the engine's server started"
        self._rate = GaugeMetricFamily(
            names.ACCEPTANCE_RATE, f"Accepted draft tokens / draft tokens, 0..1, {since}.", labels=_LABELS
        )
        self._length = GaugeMetricFamily(
            names.ACCEPTANCE_LENGTH, f"Tokens per draft step (1 + accepted / draft steps), {since}.", labels=_LABELS
        )
        self._position = GaugeMetricFamily(
            names.ACCEPTANCE_RATE_POSITION,
            f"Share of draft steps that accepted the draft at this position (from 0), {since}.",
            labels=(*_LABELS, names.LABEL_POSITION),
        )
        self._tpot = GaugeMetricFamily(
            names.TPOT, f"Mean time per output token of requests of 2 tokens and more, {since}.", labels=_LABELS
        )

    def add(self, labels: list[str], samples: Samples) -> None:
        try:
            self._add_acceptance(labels, samples)
            tpot = engine_stats.mean_tpot(samples)
        except ValueError as error:  # counters that contradict each other: say so, export nothing
            LOG.error("engine %s: %s", labels[1], error)
            return
        if tpot is not None:
            self._tpot.add_metric(labels, tpot)

    def _add_acceptance(self, labels: list[str], samples: Samples) -> None:
        counts = engine_stats.draft_counts(samples)
        if counts is None or counts.drafts <= 0:
            return
        rate, length, positions = counts.rate, counts.length, counts.position_rates
        self._rate.add_metric(labels, rate)
        self._length.add_metric(labels, length)
        for position, value in enumerate(positions):
            self._position.add_metric([*labels, str(position)], value)

    def families(self) -> Iterator[Metric]:
        yield from (self._rate, self._length, self._position, self._tpot)


def serve(engines: Sequence[Engine], host: str, port: int) -> None:
    """Serve /metrics on host:port until SIGTERM or SIGINT; OSError when the port is taken."""
    registry = CollectorRegistry()
    registry.register(MtpCollector(engines))
    server, thread = start_http_server(port, addr=host, registry=registry)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    LOG.info("exporter on %s:%d for %s", host, port, [engine.instance for engine in engines if engine.decodes])
    stop.wait()
    server.shutdown()
    server.server_close()
    thread.join()


def main(argv: list[str] | None = None) -> int:
    """Exit code 2 for an unusable plan, 1 for a taken port, 0 after a signal."""
    parser = argparse.ArgumentParser(description="Export MTP acceptance and TPOT of a cluster's engines.")
    parser.add_argument("--plan", type=Path, required=True, help="plan.json of the cluster")
    parser.add_argument("--host", help="listen address (default: the plan's exporter host)")
    parser.add_argument("--port", type=int, help="listen port (default: the plan's exporter port)")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        plan = read_plan(args.plan)
    except PlanError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    plan_host, plan_port = plan.exporter.rsplit(":", 1)
    host, port = args.host or plan_host, args.port or int(plan_port)
    try:
        serve(plan.engines, host, port)
    except OSError as error:
        print(f"error: cannot listen on {host}:{port}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
