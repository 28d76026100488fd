"""Values that follow from others where nobody writes them: what they are, and that a written one is taken."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inventory_copy import DELETE, Copy

from mtp_runtime.config import api, placement, sizes
from mtp_runtime.config.plan_checks import flag

MakeCopy = Callable[[str], Copy]
RECOMPUTE = "serving.decode.additional_config.recompute_scheduler_enable"
A3 = api.load_checked("a3")
BATCHED = "serving.decode.max_num_batched_tokens"
SIZES = "serving.decode.compilation_config.cudagraph_capture_sizes"


def ranks(base: str, edits: dict[str, Any], copy: MakeCopy) -> list[dict[str, Any]]:
    """The rendered ranks of an edited inventory."""
    return list(api.plan(base, copy(base).edit(edits).root)["ranks"])


def tokens(rank: dict[str, Any]) -> str | None:
    return flag(rank["argv"], "--max-num-batched-tokens")


def captured(rank: dict[str, Any]) -> list[int] | None:
    found = json.loads(flag(rank["argv"], "--compilation-config") or "{}").get("cudagraph_capture_sizes")
    return None if found is None else list(found)


def kv_port(rank: dict[str, Any]) -> str:
    return str(json.loads(flag(rank["argv"], "--kv-transfer-config") or "")["kv_port"])


@pytest.mark.parametrize(
    ("edits", "wanted"),
    [
        ({}, "12"),
        ({"mtp.num_speculative_tokens": 3}, "16"),
        ({"mtp.enabled": False}, "4"),
        ({"serving.decode.max_num_seqs": 10}, "30"),
        ({"serving.decode.max_num_batched_tokens": 64}, "64"),
        ({"mtp.padding": "slack", RECOMPUTE: False}, "15"),
        ({"serving.decode.max_num_seqs": None, SIZES: None}, None),
    ],
)
def test_batched_tokens_of_decode_are_a_full_step(edits: dict[str, Any], wanted: str | None, copy: MakeCopy) -> None:
    found = ranks("a3-v32", edits, copy)
    assert {tokens(rank) for rank in found if rank["role"] == "decode"} == {wanted}
    assert {tokens(rank) for rank in found if rank["role"] == "prefill"} == {"32560"}


def test_batched_tokens_of_others_are_the_engines(copy: MakeCopy) -> None:
    assert {tokens(rank) for rank in ranks("seed-online", {}, copy)} == {None}
    none = {"serving.prefill.max_num_batched_tokens": None}
    assert next(tokens(rank) for rank in ranks("a3", none, copy)) is None


def test_batched_tokens_on_cpu_hold_a_whole_prompt(copy: MakeCopy) -> None:
    assert [tokens(rank) for rank in api.plan("lab")["ranks"]] == ["4096", "4096"]
    short = {"serving.max_num_batched_tokens": DELETE, "model.max_model_len": 20, "mtp.num_speculative_tokens": 15}
    assert [tokens(rank) for rank in ranks("local", short, copy)] == ["20", "64"]


@pytest.mark.parametrize(
    ("edits", "wanted"),
    [
        ({}, [3, 6, 9, 12]),
        ({"mtp.num_speculative_tokens": 1}, [2, 4, 6, 8]),
        ({"mtp.enabled": False}, [1, 2, 3, 4]),
        ({"serving.decode.max_num_seqs": 20}, [3, 6, 12, 24, 48, 60]),
        ({"mtp.padding": "slack", RECOMPUTE: False}, [15]),
        ({SIZES: [12, 6]}, [6, 12]),
        ({SIZES: None, "mtp.num_speculative_tokens": 1}, None),
        # The engine's own end at 8 of the 12 tokens of a full batch.
        ({SIZES: None}, [3, 6, 9, 12]),
        ({"serving.decode.graph_mode": "eager"}, None),
    ],
)
def test_graph_sizes_of_auto(edits: dict[str, Any], wanted: list[int] | None, copy: MakeCopy) -> None:
    assert captured(ranks("a3-v32", edits, copy)[-1]) == wanted


def test_kv_ports_are_apart_and_clear_of_the_transport(copy: MakeCopy) -> None:
    for base, wanted in (
        ("a3-v31", ["36000"] * 2 + ["36100"] * 2 + ["36200"] * 32),
        ("a3-v32", ["36000"] * 2 + ["36100"] * 8),
    ):
        assert [kv_port(rank) for rank in api.plan(base)["ranks"]] == wanted
    unwritten = {f"hosts.all.hosts.{host}.kv_port": DELETE for host in ("p0", "p1", "d0", "d1")}
    assert ranks("a3", unwritten, copy) == api.plan("a3")["ranks"]
    role = ranks("a3-v31", {"topology.decode.kv_port": 40000, "hosts.all.hosts.p1.kv_port": 39000}, copy)
    assert [kv_port(rank) for rank in role][:5] == ["36000", "36000", "39000", "39000", "40000"]


@settings(deadline=None)
@given(st.integers(1, 1024), st.integers(0, 20))
def test_kv_port_ranges_never_overlap(devices: int, group: int) -> None:
    topology = A3.topology.model_copy(update={"devices_per_host": devices})
    cluster = A3.model_copy(update={"topology": topology})
    low, high = (placement.derived_kv_port(cluster, number) or 0 for number in (group, group + 1))
    assert placement.lowest_kv_port(devices) <= low
    assert low + devices < high


def fraction(rank: dict[str, Any]) -> str | None:
    return flag(rank["argv"], "--gpu-memory-utilization")


@pytest.mark.parametrize(
    ("edits", "wanted"),
    [
        # 0.9 less (1 GiB + 2 x 600 MB) / 64 GiB
        ({}, "0.86"),
        ({"serving.decode.hccl_buffsize": 1200}, "0.84"),
        ({"serving.decode.hccl_buffsize": None}, "0.87"),
        ({"topology.device_memory_gib": 32}, "0.83"),
        ({"mtp.enabled": False}, None),
        ({"serving.decode.gpu_memory_utilization": 0.94}, "0.94"),
        ({"serving.decode.kv_cache_bytes": 20_000_000_000}, None),
    ],
)
def test_memory_fraction_leaves_room_for_the_drafter(edits: dict[str, Any], wanted: str | None, copy: MakeCopy) -> None:
    unwritten = {"serving.decode.gpu_memory_utilization": DELETE}
    assert fraction(ranks("a3", unwritten | edits, copy)[-1]) == wanted


def test_no_memory_fraction_on_cpu() -> None:
    assert {fraction(rank) for rank in api.plan("local")["ranks"]} == {None}
    assert sizes.largest_fraction(api.load_checked("local"), "decode") is None


@pytest.mark.parametrize(
    ("k", "seqs", "rendered"),
    [
        (2, 5, [3, 6, 9, 12, 15]),
        (2, 14, [3, 6, 12, 24, 42]),
        (1, 13, [2, 4, 8, 16, 26]),
        (2, 40, None),  # 120 tokens: one of the engine's own
        (1, 3, [2, 4, 6]),
        (3, 200, None),  # above the 512 tokens at which vllm-ascend ends its sizes on purpose
    ],
)
def test_a_full_batch_has_a_graph_on_ascend(k: int, seqs: int, rendered: list[int] | None, copy: MakeCopy) -> None:
    edits = {"mtp.num_speculative_tokens": k, "serving.decode.max_num_seqs": seqs, BATCHED: seqs * (k + 1)}
    assert captured(ranks("a3", edits, copy)[-1]) == rendered
    off = copy("a3-v31").edit({"mtp.enabled": False, "serving.decode.max_num_seqs": seqs})
    assert captured(api.plan("a3-v31", off.root)["ranks"][-1]) is None
