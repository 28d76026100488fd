"""The end: destroy leaves nothing, and an inventory without P/D works too."""

from __future__ import annotations

import json

import pytest
from live_stack import CLUSTER, ROOT, Deployed, Stack, files_outside, listening, make, processes

pytestmark = [pytest.mark.live, pytest.mark.last]


def test_destroy_leaves_nothing(stack: Stack) -> None:
    assert stack.ports <= listening()
    make("destroy", CLUSTER=CLUSTER)
    assert processes(stack.state) == {}
    assert not stack.ports & listening()
    assert not stack.state.exists()
    assert sorted(files_outside() - stack.files_before) == []


def test_destroy_again_changes_nothing(stack: Stack) -> None:
    assert "changed=0" in make("destroy", CLUSTER=CLUSTER).stdout


def test_single_server_without_prefill_and_decode() -> None:
    try:
        done = make("deploy", CLUSTER="local-single")
        assert "the canary is green" in done.stdout
        report = json.loads((Deployed.find("local-single").folder / "reports" / "canary.json").read_text())
        assert report["green"]
        assert {check["name"] for check in report["checks"]} == {"key", "completion", "drafts", "plugin"}
    finally:
        make("destroy", CLUSTER="local-single")
    assert processes(ROOT / ".local" / "clusters" / "local-single") == {}
