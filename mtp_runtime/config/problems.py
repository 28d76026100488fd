"""What is wrong with a cluster file: where, which rule, and what to do."""

import re
from dataclasses import asdict, dataclass, replace
from typing import Any

KeyPath = tuple[str | int, ...]
HIDDEN = "(hidden)"
# So many problems that differ in numbers only are still told one by one.
FEW = 3
_NUMBER = re.compile(r"[0-9]+")
_SECRET = re.compile(r"ansible.*pass|password", re.IGNORECASE)


@dataclass(frozen=True)
class Problem:
    """One broken rule at one place. file is as the operator can open it; line is 1-based, 0 = unknown.

    value: what stands there, as text, empty where nothing does; source: where the rule comes from, empty = not said.
    """

    rule: str
    file: str
    key: str
    message: str
    remedy: str
    line: int = 0
    value: str = ""
    source: str = ""

    def text(self) -> str:
        """`file:line: key: value: [rule] message Remedy. Source.`"""
        place = f"{self.file}:{self.line}" if self.line else self.file
        value = f"{self.value}: " if self.value else ""
        source = f". Source: {self.source}" if self.source else ""
        return f"{place}: {self.key}: {value}[{self.rule}] {self.message} Remedy: {self.remedy}{source}"

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


class ConfigError(Exception):
    """A cluster that must not be used; carries every problem found."""

    def __init__(self, problems: list[Problem]):
        super().__init__("\n".join(p.text() for p in problems))
        self.problems = problems


def grouped(problems: list[Problem]) -> list[Problem]:
    """The problems with those of one rule at one key that differ in numbers only, as for many ranks, as one."""
    alike: dict[tuple[str, str, str, str], list[Problem]] = {}
    for one in problems:
        alike.setdefault((one.rule, one.file, one.key, _NUMBER.sub("0", one.message)), []).append(one)
    return [one for group in alike.values() for one in (group if len(group) <= FEW else [_together(group)])]


def _together(group: list[Problem]) -> Problem:
    message = f"{group[0].message} {len(group) - 1} more like it, the last one: {group[-1].message}"
    return replace(group[0], message=message)


def is_secret(*names: str | int) -> bool:
    """Does one of the names say password? What is written there is never shown; a misspelt key keeps its secret too."""
    return any(isinstance(name, str) and _SECRET.search(name) for name in names)


def dotted(path: KeyPath) -> str:
    """('a', 'b', 0) -> 'a.b[0]'; long and unprintable parts shortened and escaped."""
    text = ""
    for part in path:
        name = part if isinstance(part, int) else printable(part if len(part) <= 100 else part[:97] + "...")
        text += f"[{name}]" if isinstance(part, int) else f".{name}" if text else str(name)
    return text or "(file)"


def printable(text: str) -> str:
    """The text with escapes in the place of what a terminal would act on."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
