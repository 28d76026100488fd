"""CANN releases: which documentation describes a release, and which limits of the operator depend on it.

Published rules changed over time. Without a CANN version the strictest one holds; `RELEASES` says what a version
relaxes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Limits:
    """What depends on the CANN release or the engine.

    shortest: least tokens a segment. paged_only: whether KV must be paged. block_sizes: allowed ones by cache format.
    lse: operator versions that may return the log-sum-exp. dtypes: of query, key and value.
    """

    shortest: int
    paged_only: bool
    block_sizes: dict[str, Sequence[int]]
    lse: tuple[str, ...]
    dtypes: tuple[str, ...] = ("bfloat16", "float16")


STRICT = Limits(shortest=1, paged_only=True, block_sizes={"ND": (16, 128), "NZ": (128,)}, lse=())
# The pages of op-plugin from 7.3.0 on: no word on segments (0 is the tiling check's), KV may be paged, no format in the
# rule for block sizes, and only version 1 still refuses the log-sum-exp. Where the docstrings still say what the pages
# of 7.2.0 said, as they do up to 26.1.0, the pages count.
RELAXED = Limits(
    shortest=0,
    paged_only=False,
    block_sizes=dict.fromkeys(("ND", "NZ"), range(16, 1024 + 1, 16)),
    lse=("v2",),
    dtypes=STRICT.dtypes,
)


@dataclass(frozen=True, slots=True)
class Release:
    """A line of CANN releases.

    first: the release that opened it; the line is every later one with the same first two numbers. op_plugin: the
    branch whose documentation describes it. certainty: how sure that is.
    """

    first: str
    op_plugin: str
    certainty: str
    limits: Limits


# Published: torch_npu's compatibility table (its branches v*-7.1.0 with CANN 8.2.RC1, and so on) and op-plugin's README
# (branch 7.1.0 with torch_npu's v*-7.1.0). A guess everywhere: that the kernels of a release do what its documentation
# says. The tiling check of 2025-10 lies between 8.3.RC1 and 8.5.0: that what it takes holds from 8.5.0 on is one too.
RELEASES = (
    Release("8.2.RC1", "7.1.0", "published; version 2 of the operator is not documented there", STRICT),
    Release("8.3.RC1", "7.2.0", "published", STRICT),
    Release("8.5.0", "7.3.0", "published; a guess for 8.5.1 and later", RELAXED),
    Release("9.0.0", "26.0.0", "published; a guess for 9.0.1 and later", RELAXED),
    Release("9.1.0", "26.1.0", "published, for 9.1.1 and later too", RELAXED),
)


def release_of(cann_version: str) -> Release:
    """The line of a CANN version such as "8.2.RC1" or "9.1.0". Raises ValueError when malformed or not known."""
    asked = _order(cann_version)
    for release in RELEASES:
        first = _order(release.first)
        if first[:2] == asked[:2] and first <= asked:
            return release
    known = ", ".join(release.first for release in RELEASES)
    raise ValueError(f"cann_version {cann_version!r} is not known; known are {known} and later ones of the same lines")


def _order(version: str) -> tuple[int, int, bool, int]:
    found = re.fullmatch(r"([0-9]+)\.([0-9]+)\.(RC)?([0-9]+)", version) if isinstance(version, str) else None
    if found is None:
        raise ValueError(f"cann_version {version!r} is malformed; it is written like 8.2.RC1 or 9.1.0")
    major, minor, candidate, last = found.groups()
    return int(major), int(minor), candidate is None, int(last)


@functools.lru_cache
def limits_of(cann_version: str | None = None, engine: str = "ascend") -> Limits:
    """The limits for a CANN version (None: the strictest) and an engine ("ascend" or "cpu"). Raises ValueError."""
    limits = STRICT if cann_version is None else release_of(cann_version).limits
    if engine == "ascend":
        return limits
    if engine == "cpu":
        return replace(limits, dtypes=(*limits.dtypes, "float32"))
    raise ValueError(f"engine {engine!r} is not known; known are ascend and cpu")
