"""A patch: functions of vllm-ascend, known by their source text, and what takes their place.

The text is read from the package's file, not from what was imported: so a patch can be checked without importing what
it patches, and against a release that is only unpacked.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DIGITS = 16


class PatchRefused(RuntimeError):
    """A patch does not fit what is installed."""


@dataclass(frozen=True)
class Target:
    """A function, or method, in the package.

    module: where it is defined; name: dotted inside the module. digests: of the texts that were read and proven, one
    a release where they differ. replace: the new function, given the old one.
    """

    module: str
    name: str
    digests: tuple[str, ...]
    replace: Callable[[Any], Any]

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    def check(self, text: str) -> None:
        """Raises PatchRefused unless the module's text has this very function."""
        found = digest(text, self.name)
        if found not in self.digests:
            told = "is not there" if found is None else f"has another source (digest {found})"
            raise PatchRefused(f"{self} {told}: known are {', '.join(self.digests)}")


@dataclass(frozen=True)
class Patch:
    """Targets that are replaced together or not at all.

    name: as in the cluster file's `mtp.patches`. stage: "config" where the engine's configuration is made, in every
    process that makes one, or "worker". summary: half a sentence for operators.
    """

    name: str
    stage: str
    summary: str
    targets: tuple[Target, ...]

    def check(self) -> None:
        """Raises PatchRefused unless every target is installed as it was read."""
        for target in self.targets:
            try:
                target.check(installed_text(target.module))
            except PatchRefused as error:
                raise PatchRefused(
                    f"patch {self.name}: {error}; install a release this plugin knows, or switch the patch off: "
                    f"mtp.patches.{self.name}: false"
                ) from None

    def apply(self) -> None:
        """Replaces every target, once in a process. Raises PatchRefused before the first change."""
        self.check()
        for target in self.targets:
            owner, name = _owner(target)
            old = getattr(owner, name)
            # Two patches may share a target, each on top of the other.
            there: tuple[str, ...] = getattr(old, "mtp_runtime", ())
            if self.name in there:
                continue
            # From the class's own table: a static method stays one.
            raw = vars(owner).get(name, old)
            new = target.replace(old)
            new.mtp_runtime = (*there, self.name)
            setattr(owner, name, staticmethod(new) if isinstance(raw, staticmethod) else new)


def installed_text(module: str) -> str:
    """A module's source, without importing it (its parent packages are). Raises PatchRefused."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise PatchRefused(f"{module} is not installed")
    return Path(spec.origin).read_text()


def digest(text: str, name: str) -> str | None:
    """The first DIGITS of a function's SHA-256, decorators included; None where the module has no such function."""
    nodes: list[ast.stmt] = ast.parse(text).body
    found: ast.stmt | None = None
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = next((node for node in nodes if isinstance(node, kinds) and node.name == part), None)
        if not isinstance(found, kinds):
            return None
        nodes = found.body
    assert isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    first = min([found.lineno, *(one.lineno for one in found.decorator_list)])
    lines = text.splitlines()[first - 1 : found.end_lineno]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:DIGITS]


def _owner(target: Target) -> tuple[Any, str]:
    owner: Any = importlib.import_module(target.module)
    *outer, name = target.name.split(".")
    for part in outer:
        owner = getattr(owner, part)
    return owner, name
