"""The end: destroy leaves nothing, and an inventory without P/D works too."""

from __future__ import annotations

import json
import os
import warnings

import pytest
from leftovers import Machine, Traces
from live_stack import CLUSTER, ROOT, Deployed, Stack, listening, make, processes

pytestmark = [pytest.mark.live, pytest.mark.last]
# Set where nothing else runs: then whatever is new is ours.
QUIET_MACHINE = bool(os.environ.get("MTP_QUIET_MACHINE"))


def check_nothing_left(before: Machine, traces: Traces) -> None:
    """No process and no file outside the repository; `leftovers` says what can be seen, and for how certain."""
    left = before.settled(traces)
    if left.suspected and not QUIET_MACHINE:
        warnings.warn("new, and maybe another program's:\n" + "\n".join(left.suspected), stacklevel=2)
    assert left.certain + (left.suspected if QUIET_MACHINE else []) == []


def test_destroy_leaves_nothing(stack: Stack, machine_before: Machine) -> None:
    assert stack.ports <= listening()
    traces = Traces.take()
    assert set(processes(stack.state)) <= traces.pids, "the test does not know the stack's own processes"
    make("destroy", CLUSTER=CLUSTER)
    assert processes(stack.state) == {}
    assert not stack.ports & listening()
    assert not stack.state.exists()
    check_nothing_left(machine_before, traces)


def test_destroy_again_changes_nothing(stack: Stack) -> None:
    assert "changed=0" in make("destroy", CLUSTER=CLUSTER).stdout


def test_single_server_without_prefill_and_decode(machine_before: Machine) -> None:
    try:
        done = make("deploy", CLUSTER="local-single")
        assert "the canary is green" in done.stdout
        report = json.loads((Deployed.find("local-single").folder / "reports" / "canary.json").read_text())
        assert report["green"]
        assert {check["name"] for check in report["checks"]} == {"key", "completion", "drafts", "plugin"}
        traces = Traces.take()
    finally:
        make("destroy", CLUSTER="local-single")
    assert processes(ROOT / ".local" / "clusters" / "local-single") == {}
    check_nothing_left(machine_before, traces)
