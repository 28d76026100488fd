"""Reads an inventory and remembers file and line of every key.

Errors: ConfigError with all of C01..C07 at once, over all files: one that cannot be read hides nothing of the others.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from .document import VAULT_HEAD, parse
from .files import MAX_FILE_BYTES, PASSED_OVER, SECTIONS, VARS_FOLDER, Files, on_disk, shown
from .keys import type_at
from .nodes import Fault, Mapping, Refused, Vaulted, plain
from .problems import ConfigError, KeyPath, Problem, dotted
from .scalars import MAX_DIGITS
from .schema import Cluster, HostVars
from .schema_problems import MAX_PROBLEMS, REMEDIES, Places, schema_problems

__all__ = ["REMEDIES", "VARS_FOLDER", "Places", "load", "load_files", "shown"]

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
# How Ansible reaches a host is no part of the plan, so nobody needs to read it here.
MAY_BE_VAULTED = {n for n in HostVars.model_fields if n.startswith("ansible_")} - {"ansible_host", "ansible_connection"}
_STRAY = "move its keys there, or remove it: Ansible reads every file of an inventory but hidden ones and " + ", ".join(
    f"*{ending}" for ending in PASSED_OVER
)
_BYTE_ORDER_MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def load(folder: Path, overrides: dict[str, str] | None = None) -> tuple[Cluster, Places]:
    """The typed cluster of ansible/inventories/<name> and the places of its keys.

    overrides: section -> file text to take instead of the file on disk; section `hosts` is hosts.yml.
    """
    return load_files(on_disk(folder, overrides))


def load_files(files: Files) -> tuple[Cluster, Places]:
    """The typed cluster of an inventory's files, wherever they come from."""
    if not NAME.fullmatch(files.name):
        message = f"{files.name!r} is not a usable cluster name."
        raise ConfigError([Problem("C03", files.name, "(folder)", message, "use letters, digits, '-' and '_'")])
    problems: list[Problem] = []
    places = Places()
    data: dict[str, Any] = {"name": files.name}
    for section in ("hosts", *SECTIONS):
        _read(files, section, data, places, problems)
    for name in files.strays:
        read = f"hosts.yml and {VARS_FOLDER}/{{{','.join(SECTIONS)}}}.yml"
        message = f"this file is not part of a cluster; only {read} are read."
        problems.append(Problem("C01", name, "(file)", message, _STRAY))
    cluster = _validate(data, places, problems)
    if problems or cluster is None:
        raise ConfigError(_sorted(problems))
    return cluster, places


def read_text(files: Files, section: str) -> str:
    """A file's text as it is, line ends and byte order mark included. Errors: OSError, Refused."""
    content = files.read(section)

    def refuse(message: str, remedy: str) -> Refused:
        return Refused([Fault("C06", (), 1, message, remedy)])

    if len(content) > MAX_FILE_BYTES:
        raise refuse(f"larger than {MAX_FILE_BYTES} bytes.", "write the values out in fewer lines")
    if content[:2] in _BYTE_ORDER_MARKS:
        raise refuse(f"it is {_BYTE_ORDER_MARKS[content[:2]]}, not UTF-8.", "save the file as UTF-8")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        message = f"not UTF-8: byte 0x{content[error.start]:02x} in line {line}."
        raise Refused([Fault("C06", (), line, message, "save the file as UTF-8")]) from None
    if text.lstrip("\ufeff").startswith(VAULT_HEAD):
        remedy = "decrypt it, and vault single values (ansible-vault encrypt_string)"
        raise refuse("the whole file is vaulted: it cannot be checked.", remedy)
    return text


def _read(files: Files, section: str, data: dict[str, Any], places: Places, problems: list[Problem]) -> None:
    """One file's content into `data`, or what is wrong with it into `problems`."""
    file = files.shown(section)
    prefix: KeyPath = ("hosts",) if section == "hosts" else ()
    found: dict[KeyPath, int] = {}
    try:
        tree, faults = parse(read_text(files, section).removeprefix("\ufeff"))
        value, _ = plain(tree, found.__setitem__)
    except Refused as error:
        problems += [_fault(fault, file) for fault in error.faults]
        return
    except OSError as error:
        message = "the file is missing." if isinstance(error, FileNotFoundError) else f"{error.strerror}."
        problems.append(Problem("C04", file, "(file)", message, REMEDIES["C04"]))
        return
    if not isinstance(tree, Mapping):
        kind = "nothing" if value is None else type(value).__name__
        problems.append(Problem("C02", file, "(file)", f"expected a mapping, found {kind}.", REMEDIES["C02"], 1))
        return
    places.add(prefix or (section,), file, 1)
    for path, line in found.items():
        places.add((*prefix, *path), file, line)
    problems += [_fault(_as_text(fault, prefix), file) for fault in faults]
    problems += _vaulted(value, (), file, places, prefix)
    if section == "hosts":
        data["hosts"] = value
        return
    for key in value:
        if key != section:
            message = f"unknown key; {section}.yml holds the one key {section!r}."
            problems.append(Problem("C01", file, dotted((key,)), message, REMEDIES["C01"], found[key,]))
    if section in value:
        data[section] = value[section]
    else:
        problems.append(Problem("C07", file, section, "the key is missing.", REMEDIES["C07"], 1))


def _as_text(fault: Fault, prefix: KeyPath) -> Fault:
    """The fault with the remedy for a key that takes a text, where it is at one."""
    kind = type_at((*prefix, *fault.path)) if fault.written else None
    if kind is None or len(fault.written or "") > MAX_DIGITS:
        return fault
    try:
        TypeAdapter(kind).validate_python(fault.written, strict=True)
    except ValidationError:
        return fault
    return replace(fault, remedy=f'write "{fault.written}" in quotes: {fault.path[-1]} takes a text')


def _fault(fault: Fault, file: str) -> Problem:
    return Problem(
        fault.rule, file, dotted(fault.path), fault.message, fault.remedy or REMEDIES[fault.rule], fault.line
    )


def _vaulted(value: Any, path: KeyPath, file: str, places: Places, prefix: KeyPath) -> Iterator[Problem]:
    """Puts null in the place of every vaulted value; a problem where the plan would need it."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        here = (*path, key)
        if not isinstance(inner, Vaulted):
            yield from _vaulted(inner, here, file, places, prefix)
            continue
        value[key] = None
        unknown = type_at((*prefix, *here)) is None
        if not unknown and not (prefix and len(here) > 2 and "hosts" in here[:-2] and key in MAY_BE_VAULTED):
            message = "the value is vaulted, but the plan needs it: it cannot be checked."
            remedy = f"write it readably; in hosts.yml these may be vaulted: {', '.join(sorted(MAY_BE_VAULTED))}"
            yield Problem("C02", file, dotted(here), message, remedy, places.find((*prefix, *here))[1])


def _validate(data: dict[str, Any], places: Places, problems: list[Problem]) -> Cluster | None:
    """The typed cluster; schema errors become problems."""
    try:
        return Cluster.model_validate(data)
    except ValidationError as error:
        problems += schema_problems(error, data, places, problems)
        return None


def _sorted(problems: list[Problem]) -> list[Problem]:
    """By place; at most MAX_PROBLEMS and how many more there are."""
    found = sorted(problems, key=lambda p: (p.file, p.line, p.rule, p.key))
    if len(found) <= MAX_PROBLEMS + 1:
        return found
    last = found[MAX_PROBLEMS]
    more = f"{len(found) - MAX_PROBLEMS} more problems from here on."
    return [*found[:MAX_PROBLEMS], Problem(last.rule, last.file, "(file)", more, "repair those above first", last.line)]
