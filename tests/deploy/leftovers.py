"""What the live tests left on the machine outside the repository: processes, and files.

Other programs start processes and write to the same folders, so a listing from before is not enough; everything new is
judged. Seen for certain (`Left.certain`):
  - a process started since that is ours (`process_table`);
  - a file that the running stack held open for writing, mapped shared or listened on, wherever it lies;
  - in PLACES, a new or changed file under a name that one of our programs is known to use (KNOWN), one that carries a
    process number of the stack or the repository's path in its name, and a link into the repository.
Certainly not ours: a file that another user owns, that a process which is not ours holds open, or that has the number
of such a process in its name.

Only suspected (`Left.suspected`): a new process that names the repository's software, carries no mark and has lost its
parent; a new name in PLACES that nothing says to be ours; a semaphore while a resource tracker of somebody else runs,
which removes those of its program.

Not seen: a file closed at once and under a name of its own that lies elsewhere (deeper in a folder of PLACES, in /usr);
what an earlier run left behind and this one did not change. A port is seen with its process, and the tests look at the
plan's ports themselves.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from process_table import ROOT, Process, held, orphans, ours, process_table, reaper

# As the Makefile and pip find it: pip's cache is the user's own and may grow.
PIP_CACHE = Path(
    os.environ.get("PIP_CACHE_DIR") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pip"
)
HOME = Path.home()
PLACES = (
    *(Path(place) for place in ("/tmp", "/var/tmp", "/dev/shm", "/run", "/run/lock", f"/run/user/{os.getuid()}")),
    *(Path(place) for place in ("/etc", "/opt", "/usr/local", "/var/cache", "/var/lib", "/var/log")),
    *(HOME / part for part in ("", ".cache", ".config", ".local", ".local/lib", ".local/share", ".local/state")),
)
"""Folders whose direct entries are compared; below a KNOWN name everything is."""
KNOWN = (
    *("vllm*", "mtp-counters*", "torch*", "triton*", "pymp-*", "psm_*", "sem.mp-*", "hf_*", "huggingface*"),
    # OpenMP's registration, and the transports under torch and NIXL
    *("__kmp_registered_lib_*", "nccl*", "gloo*", "nixl*", "ucx*"),
    *("ray", "ray_*", "prometheus*", "nginx*", "supervis*", "ansible*", "locust*", "matplotlib*", "flashinfer*"),
)
"""Names, without a leading dot and in lower case, that our programs use when nobody gives them a folder."""
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
SMALL = 20  # numbers up to it are in many names

Identity = tuple[int, ...]


def known(path: Path) -> bool:
    """Whether one of our programs is known to use this name."""
    name = path.name.removeprefix(".").lower()
    if UUID.fullmatch(name):  # vLLM's ipc sockets
        return stat.S_ISSOCK(path.lstat().st_mode)
    return any(fnmatch(name, pattern) for pattern in KNOWN)


def identity(path: Path) -> Identity:
    """Changes when a file is written or replaced; a folder's does not when its entries come and go."""
    found = path.lstat()
    return (found.st_ino,) if stat.S_ISDIR(found.st_mode) else (found.st_ino, found.st_size, found.st_mtime_ns)


def listing(places: Iterable[Path] = PLACES, spared: tuple[Path, ...] = (ROOT, PIP_CACHE)) -> dict[Path, Identity]:
    """Every entry of the places, and everything below those under a known name; not what is spared."""
    found: dict[Path, Identity] = {}

    def add(path: Path, deep: bool) -> None:
        if path in spared:
            return
        try:
            found[path] = identity(path)
            if (deep or known(path)) and path.is_dir() and not path.is_symlink():
                for entry in path.iterdir():
                    add(entry, deep=True)
        except OSError:
            return

    for place in places:
        for entry in place.iterdir() if os.access(place, os.R_OK | os.X_OK) else ():
            add(entry, deep=False)
    return found


@dataclass(slots=True)
class Left:
    """What is left, as text: what is ours, and what may be anybody's."""

    certain: list[str] = field(default_factory=list)
    suspected: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Traces:
    """What only the running stack shows: its processes, and the paths outside the repository that it holds."""

    pids: frozenset[int]
    held: frozenset[str]

    @classmethod
    def take(cls) -> Traces:
        pids = ours(process_table())
        return cls(frozenset(pids), frozenset(path for path in held(pids) if not _inside(path)))


@dataclass(frozen=True)
class Machine:
    """The machine before anything was deployed."""

    taken: float
    processes: frozenset[tuple[int, int]]
    files: dict[Path, Identity]
    reaper: int
    places: tuple[Path, ...] = PLACES

    @classmethod
    def look(cls, places: tuple[Path, ...] = PLACES) -> Machine:
        taken = time.time() - 1  # a file's time lags the clock by up to a tick
        started = frozenset((process.pid, process.started) for process in process_table().values())
        return cls(taken, started, listing(places), reaper(), places)

    def left(self, traces: Traces) -> Left:
        """What is there now that was not, judged."""
        table, found = process_table(), Left()
        certain = ours(table)
        suspected = orphans(table, self.reaper) - certain
        for pids, texts in ((certain, found.certain), (suspected, found.suspected)):
            since = [table[pid] for pid in sorted(pids) if (pid, table[pid].started) not in self.processes]
            texts += [f"process {process.pid}: {process.command}" for process in since]
        paths, others = self._new(traces), {pid: table[pid] for pid in set(table) - certain - suspected}
        theirs = held(others) if paths else set()
        for path, why in sorted(paths.items()):
            if _elsewhere(path, theirs, others):
                continue
            if why and not _tracked(path, others):
                found.certain.append(f"{path} ({why})")
            else:
                found.suspected.append(str(path))
        return found

    def settled(self, traces: Traces, limit_s: float = 15.0) -> Left:
        """The same, once what is only on its way out is gone."""
        end = time.monotonic() + limit_s
        while (found := self.left(traces)).certain and time.monotonic() < end:
            time.sleep(1)
        return found

    def _new(self, traces: Traces) -> dict[Path, str]:
        """New and changed paths, each with what makes it ours; an empty text where nothing does."""
        found = {}
        for path, now in listing(self.places).items():
            why = _reason(path, traces, self.places)
            # Under a name of somebody else's only the name counts: what changes there is theirs.
            if path not in self.files or (why and self.files[path] != now):
                found[path] = why
        found |= {path: "held by the stack" for path in map(Path, traces.held) if self._written_since(path)}
        return {path: why for path, why in found.items() if path not in PIP_CACHE.parents}

    def _written_since(self, path: Path) -> bool:
        """A file, not a device or a terminal, that changed after the look."""
        try:
            found = path.lstat()
        except OSError:
            return False
        file = stat.S_ISREG(found.st_mode) or stat.S_ISSOCK(found.st_mode) or stat.S_ISFIFO(found.st_mode)
        return file and found.st_mtime > self.taken


def _inside(path: str) -> bool:
    return path == str(ROOT) or path.startswith(f"{ROOT}/")


def _elsewhere(path: Path, theirs: set[str], others: Container[int]) -> bool:
    """Whether a path is certainly somebody else's, or gone by now."""
    try:
        if path.lstat().st_uid != os.getuid():
            return True
    except OSError:
        return True
    in_use = str(path) in theirs or any(held_path.startswith(f"{path}/") for held_path in theirs)
    return in_use or any(number in others for number in _numbers(path))


def _tracked(path: Path, others: dict[int, Process]) -> bool:
    """Whether somebody else's resource tracker may be about to remove it: such a one does so when its program ends."""
    trackers = any("multiprocessing.resource_tracker" in process.command for process in others.values())
    return trackers and path.parent == Path("/dev/shm")


def _numbers(path: Path) -> set[int]:
    """Numbers in a name that may be a process's."""
    texts = re.findall(r"(?<![0-9A-Za-z])\d+(?![0-9A-Za-z])", UUID.sub("", path.name))
    return {number for number in map(int, texts) if number > SMALL}


def _reason(path: Path, traces: Traces, places: tuple[Path, ...]) -> str:
    """Why a path is ours; empty where nothing says so."""
    top = path
    while top.parent not in places and top.parent != top:
        top = top.parent
    slugs = [str(ROOT).strip("/").replace("/", mark) for mark in ("-", "_", ".", "!", "%2F")]
    try:
        if path.is_symlink() and _inside(os.readlink(path)):
            return "a link into the repository"
        if known(top):
            return "a name of our programs"
    except OSError:
        return ""
    if _numbers(path) & traces.pids:
        return "a process number of the stack"
    return "the repository's path" if any(slug in path.name for slug in slugs) else ""
