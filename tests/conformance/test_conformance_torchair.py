"""Graphs as torchair writes them: the attention calls of a decode step and of the drafter, and no unknown dimension.

Exporting dies in CANN's graph engine after the graph is written, so it runs in processes of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch_npu  # noqa: F401  brings torchair along
import torchair
from decode_cases import CASES, SCALE

from mtp_runtime.adapters.vllm_ascend.torchair_options import (
    STATIC_INPUTS,
    TorchairOptions,
    compiler_config,
    drafter_caches,
    mark_static,
)
from mtp_runtime.graphs import dump
from mtp_runtime.graphs.exported_step import DRAFT, FILE, Step, input_names

GRAPHS = ("decode", "draft", "dynamic", "dense", "sparse")
STEP = Step(heads=8, slots=18, requests=16, k=3, block_size=128, kind=DRAFT)
HERE = Path(__file__).resolve().parent
CASE = CASES["K=1, sixteen fresh requests, two slack slots"]
ATTRIBUTES = {
    "input_layout": "TND_NTD",
    "num_heads": 8,
    "num_key_value_heads": 1,
    "sparse_mode": 3,
    "block_size": 128,
    "scale": pytest.approx(SCALE),
    "softmax_lse_flag": False,
    "pre_tokens": 2**31 - 1,
    "next_tokens": 2**31 - 1,
    **dict.fromkeys(
        (
            "inner_precise",
            "pse_type",
            "antiquant_mode",
            "key_antiquant_mode",
            "value_antiquant_mode",
            "query_quant_mode",
        ),
        0,
    ),
}
"""Every attribute of the node."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three graphs of the real AscendMLAImpl's decode, and two under the options of the torchair line."""
    made = tmp_path_factory.mktemp("graphs")
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, HERE / "export_layer.py", made]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    absent = [name for name in GRAPHS if not (made / name / FILE).exists()]
    assert not absent, (absent, done.stdout[-2000:], done.stderr[-3000:])
    return made


@pytest.fixture(scope="module")
def layer(folder: Path) -> dict[str, dict[str, dump.Node]]:
    return {name: dump.read((folder / name / FILE).read_text()) for name in GRAPHS}


def test_the_decode_step_of_the_real_layer(layer: dict[str, dict[str, dump.Node]]) -> None:
    (call,) = dump.attention_calls(layer["decode"])
    lengths = {"actual_seq_lengths": [*range(1, 17), 26, 36], "actual_seq_lengths_kv": [*CASE.kv, 0, 0]}
    assert call == {**ATTRIBUTES, **lengths}
    assert not dump.dynamic(layer["decode"])


def test_the_node_gets_the_steps_tensors(layer: dict[str, dict[str, dump.Node]]) -> None:
    (node,) = (node for node in layer["decode"].values() if node.op in dump.ATTENTION)
    assert node.inputs["block_table"] == "block_table" and node.inputs["atten_mask"] == "attn_mask"
    assert {"query", "key0", "value0", "query_rope", "key_rope"} < set(node.inputs)
    dims = {name: node.shapes[f"i:{name}"].dims for name in ("query", "query_rope", "key0", "key_rope", "block_table")}
    blocks = dims["key0"][0]
    assert dims == {
        "query": (36, 8, 512),
        "query_rope": (36, 8, 64),
        "key0": (blocks, 1, 128, 512),
        "key_rope": (blocks, 1, 128, 64),
        "block_table": (18, 1),
    }
    assert node.shapes["i:query"].dtype == "DT_BF16" and node.shapes["i:block_table"].dtype == "DT_INT32"


def test_the_drafters_passes_of_the_real_layer(layer: dict[str, dict[str, dump.Node]]) -> None:
    """Each pass has lists of its own: shared ones cost acceptance (va#10878, #14236)."""
    calls = dump.attention_calls(layer["draft"])
    assert [call["actual_seq_lengths"] for call in calls] == [[*range(1, 17), 26, 36]] + 2 * [list(range(1, 19))]
    for depth, call in enumerate(calls):
        assert call["actual_seq_lengths_kv"] == [*(kv + depth for kv in CASE.kv), 0, 0]
        assert {name: call[name] for name in ATTRIBUTES} == ATTRIBUTES
    assert not dump.dynamic(layer["draft"])


def test_a_dynamic_input_is_noticed(layer: dict[str, dict[str, dump.Node]]) -> None:
    assert layer["dynamic"]["query"].shapes["o:y"].dims[0] == dump.UNKNOWN
    assert "query" in dump.dynamic_inputs(layer["dynamic"])
    assert "query o:y" in dump.dynamic(layer["dynamic"])
    assert not dump.dynamic_inputs(layer["decode"])


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_the_options_of_the_torchair_line(sparse: bool, folder: Path, layer: dict[str, dict[str, dump.Node]]) -> None:
    """Every dimension is static. The lists of lengths are inputs with `dynamic`, constants without."""
    name = "sparse" if sparse else "dense"
    found = layer[name]
    assert not dump.dynamic(found)
    calls = dump.attention_calls(found)
    assert len(calls) == STEP.k
    lists = {key: shape.dims for key, shape in dump.inputs(found).items() if key not in input_names(STEP)}
    if sparse:
        assert not lists and [(c["actual_seq_lengths"], c["actual_seq_lengths_kv"]) for c in calls] == STEP.lengths()
    else:
        # How many slots there are is fixed, what their lengths are is not.
        assert lists and set(lists.values()) == {(STEP.slots,)}
        assert {(c["actual_seq_lengths"], c["actual_seq_lengths_kv"]) for c in calls} == {(None, None)}
    written = json.loads((folder / name / "options.json").read_text())["compile options"]["graph"]
    assert written["ge.tiling_schedule_optimize"] == "1"


@pytest.mark.parametrize("name", ["frozen_parameter", "tiling_schedule_optimize", "enable_view_optimize"])
def test_the_real_compiler_config_has_the_options(name: str) -> None:
    for value in (True, False):
        config = compiler_config(TorchairOptions(**{name: value}))
        assert isinstance(config, torchair.CompilerConfig)
        assert getattr(config.experimental_config, name).value == ("1" if value else "0")
    assert getattr(compiler_config(TorchairOptions()).experimental_config, name).value == "1"


def test_torch_compile_gets_the_rest() -> None:
    assert TorchairOptions().compile_arguments() == {"dynamic": True, "fullgraph": True}
    assert TorchairOptions(sparse=True).compile_arguments() == {"dynamic": False, "fullgraph": True}
    assert TorchairOptions().jit_compile is False


def test_inputs_are_marked_static_by_dynamo_itself() -> None:
    inputs = {name: torch.zeros(4, 2) for name in STATIC_INPUTS}
    mark_static(inputs, torch._dynamo.mark_static)
    assert all(tensor._dynamo_static_indices == {0, 1} for tensor in inputs.values())


def test_inputs_of_another_name_and_missing_ones_are_refused() -> None:
    marked: list[object] = []
    inputs = {name: name for name in STATIC_INPUTS if name != "slot_mapping"}
    with pytest.raises(ValueError, match="kv_caches not known; slot_mapping missing"):
        mark_static({**inputs, "kv_caches": "kv_caches"}, marked.append)
    assert not marked
    mark_static({**inputs, "slot_mapping": "slot_mapping", "mc2_mask": None}, marked.append)
    assert marked == [name for name in STATIC_INPUTS if name != "mc2_mask"]


def test_the_drafter_gets_the_last_cache() -> None:
    assert drafter_caches(["first", "second", "mtp"]) == ["mtp"]
    with pytest.raises(ValueError, match="kv_caches"):
        drafter_caches([])
