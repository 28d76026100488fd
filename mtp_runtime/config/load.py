"""Reads an inventory folder and remembers file and line of every key.

Errors: ConfigError with all of C01..C06 at once; values are only looked at by the schema when the files could be read.
"""

import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.scalarbool import ScalarBoolean

from .problems import ConfigError, KeyPath, Problem, dotted
from .schema import Cluster

HOSTS_FILE = "hosts.yml"
REPOSITORY = Path(__file__).resolve().parents[2]
VARS_FOLDER = "group_vars/all"
SECTIONS = ("model", "topology", "mtp", "serving", "monitoring")
MAX_FILE_BYTES = 1 << 20
# Ansible reads variables from files with these suffixes.
READ_BY_ANSIBLE = ("", ".yml", ".yaml", ".json")
# Aliases can make a small file huge; no inventory comes near this.
MAX_NODES = 100_000
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
REMEDIES = {
    "C01": "remove the key or correct its spelling",
    "C02": "write a value of the type named in the message (booleans: true or false; no quotes around numbers)",
    "C03": "choose a value inside the stated limits",
    "C04": "restore the file; `mtpctl check` lists what an inventory needs",
    "C05": "keep one of the two",
    "C06": "correct the YAML at that line",
    "C07": "add the key",
}
_RANGE_ERRORS = ("greater_than", "less_than", "too_short", "too_long", "string_pattern", "literal_error", "finite")


class TooLarge(Exception):
    """The expanded file has too many nodes or is nested too deeply."""


class Places:
    """Key path -> (file, line)."""

    def __init__(self) -> None:
        self._lines: dict[KeyPath, tuple[str, int]] = {}
        self.nodes = 0

    def add(self, path: KeyPath, file: str, line: int) -> None:
        """Remembers where a key stands."""
        self._lines[path] = (file, line)

    def find(self, path: KeyPath) -> tuple[str, int]:
        """Where a key stands; for a key that is not written, its nearest parent."""
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path, ("", 0))


def load(folder: Path, overrides: dict[str, str] | None = None) -> tuple[Cluster, Places]:
    """The typed cluster and the places of its keys.

    folder: ansible/inventories/<name>. overrides: section -> file text to take instead of the file on disk.
    """
    problems: list[Problem] = []
    places = Places()
    data: dict[str, Any] = {"name": folder.name}
    if not folder.is_dir():
        known = sorted(p.name for p in folder.parent.glob("*") if (p / HOSTS_FILE).is_file())
        message = f"there is no inventory {folder.name!r}; known: {', '.join(known) or 'none'}."
        raise ConfigError([Problem("C04", shown(folder), "(folder)", message, "name one of the known inventories")])
    if not NAME.fullmatch(folder.name):
        message = f"{folder.name!r} is not a usable cluster name."
        raise ConfigError([Problem("C03", shown(folder), "(folder)", message, "use letters, digits, '-' and '_'")])
    hosts = _read(folder / HOSTS_FILE, None, problems)
    if hosts is not None:
        _take(("hosts",), hosts, folder / HOSTS_FILE, data, places, problems)
    for section in SECTIONS:
        file = folder / VARS_FOLDER / f"{section}.yml"
        found = _read(file, (overrides or {}).get(section), problems)
        if found is not None and _only_section(section, found, file, problems):
            _take((), found, file, data, places, problems)
    problems += _strays(folder)
    cluster = None
    if not any(p.rule in ("C04", "C05", "C06") for p in problems):
        cluster = _validate(data, places, problems)
    if problems or cluster is None:
        raise ConfigError(_sorted(problems))
    return cluster, places


def _strays(folder: Path) -> list[Problem]:
    """Files that Ansible would read and we would not: their keys would silently differ from the plan."""
    allowed = {f"{s}.yml" for s in SECTIONS}
    problems = []
    for place in sorted((folder / "group_vars").glob("*")) + sorted(folder.glob("host_vars/*")):
        if place != folder / VARS_FOLDER and place.suffix in READ_BY_ANSIBLE and not place.name.startswith("."):
            problems.append(_stray(place))
    for place in sorted((folder / VARS_FOLDER).glob("*")):
        if place.name not in allowed and place.suffix in READ_BY_ANSIBLE and not place.name.startswith("."):
            problems.append(_stray(place))
    return problems


def shown(file: Path) -> str:
    """A path as messages and plans name it: from the repository root when it lies inside."""
    file = file.resolve()
    return str(file.relative_to(REPOSITORY)) if file.is_relative_to(REPOSITORY) else str(file)


def _stray(place: Path) -> Problem:
    message = "this file is not part of a cluster; only hosts.yml and group_vars/all/{%s}.yml are read."
    return Problem("C01", shown(place), "(file)", message % ",".join(SECTIONS), "move its keys there, or remove it")


def _read(file: Path, text: str | None, problems: list[Problem]) -> CommentedMap | None:
    """Parsed YAML mapping, or None and a problem."""
    rule, message, line, key = "C04", "", 0, "(file)"
    data: Any = None
    try:
        if text is None:
            text = _text(file)
        data = YAML(typ="rt").load(text)
    except DuplicateKeyError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        named = re.search(r'found duplicate key "([^"]*)"', str(error.problem))
        rule, key, message = "C05", named.group(1) if named else key, "the key is written twice."
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        rule, message = "C06", f"not valid YAML: {error.problem or error.context or 'syntax error'}."
    except OSError as error:
        message = "the file is missing." if isinstance(error, FileNotFoundError) else f"{error.strerror}."
    except (YAMLError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # ruamel lets plain exceptions out on odd tags, numbers and bytes that are no UTF-8.
        rule, message = "C06", f"not valid YAML: {type(error).__name__} {str(error).splitlines()[:1]}."
    else:
        if isinstance(data, CommentedMap):
            return data
        rule, message, line = "C02", f"expected a mapping, found {_kind(data)}.", 1
    problems.append(Problem(rule, shown(file), key, message, REMEDIES[rule], line))
    return None


def _text(file: Path) -> str:
    """A file's text. Errors: OSError, ValueError when it is far too large or not UTF-8."""
    if file.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"larger than {MAX_FILE_BYTES} bytes")
    return file.read_text(encoding="utf-8")


def _only_section(section: str, found: CommentedMap, file: Path, problems: list[Problem]) -> bool:
    """Is the file's one top-level key its own name?"""
    for key in found:
        if key != section:
            message = f"unknown key; {file.name} holds the one key {section!r}."
            problems.append(Problem("C01", shown(file), str(key), message, REMEDIES["C01"], _line(found, key)))
    if section not in found:
        problems.append(Problem("C07", shown(file), section, "the key is missing.", REMEDIES["C07"], 1))
        return False
    return len(found) == 1


def _take(
    path: KeyPath, found: CommentedMap, file: Path, data: dict[str, Any], places: Places, problems: list[Problem]
) -> None:
    """Moves a file's content into `data`, at `path` (top level or one key)."""
    places.add(path or (next(iter(found)),), shown(file), 1)
    try:
        plain = _plain(found, path, shown(file), places)
    except TooLarge as error:
        problems.append(Problem("C06", shown(file), "(file)", str(error), "write the values out, without aliases", 1))
        return
    data.update({str(path[0]): plain} if path else plain)


def _line(node: CommentedMap, key: Any) -> int:
    """1-based line of a key; 0 for keys that came in through a merge."""
    return int(node.lc.key(key)[0]) + 1 if key in (node.lc.data or {}) else 0


def _plain(node: Any, path: KeyPath, file: str, places: Places) -> Any:
    """ruamel's nodes as plain dicts, lists and scalars; remembers the line of every key. Errors: TooLarge."""
    places.nodes += 1
    if places.nodes > MAX_NODES or len(path) > 20:
        raise TooLarge("too many values or nested too deeply, or an alias that contains itself.")
    if isinstance(node, CommentedMap):
        out = {}
        for key, value in node.items():
            child = (*path, key if isinstance(key, str) else repr(key))
            places.add(child, file, _line(node, key))
            out[child[-1]] = _plain(value, child, file, places)
        return out
    if isinstance(node, CommentedSeq):
        return [_plain(value, (*path, i), file, places) for i, value in enumerate(node)]
    if isinstance(node, ScalarBoolean):
        return bool(node)
    for kind in (bool, int, float, str):
        if isinstance(node, kind):
            return kind(node)
    return node


def _validate(data: dict[str, Any], places: Places, problems: list[Problem]) -> Cluster | None:
    """The typed cluster; schema errors become problems."""
    try:
        return Cluster.model_validate(data)
    except ValidationError as error:
        reported = {p.key for p in problems}
        for item in error.errors(include_url=False, include_context=True):
            problem = _schema_problem(item, data, places)
            if problem.key not in reported:
                problems.append(problem)
                reported.add(problem.key)
        return None


def _schema_problem(item: Any, data: dict[str, Any], places: Places) -> Problem:
    """One pydantic error in our words."""
    path = _key_path(item["loc"], data)
    file, line = places.find(path)
    kind, shown = item["type"], _show(item.get("input"))
    if kind == "extra_forbidden":
        rule, message = "C01", _unknown(path)
    elif kind == "missing":
        rule, message = "C07", "the key is missing."
    elif kind.startswith(_RANGE_ERRORS) or kind.endswith(_RANGE_ERRORS):
        rule, message = "C03", f"{item['msg']}, found {shown}."
    else:
        rule, message = "C02", f"{item['msg']}, found {shown}."
    # hosts.yml has no top-level key of ours.
    shown_path = path[1:] if path and path[0] == "hosts" else path
    return Problem(rule, file, dotted(shown_path), message, REMEDIES[rule], line)


def _unknown(path: KeyPath) -> str:
    """Names the key that was probably meant, or all keys of that place."""
    model: type[BaseModel] = Cluster
    for part in path[:-1]:
        field = model.model_fields.get(str(part))
        inner = _model_of(field.annotation) if field else None
        if inner is None:
            return "unknown key."
        model = inner
    near = get_close_matches(str(path[-1]), model.model_fields, n=1)
    return f"unknown key; did you mean {near[0]}?" if near else f"unknown key; valid: {', '.join(model.model_fields)}."


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The model in `Model` or `Model | None`."""
    for kind in get_args(annotation) or (annotation,):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


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


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__.replace("Commented", "").lower()


def _show(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        text = "a very large number"
    return text if len(text) <= 60 else text[:57] + "..."


def _sorted(problems: list[Problem]) -> list[Problem]:
    return sorted(problems, key=lambda p: (p.file, p.line, p.rule, p.key))
