"""A YAML file as a tree of nodes that know where they stand in the text.

Read with the parser that Ansible has (PyYAML, libyaml where it is built in), so both see one structure. Nothing is
constructed but text, numbers, booleans and null (scalars.py); depth and size are bounded.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final, NoReturn

import yaml

from .problems import KeyPath
from .scalars import MAX_DIGITS, TooLong, read_scalar, unmistakable

LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MAX_DEPTH = 20
# Aliases can make a small file huge; no inventory comes near this.
MAX_NODES = 100_000
# More than anybody repairs before the next check.
MAX_FAULTS = 100
MERGE = "<<"
VAULT_TAGS = ("!vault", "!vault-encrypted")
VAULT_HEAD = "$ANSIBLE_VAULT;"

_UNREADABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029\ufffe\uffff]")
_BREAK = re.compile(r"\r\n|\n|\r")
# What looks like something else: from a word processor, a web page, or a keyboard of another script.
_LOOKALIKES = {
    "：": "':'",
    "，": "','",
    "\u3000": "a space",
    "\u00a0": "a space",
    "\u200b": "nothing",
    "\ufeff": "nothing",
    "“": "'\"'",
    "”": "'\"'",
    "‘": '"\'"',
    "’": '"\'"',
}


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
    """What is wrong with a text. path: the key, () for the file; remedy: None, the rule's."""

    rule: str
    path: KeyPath
    line: int
    message: str
    remedy: str | None = None


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


def parse(text: str) -> tuple[Node | None, list[Fault]]:
    """The tree of a text's one document, None when there is none, and what is wrong with single values and keys.

    Errors: Refused, where there can be no tree.
    """
    return _Builder(text).build()


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


class _Builder:
    """One text on its way to a tree: a stack instead of recursion."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.faults: list[Fault] = []
        self.anchors: dict[str, Node] = {}
        self.root: Node | None = None
        # Open collections with their path and, for a mapping, the key that waits for its value.
        self.open: list[tuple[Mapping | Sequence, KeyPath]] = []
        self.keys: list[Entry | None] = []
        self.count = 0
        self.starts = [0, *(found.end() for found in _BREAK.finditer(text))]

    def build(self) -> tuple[Node | None, list[Fault]]:
        found = _UNREADABLE.search(self.text)
        if found:
            self._stop(found.start(), f"an unreadable character, U+{ord(found[0]):04X}", "remove it")
        try:
            for event in yaml.parse(self.text, Loader=LOADER):
                self._take(event)
        except yaml.MarkedYAMLError as error:
            self._syntax(error)
        except (yaml.YAMLError, ArithmeticError, LookupError, RecursionError, ValueError) as error:
            # Without libyaml the parser lets plain exceptions out on odd escapes and directives.
            self._stop(0, f"not valid YAML: {type(error).__name__}")
        return self.root, self.faults

    def line(self, index: int) -> int:
        return bisect_right(self.starts, index)

    def _stop(self, index: int, message: str, remedy: str | None = None) -> NoReturn:
        """Errors: Refused, with what was found before."""
        raise Refused([*self.faults, Fault("C06", (), self.line(index), f"{message}.", remedy)])

    def _fault(self, fault: Fault) -> None:
        if len(self.faults) >= MAX_FAULTS:
            raise Refused([*self.faults, Fault("C06", (), fault.line, "more of the same.", "repair those above first")])
        self.faults.append(fault)

    def _syntax(self, error: Any) -> None:
        """A syntax error, with the likely reason where the text shows it."""
        mark, context = error.problem_mark or error.context_mark, error.context_mark
        index = min(mark.index if mark else 0, max(len(self.text) - 1, 0))
        line = self.line(index)
        for number, shown in self._content_above(line):
            if number == line and "\t" in shown:
                self._stop(index, "a tab where YAML wants spaces", "put spaces in the place of the tab")
            for char in shown:
                if char in _LOOKALIKES:
                    name = char if char.isprintable() and not char.isspace() else f"U+{ord(char):04X}"
                    at, meant = self.starts[number - 1], _LOOKALIKES[char]
                    self._stop(at, f"not valid YAML; it has {name} in the place of {meant}", f"write {meant}")
        problem = error.problem or error.context or "syntax error"
        if context is not None and self.line(context.index) != line and "block" not in error.context:
            # What is not closed is found out at the end of the file.
            index = context.index
            problem = f"{problem} in line {line}, {error.context} that begins here"
        self._stop(index, f"not valid YAML: {problem}")

    def _content_above(self, line: int) -> Iterator[tuple[int, str]]:
        """A line and the two above it that are more than a comment, with their numbers, without their comments."""
        found = 0
        while line > 0 and found < 3:
            end = self.starts[line] if line < len(self.starts) else len(self.text)
            shown = self.text[self.starts[line - 1] : end].split("#")[0].rstrip()
            if shown:
                yield line, shown
                found += 1
            line -= 1

    def _take(self, event: Any) -> None:
        if isinstance(event, yaml.DocumentStartEvent) and self.root is not None:
            at: Any = event.start_mark
            self._stop(at.index, "a second document begins here", "keep one document, without ---")
        elif isinstance(event, yaml.AliasEvent):
            self._alias(event)
        elif isinstance(event, yaml.ScalarEvent):
            self._scalar(event)
        elif isinstance(event, yaml.CollectionStartEvent):
            self._begin(event)
        elif isinstance(event, yaml.CollectionEndEvent):
            self._end(event)

    def _path(self) -> KeyPath:
        """Of the node that comes next."""
        if not self.open:
            return ()
        parent, path = self.open[-1]
        if isinstance(parent, Sequence):
            return (*path, len(parent.items))
        entry = self.keys[-1]
        return path if entry is None else (*path, entry.key)

    def _is_key(self) -> bool:
        return bool(self.open) and isinstance(self.open[-1][0], Mapping) and self.keys[-1] is None

    def _alias(self, event: Any) -> None:
        start, name = event.start_mark.index, event.anchor
        found = self.anchors.get(name)
        if found is None:
            self._stop(start, f"the alias *{name} has no anchor &{name} above it", "write the value out")
        elif any(found is node for node, _ in self.open):
            self._stop(start, f"the alias *{name} stands inside what it stands for", "write the value out")
        elif self._is_key():
            self._stop(start, "an alias as a key", "write the key out")
        else:
            self._add(Alias(start, event.end_mark.index, self.line(start), None, found))

    def _scalar(self, event: Any) -> None:
        start, end, style = event.start_mark.index, event.end_mark.index, event.style or ""
        line, path = self.line(start), self._path()
        value: Any = event.value
        if event.tag in VAULT_TAGS and not self._is_key():
            if not value.lstrip().startswith(VAULT_HEAD):
                message = "a value tagged !vault that `ansible-vault encrypt_string` did not write."
                self._fault(Fault("C02", path, line, message, "encrypt it again, or remove the tag"))
            value = Vaulted(sha256(value.strip().encode()).hexdigest())
        elif event.tag is not None:
            self._tag(event)
        elif VAULT_HEAD in value:
            message = "a vaulted text without the tag !vault: nobody would decrypt it."
            self.faults.append(
                Fault("C02", path, line, message, "write it as `ansible-vault encrypt_string` prints it")
            )
        elif self._is_key():
            self._key(event, style)
            return
        elif not style:
            value = self._plain(event, path, line)
        if style in ("|", ">"):
            # libyaml counts the empty lines behind a block into it.
            end = start + len(self.text[start:end].rstrip())
        self._add(Scalar(start, end, line, event.anchor, value, style))

    def _tag(self, event: Any) -> None:
        tag = str(event.tag).replace("tag:yaml.org,2002:", "!!")
        self._stop(event.start_mark.index, f"the tag {tag} is not read here", "write the value without the tag")

    def _plain(self, event: Any, path: KeyPath, line: int) -> Any:
        value, trouble = read_scalar(event.value)
        if isinstance(value, TooLong):
            message = f"a number of {len(event.value)} digits."
            self._fault(Fault("C03", path, line, message))
        elif trouble:
            remedy = f"write {unmistakable(event.value, value)}"
            self._fault(Fault("C02", path, line, f"it has two meanings: {trouble}.", remedy))
        return value

    def _key(self, event: Any, style: str) -> None:
        parent, path = self.open[-1]
        assert isinstance(parent, Mapping)
        start, key = event.start_mark.index, event.value
        line = self.line(start)
        merge = not style and key == MERGE
        if not style and not merge:
            value, trouble = read_scalar(key)
            if trouble or not isinstance(value, str):
                message = f"the key {key[:MAX_DIGITS] or '(nothing)'} is not a text to every reader of YAML."
                self._fault(Fault("C02", (*path, key), line, message, f'write "{key[:MAX_DIGITS]}" in quotes'))
        if parent.merges if merge else key in parent.own:
            self._fault(Fault("C05", (*path, key), line, "the key is written twice."))
        self.keys[-1] = Entry(key, start, event.end_mark.index, start - self.starts[line - 1], line, _NOTHING)

    def _begin(self, event: Any) -> None:
        start, path = event.start_mark.index, self._path()
        if self._is_key():
            self._stop(start, "a list or mapping as a key; templates are not read here", "write the key as a text")
        if event.tag is not None:
            self._tag(event)
        if len(self.open) >= MAX_DEPTH:
            self._stop(start, "nested too deeply")
        kind = Mapping if isinstance(event, yaml.MappingStartEvent) else Sequence
        node = kind(start, event.end_mark.index, self.line(start), event.anchor, bool(event.flow_style))
        self._add(node)
        self.open.append((node, path))
        self.keys.append(None)

    def _end(self, event: Any) -> None:
        node, _ = self.open.pop()
        self.keys.pop()
        if isinstance(node, Mapping):
            self._close(node)
        if node.flow:
            node.end = event.end_mark.index
        else:
            inside = node.items if isinstance(node, Sequence) else [entry.value for entry in node.own.values()]
            merges = node.merges if isinstance(node, Mapping) else []
            node.end = max((one.end for one in (*inside, *merges)), default=node.end)

    def _close(self, node: Mapping) -> None:
        """Its entries: merged ones first, an earlier merge over a later one, its own over all."""
        if not node.merges:
            node.entries = node.own
            return
        (given,) = node.merges
        inner = target(given)
        node.merges = inner.items if isinstance(inner, Sequence) else [given]
        for one in reversed(node.merges):
            base = target(one)
            if not isinstance(base, Mapping):
                self._stop(given.start, "<< takes a mapping or a list of mappings", "name an anchor of a mapping")
            node.entries.update(base.entries)
        node.entries.update(node.own)
        self._count(node.start, len(node.entries))

    def _count(self, start: int, more: int) -> None:
        self.count += more
        if self.count > MAX_NODES:
            self._stop(start, "too many values", "write the values out, without aliases")

    def _add(self, node: Node) -> None:
        """Puts a value where it belongs."""
        self._count(node.start, 1)
        if node.anchor in self.anchors:
            self._stop(node.start, f"the anchor &{node.anchor} is written twice", "give one of the two another name")
        if node.anchor:
            self.anchors[node.anchor] = node
        if not self.open:
            self.root = node
            return
        parent, _ = self.open[-1]
        if isinstance(parent, Sequence):
            parent.items.append(node)
            return
        entry = self.keys[-1]
        assert entry is not None
        self.keys[-1] = None
        entry.value = node
        if entry.key == MERGE and self.text.startswith(MERGE, entry.start):
            parent.merges = [node]
        else:
            parent.own[entry.key] = entry


_NOTHING = Node(0, 0, 0, None)
