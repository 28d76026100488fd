"""What `make destroy` is judged by: finds what is ours among what other programs do at the same time."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import leftovers
import process_table
import pytest
from leftovers import Machine, Traces
from process_table import ROOT, RUN, Process

NOTHING = Traces(frozenset(), frozenset())
Start = Callable[..., int]
NUMBER = 5_000_000  # larger than any process number


@pytest.fixture(autouse=True)
def run(monkeypatch: pytest.MonkeyPatch) -> str:
    """The mark of a run, as the live tests set it."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(RUN, mark)
    return mark


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts `sleep` with an environment, as a child or with nobody above it; returns its number."""
    shells: list[subprocess.Popen[str]] = []
    running: list[int] = []

    def begin(orphan: bool = True, command: str = "exec sleep 60", **environment: str) -> int:
        line = f"({command}) >/dev/null 2>&1 & echo $!" if orphan else f"echo $$; {command}"
        environment["PATH"] = os.environ["PATH"]
        shell = subprocess.Popen(["/bin/sh", "-c", line], env=environment, stdout=subprocess.PIPE, text=True)
        assert shell.stdout is not None
        shells.append(shell)
        running.append(int(shell.stdout.readline()))
        if orphan:
            shell.wait()
        while Path(f"/proc/{running[-1]}/comm").read_text() != "sleep\n":
            time.sleep(0.01)
        return running[-1]

    yield begin
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for shell in shells:
        shell.wait()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder of PLACES."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


def certain(before: Machine, traces: Traces = NOTHING) -> str:
    return "\n".join(before.left(traces).certain)


def suspected(before: Machine, traces: Traces = NOTHING) -> str:
    return "\n".join(before.left(traces).suspected)


def test_nothing_new_is_nothing_left(place: Path) -> None:
    (place / "vllm").mkdir()
    before = Machine.look((place,))
    left = before.left(NOTHING)
    assert str(place) not in "\n".join(left.certain + left.suspected)


@pytest.mark.parametrize(
    "name", ["vllm_dist_1", ".ansible", "torchinductor_me", "sem.mp-abc", "__KMP_REGISTERED_LIB_x"]
)
def test_names_of_our_programs_are_ours(place: Path, name: str) -> None:
    before = Machine.look((place,))
    (place / name).mkdir()
    (place / name / "inside").write_text("x")
    found = certain(before)
    assert f"{place / name} (" in found
    assert f"{place / name / 'inside'} (" in found


def test_a_changed_file_under_a_known_name_is_ours(place: Path) -> None:
    (place / ".ansible").mkdir()
    (place / ".ansible" / "facts").write_text("old")
    before = Machine.look((place,))
    (place / ".ansible" / "facts").write_text("newer")
    assert f"{place / '.ansible' / 'facts'} (" in certain(before)


def test_vllms_sockets_are_ours_and_files_of_such_names_are_not(place: Path) -> None:
    before = Machine.look((place,))
    name, other = str(uuid.uuid4()), str(uuid.uuid4())
    with socket.socket(socket.AF_UNIX) as server:
        folder = os.open(place, os.O_PATH)
        server.bind(f"/proc/self/fd/{folder}/{name}")  # the path of a socket must be short
        os.close(folder)
    (place / other).write_text("x")
    assert name in certain(before) and other not in certain(before)
    assert other in suspected(before)


def test_names_that_tell_whose_they_are(place: Path) -> None:
    before = Machine.look((place,))
    (place / f"lock-{NUMBER}").write_text("x")
    (place / f"cache{str(ROOT).replace('/', '-')}").write_text("x")
    (place / "link").symlink_to(ROOT / ".local" / "engine")
    (place / f"lock-{NUMBER}1").write_text("x")
    found = certain(before, Traces(frozenset({NUMBER}), frozenset()))
    assert found.count(str(place)) == 3
    assert f"lock-{NUMBER}1" not in found


def test_what_others_write_is_suspected_at_most(place: Path, start: Start) -> None:
    """An unknown name, what changes below it, and a known name that somebody else's process holds or carries."""
    (place / "editor").mkdir()
    before = Machine.look((place,))
    (place / "editor" / "file").write_text("x")
    (place / "new").write_text("x")
    (place / "vllm_theirs").mkdir()
    other = start(command=f"exec sleep 60 3>{place}/psm_theirs 4>{place}/vllm_theirs/held")
    (place / f"__KMP_REGISTERED_LIB_{other}_0").write_text("x")
    assert str(place) not in certain(before)
    assert suspected(before).count(str(place)) == 1


def test_a_semaphore_is_its_holders() -> None:
    """It is mapped under a first name that is gone by then."""
    program = (
        "import multiprocessing; lock = multiprocessing.get_context('spawn').Lock();"
        "print(lock._semlock.name[1:]); input()"
    )
    command = [sys.executable, "-uc", program]
    before = Machine.look((Path("/dev/shm"),))
    with subprocess.Popen(command, env={}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        name = f"sem.{holder.stdout.readline().strip()}"
        assert Path("/dev/shm", name).exists()
        left = before.left(NOTHING)
        assert name not in "\n".join(left.certain + left.suspected)
        holder.communicate("\n")


def test_a_semaphore_that_a_tracker_may_remove_is_not_certain() -> None:
    tracker = Process(5, 1, 0, "python -c from multiprocessing.resource_tracker import main", False, False)
    other = Process(6, 1, 0, "vi", False, False)
    semaphore = Path("/dev/shm/sem.mp-x")
    assert leftovers._tracked(semaphore, {5: tracker, 6: other})
    assert not leftovers._tracked(semaphore, {6: other})
    assert not leftovers._tracked(Path("/tmp/vllm"), {5: tracker})


def test_what_the_stack_held_is_ours_wherever_it_lies(tmp_path: Path, start: Start, run: str) -> None:
    before = Machine.look(())
    pid = start(command=f"exec sleep 60 3>{tmp_path}/held 4<{__file__}", **{RUN: run})
    traces = Traces.take()
    assert pid in traces.pids
    assert {path for path in traces.held if path.startswith(str(tmp_path))} == {f"{tmp_path}/held"}
    os.kill(pid, signal.SIGTERM)
    assert f"{tmp_path}/held (held by the stack)" in certain(before, traces)
    (tmp_path / "held").unlink()
    assert str(tmp_path) not in certain(before, traces)


@pytest.mark.parametrize("orphan", [True, False], ids=["orphan", "child"])
def test_marked_processes_are_ours(start: Start, run: str, orphan: bool) -> None:
    before = Machine.look(())
    marked = start(orphan, **{RUN: run})
    deployed = start(orphan, MTP_CLUSTER_ROOT=f"{ROOT}/.local/clusters/x", **{RUN: "another run's"})
    others = [
        start(orphan, **{RUN: "another run's"}),
        start(orphan, MTP_CLUSTER_ROOT=f"/elsewhere{ROOT}/.local/clusters/x"),
    ]
    found = certain(before)
    assert all(f"process {pid}:" in found for pid in (marked, deployed))
    assert not any(f"process {pid}:" in found for pid in others)


def test_unmarked_users_of_our_software_are_suspected_when_orphaned(start: Start) -> None:
    before = Machine.look(())
    environment = {"TMPDIR": f"{ROOT}/.local/tmp"}
    lost, elsewhere, child = start(**environment), start(TMPDIR=f"{ROOT}-2/.local/tmp"), start(False, **environment)
    found = suspected(before)
    assert f"process {lost}:" in found
    assert not any(f"process {pid}:" in found for pid in (elsewhere, child))
    assert f"process {lost}:" not in certain(before)


def test_what_runs_before_is_not_new(start: Start, run: str) -> None:
    pid = start(**{RUN: run})
    assert f"process {pid}:" not in certain(Machine.look(()))


def test_orphans_go_to_the_reaper(start: Start) -> None:
    pid = start()
    assert process_table.process_table()[pid].parent == process_table.reaper()


def test_pips_cache_is_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the Makefile's variable, else as pip finds it."""
    program = "import leftovers; print(leftovers.PIP_CACHE)"
    plain = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(ROOT / "tests" / "deploy")}
    for environment, wanted in (
        ({}, tmp_path / ".cache" / "pip"),
        ({"XDG_CACHE_HOME": "/x"}, Path("/x/pip")),
        ({"XDG_CACHE_HOME": "/x", "PIP_CACHE_DIR": "/y"}, Path("/y")),
    ):
        done = subprocess.run([sys.executable, "-c", program], env={**plain, **environment}, capture_output=True,
                              text=True, check=True)  # fmt: skip
        assert done.stdout.strip() == str(wanted)


def test_the_spared_folders_are_exact(tmp_path: Path) -> None:
    """A neighbour whose path begins like a spared folder's is looked at; so are the folders above it."""
    for name in ("pip", "pip-2"):
        (tmp_path / name).mkdir()
    assert set(leftovers.listing((tmp_path,), (tmp_path / "pip",))) == {tmp_path / "pip-2"}
