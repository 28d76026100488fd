"""Whatever the keys say together: an answer, and what breaks no rule renders to words that an engine can be given."""

import copy as copying
from functools import cache
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_runtime import releases
from mtp_runtime.config import api, rules
from mtp_runtime.config.explain import explain
from mtp_runtime.config.load import Places, load
from mtp_runtime.config.render import render
from mtp_runtime.config.schema import ROLES, Cluster

BASES = ("a3", "a3-single", "a3-v32", "lab", "local", "local-single", "seed-online")
VALUES: dict[str, tuple[Any, ...]] = {
    "topology.release": tuple(found.version for found in releases.RELEASES),
    "topology.engine": ("vllm-cpu", "vllm-ascend"),
    "topology.runner": (None, "supervisor", "container"),
    "topology.connector": (None, *releases.ROUTER_CONNECTOR),
    "topology.device_memory_gib": (None, 1, 2, 32, 4096),
    "topology.devices_per_host": (None, 1, 8, 99, 100, 1024),
    "mtp.enabled": (True, False),
    "mtp.num_speculative_tokens": (None, 0, 1, 2, 14, 15, 16, 99),
    "mtp.method": (*releases.METHODS, "mpt"),
    "mtp.draft_model": (None, "drafter"),
    "mtp.padding": ("auto", "slack", "placeholder"),
    "mtp.attention": ("tnd", "batch_expansion", "chunked_prefill"),
    "mtp.disable_padded_drafter_batch": (True, False),
    "model.num_attention_heads": (None, 1, 7, 128),
    "model.max_model_len": (1, 16, 40000, 10**8),
    "model.moe": (True, False),
    "serving.seed": (None, 0),
}
SERVING: dict[str, tuple[Any, ...]] = {
    "max_num_seqs": (None, 1, 4, 40, 65536),
    "max_num_batched_tokens": (None, 1, 12, 10**8),
    "gpu_memory_utilization": (None, 0.01, 0.9, 0.999),
    "graph_mode": (None, "eager", "piecewise", "full"),
    "enforce_eager": (None, True, False),
    "hccl_buffsize": (None, 1, 65536),
    "kv_cache_bytes": (None, "auto", 1, 10**9),
    "compilation_config": (
        None,
        {"cudagraph_capture_sizes": "auto"},
        {"cudagraph_capture_sizes": "auto", "max_cudagraph_capture_size": 12},
        {"cudagraph_capture_sizes": [3, 6]},
        {"cudagraph_mode": "NONE"},
        {"cudagraph_mode": "FULL"},
    ),
    "additional_config": (
        None,
        {},
        {"torchair_graph_config": {"enabled": True}},
        {"torchair_graph_config": {"enabled": True, "graph_batch_sizes": [16, 8]}},
        {"ascend_scheduler_config": {"enabled": True}},
        {"recompute_scheduler_enable": True},
        {"enable_dsa_cp": True},
        {"layer_sharding": ["o_proj"]},
    ),
}
LAYOUT: dict[str, tuple[Any, ...]] = {
    "dp": (1, 2, 32, 4096),
    "tp": (1, 4, 16, 1024),
    "internal_dp": (True, False),
    "port": (1, 8000, 65535),
    "rpc_port": (None, 1, 12321),
    "kv_port": (None, 1, 36000, 65535),
}
KEYS = {
    **VALUES,
    **{f"serving.{role}.{key}": values for role in ROLES for key, values in SERVING.items()},
    **{f"serving.{key}": values for key, values in SERVING.items()},
    **{f"topology.{role}.{key}": values for role in ROLES for key, values in LAYOUT.items()},
}
EDIT = st.sampled_from(sorted(KEYS)).flatmap(lambda key: st.tuples(st.just(key), st.sampled_from(KEYS[key])))


@cache
def shipped(name: str) -> tuple[dict[str, Any], Places]:
    """An inventory's written keys and their places."""
    cluster, places = load(api.inventories() / name)
    return cluster.model_dump(exclude_unset=True), places


def edited(name: str, edits: list[tuple[str, Any]]) -> Cluster:
    """The inventory with other values; a layout is only changed where there is one."""
    data = copying.deepcopy(shipped(name)[0])
    for dotted, value in edits:
        section, *path = dotted.split(".")
        node = data[section]
        if section == "topology" and len(path) > 1 and not node.get(path[0]):
            continue
        for part in path[:-1]:
            node[part] = node.get(part) or {}
            node = node[part]
        node[path[-1]] = value
    return Cluster.model_validate(data)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(BASES), st.lists(EDIT, min_size=1, max_size=4), st.sampled_from([None, 1, 2]))
def test_every_combination_is_answered(name: str, edits: list[tuple[str, Any]], mtp_layers: int | None) -> None:
    cluster, places = edited(name, edits).with_k_of(mtp_layers), shipped(name)[1]
    problems = rules.check_cluster(cluster, places)
    rules.check_warnings(cluster, mtp_layers, places)
    assert all(p.message and p.remedy and p.source and p.file for p in problems)
    if problems:
        return
    plan = render(cluster)
    assert plan["ranks"] and explain(cluster)
    for rank in plan["ranks"]:
        words = [*rank["argv"], *rank["env"], *rank["env"].values()]
        assert all(isinstance(word, str) and word.isprintable() and word != "None" for word in words)
        assert 0 <= rank["k"] <= 15
