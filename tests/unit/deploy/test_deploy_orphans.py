"""Former processes of a cluster's program are ended, whoever their parent is; everybody else's are spared."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[3] / "ansible" / "module_utils" / "mtp_processes.py"
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    running: list[subprocess.Popen[bytes]] = []

    def run(cluster: Path, program: str, command: str = "exec sleep 300") -> subprocess.Popen[bytes]:
        environment = {"MTP_CLUSTER_ROOT": str(cluster), "MTP_PROGRAM": program}
        process = subprocess.Popen(["/bin/sh", "-c", f"echo; {command}"], env=environment, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()  # it runs with its environment
        running.append(process)
        return process

    yield run
    for process in running:
        process.kill()
        process.wait()


def end(cluster: Path, program: str | None) -> subprocess.CompletedProcess[str]:
    environment = {"MTP_CLUSTER_ROOT": str(cluster)} | ({"MTP_PROGRAM": program} if program else {})
    return subprocess.run(
        [sys.executable, str(TOOL)], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_only_the_programs_own_former_processes(tmp_path: Path, start: Start) -> None:
    former, sibling = start(tmp_path, "decode-0"), start(tmp_path, "prefill-0")
    stranger, longer = start(tmp_path / "other", "decode-0"), start(tmp_path, "decode-01")
    done = end(tmp_path, "decode-0")
    assert done.returncode == 0
    assert str(former.pid) in done.stdout
    assert former.wait(10) == -signal.SIGTERM
    assert [process.poll() for process in (sibling, stranger, longer)] == [None, None, None]


def test_all_of_a_cluster(tmp_path: Path, start: Start) -> None:
    ours, stranger = [start(tmp_path, "a"), start(tmp_path, "b")], start(tmp_path / "other", "a")
    assert end(tmp_path, None).returncode == 0
    assert [process.wait(10) for process in ours] == [-signal.SIGTERM] * 2
    assert stranger.poll() is None


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path, start: Start) -> None:
    stubborn = start(tmp_path, "a", "trap '' TERM; while :; do sleep 1; done")
    assert end(tmp_path, "a").returncode == 0
    assert stubborn.wait(10) == -signal.SIGKILL


def test_clusters_with_processes_are_named(tmp_path: Path, start: Start) -> None:
    for cluster in ("b", "a", "a"):
        start(tmp_path / "clusters" / cluster, "decode-0")
    start(tmp_path / "clusters-of-another-checkout" / "c", "decode-0")

    def running(folder: Path) -> list[str]:
        command = [sys.executable, str(TOOL), "running", str(folder)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()

    assert running(tmp_path / "clusters") == ["a", "b"]
    assert running(tmp_path / "elsewhere") == []


def test_nothing_to_end(tmp_path: Path) -> None:
    done = end(tmp_path, "a")
    assert (done.returncode, done.stdout) == (0, "")
