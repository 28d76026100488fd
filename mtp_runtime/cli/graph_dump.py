"""`mtpctl graph dump`: exports a step's graph as torchair writes it, and lists inputs with unknown dimensions.

Needs an interpreter that has torch_npu, and no device: this one, or the conformance environment's, or --python.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

import mtp_runtime
from mtp_runtime import releases
from mtp_runtime.cli.app import BAD_INPUT, AsJson, Inventories, Name, fail, out
from mtp_runtime.config import edit
from mtp_runtime.config.graph_plan import full_slots
from mtp_runtime.config.problems import ConfigError, Problem
from mtp_runtime.config.schema import Cluster
from mtp_runtime.graphs import dump as dumps
from mtp_runtime.graphs.exported_step import DECODE, FILE, MISSING, STEPS, Step, input_names, words
from mtp_runtime.graphs.planner import PlanError

ROOT = Path(mtp_runtime.__file__).resolve().parents[1]
CONFORMANCE = ROOT / ".local" / "conformance" / "bin" / "python"
EXPORT_SECONDS = 600
app = typer.Typer(help="Graphs of a decode step.", no_args_is_help=True)


@app.callback()
def graph() -> None:
    """Graphs of a decode step."""


@app.command()
def dump(
    cluster: Name,
    step: Annotated[str, typer.Option("--step", metavar="KIND", help=f"which passes: {' or '.join(STEPS)}")] = DECODE,
    python: Annotated[
        Path | None, typer.Option("--python", help="interpreter that has torch_npu; default: one that is found")
    ] = None,
    folder: Annotated[Path | None, typer.Option("--out", help="folder that keeps the graph's file")] = None,
    dynamic: Annotated[
        list[str] | None,
        typer.Option("--dynamic", metavar="INPUT", help="mark this input dynamic, to see what it does"),
    ] = None,
    as_json: AsJson = False,
    inventories: Inventories = None,
) -> None:
    """Exports the graph of a decode step's attention with a cluster's numbers: what in it is static, what is not?"""
    try:
        found = edit.check_with_k(cluster, None, inventories).cluster
    except ConfigError as error:
        raise fail(error.problems, as_json) from None
    wanted = _step(found, step, tuple(dynamic or ()), as_json)
    interpreter = python or _interpreter(as_json)
    with tempfile.TemporaryDirectory() as scratch:
        where = (folder or Path(scratch)).resolve()
        text = _export(interpreter, wanted, where, as_json)
        report = _report(wanted, dumps.read(text), where / FILE if folder else None)
    if as_json:
        print(json.dumps({"cluster": cluster, **report}, indent=2))
    else:
        _print(cluster, report)


def _step(cluster: Cluster, kind: str, dynamic: tuple[str, ...], as_json: bool) -> Step:
    """The step of the role that decodes, at a full batch."""
    role = next((role for role in cluster.active_roles() if role != "prefill"), None)
    heads, release = cluster.model.num_attention_heads, releases.find(cluster.topology.engine, cluster.topology.release)
    layout = cluster.role_topology(role) if role else None
    slots = full_slots(cluster, role) if role else None
    if kind not in STEPS:
        raise _refuse("--step", f"{kind!r} is no step", f"use {' or '.join(STEPS)}", as_json)
    if cluster.topology.engine != "vllm-ascend":
        message = f"torchair makes no graphs for {cluster.topology.engine}"
        raise _refuse("CLUSTER", message, "name a cluster with engine vllm-ascend", as_json)
    if role is None or layout is None or heads is None or slots is None or release is None:
        message = "the files do not say which step: heads, tp, max_num_seqs and the release are needed"
        raise _refuse("CLUSTER", message, "write model.num_attention_heads and serving.max_num_seqs", as_json)
    requests = cluster.role_serving(role).max_num_seqs or slots
    made = Step(
        heads=heads // layout.tp,
        slots=slots,
        requests=requests,
        k=cluster.draft_tokens(role),
        block_size=release.block_size,
        kv=min(cluster.model.max_model_len, 4096),
        kind=kind,
        dynamic=dynamic,
    )
    unknown = sorted(set(dynamic) - set(input_names(made)))
    if unknown:
        message = f"the step has no input {', '.join(unknown)}"
        raise _refuse("--dynamic", message, f"it has {', '.join(input_names(made))}", as_json)
    try:
        made.lengths()
    except PlanError as error:
        raise _refuse("CLUSTER", error.what, error.remedy, as_json) from None
    return made


def _interpreter(as_json: bool) -> Path:
    if importlib.util.find_spec("torch_npu") is not None:
        return Path(sys.executable)
    if CONFORMANCE.exists():
        return CONFORMANCE
    message = "torch_npu is not installed here, and there is no conformance environment (.local/conformance)"
    raise _refuse("--python", message, "make conformance, or name an interpreter that has torch_npu", as_json)


def _export(python: Path, step: Step, folder: Path, as_json: bool) -> str:
    """The graph's text. The process may die once it is written: what counts is the file."""
    written = folder / FILE
    written.unlink(missing_ok=True)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    try:
        done = subprocess.run(
            [str(python), *words(step, folder)], env=env, capture_output=True, text=True, timeout=EXPORT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        message = f"{python} cannot be run: {error}"
        raise _refuse("--python", message, "name an interpreter that has torch_npu", as_json) from None
    if done.returncode == MISSING:
        message = f"{python} has no {done.stdout.split()[-1]}"
        raise _refuse("--python", message, "make conformance, or name an interpreter that has it", as_json)
    if not written.exists():
        last = [line for line in done.stderr.splitlines() if "Error" in line][-1:] or done.stderr.splitlines()[-1:]
        message = f"torchair wrote no graph: {' '.join(last)[:300]}"
        raise _refuse("--python", message, "look at an input that was marked, or at torch_npu's release", as_json)
    return written.read_text()


def _report(step: Step, graph: dict[str, dumps.Node], file: Path | None) -> dict[str, Any]:
    calls = dumps.attention_calls(graph)
    shapes = {name: list(shape.dims) for name, shape in dumps.inputs(graph).items()}
    return {
        "step": asdict(step),
        "file": None if file is None else str(file),
        "inputs": shapes,
        "dynamic_inputs": {name: list(shape.dims) for name, shape in dumps.dynamic_inputs(graph).items()},
        "dynamic_places": dumps.dynamic(graph),
        "attention_calls": calls,
    }


def _print(cluster: str, report: dict[str, Any]) -> None:
    step = report["step"]
    title = f"{cluster}: {step['kind']}, {step['heads']} heads, {step['slots']} slots, K = {step['k']}"
    table = Table("input", "shape", "", title=title)
    for name, dims in report["inputs"].items():
        table.add_row(name, str(dims), "dynamic" if name in report["dynamic_inputs"] else "static")
    out.print(table)
    for call in report["attention_calls"]:
        lengths = call["actual_seq_lengths"]
        told = "input of the graph" if lengths is None else f"{len(lengths)} entries, the last {lengths[-1]}"
        out.print(
            Text(f"attention: {call['num_heads']} heads, {call['input_layout']}, lengths: {told}"), soft_wrap=True
        )
    count = len(report["dynamic_inputs"])
    out.print(Text(f"inputs with unknown dimensions: {count or 'none'}"))
    if report["file"]:
        out.print(Text(f"graph: {report['file']}"), soft_wrap=True)


def _refuse(key: str, message: str, remedy: str, as_json: bool) -> typer.Exit:
    exit_ = fail([Problem("C03", "command line", key, message, remedy)], as_json)
    assert exit_.exit_code == BAD_INPUT
    return exit_
