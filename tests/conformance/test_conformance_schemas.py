"""The attention operator in torch_npu 2.13.0, which is installed here, and in 2.10.0.post4, which is deployed: schemas
and documentation. There is no difference; one fails.
"""

from __future__ import annotations

import ast
import difflib
import functools
from pathlib import Path

import pytest
import torch
import torch_npu

from mtp_runtime.attention.call import OPERATORS, SCHEMA

ROOT = Path(__file__).resolve().parents[2]
DEPLOYED = ROOT / ".local" / "conformance" / "torch_npu-2.10.0.post4"
INSTALLED = Path(torch_npu.__file__).with_name("_op_plugin_docs.py")
FORMS = [f"{name}{form}" for name in OPERATORS.values() for form in ("", ".out")]
WORKSPACE = "_npu_fused_infer_attention_score_v2_get_max_workspace"


@functools.cache
def deployed() -> dict[str, torch._C.FunctionSchema]:
    """Name with overload -> schema, as 2.10.0.post4 registers it, read by torch's own parser."""
    lines = (DEPLOYED / "schemas.txt").read_text().splitlines()
    schemas = [torch._C.parse_schema(f"npu::{line}") for line in lines]
    return {full_name(schema): schema for schema in schemas}


@functools.cache
def installed() -> dict[str, torch._C.FunctionSchema]:
    schemas = (schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("npu::"))
    return {full_name(schema): schema for schema in schemas}


def full_name(schema: torch._C.FunctionSchema) -> str:
    name = schema.name.removeprefix("npu::")
    return f"{name}.{schema.overload_name}" if schema.overload_name else name


@functools.cache
def documentation(path: Path) -> dict[str, str]:
    """Operator -> docstring of every call in the file that gives one."""
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    texts: dict[str, str] = {}
    for call in calls:
        match call.args:
            case [ast.Constant(value=str(name)), ast.Constant(value=str(text))]:
                texts[name] = text
    return texts


@pytest.mark.parametrize("name", [*FORMS, WORKSPACE])
def test_schemas_are_the_same(name: str) -> None:
    """Names, types, defaults and order of all arguments, and the results."""
    assert deployed()[name] == installed()[name]
    assert str(deployed()[name]) == str(installed()[name])


def test_our_names_are_the_deployed_ones_too() -> None:
    for version, name in OPERATORS.items():
        assert SCHEMA[version] == {argument.name for argument in deployed()[name].arguments}


def changes(old: str, new: str) -> list[str]:
    """Changed lines with + or - before them."""
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0)
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


@pytest.mark.parametrize("name", OPERATORS.values())
def test_documentation_is_the_same(name: str) -> None:
    old, new = documentation(DEPLOYED / INSTALLED.name)[name], documentation(INSTALLED)[name]
    # The rules are in it: an empty or cut text would compare equal to another.
    assert len(old) > 10_000 and "TND" in old and "block_table" in old
    assert changes(old, new) == []


def test_a_difference_is_seen() -> None:
    """Of one default, and of one line."""
    name = OPERATORS["v2"]
    line = next(line for line in (DEPLOYED / "schemas.txt").read_text().splitlines() if line.startswith(f"{name}("))
    changed = line.replace("int block_size=0", "int block_size=128")
    assert changed != line and torch._C.parse_schema(f"npu::{changed}") != installed()[name]
    text = documentation(INSTALLED)[name]
    assert len(changes(text, text.replace("TND", "TN", 1))) == 2
