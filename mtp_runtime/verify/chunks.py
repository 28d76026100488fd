"""A vocabulary in pieces, where a temporary is needed for every row."""

from __future__ import annotations

from collections.abc import Iterator

CHUNK = 1 << 16
"""Elements worked on at a time: few enough for a core's cache, so that a temporary costs neither memory nor a pass."""


def chunks(rows: int, vocab: int, multiple: int = 1) -> Iterator[slice]:
    """Columns of [rows, vocab], about CHUNK elements a piece, each but the last a multiple of `multiple` wide."""
    step = max(CHUNK // max(rows, 1) // multiple, 1) * multiple
    for begin in range(0, vocab, step):
        yield slice(begin, min(begin + step, vocab))
