"""What is wrong with keys and values, in the operator's words: pydantic's errors as problems C01, C02, C03, C07."""

import re
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from .base_types import PATTERN_WORDS
from .keys import elsewhere, keys_at
from .problems import HIDDEN, KeyPath, Problem, dotted, is_secret, printable
from .values import shown

# More than anybody repairs before the next check.
MAX_PROBLEMS = 100
REMEDIES = {
    "C01": "remove the key or correct its spelling",
    "C02": "write a value of the type named in the message (booleans: true or false; no quotes around numbers)",
    "C03": "choose a value inside the stated limits",
    "C04": "restore the file, or start a new inventory: mtpctl init NAME --from CLUSTER",
    "C05": "keep one of the two",
    "C06": "correct the YAML at that line",
    "C07": "add the key",
    "C08": "name a revision that has the inventory, or --deployed",
}
_RANGE_ERRORS = ("greater_than", "less_than", "too_short", "too_long", "string_pattern", "literal_error", "finite")
# pydantic would name Python's types.
_WANTED = dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "Input should be keys with their values")


_HEAD = "Input should be "


class Places:
    """Key path -> (file, line)."""

    def __init__(self) -> None:
        self._lines: dict[KeyPath, tuple[str, int]] = {}

    def add(self, path: KeyPath, file: str, line: int) -> None:
        """Remembers where a key stands."""
        self._lines[path] = (file, line)

    def find(self, path: KeyPath) -> tuple[str, int]:
        """Where a key stands; for a key that is not written, its nearest parent."""
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path, ("", 0))


def schema_problems(
    error: ValidationError, data: dict[str, Any], places: Places, known: list[Problem]
) -> list[Problem]:
    """Every error of a cluster's data at a key that is not among the `known` problems, each key once.

    A section that is not there is among them: its file could not be read, or has another key.
    """
    reported = {p.key for p in known}
    problems: list[Problem] = []
    found = [item for item in error.errors(include_url=False, include_context=True) if item["loc"][0] in data]
    found = _one_a_value(found, data)
    for number, item in enumerate(found):
        if len(problems) >= MAX_PROBLEMS:
            file, line = places.find(_key_path(item["loc"], data))
            message = f"{len(found) - number} more values or keys are wrong."
            problems.append(Problem("C02", file, "(file)", message, "repair those above first", line))
            break
        problem = _schema_problem(item, data, places)
        if problem.key not in reported:
            problems.append(problem)
            reported.add(problem.key)
    return problems


def _one_a_value(items: list[Any], data: dict[str, Any]) -> list[Any]:
    """The errors with those of the branches of a union, which are about one value, as one that names all of them."""
    first: dict[KeyPath, Any] = {}
    paths = [_key_path(item["loc"], data) for item in items]
    # Lists whose items are wrong: that they are no 'auto' says nothing more.
    lists = {path[:-1] for path in paths if path and isinstance(path[-1], int)}
    for path, item in zip(paths, items, strict=True):
        if path in lists:
            continue
        known = first.setdefault(path, item)
        more = "a list, as in [2, 4]" if item["type"] == "list_type" else item["msg"].removeprefix(_HEAD)
        if known is not item and item["msg"].startswith(_HEAD) and known["msg"].startswith(_HEAD):
            first[path] = {**known, "msg": f"{known['msg']} or {more}"}
    return list(first.values())


def _schema_problem(item: Any, data: dict[str, Any], places: Places) -> Problem:
    """One pydantic error in our words."""
    path = _key_path(item["loc"], data)
    file, line = places.find(path)
    kind, value = item["type"], item.get("input")
    wanted, remedy = _WANTED.get(kind, item["msg"]), None
    if kind == "string_pattern_mismatch":
        wanted, remedy = PATTERN_WORDS.get(item["ctx"]["pattern"], wanted), "write a text of that form"
    if kind == "extra_forbidden":
        rule, message = "C01", _unknown(path)
    elif kind == "missing":
        rule, message = "C07", "the key is missing."
    elif kind.startswith(_RANGE_ERRORS) or kind.endswith(_RANGE_ERRORS):
        rule, message = "C03", f"{wanted}, found {_show(value, path)}."
    else:
        rule, message = "C02", f"{wanted}, found {_show(value, path)}."
        remedy = _unquote(kind, value) or _quote(kind, value)
    # hosts.yml has no top-level key of ours.
    shown_path = path[1:] if path and path[0] == "hosts" else path
    return Problem(rule, file, dotted(shown_path), message, remedy or REMEDIES[rule], line)


def _unquote(kind: str, value: Any) -> str | None:
    """The remedy for a text where a number or a boolean belongs."""
    if not isinstance(value, str):
        return None
    if kind.startswith("bool") and value.lower() in ("true", "false", "yes", "no", "on", "off", "y", "n"):
        return f"write {'true' if value.lower() in ('true', 'yes', 'on', 'y') else 'false'}, without quotes"
    if kind.startswith(("int", "float")) and re.fullmatch(r"\s*[-+]?[0-9]+(\.[0-9]+)?\s*", value[:40]):
        return f"drop the quotes: a number has none, as in {value[:40].strip()}"
    return None


def _quote(kind: str, value: Any) -> str | None:
    """The remedy for a number or a boolean where a text belongs."""
    if kind != "string_type" or not isinstance(value, bool | int | float):
        return None
    return 'put it in quotes: a text that looks like a number or a boolean needs them, as in "0.32.0"'


def _unknown(path: KeyPath) -> str:
    """Names the key that was probably meant, or all keys of that place."""
    known = keys_at(path[:-1])
    if not known:
        return "unknown key."
    near = get_close_matches(str(path[-1])[:100], known, n=1)
    other = elsewhere(path)
    if other:
        return f"unknown key here; did you mean {other}?"
    return f"unknown key; did you mean {near[0]}?" if near else f"unknown key; valid: {', '.join(known)}."


def _key_path(location: tuple[Any, ...], data: Any) -> KeyPath:
    """pydantic's location without the names of union branches: as far as the written data goes, plus a missing key."""
    path: list[str | int] = []
    node = data
    for position, part in enumerate(location):
        in_list = isinstance(node, list) and isinstance(part, int) and part < len(node)
        if in_list or (isinstance(node, dict) and part in node):
            node = node[part]
        elif isinstance(node, dict) and position == len(location) - 1:
            path.append(part)
            break
        else:
            continue
        path.append(part)
    return tuple(path)


def _show(value: Any, path: KeyPath) -> str:
    """The value as the files would have it; a password not, nor what one may hide in, as `ansible_password:x` does."""
    text = shown(value)
    return HIDDEN if is_secret(*path, text) else printable(text)
