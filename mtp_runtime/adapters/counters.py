"""Counters that prove our parts run, two gauges, and their way to the server's /metrics.

The engine core is a process of its own under the API server, which alone answers /metrics. Each engine process counts
in a small shared file (one 64-bit slot a counter: an increment is a store, no lock, no system call), the API server
sums the files at each scrape. A gauge is a slot too; only schedulers set it, all to the same value, so the largest
counts. vLLM's own multi-process mode of prometheus_client would change every gauge of the
engine, so it is not used.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mtp_runtime.metrics import names

PREFIX = "mtp-counters-"
FOLDER = "MTP_RUNTIME_COUNTERS_DIR"
"""Environment variable, set by the first process of a server for its children."""

DESCRIPTIONS = {
    names.PLUGIN_VERIFY_CALLS: "Engine steps whose drafts our verification decided.",
    names.PLUGIN_VERIFY_DRAFT_STEPS: "Draft steps (one request, one step) our verification decided, placeholders too.",
    names.PLUGIN_PLACEHOLDER_STEPS: "Draft steps whose drafts were all placeholders (-1), which are always rejected.",
    names.PLUGIN_PLACEHOLDER_TOKENS: "Placeholder drafts (-1).",
    names.PLUGIN_ATTENTION_DECODE_CALLS: "Calls of our decode attention in engine steps with drafts, one a layer.",
    names.PLUGIN_ATTENTION_DRAFT_STEPS: "Engine steps with drafts that went through our decode attention.",
    names.PLUGIN_GRAPH_REPLAYS: "Steps of the target that replayed a static graph.",
    names.PLUGIN_GRAPH_DRAFT_REPLAYS: "Passes of the drafter that replayed a static graph.",
    names.PLUGIN_GRAPH_EAGER_STEPS: "Decode steps and drafter passes that fit no static graph and ran eagerly.",
    names.PLUGIN_ENGINE_DRAFT_STEPS: "Engine steps for which the scheduler scheduled a draft.",
}
"""Every counter, in the order of its slot in the file."""

GAUGES = {
    names.PLUGIN_ACTIVE_K: "Drafts a request gets each step; 0 while the drafter only keeps its KV up to date.",
    names.PLUGIN_LOADED_K: "The K that the server was started with, the largest active one; 0 without MTP.",
}
"""Every gauge; their slots follow the counters'."""

_SLOT = {name: index for index, name in enumerate((*DESCRIPTIONS, *GAUGES))}
_ROWS: dict[str, np.ndarray] = {}


def folder() -> Path:
    """Where this server's processes count. The first process to ask makes it, tells its children and removes it.

    A process that was killed leaves its folder behind: the next one takes away those whose owner is gone.
    """
    known = os.environ.get(FOLDER)
    if known:
        return Path(known)
    owner = os.getpid()
    for old in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        pid = old.name.removeprefix(PREFIX).split("-")[0]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(old, ignore_errors=True)
    made = tempfile.mkdtemp(prefix=f"{PREFIX}{owner}-")
    os.environ[FOLDER] = made
    # A forked child inherits the hook: only the owner may remove the folder.
    atexit.register(lambda: shutil.rmtree(made, ignore_errors=True) if os.getpid() == owner else None)
    return Path(made)


def slots() -> np.ndarray:
    """Counters and gauges of this process, [len(_SLOT)] int64, shared with the process that answers /metrics."""
    path = str(folder() / f"{os.getpid()}.i64")
    if path not in _ROWS:
        size = 8 * len(_SLOT)
        with Path(path).open("wb+") as file:
            file.truncate(size)
            _ROWS[path] = np.frombuffer(mmap.mmap(file.fileno(), size), dtype=np.int64)
    return _ROWS[path]


class Count:
    """One counter of this process."""

    __slots__ = ("_index", "_slots")

    def __init__(self, name: str) -> None:
        self._slots, self._index = slots(), _SLOT[name]

    def add(self, amount: int = 1) -> None:
        """Increase by amount >= 0."""
        self._slots[self._index] += amount


class Level:
    """One gauge of this process."""

    __slots__ = ("_index", "_slots")

    def __init__(self, name: str) -> None:
        self._slots, self._index = slots(), _SLOT[name]

    def set(self, value: int) -> None:
        """Replace the value, >= 0."""
        self._slots[self._index] = value


def totals() -> dict[str, int]:
    """Counter name -> sum over the engine processes of this server."""
    return dict(zip(DESCRIPTIONS, _rows()[:, : len(DESCRIPTIONS)].sum(axis=0).tolist(), strict=True))


def levels() -> dict[str, int]:
    """Gauge name -> its largest value in the engine processes of this server."""
    return dict(zip(GAUGES, _rows()[:, len(DESCRIPTIONS) :].max(axis=0).tolist(), strict=True))


def _rows() -> np.ndarray:
    """[1 + processes, len(_SLOT)]: the slots of every engine process, after a row of zeros."""
    rows = [np.zeros(len(_SLOT), dtype=np.int64)]
    for path in folder().glob("*.i64"):
        with contextlib.suppress(FileNotFoundError):  # its process ends now
            rows.append(np.fromfile(path, dtype=np.int64))
    return np.stack([row for row in rows if row.shape == rows[0].shape])  # else just being created


class _Export(Collector):
    def collect(self) -> Iterator[Metric]:
        for name, value in totals().items():
            yield CounterMetricFamily(name.removesuffix("_total"), DESCRIPTIONS[name], value=value)
        for name, value in levels().items():
            yield GaugeMetricFamily(name, GAUGES[name], value=value)


@cache
def export() -> None:
    """Offer counters and gauges on this process's default registry, once. 0 from the start: absent means no plugin."""
    folder()
    REGISTRY.register(_Export())
