"""The tree of a YAML file: nodes that know where they stand in the text, and the data that they make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .problems import KeyPath

MAX_DEPTH = 20
# Aliases can make a small file huge; no inventory comes near this.
MAX_NODES = 100_000


@dataclass(frozen=True)
class Vaulted:
    """Stands for a value that only Ansible can read. It has no text: it cannot be printed by accident.

    digest: of the encrypted text, to tell that it was changed.
    """

    digest: str

    def __repr__(self) -> str:
        return "(vaulted)"


@dataclass(frozen=True)
class Fault:
    """What is wrong with a text. path: the key, () for the file; remedy: None, the rule's.

    written: the value as it stands there, where in quotes it would be a text.
    """

    rule: str
    path: KeyPath
    line: int
    message: str
    remedy: str | None = None
    written: str | None = None


class Refused(Exception):
    """A text that has no tree; carries every fault found before reading stopped."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__("\n".join(fault.message for fault in faults))
        self.faults = faults


@dataclass(slots=True)
class Node:
    """start, end: offsets in the text, its anchor and tag included; line: 1-based."""

    start: int
    end: int
    line: int
    anchor: str | None


@dataclass(slots=True)
class Scalar(Node):
    """style: '' plain, or one of ' " | >; an absent value is null with start = end, behind its key's colon."""

    value: Any
    style: str


@dataclass(slots=True)
class Alias(Node):
    """A value written elsewhere."""

    target: Node


@dataclass(slots=True)
class Sequence(Node):
    """flow: written in brackets."""

    flow: bool
    items: list[Node] = field(default_factory=list)


@dataclass(slots=True)
class Entry:
    """A key and its value. start, end, line, column: of the key."""

    key: str
    start: int
    end: int
    column: int
    line: int
    value: Node


@dataclass(slots=True)
class Mapping(Node):
    """flow: written in braces. own: the entries written here; merges: values of `<<`; entries: own and merged ones."""

    flow: bool
    own: dict[str, Entry] = field(default_factory=dict)
    merges: list[Node] = field(default_factory=list)
    entries: dict[str, Entry] = field(default_factory=dict)


def target(node: Node) -> Node:
    """The node itself, or what an alias stands for."""
    while isinstance(node, Alias):
        node = node.target
    return node


def plain(node: Node | None, seen: Callable[[KeyPath, int], None], limit: int = MAX_NODES) -> tuple[Any, int]:
    """A tree as dicts, lists and scalars, aliases and merges written out, Vaulted where only Ansible can read.

    seen: is told the path and line of every key. Returns the data and how many values it has. Errors: Refused, when
    there are more than `limit` or they nest too deeply.
    """
    count = 0

    def walk(node: Node, path: KeyPath) -> Any:
        nonlocal count
        count += 1
        if count > limit or len(path) > MAX_DEPTH:
            message = "too many values or nested too deeply."
            raise Refused([Fault("C06", (), node.line, message, "write the values out, without aliases")])
        node = target(node)
        if isinstance(node, Mapping):
            out = {}
            for key, entry in node.entries.items():
                seen((*path, key), entry.line)
                out[key] = walk(entry.value, (*path, key))
            return out
        if isinstance(node, Sequence):
            return [walk(item, (*path, index)) for index, item in enumerate(node.items)]
        assert isinstance(node, Scalar)
        return node.value

    return (None if node is None else walk(node, ())), count
