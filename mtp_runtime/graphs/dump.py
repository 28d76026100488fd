"""Reads a graph as torchair writes it (dynamo.pbtxt): nodes, their attributes, shapes, and where each input comes from.

Needs neither torch nor protobuf. In such a file every attribute is a quoted text that is itself protobuf text; a
dimension of -1 is one that torchair does not know, and one such input makes the whole graph dynamic.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

ATTENTION = ("FusedInferAttentionScore", "FusedInferAttentionScoreV2")
UNKNOWN = -1
_SCALAR = re.compile(r"(i|f|b|s): (.*)\n?")
_NUMBERS = {"i": int, "f": float}


class DumpError(ValueError):
    """The text is no such graph; the message says what is odd."""


@dataclass(frozen=True, slots=True)
class Shape:
    """dtype as GE calls it, such as DT_BF16; dims: -1 is unknown."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def dynamic(self) -> bool:
        return UNKNOWN in self.dims


@dataclass(slots=True)
class Node:
    """One operator. inputs: name -> node it comes from, absent ones left out; shapes: "i:NAME" of an input, "o:NAME" of
    an output; attributes: single values; value: a constant's, as its text has it."""

    name: str = ""
    op: str = ""
    inputs: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    value: Any = None


def read(text: str) -> dict[str, Node]:
    """Name -> node, in the order of the file. Raises DumpError."""
    nodes = [_node(part) for part in re.split(r"^node \{$", text, flags=re.MULTILINE)[1:]]
    if not nodes or not all(node.name and node.op for node in nodes):
        raise DumpError("no nodes with a name and an operator in it")
    return {node.name: node for node in nodes}


def dynamic_inputs(graph: dict[str, Node]) -> dict[str, Shape]:
    """Inputs of the graph with a dimension that is not known: what to mark static."""
    return {
        node.name: shape
        for node in graph.values()
        if node.op in ("Data", "RefData")
        for shape in node.shapes.values()
        if shape.dynamic
    }


def inputs(graph: dict[str, Node]) -> dict[str, Shape]:
    """Every input of the graph."""
    return {node.name: node.shapes["o:y"] for node in graph.values() if node.op in ("Data", "RefData")}


def dynamic(graph: dict[str, Node]) -> list[str]:
    """Every place with a dimension that is not known, as "NODE i:INPUT" and "NODE o:OUTPUT"."""
    return [f"{node.name} {place}" for node in graph.values() for place, shape in node.shapes.items() if shape.dynamic]


def attention_calls(graph: dict[str, Node]) -> list[dict[str, Any]]:
    """Attributes of each attention call, and its length lists where they are constants of the graph (else None)."""
    return [_call(graph, node) for node in graph.values() if node.op in ATTENTION]


def _call(graph: dict[str, Node], node: Node) -> dict[str, Any]:
    lists = ("actual_seq_lengths", "actual_seq_lengths_kv")
    sources = {name: graph.get(node.inputs.get(name, "")) for name in lists}
    return {**node.attributes, **{name: None if made is None else made.value for name, made in sources.items()}}


def _node(text: str) -> Node:
    node, sources = Node(), []
    attributes = dict(_attributes(text))
    for line in text.splitlines():
        word, _, rest = line.strip().partition(": ")
        if line.startswith("    ") and not line.startswith("     ") and word in ("name", "op", "input"):
            given = ast.literal_eval(rest)
            if word == "input":
                sources.append(given)
            else:
                setattr(node, word, given)
    names = re.findall(r'^  s: "(.*)"$', attributes.get("_input_name_key", ""), re.MULTILINE)
    node.inputs = {name: source.rpartition(":")[0] for name, source in zip(names, sources, strict=False) if source}
    for key, given in attributes.items():
        if key.startswith(("[i]", "[o]")):
            node.shapes[f"{key[1]}:{key[3:]}"] = _shape(given)
        elif key == "_readable_value":
            node.value = _value(_scalar(given))
        elif not key.startswith("_") and (found := _SCALAR.fullmatch(given)):
            node.attributes[key] = _scalar(found.group(0))
    return node


def _attributes(text: str) -> Iterator[tuple[str, str]]:
    """Key and inner text of each attribute."""
    key = ""
    for line in text.splitlines():
        word, _, rest = line.strip().partition(": ")
        if word == "key":
            key = ast.literal_eval(rest)
        elif word == "s" and key:
            yield key, ast.literal_eval(rest)
            key = ""


def _scalar(text: str) -> Any:
    found = _SCALAR.fullmatch(text)
    if found is None:
        return None
    kind, written = found.groups()
    if kind == "b":
        return written == "true"
    return ast.literal_eval(written) if kind == "s" else _NUMBERS[kind](written)


def _value(written: Any) -> Any:
    """A constant: its text where that is no list of numbers."""
    try:
        return ast.literal_eval(written)
    except (ValueError, SyntaxError, TypeError):
        return written


def _shape(text: str) -> Shape:
    """Of a tensor's description. Between operators GE works shapes out itself; torch's, written beside, stands in, its
    symbols as unknown."""
    dtype = re.search(r"^dtype: (\w+)$", text, re.MULTILINE)
    dims = re.search(r"^shape \{\n((?:  dim: -?\d+\n)*)\}", text, re.MULTILINE)
    if dims:
        words = re.findall(r"-?\d+", dims.group(1))
    else:
        torchs = re.search(r"shape=torch\.Size\(\[(.*?)\]\)", text)
        words = [word.strip() for word in torchs.group(1).split(",") if word.strip()] if torchs else []
    numbers = (int(word) if word.lstrip("-").isdigit() else UNKNOWN for word in words)
    return Shape(dtype.group(1) if dtype else "", tuple(numbers))
