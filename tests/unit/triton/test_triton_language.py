"""The kernels keep to what triton-ascend 3.2.0 offers: it compiles them, and its table lists what they use."""

from __future__ import annotations

import ast
import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mtp_runtime.verify.triton as package

TABLE = Path(__file__).with_name("ascend_ops.csv")
"""Operation -> types it takes, from docs/sources/python-api/outline.md of triton-ascend, tag v3.2.0."""

UNTYPED = {"program_id", "constexpr", "float32", "int32", "int64"}


def used() -> set[str]:
    """Every name the modules take from triton.language."""
    names = set()
    for path in Path(package.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tl":
                names.add(node.attr)
            assert not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("triton.language"))
    return names


def test_operations_are_in_the_table() -> None:
    with TABLE.open() as lines:
        types = {row["operation"]: row["types"].split() for row in csv.DictReader(lines)}
    names = used() - UNTYPED
    assert {"arange", "load", "store", "where", "sum", "cumsum"} <= names
    for name in names:
        assert "int32" in types[name], name
        assert "fp32" in types[name] or name == "arange", name


@pytest.fixture(scope="module")
def lowered() -> dict[str, list[str]]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, Path(__file__).with_name("lowering.py")]
    return json.loads(subprocess.check_output(command, env=environment))


def test_the_ascend_compiler_takes_every_kernel(lowered) -> None:
    assert len(lowered) == 6
    assert all("tt.func public @" in ttir and "func.func @" in linalg for ttir, linalg in lowered.values())


def test_types_are_those_of_ascend(lowered) -> None:
    """No float64 and nothing else its table lacks: `where` exists for int64 in Triton, but not there."""
    for name, (ttir, _) in lowered.items():
        kinds = set(re.findall(r"(?<![\w%])(?:f|i|bf|ui)\d+(?!\w)", ttir))
        assert kinds <= {"f32", "i32", "i64", "i1"}, name
        assert not re.findall(r"arith\.select .*i64", ttir), name


def test_scattered_loads_read_before_the_mask(lowered) -> None:
    """Why addresses behind a mask must be valid. Fails when a new compiler masks first: then the clamps may go."""
    linalg = lowered["tokenwise, probabilities"][1]
    loops = re.findall(r"scf\.for(?:(?!scf\.for).)*?\{ExtractedLoadOrStore\}", linalg, re.S)
    assert len(loops) == 2  # p and q of the drafts
    assert all("memref.load" in loop and "scf.if" not in loop for loop in loops)
