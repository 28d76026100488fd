"""Writes files of an inventory: all of them or none, and never half of one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


class ChangedMeanwhile(Exception):
    """Somebody else wrote the file between reading and writing."""

    def __init__(self, file: Path) -> None:
        super().__init__(str(file))
        self.file = file


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One writer of an inventory at a time; others wait. Errors: OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def write_all(changes: dict[Path, tuple[bytes, bytes]]) -> None:
    """Replaces files, path -> (content that was read, new content); modes and links stay.

    A reader sees an old or a new file, never half of one. Errors: OSError, ChangedMeanwhile; then every file is as it
    was, unless the disk refuses that too.
    """
    staged: list[tuple[Path, Path, bytes]] = []
    done: list[tuple[Path, bytes]] = []
    try:
        for file, (old, new) in changes.items():
            place = file.resolve()
            staged.append((_stage(place, new), place, old))
        for _, place, old in staged:
            if place.read_bytes() != old:
                raise ChangedMeanwhile(place)
        for temporary, place, old in staged:
            temporary.replace(place)
            done.append((place, old))
    except BaseException:
        for place, old in done:
            _stage(place, old).replace(place)
        raise
    finally:
        for temporary, _, _ in staged:
            temporary.unlink(missing_ok=True)


def _stage(place: Path, content: bytes) -> Path:
    """A file beside `place` with the content, on the disk, with the mode of `place`."""
    mode = place.stat().st_mode & 0o7777
    handle, name = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.chmod(mode)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary
