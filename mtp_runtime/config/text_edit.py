"""Changes one value in a YAML text and leaves every other byte as it is: comments, quotes, line ends, order.

The place is found by offset in the text. A change is believed only when the new text reads back as the old data with
that one value changed; where it does not (an anchor that others use, a merge), the text is refused, not guessed at.
"""

from __future__ import annotations

import copy
import json
import re
from typing import Any, Final

from .document import parse
from .nodes import Alias, Entry, Mapping, Node, Refused, Scalar, Sequence, Vaulted, plain
from .problems import HIDDEN, KeyPath, dotted, is_secret, printable
from .scalars import read_scalar

REMOVED: Final = object()
VAULTED = "(vaulted)"
INDENT = 2
_BARE = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./:@+-]*(?<!:)")


class Unplaceable(Exception):
    """The text has no place for the value that changes nothing else. line: 1-based, where to edit by hand."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line, self.reason = line, reason


def put(text: str, path: KeyPath, value: Any) -> str:
    """The text with `value` at `path`, in mappings that are made where they are missing; REMOVED takes the key out.

    value: None, boolean, number, text, list or dictionary. Errors: Refused for a text that is no YAML, Unplaceable.
    """
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    body = text[len(mark) :]
    tree, data = _read(body)
    if not isinstance(tree, Mapping):
        raise Unplaceable(1, "the file is no mapping")
    wanted = _changed(data, path, value)
    if _same(data, wanted):
        return text
    edited, line = _edit(body, tree, path, value)
    try:
        found = _read(edited)[1]
    except Refused:
        found = REMOVED
    if not _same(found, wanted):
        raise Unplaceable(line, f"{dotted(path)} cannot be changed here without changing more than it")
    return mark + edited


def _read(text: str) -> tuple[Node | None, Any]:
    tree, faults = parse(text)
    if any(fault.rule == "C05" for fault in faults):
        raise Refused(faults)
    return tree, plain(tree, lambda path, line: None)[0]


def _changed(data: Any, path: KeyPath, value: Any) -> Any:
    """The data with one value changed."""
    data = copy.deepcopy(data)
    node = data
    for part in path[:-1]:
        if not isinstance(node.get(part), dict):
            if value is REMOVED:
                return data
            node[part] = {}
        node = node[part]
    if value is not REMOVED:
        node[path[-1]] = value
    else:
        node.pop(path[-1], None)
    return data


def _same(one: Any, other: Any) -> bool:
    """Equal, types too; a mapping without keys is null, as in YAML where nothing is left below a key."""
    one, other = (None if isinstance(side, dict) and not side else side for side in (one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Vaulted):
        return bool(one == other)
    return type(one) is type(other) and repr(one) == repr(other)


def _edit(text: str, tree: Mapping, path: KeyPath, value: Any) -> tuple[str, int]:
    """The new text, and the line of the change."""
    node, line = tree, 1
    for depth, part in enumerate(path):
        entry = node.own.get(str(part))
        rest = path[depth + 1 :]
        if entry is None and value is REMOVED:
            raise Unplaceable(node.line, f"{dotted(path[: depth + 1])} comes from a merge (<<)")
        if entry is None:
            return _insert(text, node, path[depth:], value), line
        line = entry.line
        if not rest:
            return _remove(text, node, entry) if value is REMOVED else _replace(text, entry, value), line
        if isinstance(entry.value, Alias):
            raise Unplaceable(line, f"{dotted(path[: depth + 1])} is an alias of a value written elsewhere")
        if not isinstance(entry.value, Mapping):
            return _nest(text, node, entry, rest, value), line
        node = entry.value
    raise AssertionError("a path has parts")


def _replace(text: str, entry: Entry, value: Any) -> str:
    """Another value behind the same key."""
    old = entry.value
    written = scalar(value, old.style if isinstance(old, Scalar) else "")
    if isinstance(old, Mapping | Sequence) and not old.flow:
        # From lines of its own to the key's line, in front of a comment there.
        colon = text.index(":", entry.end) + 1
        return f"{text[:colon]} {written}{text[colon : old.start].rstrip()}{text[old.end :]}"
    space = " " if text[old.start - 1] == ":" else ""
    return text[: old.start] + space + written + text[old.end :]


def _nest(text: str, parent: Mapping, entry: Entry, rest: KeyPath, value: Any) -> str:
    """A mapping with one value in the place of null or of something else."""
    old = entry.value
    if parent.flow:
        return _replace(text, entry, _nested(rest, value))
    if old.start != old.end:
        colon = text.index(":", entry.end) + 1
        text = text[:colon] + text[old.end :]
        end = _line_end(text, colon)
    else:
        end = _line_end(text, old.end)
    return text[:end] + _lines(text, entry.column + INDENT, rest, value) + text[end:]


def _insert(text: str, node: Mapping, rest: KeyPath, value: Any) -> str:
    """A new key behind the last one of a mapping."""
    if node.flow:
        last = max((one.end for one in (*(entry.value for entry in node.own.values()), *node.merges)), default=None)
        written = f"{scalar(str(rest[0]))}: {scalar(_nested(rest[1:], value))}"
        at = node.end - 1 if last is None else last
        return text[:at] + ("" if last is None else ", ") + written + text[at:]
    line_start = max(text.rfind("\n", 0, node.start), text.rfind("\r", 0, node.start)) + 1
    # With an anchor the mapping starts before its first key.
    column = next((entry.column for entry in node.own.values()), node.start - line_start)
    end = _line_end(text, node.end)
    return text[:end] + _lines(text, column, rest, value) + text[end:]


def _remove(text: str, node: Mapping, entry: Entry) -> str:
    """Without a key and its value; a comment behind the value goes with it, those above stay."""
    end = entry.value.end
    if node.flow:
        order = sorted(node.own.values(), key=lambda one: one.start)
        at = order.index(entry)
        if at:
            return text[: order[at - 1].value.end] + text[end:]
        return text[: entry.start] + text[order[1].start if len(order) > 1 else end :]
    start = entry.start - entry.column
    if text[start : entry.start].strip() or not re.match(r"[ \t]*(#|$|[\r\n])", text[end:]):
        raise Unplaceable(entry.line, f"{entry.key} shares its line with something else")
    stop = _line_end(text, end)
    stop += len(re.match(r"\r\n|\n|\r|", text[stop:])[0])  # type: ignore[index]
    return text[:start] + text[stop:]


def _nested(rest: KeyPath, value: Any) -> Any:
    for part in reversed(rest):
        value = {part: value}
    return value


def _lines(text: str, column: int, rest: KeyPath, value: Any) -> str:
    """Block lines for a key and what is below it, each with a line break in front."""
    line_break = re.search(r"\r\n|\n|\r", text)
    head = (line_break[0] if line_break else "\n") + " " * column + scalar(str(rest[0])) + ":"
    return f"{head} {scalar(value)}" if len(rest) == 1 else head + _lines(text, column + INDENT, rest[1:], value)


def _line_end(text: str, index: int) -> int:
    found = re.compile(r"[\r\n]").search(text, index)
    return found.start() if found else len(text)


def scalar(value: Any, style: str = "") -> str:
    """A value as one piece of YAML that every reader reads alike. style: of the quotes, where it can be kept."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{scalar(str(key))}: {scalar(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(scalar, value)) + "]"
    if isinstance(value, str):
        if style == "'" and value.isprintable() and "'" not in value:
            return f"'{value}'"
        bare = style != '"' and _BARE.fullmatch(value) and read_scalar(value) == (value, None)
        return value if bare else json.dumps(value, ensure_ascii=False)
    text = json.dumps(value)
    return text if read_scalar(text) == (value, None) else f"{value:f}"


def for_people(value: Any, path: KeyPath = ()) -> str:
    """A value as YAML on one line, for messages: no password, no vaulted text, nothing that a terminal would act on.

    path: where it is written.
    """
    text = scalar(_without_secrets(value, is_secret(*path)))
    for mark in (VAULTED, HIDDEN):
        text = text.replace(f'"{mark}"', mark)
    return printable(text)


def _without_secrets(value: Any, secret: bool) -> Any:
    if isinstance(value, Vaulted):
        return VAULTED
    if isinstance(value, dict):
        return {key: _without_secrets(inner, secret or is_secret(key)) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_secrets(inner, secret) for inner in value]
    return HIDDEN if secret and value is not None else value
