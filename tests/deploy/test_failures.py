"""When parts die: an error, never a clean empty answer; a red canary that names the log; orphans are ended.

A test that breaks something leaves the repair to the deployment of the next one, and the last to `healed`: each costs
most of a minute.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_stack import CLUSTER, ROOT, Stack, make, processes, wait_until

pytestmark = pytest.mark.live

RESTART_S = 300


@pytest.fixture(scope="module", autouse=True)
def healed(stack: Stack) -> Iterator[None]:
    """Whatever happened here, the next tests find a cluster that one deployment has put in order."""
    yield
    make("deploy", CLUSTER=CLUSTER)
    assert serves(stack)


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


# FAULTS of mtp_runtime/adapters/vllm_cpu/settings.py
@pytest.mark.parametrize("part", ["verify", "attention"])
def test_fault_in_our_part_fails_the_deployment(stack: Stack, tmp_path: Path, part: str) -> None:
    """No silent fallback: when a part of ours raises, requests fail and the deployment says where to look."""
    log = Path(stack.deployed.log("decode-0"))
    fault = tmp_path / "fault.json"
    fault.write_text(json.dumps({"engine_extra_env": {"decode": {"MTP_RUNTIME_FAULT": part}}}))
    done = make("deploy", CLUSTER=CLUSTER, ARGS=f"-e @{fault}", expect=2)
    assert processes(stack.state, "prefill-0"), "a deployment starts what was stopped"
    assert "the canary is red" in done.stdout
    assert "decode-0.log" in done.stdout
    assert stack.completion(16)[0] >= 500
    assert f"MTP_RUNTIME_FAULT={part}: injected fault" in log.read_text(), "it failed for another reason"
