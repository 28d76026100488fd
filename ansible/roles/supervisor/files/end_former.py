"""Ends processes of this cluster that outlived their parent, and nobody else's.

MTP_CLUSTER_ROOT in the environment names the cluster; with MTP_PROGRAM only that program's former processes are meant
(each program runs this before it starts), without it all of them (when no supervisor runs). A process is known by
carrying the same values in its own environment, whatever its name or parent; nginx overwrites its environment and is
known by its working folder instead. Prints the processes it ended.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

GRACE_S = 5.0


def marker() -> set[bytes]:
    """The environment entries that a former process carries."""
    names = ["MTP_CLUSTER_ROOT"] + (["MTP_PROGRAM"] if os.environ.get("MTP_PROGRAM") else [])
    return {f"{name}={os.environ[name]}".encode() for name in names}


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


def is_front(pid: int) -> bool:
    """An nginx in this cluster's run folder."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        return name == "nginx" and os.readlink(f"/proc/{pid}/cwd") == f"{os.environ['MTP_CLUSTER_ROOT']}/run"
    except OSError:
        return False


def find(wanted: set[bytes]) -> list[int]:
    """Processes that carry all of `wanted`, without this one and its ancestors; zombies do not count."""
    front = os.environ.get("MTP_PROGRAM", "front") == "front"
    found, spared = [], own_line()
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if pid in spared:
            continue
        try:
            environment = set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
            if wanted <= environment or (front and is_front(pid)):
                found.append(pid)
        except OSError:
            continue
    return found


def end(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def main() -> int:
    wanted = marker()
    left = find(wanted)
    if not left:
        return 0
    print(f"ending {len(left)} former processes: {' '.join(map(str, left))}", flush=True)
    end(left, signal.SIGTERM)
    limit = time.monotonic() + GRACE_S
    while left and time.monotonic() < limit:
        time.sleep(0.2)
        left = find(wanted)
    end(left, signal.SIGKILL)
    limit = time.monotonic() + GRACE_S
    while (left := find(wanted)) and time.monotonic() < limit:
        time.sleep(0.2)
    if left:
        print(f"still there: {' '.join(map(str, left))}", file=sys.stderr)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
