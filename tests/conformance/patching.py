"""Functions of the real packages before and after a patch, whatever other tests of this process applied."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import vllm_ascend.ops  # noqa: F401  before attention.mla_v1, which alone is a circular import

from mtp_runtime.adapters.vllm_ascend.patches import Patch, installed_text


def as_installed(module: str, name: str) -> Any:
    """A function made anew from the package's own file, in its module's names. name: dotted inside the module.

    Not for one that says `super()`.
    """
    text, owner = installed_text(module), importlib.import_module(module)
    nodes: list[ast.stmt] = ast.parse(text).body
    for part in name.split("."):
        found = next(node for node in nodes if getattr(node, "name", None) == part)
        nodes = getattr(found, "body", [])
    assert isinstance(found, ast.FunctionDef)
    found.decorator_list = []
    made: dict[str, Any] = {}
    exec(compile(ast.Module([found], []), owner.__file__ or module, "exec"), vars(owner), made)
    return made[found.name]


@contextmanager
def applied(patch: Patch) -> Iterator[None]:
    """The patch, as a worker applies it; the classes are as they were afterwards."""
    kept = []
    for target in patch.targets:
        owner: Any = importlib.import_module(target.module)
        *outer, name = target.name.split(".")
        for part in outer:
            owner = getattr(owner, part)
        kept.append((owner, name, vars(owner)[name]))
    try:
        patch.apply()
        yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """owner.name is `value` for a while."""
    kept = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)
