"""What the engine benchmark starts and compares."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from loadtests.bench_arms import MOST_ENGINES, PARTS, Arm, Engine, Group

MODEL = str(Path(__file__).parents[3] / "mtp_runtime/model/weights")
GROUPS = [group for part in PARTS.values() for group in part.groups]


@pytest.mark.parametrize(
    ("engine", "sizes"),
    [
        (Engine(1), []),
        (Engine(0, "full"), [1, 2, 4]),
        (Engine(1, "full"), [2, 4, 8]),
        (Engine(1, "full", "slack"), [2, 4, 10]),
        (Engine(1, "full", "slack", slots=16), [2, 4, 8, 16, 36]),
        (Engine(3, "piecewise", slots=16), [4, 8, 16, 32, 64]),
    ],
)
def test_graphs_have_the_sizes_of_a_rank(engine: Engine, sizes: list[int]) -> None:
    assert engine.graph_sizes == sizes
    found = engine.arguments(MODEL, 512)
    assert found.get("enforce_eager", False) == (engine.mode == "eager")
    graphs = found.get("compilation_config", {})
    assert graphs.get("cudagraph_capture_sizes", []) == sizes
    assert graphs.get("cudagraph_mode") == {"full": "FULL_DECODE_ONLY", "piecewise": "PIECEWISE"}.get(engine.mode)
    assert found.get("speculative_config", {}).get("num_speculative_tokens", 0) == engine.k


@pytest.mark.parametrize(("k", "layers"), [(0, 20), (1, 21), (3, 21)])
def test_memory_is_that_of_all_slots_at_full_context(k: int, layers: int) -> None:
    blocks = 4 * -(-(512 + k) // 16) + 1  # and the null block
    assert Engine(k).kv_bytes(MODEL, 512) == blocks * 16 * layers * 576 * 4


@pytest.mark.parametrize(
    ("engine", "env"),
    [
        (Engine(1), {"MTP_ATTENTION": "tnd", "MTP_PADDING": "placeholder"}),
        (Engine(1, attention="chunked_prefill"), {"MTP_ATTENTION": "chunked_prefill", "MTP_PADDING": "placeholder"}),
        (Engine(1, "full", "slack"), {"MTP_ATTENTION": "tnd", "MTP_PADDING": "slack"}),
        (
            Engine(1, "piecewise"),
            {"MTP_ATTENTION": "tnd", "MTP_PADDING": "placeholder", "VLLM_USE_BREAKABLE_CUDAGRAPH": "1"},
        ),
        (Engine(1, plugin=False), {"VLLM_PLUGINS": ""}),
    ],
)
def test_modes_reach_the_engine_by_its_environment(engine: Engine, env: dict[str, str]) -> None:
    assert engine.environment() == env


@pytest.mark.parametrize(
    "wrong",
    [
        {"k": -1},
        {"k": 1, "padding": "none"},
        {"k": 1, "attention": "flash"},
        {"k": 1, "slots": 0},
        {"k": 0, "mode": "full", "padding": "slack"},
        {"k": 1, "mode": "full", "plugin": False},
        {"k": 1, "attention": "batch_expansion", "plugin": False},
    ],
)
def test_an_engine_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Engine(**wrong)


@pytest.mark.parametrize("wrong", [{"at_once": 0}, {"at_once": 5}, {"active_k": 2}, {"active_k": -1}])
def test_an_arm_that_its_engine_cannot_serve_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        Arm(Engine(1), **wrong)
    with pytest.raises(ValueError):
        Arm(Engine(1, plugin=False), active_k=0)


def test_too_many_engines_at_once_are_refused() -> None:
    arms = tuple(Arm(Engine(k)) for k in range(MOST_ENGINES))
    assert len(Group("enough", (*arms, Arm(Engine(0), 2))).engines) == MOST_ENGINES
    with pytest.raises(ValueError, match="7 engines"):
        Group("too many", (*arms, Arm(Engine(0, "full"))))


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.title)
def test_every_arm_has_its_name_and_what_its_gain_refers_to(group: Group) -> None:
    assert len({arm.name for arm in group.arms}) == len(group.arms)
    assert all(arm.without_mtp() in group.arms for arm in group.arms)


def test_what_an_arm_refers_to_differs_in_one_thing() -> None:
    slack = Arm(Engine(3, "full", "slack", slots=16), 16, active_k=1)
    assert slack.drafts == 1
    assert slack.without_mtp() == Arm(Engine(0, "full", slots=16), 16)
    assert slack.eager() == Arm(Engine(3, slots=16), 16, active_k=1)
    assert Arm(Engine(1, attention="batch_expansion")).without_mtp() == Arm(Engine(0))


def test_parts_measure_what_they_say() -> None:
    engines = {name: {arm.engine for group in part.groups for arm in group.arms} for name, part in PARTS.items()}
    assert {(e.k, e.plugin) for e in engines["cost"]} == {(0, True), (1, True), (3, True), (1, False), (3, False)}
    modes = {(e.k, e.mode, e.padding) for e in engines["modes"]}
    assert modes >= {(k, mode, "placeholder") for k in (0, 1) for mode in ("eager", "piecewise", "full")}
    assert (1, "full", "slack") in modes
    assert {e.attention for e in engines["modes"] if e.k} == {"tnd", "batch_expansion", "chunked_prefill"}
    load = {(arm.drafts, arm.engine.padding, arm.at_once) for group in PARTS["load"].groups for arm in group.arms}
    assert load == {(k, "placeholder", n) for k in range(4) for n in (1, 4, 16)} | {(k, "slack", 16) for k in (1, 2, 3)}
    assert {arm.engine.mode for group in PARTS["load"].groups for arm in group.arms} == {"full"}
    assert {(arm.engine.k, arm.drafts) for arm in PARTS["active-k"].groups[0].arms} == {(0, 0), (1, 0), (1, 1)}


def test_parts_are_plain_data() -> None:
    assert json.dumps([dataclasses.asdict(group) for group in GROUPS])
