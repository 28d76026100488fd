"""Rendered command lines of every 0.23 cluster through the real create_engine_config: is what comes out what was meant?

`CHANGED` and `GIVEN` list every value that vLLM or vllm-ascend makes another one of; whatever else changes fails here.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from inventories import edited
from real_config import make_config, write_model

from mtp_runtime.config import api
from mtp_runtime.config.arguments import engine_arguments

# The model whose weights a cluster serves.
CLUSTERS = {"a3": "r1", "a3-single": "r1", "a3-v31": "v3.1", "a3-v32": "v3.2"}
LINE = "0.23.0"
# What a rendered value becomes, and why.
CHANGED = {
    ("speculative_config", "method", "deepseek_mtp"): ("mtp", "vLLM 0.23 knows the old name and maps it"),
    ("kv_transfer_config", "kv_port"): (int, "a text in vllm-ascend's documents, a number in vLLM"),
}
# What NPUPlatform changes in any configuration: field -> why it is right for what we render.
GIVEN = {
    "additional_config": "defaults of ascend_compilation_config and ascend_fusion_config are added",
    "cache_config.block_size": "128, the operator's block size; rules count KV blocks with it (releases.block_size)",
    "cache_config.cache_dtype": "V3.2: sparse attention names the model's dtype instead of auto",
    "compilation_config.cudagraph_capture_sizes": "multiples of K + 1 up to a full batch, by our patch graph_sizes",
    "compilation_config.max_cudagraph_capture_size": "the largest of them",
    "compilation_config.bs_to_padded_graph_size": "made of them",
    "compilation_config.cudagraph_num_of_warmups": "1 in eager mode, where nothing is captured",
    "compilation_config.splitting_ops": "none: a whole-step graph is not split",
    "kv_transfer_config.engine_id": "a second random part",
    "model_config.disable_cascade_attn": "a GPU's feature; MLA has none",
    "parallel_config.all2all_backend": "keeps vLLM's sequence parallel MoE off; the NPU has its own dispatch",
    "parallel_config.worker_cls": "the worker; ours with MTP",
    "scheduler_config.scheduler_cls": "D: the recompute scheduler, which makes placeholder drafts, with our statistics",
    "speculative_config.quantization": "none: the drafter takes the target's",
    # The same objects, seen from the drafter.
    "speculative_config.target_model_config.disable_cascade_attn": "as above",
    "speculative_config.target_parallel_config.all2all_backend": "as above",
    "speculative_config.target_parallel_config.worker_cls": "as above",
}
ADDED = ("ascend_compilation_config", "ascend_fusion_config")
RECOMPUTE = "mtp_runtime.adapters.vllm_ascend.scheduler.MtpAsyncRecomputeScheduler"


def plan_of(name: str) -> dict[str, Any]:
    return api.plan(name)


def samples() -> list[Any]:
    """First and last rank of every role: between them only addresses and the rank's number differ."""
    found = []
    for name in CLUSTERS:
        ranks = plan_of(name)["ranks"]
        for role in sorted({rank["role"] for rank in ranks}):
            of_role = [rank for rank in ranks if rank["role"] == role]
            edges = {rank["name"]: rank for rank in (of_role[0], of_role[-1])}
            found += [pytest.param(name, rank, id=f"{name}-{rank_name}") for rank_name, rank in edges.items()]
    return found


SAMPLES = samples()


def real(name: str, rank: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The configuration of a rank as it starts: its environment, its words."""
    for variable, value in rank["env"].items():
        monkeypatch.setenv(variable, value)
    return make_config(write_model(folder, CLUSTERS[name]), rank["argv"][3:])


def test_every_cluster_of_the_line_is_here() -> None:
    names = [folder.name for folder in sorted(api.inventories().iterdir()) if (folder / "hosts.yml").is_file()]
    of_line = {name for name in names if plan_of(name)["release"] == LINE and plan_of(name)["engine"] == "vllm-ascend"}
    assert of_line == set(CLUSTERS)


def test_ranks_between_first_and_last_differ_in_place_only() -> None:
    placed = {"--host", "--port", "--data-parallel-rank", "--data-parallel-address"}
    for name in CLUSTERS:
        lines: dict[str, set[str]] = {}
        for rank in plan_of(name)["ranks"]:
            words, argv = [], list(rank["argv"])
            while argv:
                word = argv.pop(0)
                if word in placed:
                    argv.pop(0)
                    continue
                words.append(word.replace(f'"{rank_kv_port(rank)}"', "KV_PORT"))
            lines.setdefault(rank["role"], set()).add(json.dumps(words))
        assert all(len(found) == 1 for found in lines.values()), name


def rank_kv_port(rank: dict[str, Any]) -> str | None:
    transfer = engine_arguments(rank["argv"]).get("kv_transfer_config")
    return transfer["kv_port"] if transfer else None


@pytest.mark.parametrize("name, rank", SAMPLES)
def test_every_rendered_argument_arrives(
    name: str, rank: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = real(name, rank, tmp_path / "weights", monkeypatch)
    asked = engine_arguments(rank["argv"])
    found = arrived(config, str(tmp_path / "weights"))
    del asked["model"]
    # The API server's, no part of the configuration.
    assert (asked.pop("host"), asked.pop("port")) == (rank["address"], rank["port"])
    for key, value in asked.items():
        if isinstance(value, dict):
            assert_object(key, value, found[key])
        else:
            assert found[key] == value, key


def arrived(config: Any, model: str) -> dict[str, Any]:
    """A configuration as arguments; a rendered argument that is not listed here fails its test."""
    parallel, scheduler, cache, spec = (
        config.parallel_config,
        config.scheduler_config,
        config.cache_config,
        config.speculative_config,
    )
    assert config.model_config.model == model
    return {
        "seed": config.model_config.seed,
        "served_model_name": config.model_config.served_model_name,
        "max_model_len": config.model_config.max_model_len,
        "enforce_eager": config.model_config.enforce_eager,
        "trust_remote_code": config.model_config.trust_remote_code,
        "quantization": config.model_config.quantization,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "gpu_memory_utilization": cache.gpu_memory_utilization,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "data_parallel_size": parallel.data_parallel_size,
        "data_parallel_rank": parallel.data_parallel_rank,
        "data_parallel_address": parallel.data_parallel_master_ip,
        "data_parallel_rpc_port": parallel.data_parallel_rpc_port,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "enable_expert_parallel": parallel.enable_expert_parallel,
        "speculative_config": vars(spec),
        "compilation_config": vars(config.compilation_config)
        | {"cudagraph_mode": config.compilation_config.cudagraph_mode.name},
        "additional_config": config.additional_config,
        "kv_transfer_config": vars(config.kv_transfer_config) if config.kv_transfer_config else None,
    }


def assert_object(key: str, asked: dict[str, Any], found: dict[str, Any]) -> None:
    for name, value in asked.items():
        became, _ = CHANGED.get((key, name, value) if isinstance(value, str) else (), (None, ""))
        as_type, _ = CHANGED.get((key, name), (None, ""))
        expected = became or (as_type(value) if as_type else value)
        assert found[name] == expected, (key, name)
    if key == "additional_config":
        assert set(found) - set(asked) == set(ADDED)


@pytest.mark.parametrize("name, rank", SAMPLES)
def test_what_was_meant(name: str, rank: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, plan = real(name, rank, tmp_path / "weights", monkeypatch), plan_of(name)
    spec, compilation, scheduler = config.speculative_config, config.compilation_config, config.scheduler_config
    assert (spec.num_speculative_tokens, spec.method) == (rank["k"], "mtp")
    assert spec.draft_model_config.hf_config.architectures == ["DeepSeekMTPModel"]
    assert spec.draft_model_config.max_model_len == config.model_config.max_model_len
    assert spec.draft_tensor_parallel_size == config.parallel_config.tensor_parallel_size
    assert not spec.disable_padded_drafter_batch and config.model_config.use_mla
    assert scheduler.async_scheduling and scheduler.max_num_scheduled_tokens == scheduler.max_num_batched_tokens
    if rank["role"] == "prefill":
        assert config.kv_transfer_config.is_kv_producer and not config.kv_transfer_config.is_kv_consumer
        assert compilation.cudagraph_mode.name == "NONE" and compilation.cudagraph_capture_sizes == []
        assert scheduler.scheduler_cls is None
        return
    assert compilation.cudagraph_mode.name == "FULL_DECODE_ONLY" and plan["graphs"]["mode"] == "full"
    assert_graphs(config, plan, rank)
    if rank["role"] == "decode":
        assert config.kv_transfer_config.is_kv_consumer and not config.kv_transfer_config.is_kv_producer
        assert scheduler.scheduler_cls == RECOMPUTE and plan["padding"]["method"] == "placeholder"
    else:
        assert config.kv_transfer_config is None and scheduler.scheduler_cls is None


def assert_graphs(config: Any, plan: dict[str, Any], rank: dict[str, Any]) -> None:
    """The sizes a worker captures: vLLM rounds them up to multiples of K + 1 after the configuration is made."""
    compilation, d = config.compilation_config, rank["k"] + 1
    asked = plan["graphs"]["capture_sizes"]
    if asked:
        assert compilation.cudagraph_capture_sizes == asked
    compilation.adjust_cudagraph_sizes_for_spec_decode(d, config.parallel_config.tensor_parallel_size)
    captured = compilation.cudagraph_capture_sizes
    assert all(size % d == 0 for size in captured) and (not asked or captured == asked)
    # A full batch has a graph, so no step of D or single runs eager.
    assert captured[-1] == compilation.max_cudagraph_capture_size == config.scheduler_config.max_num_seqs * d


@pytest.mark.parametrize("name, rank", SAMPLES)
def test_what_the_platform_changes(
    name: str, rank: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    platform, seen = type(current_platform), []
    original = platform.check_and_update_config

    def watched(cls: Any, config: Any) -> None:
        before = fields(config)
        original(config)
        seen.append((before, fields(config)))

    monkeypatch.setattr(platform, "check_and_update_config", classmethod(watched))
    real(name, rank, tmp_path / "weights", monkeypatch)
    ((before, after),) = seen
    changed = {field for field in before | after if before.get(field) != after.get(field)}
    assert changed <= set(GIVEN), {field: (before.get(field), after.get(field)) for field in changed - set(GIVEN)}
    assert {"additional_config", "parallel_config.worker_cls"} <= changed


def fields(value: Any, prefix: str = "", depth: int = 3) -> dict[str, str]:
    """Every field of a configuration as text, three levels deep."""
    found: dict[str, str] = {}
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if dataclasses.is_dataclass(inner) and depth > 1:
            found |= fields(inner, f"{prefix}{field.name}.", depth - 1)
        else:
            found[prefix + field.name] = repr(inner)
    return found


# (K, max_num_seqs) whose full batch vLLM's own sizes miss: they go up in steps of 8 and end below it (vLLM#37865, still
# so in 0.23). test_conformance_plugin.py shows what the engine does then; we render sizes.
MISSED = ((2, 5), (2, 14), (2, 28), (4, 9), (1, 13))


@pytest.mark.parametrize("k, seqs", MISSED)
def test_a_full_batch_has_a_graph(k: int, seqs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edits = {
        "mtp.num_speculative_tokens": k,
        "serving.decode.max_num_seqs": seqs,
        "serving.decode.max_num_batched_tokens": seqs * (k + 1),
    }
    plan = api.plan("a3", edited("a3", edits, tmp_path))
    rank = plan["ranks"][-1]
    assert rank["role"] == "decode"
    config = real("a3", rank, tmp_path / "weights", monkeypatch)
    assert_graphs(config, plan, rank)
    assert config.compilation_config.cudagraph_capture_sizes == plan["graphs"]["capture_sizes"]
