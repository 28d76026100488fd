"""When parts die: an error, never a clean empty answer; a red canary that names the log; orphans are ended.

A deployment takes most of a minute, so each test leaves what it broke to the next deployment, and the last test to the
switch of K that follows (`test_mtp_switch.py`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from greedy_answers import Served
from live_stack import CLUSTER, ROOT, Stack, make, processes, wait_until

from mtp_runtime.cli.canary import call

pytestmark = [pytest.mark.live, pytest.mark.last]

RESTART_S = 300


@pytest.fixture(scope="module", autouse=True)
def asked(served_as_deployed: Served) -> None:
    """The switch of K compares with these answers: ask for them while everything is whole."""


def canary(stack: Stack) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / ".venv" / "bin" / "mtpctl"), "canary", stack.cluster]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def serves(stack: Stack) -> bool:
    return stack.completion(4)[0] == 200


def test_green_to_begin_with(stack: Stack) -> None:
    done = canary(stack)
    assert done.returncode == 0, done.stdout
    report = json.loads((stack.state / "reports" / "canary.json").read_text())
    assert report["green"]
    assert report["tokens"] >= 32


def test_dead_decode(stack: Stack) -> None:
    """SIGKILL of decode's API server, as an out-of-memory kill does it, in the middle of a stream."""
    leader = stack.pids()["decode-0"]
    orphans = set(processes(stack.state, "decode-0")) - {leader}
    events: list[str] = []
    broken: list[BaseException] = []

    def read() -> None:
        try:
            events.extend(stack.stream("/v1/completions", stack.request(2000)))
        except BaseException as error:
            broken.append(error)

    reader = threading.Thread(target=read)
    stack_running = f"{stack.engine('decode')}/metrics"
    reader.start()
    wait_until(lambda: (stack.metrics("decode").total("vllm:num_requests_running") or 0) >= 1, 60, stack_running)
    os.kill(leader, signal.SIGKILL)
    reader.join(120)
    assert not reader.is_alive(), "the stream hangs"
    assert broken, f"the stream ended as if it were complete, after {len(events)} events"
    assert "[DONE]" not in events

    wait_until(lambda: stack.completion(4)[0] >= 500, 20, "an error for new requests")
    red = canary(stack)
    assert red.returncode == 1
    assert "decode-0.log" in red.stdout

    wait_until(lambda: serves(stack), RESTART_S, "decode back by itself")
    left = orphans & set(processes(stack.state, "decode-0"))
    assert not left, f"orphans of the killed server still run: {left}"


def test_dead_prefill(stack: Stack) -> None:
    stack.supervisorctl("stop", "prefill-0")
    wait_until(lambda: processes(stack.state, "prefill-0") == {}, 15, "the whole process group gone")
    wait_until(lambda: stack.completion(4)[0] >= 500, 20, "an error for new requests")
    red = canary(stack)
    assert red.returncode == 1
    assert "prefill-0.log" in red.stdout


def check_fault(stack: Stack, part: str) -> None:
    """No silent fallback: with a fault in a part of ours every request fails, and one of them for that reason."""
    log = Path(stack.deployed.log("decode-0"))

    def seen() -> bool:
        status, body = stack.completion(16)
        assert status >= 500, f"served in spite of the fault: {body}"
        return f"MTP_RUNTIME_FAULT={part}: injected fault" in log.read_text()

    wait_until(seen, RESTART_S, f"the fault in decode's log {log}")


def test_fault_in_our_verification_fails_the_deployment(stack: Stack, tmp_path: Path) -> None:
    """... and the deployment says where to look. On the way it starts what was stopped."""
    fault = tmp_path / "fault.json"
    fault.write_text(json.dumps({"engine_extra_env": {"decode": {"MTP_RUNTIME_FAULT": "verify"}}}))
    done = make("deploy", CLUSTER=CLUSTER, ARGS=f"-e @{fault}", expect=2)
    assert processes(stack.state, "prefill-0")
    assert "the canary is red" in done.stdout
    assert "decode-0.log" in done.stdout
    check_fault(stack, "verify")


def restart_decode(stack: Stack, fault: str) -> None:
    """As a deployment with that fault would start it, without the deployment: its script has the environment."""
    script = stack.state / "programs" / "decode-0.sh"
    lines = [line for line in script.read_text().splitlines(keepends=True) if "MTP_RUNTIME_FAULT" not in line]
    first = next(index for index, line in enumerate(lines) if line.startswith("export "))
    script.write_text("".join([*lines[:first], f"export MTP_RUNTIME_FAULT={fault}\n", *lines[first:]]))
    stack.supervisorctl("restart", "decode-0")
    wait_until(lambda: call(f"{stack.engine('decode')}/health", None, timeout_s=5).status == 200, RESTART_S, "decode")
    wait_until(lambda: stack.call("/readiness")[0] == 200, 30, "the router has decode again")


def test_fault_in_our_attention_fails_requests(stack: Stack) -> None:
    restart_decode(stack, "attention")
    red = canary(stack)
    assert red.returncode == 1
    assert "decode-0.log" in red.stdout
    check_fault(stack, "attention")
