"""Monitoring of the running stack, after `make validate`."""

from __future__ import annotations

import json
import math
import re
import shutil
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from live_cluster import Validated, run_validate

from dashboards.build import TARGET
from mtp_runtime.metrics import names
from mtp_runtime.metrics.plan import Engine
from mtp_runtime.metrics.promapi import Prometheus
from mtp_runtime.metrics.scrape import Samples, fetch

pytestmark = pytest.mark.live

WINDOW = "15m"  # what Grafana's $__rate_interval stands for here: long enough to hold the validation
EXPORTED = "mtp_(acceptance|tpot|exporter)_.*"


def dashboard_queries() -> list[Any]:
    panels = json.loads(TARGET.read_text(encoding="utf-8"))["panels"]
    return [
        pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}")
        for panel in panels
        for target in panel.get("targets", ())
    ]


def filled_in(expression: str) -> str:
    return expression.replace("$__rate_interval", WINDOW).replace("$engine_instance", ".*")


def needs_missing_part(expression: str, validated: Validated) -> str | None:
    """What this cluster does not have, so that the query rightly has no data."""
    if "nixl" in expression and not any(engine.role == "decode" for engine in validated.plan.engines):
        return "no prefill/decode"
    if not validated.plan.mtp_enabled and ("spec_decode" in expression or "mtp_acceptance" in expression):
        return "MTP is off"
    return None


def answers(prometheus: Prometheus, expression: str, patience_s: float) -> list[float]:
    """A query's values, asked again until there are some or the patience is over."""
    end = time.monotonic() + patience_s
    while True:
        values = [sample.value for sample in prometheus.query(expression)]
        if values or time.monotonic() > end:
            return values
        time.sleep(1)


@pytest.mark.parametrize("expression", dashboard_queries())
def test_dashboard_query_returns_numbers(expression: str, validated: Validated) -> None:
    missing = needs_missing_part(expression, validated)
    # A rate needs two samples of a series, and some series begin with the validation's first request.
    patience = 0 if missing else 4 * validated.plan.scrape_interval_s
    values = answers(Prometheus(validated.plan.prometheus), filled_in(expression), patience)
    if missing:
        assert values == [], f"{missing}, and yet there is data"
        return
    assert values, f"no data: {expression}"
    assert any(math.isfinite(value) for value in values), f"only NaN: {expression}"


def test_every_target_is_up(validated: Validated) -> None:
    samples = Prometheus(validated.plan.prometheus).query("up")
    assert {sample.labels["job"] for sample in samples} == {
        names.JOB_VLLM,
        names.JOB_ROUTER,
        names.JOB_EXPORTER,
        names.JOB_PROMETHEUS,
    }
    assert [sample.labels for sample in samples if sample.value != 1] == []
    engines = {s.labels[names.LABEL_INSTANCE] for s in samples if s.labels["job"] == names.JOB_VLLM}
    assert engines == {engine.instance for engine in validated.plan.engines}


def test_prefill_has_no_series_of_ours(validated: Validated) -> None:
    prometheus = Prometheus(validated.plan.prometheus)
    ours = prometheus.query(f'{{__name__=~"{EXPORTED}"}}')
    decoding = {engine.instance for engine in validated.plan.decoding}
    assert {sample.labels[names.LABEL_INSTANCE] for sample in ours} == decoding
    assert {sample.labels[names.LABEL_ROLE] for sample in ours} <= names.DECODING_ROLES


def raw(text: str, name: str, label: str = "") -> float:
    """Sum of the lines of `name` whose labels contain `label`; read without the code under test."""
    values = re.findall(rf"^{re.escape(name)}(?:\{{([^}}]*)\}})? (\S+)$", text, flags=re.MULTILINE)
    return sum(float(value) for labels, value in values if label in labels)


def page(engine: Engine) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(engine.metrics_url, timeout=30) as response:
        return str(response.read().decode())


def of_engine(samples: Samples, name: str, engine: Engine, **labels: str) -> float | None:
    return samples.total(name, **{names.LABEL_INSTANCE: engine.instance, **labels})


def test_exporter_equals_the_formulas_on_the_raw_counters(validated: Validated) -> None:
    """No traffic runs now, so the exporter and this test read the same counters."""
    exported = fetch(f"http://{validated.plan.exporter}/metrics", 30.0)
    for engine in validated.plan.decoding:
        text = page(engine)
        count = raw(text, f"{names.TIME_PER_OUTPUT_TOKEN}_count")
        count -= raw(text, f"{names.REQUEST_GENERATION_TOKENS}_bucket", 'le="1.0"')
        tpot = raw(text, f"{names.TIME_PER_OUTPUT_TOKEN}_sum") / count
        assert of_engine(exported, names.TPOT, engine) == pytest.approx(tpot)
        if not validated.plan.mtp_enabled:
            assert of_engine(exported, names.ACCEPTANCE_RATE, engine) is None
            assert of_engine(exported, names.ACCEPTANCE_LENGTH, engine) is None
            continue
        drafts = raw(text, names.SPEC_DRAFTS)
        tokens = raw(text, names.SPEC_DRAFT_TOKENS)
        accepted = raw(text, names.SPEC_ACCEPTED_TOKENS)
        assert of_engine(exported, names.ACCEPTANCE_RATE, engine) == pytest.approx(accepted / tokens)
        assert of_engine(exported, names.ACCEPTANCE_LENGTH, engine) == pytest.approx(1 + accepted / drafts)
        for position in range(validated.plan.k):
            label = f'position="{position}"'
            expected = raw(text, names.SPEC_ACCEPTED_PER_POSITION, label) / drafts
            value = of_engine(exported, names.ACCEPTANCE_RATE_POSITION, engine, position=str(position))
            assert value == pytest.approx(expected)


def test_placeholder_steps_are_one_a_request_and_never_accepted(validated: Validated) -> None:
    """Decode pads a new request's first step with K placeholder drafts; a plain server has no such step here."""
    if not validated.plan.mtp_enabled:
        pytest.skip("MTP is off")
    for engine in validated.plan.decoding:
        text = page(engine)
        steps = raw(text, names.PLUGIN_PLACEHOLDER_STEPS)
        assert raw(text, names.PLUGIN_PLACEHOLDER_TOKENS) == steps * validated.plan.k
        transfers = raw(text, f"{names.NIXL_XFER_TIME}_count")
        assert steps <= transfers if engine.role == "decode" else steps == 0
        # vLLM's own statistics hold the real draft steps only.
        assert raw(text, names.SPEC_DRAFTS) == raw(text, names.PLUGIN_VERIFY_DRAFT_STEPS) - steps


def test_report_has_the_figures_of_the_run(validated: Validated) -> None:
    report = validated.report
    assert report["ok"] is True
    assert report["summary"]["requests"] == len(report["records"]) == 8
    assert {record["kind"] for record in report["records"]} == {"chat", "completion"}
    assert all(record["chunks"] > 1 for record in report["records"]), "answers came in one piece: not streamed"
    assert report["summary"]["tpot_s"]["p50"] > 0
    if validated.plan.mtp_enabled:
        assert 0 < report["summary"]["acceptance_rate"] <= 1


def test_wrong_key_is_an_error_and_not_a_pass(validated: Validated, tmp_path: Path) -> None:
    copy = tmp_path / validated.plan.cluster
    (copy / "secrets").mkdir(parents=True)
    shutil.copy(validated.folder / "plan.json", copy)
    (copy / "secrets" / "api_key").write_text("wrong", encoding="utf-8")
    done = run_validate(tmp_path, validated.plan.cluster, "--requests", "1")
    assert done.returncode == 2, done.stdout
    assert "401" in done.stderr
