"""Plan reading, the Prometheus configuration made from it, and the generated dashboard."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from metrics_captures import plan_data
from ruamel.yaml import YAML

from dashboards import build as dashboard
from mtp_runtime.metrics import names
from mtp_runtime.metrics.plan import PlanError, parse_plan, read_plan
from mtp_runtime.metrics.prometheus_config import scrape_config


@pytest.fixture
def data() -> dict[str, Any]:
    return copy.deepcopy(plan_data("http://127.0.0.1:8300", 9108))


def without(data: dict[str, Any], path: str) -> dict[str, Any]:
    *parents, last = path.split(".")
    node: Any = data
    for key in parents:
        node = node[int(key)] if isinstance(node, list) else node[key]
    del node[last]
    return data


@pytest.mark.parametrize(
    "path",
    ["cluster", "mtp.enabled", "router.front.port", "targets.vllm", "targets.vllm.1.role", "targets.prometheus.port"],
)
def test_missing_key_is_named(data: dict[str, Any], path: str) -> None:
    with pytest.raises(PlanError, match=rf"plan\.json: {path} is missing"):
        parse_plan(without(data, path), "plan.json")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [("enabled", "yes", "mtp.enabled must be true or false"), ("k", True, "mtp.k must be a whole number")],
)
def test_wrong_type_is_named(data: dict[str, Any], key: str, value: object, words: str) -> None:
    data["mtp"][key] = value
    with pytest.raises(PlanError, match=words):
        parse_plan(data, "plan.json")


def test_absent_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no such plan"):
        read_plan(tmp_path / "plan.json")
    (tmp_path / "plan.json").write_text("{", encoding="utf-8")
    with pytest.raises(PlanError, match="not JSON"):
        read_plan(tmp_path / "plan.json")


def test_two_engines_of_one_name_are_refused(data: dict[str, Any]) -> None:
    data["targets"]["vllm"][0]["instance"] = "decode-0"
    with pytest.raises(PlanError, match="share an instance name"):
        parse_plan(data, "plan.json")


def test_every_target_of_the_plan_is_scraped_with_its_labels(data: dict[str, Any]) -> None:
    config = scrape_config(parse_plan(data, "plan.json"))
    jobs = {job["job_name"]: job["static_configs"] for job in config["scrape_configs"]}
    assert jobs[names.JOB_VLLM] == [
        {"targets": ["127.0.0.1:8200"], "labels": {"instance_role": "prefill", "engine_instance": "prefill-0"}},
        {"targets": ["127.0.0.1:8300"], "labels": {"instance_role": "decode", "engine_instance": "decode-0"}},
    ]
    assert jobs[names.JOB_ROUTER][0]["targets"] == ["127.0.0.1:8101"]
    assert jobs[names.JOB_EXPORTER][0]["targets"] == ["127.0.0.1:9108"]
    assert jobs[names.JOB_PROMETHEUS][0]["targets"] == ["127.0.0.1:9090"]
    assert config["global"]["scrape_interval"] == "5s"


def test_command_prints_that_configuration_and_refuses_a_bad_plan(data: dict[str, Any], tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(data), encoding="utf-8")
    command = [sys.executable, "-m", "mtp_runtime.metrics.prometheus_config", "--plan", str(plan)]
    good = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert YAML(typ="safe").load(good.stdout) == scrape_config(read_plan(plan))
    plan.write_text(json.dumps(without(data, "targets.exporter")), encoding="utf-8")
    bad = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert "targets.exporter.host is missing" in bad.stderr


def expressions() -> Iterator[str]:
    for panel in json.loads(dashboard.build())["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]


def test_committed_dashboard_is_what_the_source_builds() -> None:
    assert dashboard.TARGET.read_text(encoding="utf-8") == dashboard.build(), "run `make dashboards`"


def test_check_option_sees_a_changed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = tmp_path / "mtp.json"
    changed.write_text(dashboard.build().replace("Acceptance", "Rejection", 1), encoding="utf-8")
    monkeypatch.setattr(dashboard, "TARGET", changed)
    assert dashboard.main(["--check"]) == 1
    assert dashboard.main([]) == 0
    assert dashboard.main(["--check"]) == 0


def test_panel_ids_are_unique_and_every_figure_of_the_exporter_is_shown() -> None:
    panels = json.loads(dashboard.build())["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    text = "\n".join(expressions())
    for name in (names.ACCEPTANCE_RATE, names.ACCEPTANCE_LENGTH, names.TPOT, names.SPEC_ACCEPTED_PER_POSITION):
        assert name in text
