"""`key=value` of the command line: which key of the schema it names, and which value of the key's type it gives.

The value is YAML (`3`, `true`, `null`, `[2, 4]`, `'"0.32.0"'`); a key that takes a text also takes what YAML reads as
something else (`topology.release=0.32`). Nothing behind the `=` takes the key out of the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

from .document import VAULT_HEAD, parse
from .files import SECTIONS
from .keys import keys_at, type_at
from .nodes import Refused, plain
from .problems import ConfigError, KeyPath, Problem, printable
from .schema_problems import REMEDIES
from .text_edit import REMOVED

HERE = "command line"
MAX_LENGTH = 10_000


@dataclass(frozen=True)
class Assignment:
    """One value for one key. path: inside the section's file; value: REMOVED takes the key out."""

    key: str
    section: str
    path: KeyPath
    value: Any

    @classmethod
    def parse_all(cls, words: list[str], data: dict[str, Any]) -> list[Assignment]:
        """Every word as an assignment. data: section -> content of its file. Errors: ConfigError, all at once."""
        found: list[Assignment] = []
        problems: list[Problem] = []
        for word in words:
            try:
                found.append(_one(word, data))
            except _Unusable as error:
                problems.append(error.problem)
        for number, one in enumerate(found):
            for other in found[:number]:
                if one.section == other.section and one.path[: len(other.path)] == other.path[: len(one.path)]:
                    message = f"{other.key} is given too." if other.key != one.key else "it is given twice."
                    problems.append(Problem("C05", HERE, one.key, message, REMEDIES["C05"]))
        if problems:
            raise ConfigError(problems)
        return found


class _Unusable(Exception):
    def __init__(self, rule: str, key: str, message: str, remedy: str) -> None:
        super().__init__(message)
        shown = printable(key if len(key) <= 100 else key[:97] + "...")
        self.problem = Problem(rule, HERE, shown, message, remedy)


def _one(word: str, data: dict[str, Any]) -> Assignment:
    key, equals, text = word.partition("=")
    key = key.strip()
    if not equals or not key:
        example = "as in mtp.num_speculative_tokens=2; nothing behind the = takes the key out"
        raise _Unusable("C02", word, "this is no assignment.", f"write key=value, {example}")
    if len(word) > MAX_LENGTH or not word.isprintable() or VAULT_HEAD in word:
        remedy = "write it into the file itself"
        raise _Unusable("C02", key, "a value that no command line can carry, or that is vaulted.", remedy)
    section, path = _path(key, data)
    kind = type_at(("hosts", *path) if section == "hosts" else path) if section else None
    if kind is None:
        raise _Unusable("C01", key, _unknown(key), REMEDIES["C01"])
    return Assignment(key, section, path, _value(key, text.strip(), kind, path))


def _path(key: str, data: dict[str, Any]) -> tuple[str, KeyPath]:
    """Section ('' where there is none) and path of a key; the names of hosts may have dots in them."""
    parts = key.split(".")
    if parts[0] != "all":
        return (parts[0] if parts[0] in SECTIONS else ""), tuple(parts)
    at = 2 if parts[1:2] == ["hosts"] else 4 if parts[1:2] == ["children"] and parts[3:4] == ["hosts"] else 0
    if not at or len(parts) <= at:
        return "hosts", tuple(parts)
    known = data["hosts"]
    for part in parts[:at]:
        known = known.get(part) if isinstance(known, dict) else None
    known = [str(host) for host in known] if isinstance(known, dict) else []
    whole, name = ".".join(parts[at:]), ".".join(parts[at:-1])
    if whole in known:
        return "hosts", (*parts[:at], whole)
    if name not in known:
        near, group = get_close_matches(name or whole, known, n=1), _group_with(name or whole, data["hosts"])
        hint = f"did you mean {near[0]}?" if near else f"hosts there: {', '.join(known) or 'none'}."
        hint = f"did you mean all.children.{group}.hosts?" if group else hint
        message = f"there is no host {printable(name or whole)} in {'.'.join(parts[:at])}; {hint}"
        raise _Unusable("C01", key, message, "write a new host into hosts.yml itself, and into its groups")
    return "hosts", (*parts[:at], name, parts[-1])


def _group_with(host: str, hosts: Any) -> str | None:
    """The first group that lists a host; None where none does. hosts: the data of hosts.yml, whatever it is."""
    for part in ("all", "children"):
        hosts = hosts.get(part) if isinstance(hosts, dict) else None
    groups = hosts.items() if isinstance(hosts, dict) else ()
    for name, group in groups:
        if isinstance(group, dict) and isinstance(group.get("hosts"), dict) and host in group["hosts"]:
            return str(name)
    return None


def _unknown(key: str) -> str:
    """Names the keys that were probably meant, or those of the place."""
    everything = all_keys()
    parts = key.split(".")
    if parts[0] == "hosts" and type_at(tuple(parts)):  # the file, where a section stands for its own
        return f"unknown key; did you mean {key.removeprefix('hosts.')}?"
    near = [one for one in everything if one.rsplit(".", 1)[-1] == parts[-1]][:4]
    near += [one for one in get_close_matches(key[:100], everything, n=3) if one not in near]
    if near:
        return f"unknown key; did you mean {' or '.join(near[:4])}?"
    while parts and not keys_at(tuple(parts)):
        parts.pop()
    return f"unknown key; {printable('.'.join(parts))} has: {', '.join(keys_at(tuple(parts)))}." if parts else _SECTIONS


_SECTIONS = f"unknown key; keys begin with {', '.join(SECTIONS)} or all.hosts."


def all_keys() -> list[str]:
    """Every dotted key of the variables files, those of groups too; `all.hosts.HOST.` stands for a host's."""

    def below(path: KeyPath) -> list[str]:
        names = keys_at(path)
        return [found for name in names for found in (".".join(map(str, (*path, name))), *below((*path, name)))]

    hosts = [f"all.hosts.HOST.{name}" for name in keys_at(("hosts", "all", "hosts", "HOST"))]
    return [*(found for section in SECTIONS for found in below((section,))), *hosts]


def _value(key: str, text: str, kind: Any, path: KeyPath) -> Any:
    """The value of the key's type; what fits no type goes into the file's text, where the schema says why."""
    if not text:
        return REMOVED
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    choices = [found for found in _readings(text, kind) if not isinstance(found, dict)] or [text]
    if _is_group(kind) and choices[0] is not None:
        inner = keys_at(("hosts", *path) if path[0] == "all" else path)
        message = f"it is a group of keys: {', '.join(inner)}."
        raise _Unusable(
            "C02", key, message, "set its keys, each by its own name; null or nothing takes all of them out"
        )
    for found in choices:
        try:
            return adapter.validate_python(found, strict=True)
        except ValidationError:
            continue
    if text.lower() in ("yes", "no", "on", "off") and bool in _parts(kind):
        message = f"{text} has two meanings in YAML, a boolean and a text; booleans are true and false."
        wanted = str(text.lower() in ("yes", "on")).lower()
        raise _Unusable("C02", key, message, f"write {key}={wanted}")
    return choices[0]


def _readings(text: str, kind: Any) -> list[Any]:
    """What the text may mean, the likeliest first: YAML, a list without its brackets, a text."""
    found = []
    for form in (text, f"[{text}]") if _has(kind, list) and not text.startswith("[") else (text,):
        try:
            tree, faults = parse(form)
        except Refused:
            continue
        if not faults:
            found.append(plain(tree, lambda path, line: None)[0])
    return [*found, text]


def _is_group(kind: Any) -> bool:
    return _has(kind, dict) or any(isinstance(one, type) and issubclass(one, BaseModel) for one in _parts(kind))


def _has(kind: Any, container: type) -> bool:
    return any(get_origin(one) is container for one in _parts(kind))


def _parts(kind: Any) -> list[Any]:
    """The alternatives of a type, annotations taken off."""
    if get_origin(kind) in (list, dict) or isinstance(kind, type):
        return [kind]
    return [kind, *(found for one in get_args(kind) for found in _parts(one))]
