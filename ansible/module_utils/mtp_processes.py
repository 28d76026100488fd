"""Whose process is it? A process of a cluster carries MTP_CLUSTER_ROOT (its state folder) and MTP_PROGRAM in its own
environment, whatever its name or parent; nginx overwrites its environment and is known by its working folder instead.

Ansible modules import this. It is also a script without requirements:

    MTP_CLUSTER_ROOT=... [MTP_PROGRAM=...] mtp_processes.py
        ends the processes that outlived their parent, and nobody else's: that program's (each program runs this
        before it starts), or without MTP_PROGRAM all of the cluster's (when no supervisor runs). Prints them.
    mtp_processes.py running FOLDER
        prints the clusters with their state in FOLDER that have processes, one a line.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

GRACE_S = 5.0


def pids() -> list[int]:
    """Every process."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def environment(pid: int) -> set[bytes]:
    """NAME=value entries a process was started with; none for one that is gone, a zombie or another user's."""
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return set()


def is_front(pid: int, state: str) -> bool:
    """An nginx in this cluster's run folder."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        return name == "nginx" and os.readlink(f"/proc/{pid}/cwd") == f"{state}/run"
    except OSError:
        return False


def belongs(pid: int, state: str, program: str | None = None) -> bool:
    """Whether a process is of the cluster with this state folder, and of this program of it."""
    wanted = {f"MTP_CLUSTER_ROOT={state}"} | ({f"MTP_PROGRAM={program}"} if program else set())
    if {os.fsencode(entry) for entry in wanted} <= environment(pid):
        return True
    return program in (None, "front") and is_front(pid, state)


def running(clusters: str) -> list[str]:
    """Names of the clusters below a folder that have processes."""
    prefix = os.fsencode(f"MTP_CLUSTER_ROOT={clusters}/")
    entries = (entry for pid in pids() for entry in environment(pid) if entry.startswith(prefix))
    return sorted({os.fsdecode(entry[len(prefix) :]) for entry in entries})


def parent(pid: int) -> int:
    """Parent of a process, 0 when it is gone."""
    try:
        # The name in parentheses may hold spaces: the fields start behind it.
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def own_line() -> set[int]:
    """This process and its ancestors."""
    line, pid = set(), os.getpid()
    while pid > 0 and pid not in line:
        line.add(pid)
        pid = parent(pid)
    return line


def former(state: str, program: str | None) -> list[int]:
    """Processes to end: without this one and its ancestors, which carry the same environment."""
    spared = own_line()
    return [pid for pid in pids() if pid not in spared and belongs(pid, state, program)]


def send(found: list[int], number: signal.Signals) -> None:
    for pid in found:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def end_former(state: str, program: str | None) -> int:
    """SIGTERM, and SIGKILL after a while. Exit code 1 when one is left."""
    left = former(state, program)
    if not left:
        return 0
    print(f"ending {len(left)} former processes: {' '.join(map(str, left))}", flush=True)
    for number in (signal.SIGTERM, signal.SIGKILL):
        send(left, number)
        limit = time.monotonic() + GRACE_S
        while (left := former(state, program)) and time.monotonic() < limit:
            time.sleep(0.2)
    if left:
        print(f"still there: {' '.join(map(str, left))}", file=sys.stderr)
    return 1 if left else 0


def main() -> int:
    if sys.argv[1:2] == ["running"] and len(sys.argv) == 3:
        for name in running(sys.argv[2]):
            print(name)
        return 0
    return end_former(os.environ["MTP_CLUSTER_ROOT"], os.environ.get("MTP_PROGRAM") or None)


if __name__ == "__main__":
    sys.exit(main())
