"""A validation of the running stack, whose traffic the live tests then find in Prometheus."""

from __future__ import annotations

import json
import os

import pytest
from live_cluster import CLUSTERS, Validated, run_validate

from mtp_runtime.metrics.plan import read_plan


@pytest.fixture(scope="module")
def validated(request: pytest.FixtureRequest) -> Validated:
    """The shared live stack; MTP_RUNNING_CLUSTER=NAME takes a cluster that runs already instead of deploying one."""
    cluster = os.environ.get("MTP_RUNNING_CLUSTER") or request.getfixturevalue("stack").cluster
    folder = CLUSTERS / cluster
    done = run_validate(CLUSTERS, cluster, "--users", "2", "--requests", "8", "--max-tokens", "48")
    assert done.returncode == 0, f"validation failed:\n{done.stdout}\n{done.stderr}"
    newest = max((folder / "reports").glob("validate-*.json"))
    return Validated(folder, read_plan(folder / "plan.json"), json.loads(newest.read_text(encoding="utf-8")))
