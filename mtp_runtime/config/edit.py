"""Changes values of an inventory and keeps everything else of its files, comments included."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .api import Checked, check, folder, load_checked
from .assign import Assignment
from .document import parse
from .files import NAMES, Files, on_disk
from .load import REMEDIES, load, read_text
from .nodes import Refused, plain
from .problems import ConfigError, KeyPath, Problem, dotted
from .schema import Cluster
from .store import ChangedMeanwhile, locked, write_all
from .text_edit import REMOVED, Unplaceable, for_people, put

BY_HAND = "edit the file by hand"


@dataclass(frozen=True)
class Change:
    """What an assignment did. old, new: as YAML, a password hidden; None where the key is not written."""

    file: str
    key: str
    old: str | None
    new: str | None


def check_with_k(name: str, k: int | None, root: Path | None = None) -> Checked:
    """The cluster as it would be with another K, which is written nowhere; None: as it is. Errors: ConfigError."""
    if k is None:
        return check(name, root)
    files = on_disk(folder(name, root))
    return check(name, root, {"mtp": _with_k(files, _mtp(name, root), k)})


def set_k(name: str, k: int, root: Path | None = None) -> tuple[Cluster, bool]:
    """Writes K into a cluster's mtp.yml; returns the new cluster and whether the file changed.

    K = 0 sets enabled: false and leaves num_speculative_tokens, so that switching on again finds the old value.
    Errors: ConfigError, before anything is written, when the new file would break a rule.
    """
    place = folder(name, root)
    files = on_disk(place)
    with locked(place):
        old = _mtp(name, root)
        new = _with_k(files, old, k)
        cluster = load_checked(name, root, {"mtp": new})
        _write(place, {"mtp": (old, new)})
    return cluster, new != old


def _mtp(name: str, root: Path | None) -> str:
    """mtp.yml. The files must be readable and typed, but may break a rule: setting K may be what repairs them."""
    place = folder(name, root)
    load(place)
    return read_text(on_disk(place), "mtp")


def _with_k(files: Files, text: str, k: int) -> str:
    try:
        return with_k(text, k)
    except Unplaceable as error:
        raise ConfigError([_unplaceable(files, "mtp", "mtp", error)]) from None


def with_k(text: str, k: int) -> str:
    """mtp.yml's text with another K; the same text when nothing changes. Errors: Refused, Unplaceable."""
    text = put(text, ("mtp", "enabled"), k != 0)
    return put(text, ("mtp", "num_speculative_tokens"), k) if k else text


def set_values(name: str, words: list[str], root: Path | None = None) -> tuple[Checked, list[Change]]:
    """Carries out assignments (`mtp.num_speculative_tokens=2`), all or none; returns what changed in which file.

    Errors: ConfigError, with nothing written, for words that are no assignment, for keys that do not exist and when the
    result would break a rule; the files may break rules before it.
    """
    place = folder(name, root)
    files = on_disk(place)
    with locked(place):
        texts, data = _texts(files)
        assignments = Assignment.parse_all(words, data)
        new, problems = dict(texts), []
        for one in assignments:
            try:
                new[one.section] = put(new[one.section], one.path, one.value)
            except Unplaceable as error:
                problems.append(_unplaceable(files, one.section, one.key, error))
            except Refused as error:
                message = "; ".join(fault.message for fault in error.faults)
                problems.append(Problem("C06", files.shown(one.section), one.key, message, BY_HAND))
        if problems:
            raise ConfigError(problems)
        changed = {section: text for section, text in new.items() if text != texts[section]}
        found = check(name, root, changed)
        _write(place, {section: (texts[section], text) for section, text in changed.items()})
    changes = (_change(files, one, data, new) for one in assignments)
    return found, [one for one in changes if one is not None]


def _texts(files: Files) -> tuple[dict[str, str], dict[str, Any]]:
    """Every file's text, and its data. Errors: ConfigError for what cannot be read."""
    texts, data, problems = {}, {}, []
    for section in NAMES:
        try:
            texts[section] = read_text(files, section)
            tree, _ = parse(texts[section].removeprefix("\ufeff"))
            data[section] = plain(tree, lambda path, line: None)[0]
        except Refused as error:
            for fault in error.faults:
                remedy = fault.remedy or REMEDIES[fault.rule]
                shown = files.shown(section)
                problems.append(Problem(fault.rule, shown, dotted(fault.path), fault.message, remedy, fault.line))
        except OSError as error:
            message = f"{error.strerror or error}."
            problems.append(Problem("C04", files.shown(section), "(file)", message, REMEDIES["C04"]))
    if problems:
        raise ConfigError(problems)
    return texts, data


def _change(files: Files, one: Assignment, data: dict[str, Any], new: dict[str, str]) -> Change | None:
    """What an assignment changed; None when nothing. The values are compared, not their texts: passwords look alike."""
    after = plain(parse(new[one.section].removeprefix("\ufeff"))[0], lambda path, line: None)[0]
    values = [_value_at(data[one.section], one.path), _value_at(after, one.path)]
    if repr(values[0]) == repr(values[1]) and values[0] == values[1]:
        return None
    old, new_text = (None if value is REMOVED else for_people(value, one.path) for value in values)
    return Change(files.shown(one.section), one.key, old, new_text)


def _value_at(data: Any, path: KeyPath) -> Any:
    """A value, from the data of one file; REMOVED where it is not written."""
    for part in path:
        if not isinstance(data, dict) or part not in data:
            return REMOVED
        data = data[part]
    return data


def _unplaceable(files: Files, section: str, key: str, error: Unplaceable) -> Problem:
    return Problem("C06", files.shown(section), key, f"{error.reason}.", BY_HAND, error.line)


def _write(place: Path, texts: dict[str, tuple[str, str]]) -> None:
    """section -> (old text, new text), those that differ."""
    changes = {
        place / NAMES[section]: (old.encode("utf-8"), new.encode("utf-8"))
        for section, (old, new) in texts.items()
        if new != old
    }
    try:
        write_all(changes)
    except ChangedMeanwhile as error:
        message = "somebody else changed the file at the same time."
        raise ConfigError([Problem("C04", str(error.file), "(file)", message, "look at it, then try again")]) from None
