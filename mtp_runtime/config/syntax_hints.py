"""Why a YAML text cannot be read, as somebody sees who looks at the line: tabs, characters of other keyboards."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

# Control characters, and line breaks of YAML 1.1 that are none in 1.2: nobody sees them.
UNREADABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029\ufffe\uffff]")
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


def line_starts(text: str) -> list[int]:
    """Offset of every line."""
    return [0, *(found.end() for found in _BREAK.finditer(text))]


def likely_reason(text: str, starts: list[int], error: Any) -> tuple[int, str, str | None]:
    """Offset, message and remedy (None: the rule's) for a syntax error of the parser. starts: line_starts(text)."""
    mark, context = error.problem_mark or error.context_mark, error.context_mark
    index = min(mark.index if mark else 0, max(len(text) - 1, 0))
    line = bisect_right(starts, index)
    for number, shown in _content_above(text, starts, line):
        if number == line and "\t" in shown:
            return index, "a tab where YAML wants spaces", "put spaces in the place of the tab"
        for char in shown:
            if char in _LOOKALIKES:
                name = char if char.isprintable() and not char.isspace() else f"U+{ord(char):04X}"
                meant = _LOOKALIKES[char]
                return starts[number - 1], f"not valid YAML; it has {name} in the place of {meant}", f"write {meant}"
    problem = error.problem or error.context or "syntax error"
    if context is not None and bisect_right(starts, context.index) != line and "block" not in error.context:
        # What is not closed is found out at the end of the file.
        index = context.index
        problem = f"{problem} in line {line}, {error.context} that begins here"
    return index, f"not valid YAML: {problem}", None


def _content_above(text: str, starts: list[int], line: int) -> Iterator[tuple[int, str]]:
    """A line and the two above it that are more than a comment, with their numbers, without their comments."""
    found = 0
    while line > 0 and found < 3:
        end = starts[line] if line < len(starts) else len(text)
        shown = text[starts[line - 1] : end].split("#")[0].rstrip()
        if shown:
            yield line, shown
            found += 1
        line -= 1
