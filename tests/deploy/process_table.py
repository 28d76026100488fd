"""Whose a process is, and what it holds: read from /proc.

A process is ours for certain when it carries RUN or the deployment's marker in its environment, or when its program,
command line or working folder lies in what the deployment made.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN = "MTP_TEST_RUN"
"""Environment variable that everything inherits from the tests; supervisor's programs have MTP_CLUSTER_ROOT instead."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process; `started` (ticks since boot) tells it from a later one of the same number.

    ours: started by this run or its deployment, for certain; names_software: it names the repository's .local or .venv.
    """

    pid: int
    parent: int
    started: int
    command: str
    ours: bool
    names_software: bool


def process_table(root: Path = ROOT) -> dict[int, Process]:
    """Every process that can be read."""
    found = (_process(int(pid), root) for pid in os.listdir("/proc") if pid.isdigit())
    return {process.pid: process for process in found if process}


def _process(pid: int, root: Path) -> Process | None:
    folder = Path("/proc", str(pid))
    try:
        # The name in parentheses may hold spaces: the fields start behind it.
        fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        command, environ = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
        texts = [command, *(os.fsencode(os.readlink(folder / link)) for link in ("cwd", "exe"))]
    except OSError:  # gone, another user's, or the kernel's
        return None
    if fields[0] == "Z":
        return None
    marked = any(_marked(entry, root) for entry in environ.split(b"\0"))
    # nginx overwrites its environment: where it runs tells whose it is.
    placed = any(_names(text, root, b"[.]local/(clusters|deb)") for text in texts)
    software = any(_names(text, root, b"[.](local|venv)") for text in [*texts, environ])
    text = command.replace(b"\0", b" ").decode(errors="replace").strip()
    return Process(pid, int(fields[1]), int(fields[19]), text, marked or placed, software)


def _marked(entry: bytes, root: Path) -> bool:
    run = RUN in os.environ and entry == os.fsencode(f"{RUN}={os.environ[RUN]}")
    return run or entry.startswith(os.fsencode(f"MTP_CLUSTER_ROOT={root}/.local/clusters/"))


def _names(text: bytes, root: Path, part: bytes) -> bool:
    """Whether a text has the path of this part of the repository, and not as a part of another path."""
    return bool(re.search(rb"(?<![\w.-])" + re.escape(os.fsencode(root)) + b"/" + part + rb"(?![\w.-])", text))


def ours(table: dict[int, Process]) -> set[int]:
    """Processes of this run and its deployment, without this one and those above it."""
    line, pid = {os.getpid()}, os.getpid()
    while pid in table and (pid := table[pid].parent) not in line:
        line.add(pid)
    return {process.pid for process in table.values() if process.ours} - line


@cache
def reaper() -> int:
    """Who inherits orphans here: process 1, or a subreaper such as a user's systemd."""
    orphan = "(sleep 0.2; exec cut -d' ' -f4 /proc/self/stat) &"
    return int(subprocess.run(["sh", "-c", orphan], capture_output=True, text=True, timeout=30, check=True).stdout)


def orphans(table: dict[int, Process], inherited_by: int) -> set[int]:
    """Processes that name the repository's software and have no program of anybody else above them.

    What an editor or a shell runs in the same folder has that editor or shell above it; what is left behind has lost
    its parent, or is below something that has.
    """

    def lost(pid: int) -> bool:
        while pid != inherited_by:
            if pid not in table or not table[pid].names_software:
                return False
            pid = table[pid].parent
        return True

    return {pid for pid in table if pid not in (inherited_by, os.getpid()) and lost(pid)}


def held(pids: Iterable[int]) -> set[str]:
    """Paths that these processes hold: open for writing, mapped shared and writable, or a socket's."""
    sockets, semaphores, found = _sockets(), _semaphores(), set()
    for pid in pids:
        folder = Path("/proc", str(pid))
        try:
            found |= set(_open(folder, sockets)) | set(_mapped(folder, semaphores))
        except OSError:
            continue
    return {path for path in found if path.startswith("/") and not path.endswith(" (deleted)")}


def _sockets() -> dict[str, str]:
    """Inode -> path of every unix socket that has one."""
    rows = [line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {row[6]: row[7] for row in rows if len(row) == 8}


def _semaphores() -> dict[str, str]:
    """Inode -> path of everything in /dev/shm. A semaphore is mapped under a first name that is gone by then."""
    with os.scandir("/dev/shm") as entries:
        return {str(entry.inode()): entry.path for entry in entries}


def _open(folder: Path, sockets: dict[str, str]) -> Iterator[str]:
    for descriptor in os.listdir(folder / "fd"):
        try:
            target = os.readlink(folder / "fd" / descriptor)
            flags = re.search(r"^flags:\s*(\d+)", (folder / "fdinfo" / descriptor).read_text(), re.MULTILINE)
        except OSError:
            continue
        if target.startswith("socket:["):
            yield sockets.get(target[len("socket:[") : -1], "")
        elif flags and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY:
            yield target


def _mapped(folder: Path, semaphores: dict[str, str]) -> Iterator[str]:
    for line in (folder / "maps").read_text().splitlines():
        columns = line.split(maxsplit=5)
        if len(columns) == 6 and columns[1].startswith("rw") and columns[1].endswith("s"):
            in_memory = columns[5].startswith("/dev/shm/")
            yield semaphores.get(columns[4], columns[5]) if in_memory else columns[5]
