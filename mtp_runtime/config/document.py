"""A YAML file as a tree of nodes that know where they stand in the text.

Read with the parser that Ansible has (PyYAML, libyaml where it is built in), so both see one structure. Nothing is
constructed but text, numbers, booleans and null (scalars.py); depth and size are bounded.
"""

from __future__ import annotations

from bisect import bisect_right
from hashlib import sha256
from typing import Any, Final, NoReturn

import yaml

from .nodes import MAX_DEPTH, MAX_NODES, Alias, Entry, Fault, Mapping, Node, Refused, Scalar, Sequence, Vaulted, target
from .problems import HIDDEN, KeyPath, is_secret
from .scalars import MAX_DIGITS, TooLong, read_scalar, unmistakable
from .syntax_hints import UNREADABLE, likely_reason, line_starts

LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# More than anybody repairs before the next check.
MAX_FAULTS = 100
MERGE = "<<"
VAULT_TAGS = ("!vault", "!vault-encrypted")
VAULT_HEAD = "$ANSIBLE_VAULT;"


def parse(text: str) -> tuple[Node | None, list[Fault]]:
    """The tree of a text's one document, None when there is none, and what is wrong with single values and keys.

    Errors: Refused, where there can be no tree.
    """
    return _Builder(text).build()


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
        self.starts = line_starts(text)

    def build(self) -> tuple[Node | None, list[Fault]]:
        found = UNREADABLE.search(self.text)
        if found:
            self._stop(found.start(), f"an unreadable character, U+{ord(found[0]):04X}", "remove it")
        try:
            for event in yaml.parse(self.text, Loader=LOADER):
                self._take(event)
        except yaml.MarkedYAMLError as error:
            index, message, remedy = likely_reason(self.text, self.starts, error)
            self._stop(index, message, remedy)
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

    def _name(self, written: str) -> str:
        """An anchor, alias or tag as messages name it: an unquoted password may look like one."""
        return HIDDEN if is_secret(*self._path()) else written

    def _is_key(self) -> bool:
        return bool(self.open) and isinstance(self.open[-1][0], Mapping) and self.keys[-1] is None

    def _alias(self, event: Any) -> None:
        start, name = event.start_mark.index, self._name(event.anchor)
        found = self.anchors.get(event.anchor)
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
        tag = self._name(str(event.tag).replace("tag:yaml.org,2002:", "!!"))
        self._stop(event.start_mark.index, f"the tag {tag} is not read here", "write the value without the tag")

    def _plain(self, event: Any, path: KeyPath, line: int) -> Any:
        value, trouble = read_scalar(event.value)
        if isinstance(value, TooLong):
            message = f"a number of {len(event.value)} digits."
            self._fault(Fault("C03", path, line, message))
        elif trouble and is_secret(*path):
            self._fault(Fault("C02", path, line, "it is no text to every reader of YAML.", "write it in quotes"))
        elif trouble:
            remedy = f"write {unmistakable(event.value, value)}"
            self._fault(Fault("C02", path, line, f"it has two meanings: {trouble}.", remedy, event.value))
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
            name = self._name(node.anchor or "")
            self._stop(node.start, f"the anchor &{name} is written twice", "give one of the two another name")
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
