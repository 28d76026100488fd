"""What explains a plan agrees with the plan, and says where somebody wrote a value."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from inventory_copy import DELETE, Copy

from mtp_runtime.config import api
from mtp_runtime.config.explain import Explained, explain
from mtp_runtime.config.plan_checks import flag
from mtp_runtime.config.render import render

MakeCopy = Callable[[str], Copy]
SHIPPED = sorted(file.parent.name for file in api.inventories().glob("*/hosts.yml"))


def rows(base: str, root: Path | None = None) -> dict[str, Explained]:
    """Explained values by key."""
    found = explain(api.load_checked(base, root))
    assert len({row.key for row in found}) == len(found)
    return {row.key: row for row in found}


def rendered(rank: dict[str, Any]) -> dict[str, Any]:
    """The values that explain names, as a rank's command line has them."""
    argv = rank["argv"]
    compiled = json.loads(flag(argv, "--compilation-config") or "{}")
    numbers = {
        name: None if (text := flag(argv, option)) is None else json.loads(text)
        for name, option in (
            ("max_num_batched_tokens", "--max-num-batched-tokens"),
            ("gpu_memory_utilization", "--gpu-memory-utilization"),
            ("kv_cache_bytes", "--kv-cache-memory-bytes"),
        )
    }
    return numbers | {"compilation_config.cudagraph_capture_sizes": compiled.get("cudagraph_capture_sizes")}


@pytest.mark.parametrize("name", SHIPPED)
def test_it_agrees_with_the_plan(name: str) -> None:
    cluster = api.load_checked(name)
    plan, found = render(cluster), rows(name)
    torchair = "torchair_graph_config" in " ".join(plan["ranks"][0]["argv"])
    for rank in plan["ranks"]:
        for key, value in rendered(rank).items():
            row = found.get(f"serving.{rank['role']}.{key}")
            if row is not None and not torchair:
                assert row.value == value, row
        transfer = json.loads(flag(rank["argv"], "--kv-transfer-config") or "{}")
        if "kv_port" in transfer:
            assert str(found[f"kv_port of {rank['role']} on {rank['host']}"].value) == transfer["kv_port"]
    assert found["mtp.num_speculative_tokens"].value == plan["mtp"]["k"]
    assert found["mtp.padding"].value == plan["padding"]["method"]
    assert found["mtp.verification"].value == plan["verification"]["method"]
    assert found["deployable"].value == plan["deployable"]["ok"]
    for role in cluster.active_roles():
        assert found[f"ranks of {role}"].value == sum(rank["role"] == role for rank in plan["ranks"])
    assert all(row.how for row in found.values())


@pytest.mark.parametrize(
    ("base", "edits", "key", "value", "how", "where"),
    [
        ("a3-v32", {}, "serving.decode.max_num_batched_tokens", 12, "4 slots x (K + 1 = 3) = 12", None),
        (
            "a3-v32",
            {"serving.decode.max_num_batched_tokens": 30},
            "serving.decode.max_num_batched_tokens",
            30,
            "4 slots x (K + 1 = 3) = 12",
            "group_vars/all/serving.yml: serving.decode.max_num_batched_tokens",
        ),
        (
            "local",
            {},
            "serving.decode.max_num_batched_tokens",
            8192,
            "the larger of a whole prompt, max_model_len 8192, and 4 slots x (K + 1 = 2) = 8192",
            "group_vars/all/serving.yml: serving.max_num_batched_tokens",
        ),
        (
            "a3",
            {"serving.decode.gpu_memory_utilization": DELETE},
            "serving.decode.gpu_memory_utilization",
            0.86,
            "the engine's 0.9 less (drafter 1 GiB + HCCL buffers 2 x 600 MB) / 64 GiB = 0.86",
            None,
        ),
        (
            "a3-v31",
            {"hosts.all.hosts.p1.kv_port": 40000},
            "kv_port of prefill on p1",
            40000,
            "20000 + 1000 x 16 devices + 100 x group 1 = 36100",
            "hosts.yml: all.hosts.p1.kv_port",
        ),
        (
            "a3-v31",
            {"topology.decode.kv_port": 41000},
            "kv_port of decode on d0",
            41000,
            "20000 + 1000 x 16 devices + 100 x group 2 = 36200",
            "group_vars/all/topology.yml: topology.decode.kv_port",
        ),
        (
            "local",
            {"mtp.padding": "slack"},
            "slots of decode",
            5,
            "max_num_seqs 4 + slack ceil(4 x 1 / (15 - 1)) = 1",
            None,
        ),
        (
            "local",
            {"serving.decode.compilation_config": {"cudagraph_capture_sizes": [8]}},
            "serving.decode.compilation_config.cudagraph_capture_sizes",
            [8],
            "powers of two below 4, and 4 slots x (K + 1 = 2)",
            "group_vars/all/serving.yml: serving.decode.compilation_config.cudagraph_capture_sizes",
        ),
        (
            "local",
            {"mtp.num_speculative_tokens": DELETE},
            "mtp.num_speculative_tokens",
            1,
            "num_nextn_predict_layers of the weights",
            None,
        ),
        ("local", {"mtp.enabled": False}, "mtp.num_speculative_tokens", 0, "MTP is off (mtp.enabled)", None),
        (
            "seed-online",
            {"serving.additional_config.ascend_scheduler_config": {"enabled": True}},
            "scheduler of single",
            "v0",
            "V1 unless switched",
            "group_vars/all/serving.yml: serving.additional_config.ascend_scheduler_config.enabled",
        ),
    ],
)
def test_how_and_where(
    base: str, edits: dict[str, Any], key: str, value: Any, how: str, where: str | None, copy: MakeCopy
) -> None:
    row = rows(base, copy(base).edit(edits).root)[key]
    assert row == Explained(key, value, how, where)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_written_value_stands_where_it_says(name: str) -> None:
    for row in rows(name).values():
        if row.overridden:
            file, _, key = row.overridden.partition(": ")
            assert key.rsplit(".")[-1] + ":" in (api.inventories() / name / file).read_text()
