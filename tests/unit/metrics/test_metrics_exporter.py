"""The exporter on scrapes captured from real servers (see tests/monitoring/fixtures/README.md)."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from metrics_captures import Serve, plan_data, raw
from prometheus_client import CollectorRegistry, generate_latest

from mtp_runtime.metrics import engine_stats, names
from mtp_runtime.metrics.exporter import MtpCollector
from mtp_runtime.metrics.plan import Engine
from mtp_runtime.metrics.scrape import Samples, ScrapeError, fetch, parse


def export(*engines: Engine, timeout_s: float = 2.0) -> Samples:
    registry = CollectorRegistry()
    registry.register(MtpCollector(engines, timeout_s=timeout_s))
    return parse(generate_latest(registry).decode())


def derived(samples: Samples) -> set[str]:
    """Names of the figures that were exported."""
    figures = {names.ACCEPTANCE_RATE, names.ACCEPTANCE_LENGTH, names.ACCEPTANCE_RATE_POSITION, names.TPOT}
    return {sample.name for sample in samples} & figures


def test_figures_equal_the_formulas_on_the_raw_counters(serve: Serve, decode_text: str) -> None:
    """TPOT comes from the time a request takes, not from vLLM's inter-token latency, which is per step (vLLM#47382)."""
    drafts = raw(decode_text, names.SPEC_DRAFTS)
    draft_tokens = raw(decode_text, names.SPEC_DRAFT_TOKENS)
    accepted = raw(decode_text, names.SPEC_ACCEPTED_TOKENS)
    several = raw(decode_text, f"{names.TIME_PER_OUTPUT_TOKEN}_count") - raw(
        decode_text, f"{names.REQUEST_GENERATION_TOKENS}_bucket", 'le="1.0"'
    )
    assert drafts > 0 and several > 0, "the capture must have drafts and finished requests"

    samples = export(Engine(serve(decode_text), "decode", "decode-0"))

    labels = {names.LABEL_ROLE: "decode", names.LABEL_INSTANCE: "decode-0"}
    assert samples.total(names.ACCEPTANCE_RATE, **labels) == pytest.approx(accepted / draft_tokens)
    assert samples.total(names.ACCEPTANCE_LENGTH, **labels) == pytest.approx(1 + accepted / drafts)
    position_0 = raw(decode_text, names.SPEC_ACCEPTED_PER_POSITION, 'position="0"') / drafts
    assert samples.by_label(names.ACCEPTANCE_RATE_POSITION, names.LABEL_POSITION) == {"0": pytest.approx(position_0)}
    tpot = raw(decode_text, f"{names.TIME_PER_OUTPUT_TOKEN}_sum") / several
    assert samples.total(names.TPOT, **labels) == pytest.approx(tpot)
    assert samples.total(names.ENGINE_UP, **labels) == 1


def test_capture_has_a_one_token_request(decode_text: str) -> None:
    """Guards the test above: without one, its correction of the mean would not be seen."""
    assert raw(decode_text, f"{names.REQUEST_GENERATION_TOKENS}_bucket", 'le="1.0"') > 0


def test_prefill_has_no_series_at_all(serve: Serve, prefill_text: str) -> None:
    assert raw(prefill_text, f"{names.TIME_PER_OUTPUT_TOKEN}_count") > 0  # vLLM itself does count on prefill
    assert list(export(Engine(serve(prefill_text), "prefill", "prefill-0"))) == []


def test_mtp_off_has_tpot_but_no_acceptance(serve: Serve, without_mtp: str) -> None:
    assert derived(export(Engine(serve(without_mtp), "single", "single-0"))) == {names.TPOT}


def test_fresh_server_has_no_figures(serve: Serve, decode_text: str) -> None:
    """A server that answered nothing yet: its counters are there, all 0."""
    fresh = "".join(
        line if line.startswith("#") else f"{line.rsplit(' ', 1)[0]} 0.0\n"
        for line in decode_text.splitlines(keepends=True)
    )
    samples = export(Engine(serve(fresh), "decode", "decode-0"))
    assert derived(samples) == set()
    assert samples.total(names.ENGINE_UP) == 1


def test_dead_engine_is_down_and_leaves_the_other_alone(serve: Serve, decode_text: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        dead = Engine(f"http://127.0.0.1:{taken.getsockname()[1]}", "decode", "decode-0")
        samples = export(dead, Engine(serve(decode_text), "decode", "decode-1"))
    assert samples.by_label(names.ENGINE_UP, names.LABEL_INSTANCE) == {"decode-0": 0, "decode-1": 1}
    assert samples.by_label(names.SCRAPE_FAILURES, names.LABEL_INSTANCE) == {"decode-0": 1, "decode-1": 0}
    assert set(samples.by_label(names.TPOT, names.LABEL_INSTANCE)) == {"decode-1"}


def test_silent_engine_times_out() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        began = time.monotonic()
        engine = Engine(f"http://127.0.0.1:{silent.getsockname()[1]}", "decode", "decode-0")
        samples = export(engine, timeout_s=0.3)
    assert time.monotonic() - began < 3
    assert samples.total(names.ENGINE_UP) == 0


def test_contradicting_counters_give_no_figures(serve: Serve, decode_text: str) -> None:
    line = next(line for line in decode_text.splitlines() if line.startswith(names.SPEC_ACCEPTED_TOKENS + "{"))
    wrong = decode_text.replace(line, f"{line.rsplit(' ', 1)[0]} 1e9")
    samples = export(Engine(serve(wrong), "decode", "decode-0"))
    assert derived(samples) == set()


def test_page_that_is_not_metrics_is_a_failed_scrape(serve: Serve) -> None:
    url = serve("<html>bad gateway</html>")
    with pytest.raises(ScrapeError, match="not Prometheus text"):
        fetch(f"{url}/metrics", 2.0)
    assert export(Engine(url, "decode", "decode-0")).total(names.ENGINE_UP) == 0


def test_counts_between_two_readings_survive_a_restart() -> None:
    early = engine_stats.DraftCounts(drafts=10, draft_tokens=20, accepted=12, per_position=(8, 4))
    late = engine_stats.DraftCounts(drafts=15, draft_tokens=30, accepted=19, per_position=(12, 7))
    assert late.since(early) == engine_stats.DraftCounts(5, 10, 7, (4, 3))
    assert late.since(None) == late
    assert early.since(late) == early  # counters fell: restarted
    other_k = engine_stats.DraftCounts(drafts=20, draft_tokens=20, accepted=9, per_position=(9,))
    assert other_k.since(late) == other_k


def test_process_serves_and_stops_on_sigterm(serve: Serve, decode_text: str, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(plan_data(serve(decode_text), port)), encoding="utf-8")
    command = [sys.executable, "-m", "mtp_runtime.metrics.exporter", "--plan", str(plan)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        samples = wait_for(f"http://127.0.0.1:{port}/metrics")
        assert samples.total(names.ACCEPTANCE_LENGTH) is not None
        second = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert second.returncode == 1 and f"cannot listen on 127.0.0.1:{port}" in second.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0
    finally:
        process.kill()
        process.communicate()


def wait_for(url: str) -> Samples:
    for _ in range(100):
        try:
            return fetch(url, 2.0)
        except ScrapeError:
            time.sleep(0.1)
    raise AssertionError(f"{url} did not answer")
