"""The value of a plain YAML scalar, where everybody reads the same one.

Ansible reads YAML 1.1 (PyYAML), editors and most other programs 1.2. A scalar on which the two disagree has no value
here: `yes` (true or a text), `010` (8 or 10), `1_000`, `1e3` and `12:30` (a number or a text), `2026-01-31` (a date or
a text).
"""

from __future__ import annotations

import re
from datetime import date, datetime
from typing import Any

import yaml

MAX_DIGITS = 40
_NULL = re.compile(r"null|Null|NULL|~|")
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INF_OR_NAN = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


class TooLong(int):
    """Stands for a number with more digits than anybody writes."""


def read_scalar(text: str) -> tuple[Any, str | None]:
    """A plain scalar's value, and what is wrong with it: None, or half a sentence when it has two meanings."""
    ours, theirs = _value_1_2(text), _value_1_1(text)
    if isinstance(ours, TooLong) or (type(ours) is type(theirs) and repr(ours) == repr(theirs)):
        return ours, None
    other = "another " if _kind(ours) == _kind(theirs) else "a "
    return ours, f"Ansible reads {text[:MAX_DIGITS]} as a {_kind(theirs)}, YAML 1.2 as {other}{_kind(ours)}"


def _value_1_2(text: str) -> Any:
    """A plain scalar by the core schema of YAML 1.2."""
    if _NULL.fullmatch(text):
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.fullmatch(text):
        if len(text) > MAX_DIGITS:
            return TooLong()
        return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
    if _INF_OR_NAN.fullmatch(text):
        return float(text.lower().replace(".", ""))
    return float(text) if _FLOAT.fullmatch(text) else text


_RESOLVER: Any = yaml.resolver.Resolver()
_CONSTRUCTOR: Any = yaml.constructor.SafeConstructor()


def _value_1_1(text: str) -> Any:
    """A plain scalar as Ansible reads it; a date is a date, and an object where nothing can be read."""
    tag = _RESOLVER.resolve(yaml.ScalarNode, text, (True, False))
    if tag == "tag:yaml.org,2002:str":
        return text
    try:
        return object() if len(text) > MAX_DIGITS else _CONSTRUCTOR.construct_object(yaml.ScalarNode(tag, text))
    except (yaml.YAMLError, ArithmeticError, LookupError, ValueError):
        return object()


def _kind(value: Any) -> str:
    kinds = {bool: "boolean", int: "number", float: "number", str: "text", date: "date", datetime: "date"}
    return kinds.get(type(value), "value of its own")


def unmistakable(text: str, value: Any) -> str:
    """How to write what was probably meant."""
    if text.lower() in ("yes", "on", "no", "off"):
        return f'{"true" if text.lower() in ("yes", "on") else "false"}, or "{text}" in quotes where a text belongs'
    if isinstance(value, int):
        return f'{value}, or "{text}" in quotes where a text belongs'
    return f'"{text}" in quotes where a text belongs, or the number in full, as 1000 or 0.5'
