"""The real AscendMLAImpl's decode with our reference kernel in the operator's place, against the CPU engine's layer.

Tolerances, in DTYPE (bf16, outputs up to 4): the two packages one rounding step apart, since both round the absorbed
query and the latent output at the same places; either of them 2**-6 from float64 without absorption.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_layer import forward, layer, step
from cpu_edge import Fia
from decode_cases import CASES, LATENT, ROPE, SCALE, numbers, truth
from torch import Tensor

from mtp_runtime.attention.mask import is_causal

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / ".local" / "engine" / "bin" / "python"
STEP = 2.0**-8
FROM_TRUTH = 2.0**-6
ORDERS = (3, 4, 5)
"""Seeds of three block tables."""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    Fia.calls.clear()
    yield
    Fia.change = None


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """What the CPU engine's own layer gives, in its own environment."""
    if not ENGINE.exists():
        pytest.skip("no CPU engine here (make engine): float64 alone is the measure")
    folder = tmp_path_factory.mktemp("engine")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_PLUGINS": ""}
    command = [ENGINE, Path(__file__).with_name("engine_layer.py"), folder]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return torch.load(folder / "engine.pt")


def ours(name: str, order: int = ORDERS[0]) -> Tensor:
    """All T rows of a case through the real layer."""
    case = CASES[name]
    found = numbers(case)
    return forward(layer(found.weight), *step(case, found, order))


@pytest.mark.parametrize("name", CASES)
def test_the_layer_is_the_cpu_engines(name: str, engine: dict[str, Tensor]) -> None:
    torch.testing.assert_close(ours(name)[: CASES[name].plan.tokens], engine[name], atol=STEP, rtol=STEP)


@pytest.mark.parametrize("name", CASES)
def test_the_layer_is_attention(name: str) -> None:
    case = CASES[name]
    exact = truth(case, numbers(case))
    tokens = case.plan.tokens
    results = [ours(name, order) for order in ORDERS]
    torch.testing.assert_close(results[0][:tokens].double(), exact, atol=FROM_TRUTH, rtol=STEP)
    # Where a request's blocks lie changes nothing at all.
    assert all(torch.equal(one, results[0]) for one in results)
    assert not results[0][tokens:].any(), "slack slots yield zeros"


def test_the_call_is_the_plans() -> None:
    name = "K=1, sixteen fresh requests, two slack slots"
    ours(name)
    (call,) = Fia.calls
    assert call["actual_seq_lengths"] == [*range(1, 17), 26, 36]
    assert call["actual_seq_lengths_kv"] == [*CASES[name].kv, 0, 0]
    wanted = {"num_heads": 8, "num_key_value_heads": 1, "sparse_mode": 3, "block_size": 128, "input_layout": "TND_NTD"}
    assert {key: call[key] for key in wanted} == wanted and call["scale"] == pytest.approx(SCALE)
    assert is_causal(call["atten_mask"]) and call["atten_mask"].dtype == torch.int8


NAME = "K=3, ragged, slack"


def _later(arguments: dict[str, Any]) -> dict[str, Any]:
    """Every token sees an entry less: a mask one place off."""
    lengths = [max(kv - 1, 0) for kv in arguments["actual_seq_lengths_kv"]]
    return {**arguments, "actual_seq_lengths_kv": lengths}


def _uniform(arguments: dict[str, Any]) -> dict[str, Any]:
    """Segments of K + 1 tokens each, whatever the requests have."""
    return {**arguments, "actual_seq_lengths": [4 * (slot + 1) for slot in range(9)]}


def _swapped(arguments: dict[str, Any]) -> dict[str, Any]:
    """Two requests with each other's blocks."""
    return {**arguments, "block_table": arguments["block_table"][[0, 3, 2, 1, *range(4, 9)]]}


WRONG: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "mask one place off": _later,
    "query lengths": _uniform,
    "block table": _swapped,
    # That of the absorbed head size instead of the model's.
    "scale": lambda arguments: {**arguments, "scale": (LATENT + ROPE) ** -0.5},
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_call_is_noticed(what: str) -> None:
    case = CASES[NAME]
    exact = truth(case, numbers(case))
    Fia.change = WRONG[what]
    wrong = (ours(NAME)[: case.plan.tokens].double() - exact).abs().max()
    assert wrong > 4 * (FROM_TRUTH + STEP * exact.abs().max())


def test_a_mask_that_is_not_sparse_mode_3s_is_noticed() -> None:
    case = CASES[NAME]
    found = numbers(case)
    query, latent, rope, meta = step(case, found, ORDERS[0])
    meta.decode.attn_mask = meta.decode.attn_mask.T.contiguous()
    with pytest.raises(ValueError, match="atten_mask"):
        forward(layer(found.weight), query, latent, rope, meta)
