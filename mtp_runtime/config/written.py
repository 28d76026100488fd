"""What an inventory's files say, key by key, defaults left out: for telling which keys differ between two of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .document import parse
from .files import NAMES, Files
from .impact import differences
from .load import read_text
from .nodes import Refused, plain
from .problems import KeyPath, dotted, printable
from .text_edit import for_people


@dataclass(frozen=True)
class KeyChange:
    """A key that differs. old, new: as YAML, None where it is not written; file, line: where it stands, or stood."""

    key: str
    file: str
    line: int
    old: str | None
    new: str | None


def changed_keys(old: Files, new: Files) -> list[KeyChange]:
    """Keys whose values differ; files that cannot be read count as empty."""
    found = []
    for section in NAMES:
        before, after = _data(old, section), _data(new, section)
        for key, one, other in differences(before[0], after[0]):
            there = other is not None
            line = (after if there else before)[1].get(key, 0)
            file = (new if there else old).shown(section)
            found.append(KeyChange(key, file, line, _text(one, key), _text(other, key)))
    return found


def _data(files: Files, section: str) -> tuple[dict[str, Any], dict[str, int]]:
    """A file's data with null as a value of its own, and the line of every dotted key."""
    lines: dict[str, int] = {}

    def seen(path: KeyPath, line: int) -> None:
        lines[dotted(path)] = line

    try:
        value = plain(parse(read_text(files, section).removeprefix("\ufeff"))[0], seen)[0]
    except (Refused, OSError):
        value = None
    return (_leaves(value) if isinstance(value, dict) else {}), lines


@dataclass(frozen=True)
class _Leaf:
    """A written value: null is one too."""

    value: Any


def _leaves(value: dict[str, Any]) -> dict[str, Any]:
    return {
        printable(str(key)): _leaves(one) if isinstance(one, dict) and one else _Leaf(one) for key, one in value.items()
    }


def _text(found: Any, key: str) -> str | None:
    return None if found is None else for_people(_values(found), (key,))


def _values(found: Any) -> Any:
    return found.value if isinstance(found, _Leaf) else {key: _values(one) for key, one in found.items()}
