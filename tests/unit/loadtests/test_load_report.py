"""The verdict of a run: each check passes on a good run and fails on the one thing it looks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests import report as reports
from loadtests import validate
from mtp_runtime.metrics import names
from mtp_runtime.metrics.plan import Plan, parse_plan
from mtp_runtime.metrics.scrape import Samples, parse

DECODE = (Path(__file__).parents[2] / "monitoring" / "fixtures" / "decode_k1.prom").read_text(encoding="utf-8")
SETTINGS = reports.Settings(users=2, requests=2, duration_s=300, max_tokens=12, temperature=0.0)


def plan_of(mtp: bool = True) -> Plan:
    where = {"host": "127.0.0.1", "port": 1}
    return parse_plan(
        {
            "cluster": "test",
            "mtp": {"enabled": mtp, "k": 1},
            "router": {"front": where, "metrics": where},
            "targets": {
                "vllm": [{"url": "http://127.0.0.1:8300", "role": "decode", "instance": "decode-0"}],
                "prometheus": where | {"scrape_interval_s": 5},
                "exporter": where,
            },
        },
        "plan.json",
    )


def record(kind: str, **changes: Any) -> dict[str, Any]:
    whole = {"kind": kind, "status": 200, "problem": None, "tokens": 12, "usage_tokens": 12, "chunks": 7}
    return whole | {"ttft_s": 0.1, "tpot_s": 0.02, "total_s": 0.4} | changes


def grown(**growth: float) -> Samples:
    """The captured scrape after counters grew; keys are attributes of `names`, with _COUNT for a histogram's count."""
    lines = []
    for line in DECODE.splitlines():
        for key, amount in growth.items():
            name = (
                f"{getattr(names, key.removesuffix('_COUNT'))}_count" if key.endswith("_COUNT") else getattr(names, key)
            )
            if line.startswith(name + "{"):
                start, value = line.rsplit(" ", 1)
                line = f"{start} {float(value) + amount}"
        lines.append(line)
    return parse("\n".join(lines) + "\n")


GOOD = {
    "GENERATION_TOKENS": 24,
    "SPEC_DRAFTS": 14,
    "SPEC_DRAFT_TOKENS": 14,
    "SPEC_ACCEPTED_TOKENS": 10,
    "SPEC_ACCEPTED_PER_POSITION": 10,
    "NIXL_XFER_TIME_COUNT": 2,
}


def verdict(
    records: list[dict[str, Any]] | None = None, growth: dict[str, float] | None = None, mtp: bool = True
) -> reports.Report:
    around = {"decode-0": reports.Around("decode", parse(DECODE), grown(**(GOOD if growth is None else growth)))}
    both = [record("chat"), record("completion")]
    return reports.build(plan_of(mtp), SETTINGS, "now", 10.0, both if records is None else records, around)


def failed(report: reports.Report) -> list[str]:
    return [check.name for check in report.checks if not check.ok]


def test_good_run_passes_with_the_figures_of_the_run_alone() -> None:
    report = verdict()
    assert report.ok and failed(report) == []
    assert report.summary["acceptance_rate"] == pytest.approx(10 / 14)
    assert report.summary["acceptance_length"] == pytest.approx(1 + 10 / 14)
    assert report.summary["tokens"] == 24
    assert report.summary["tokens_per_second"] == pytest.approx(2.4)


@pytest.mark.parametrize(
    ("growth", "check"),
    [
        (GOOD | {"GENERATION_TOKENS": 23}, "tokens equal Prometheus"),
        (GOOD | {"GENERATION_TOKENS": 25}, "tokens equal Prometheus"),
        (GOOD | {"GENERATION_TOKENS": -5}, "tokens equal Prometheus"),
        (GOOD | {"NIXL_XFER_TIME_COUNT": 1}, "one KV transfer a request"),
        ({"GENERATION_TOKENS": 24, "NIXL_XFER_TIME_COUNT": 2}, "drafts match the MTP switch"),
    ],
)
def test_counter_that_does_not_fit_fails_its_check(growth: dict[str, float], check: str) -> None:
    assert failed(verdict(growth=growth)) == [check]


def test_draft_counters_with_mtp_off_fail() -> None:
    assert failed(verdict(mtp=False)) == ["drafts match the MTP switch"]


def test_failed_missing_and_one_sided_requests_fail() -> None:
    broken = [record("chat"), record("completion", problem="no token seen")]
    report = verdict(broken)
    assert "no failed request" in failed(report)
    assert report.failures == {"no token seen": 1}
    assert "1 x no token seen" in reports.to_markdown(report)
    assert "requests sent" in failed(verdict([record("chat")]))
    assert "chat and completions" in failed(verdict([record("chat"), record("chat")]))
    assert "requests sent" in failed(verdict([]))


def test_engine_missing_in_prometheus_fails() -> None:
    empty = {"decode-0": reports.Around("decode", Samples([]), Samples([]))}
    report = reports.build(plan_of(), SETTINGS, "now", 10.0, [record("chat"), record("completion")], empty)
    assert failed(report) == ["tokens equal Prometheus", "drafts match the MTP switch"]


def test_files_hold_the_whole_run(tmp_path: Path) -> None:
    records = [record("chat"), record("completion")]
    data, page = reports.write(verdict(records), records, tmp_path / "reports", "validate-1")
    saved = json.loads(data.read_text(encoding="utf-8"))
    assert saved["ok"] is True
    assert saved["records"] == records
    assert {check["name"] for check in saved["checks"]} >= {"tokens equal Prometheus", "one KV transfer a request"}
    assert page.read_text(encoding="utf-8").startswith("# Validation of test: passed")


@given(st.lists(st.floats(0, 100), min_size=1), st.floats(0.01, 1.0))
def test_quantile_covers_its_share(values: list[float], share: float) -> None:
    value = reports.quantile(values, share)
    assert value in values
    assert sum(other <= value for other in values) >= share * len(values) - 1e-6


def test_limits_and_defaults_of_the_command() -> None:
    def settings(*more: str) -> reports.Settings:
        return validate.settings_of(validate.parse_args(["--cluster", "test", *more]))

    assert (settings().requests, settings().duration_s) == (24, 300)
    assert settings("--duration", "60").requests == validate.LIMITS["requests"]
    assert settings("--requests", "5", "--duration", "60") == reports.Settings(4, 5, 60, 64, 0.0)
    for wrong in (("--users", "0"), ("--users", "65"), ("--duration", "3601"), ("--requests", "x")):
        with pytest.raises(SystemExit) as stop:
            settings(*wrong)
        assert stop.value.code == 2


def test_cluster_that_is_not_deployed_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert validate.main(["--cluster", "absent", "--clusters-dir", str(tmp_path)]) == 2
    assert "deploy the cluster first" in capsys.readouterr().err
