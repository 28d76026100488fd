"""Command line and environment of one rank, per engine. Pure; a list of strings, never a shell string.

`{root}` stands for the repository root and `{engine_python}` for the engine environment's Python; the role that starts
a rank puts them in, so a plan is the same on every machine.
"""

import json
from typing import Any

from mtp_runtime import releases
from mtp_runtime.choice import PROBABILISTIC
from mtp_runtime.patch_names import PATCH_NAMES, variable

from .graph_plan import batched_tokens, compilation_config, graph_mode, padding
from .placement import Rank
from .schema import Cluster, Serving
from .sizes import kv_cache_bytes, memory_fraction

ENGINE_PYTHON = "{engine_python}"
ROOT = "{root}"
# The backend that our plugin stands in for: unasked, vLLM takes AMX_MLA on processors that have AMX.
CPU_ATTENTION = "CPU_MLA"
# Seen needed on CPU: more threads than free cores made a token 3-20 times slower.
CPU_ENV = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Core and worker in one process: a third less memory, half the start time.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_PLUGINS": "mtp_runtime",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "XDG_CACHE_HOME": f"{ROOT}/.local/cache",
    "XDG_CONFIG_HOME": f"{ROOT}/.local/cache/config",
    "HF_HOME": f"{ROOT}/.local/cache/huggingface",
    "VLLM_CACHE_ROOT": f"{ROOT}/.local/cache/vllm",
    "VLLM_CONFIG_ROOT": f"{ROOT}/.local/cache/vllm-config",
    "TORCHINDUCTOR_CACHE_DIR": f"{ROOT}/.local/cache/torchinductor",
    "TMPDIR": f"{ROOT}/.local/tmp",
}
ASCEND_ENV = {
    "OMP_PROC_BIND": "false",
    "OMP_NUM_THREADS": "10",
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    "HCCL_OP_EXPANSION_MODE": "AIV",
    "TASK_QUEUE_ENABLE": "1",
    "VLLM_USE_V1": "1",
    # 120 s, the default, is too short for a group of 32 ranks (vllm-ascend#9447); equal on all ranks.
    "HCCL_CONNECT_TIMEOUT": "600",
    "HCCL_EXEC_TIMEOUT": "3600",
    "VLLM_RPC_TIMEOUT": "3600000",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "30000",
    "VLLM_ENGINE_READY_TIMEOUT_S": "1800",
    "HF_HUB_OFFLINE": "1",
    # No VLLM_PLUGINS: it would also filter out the engine's own plugins, its KV connectors among them.
}
# Only with a Mooncake connector: P frees a request's blocks after the first one, seconds; the others are ms.
MOONCAKE_ENV = {
    "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "480",
    "ASCEND_CONNECT_TIMEOUT": "10000",
    "ASCEND_TRANSFER_TIMEOUT": "10000",
}


def rank_command(cluster: Cluster, rank: Rank) -> tuple[list[str], dict[str, str]]:
    """argv and env of one rank."""
    if cluster.topology.engine == "vllm-cpu":
        return _cpu_argv(cluster, rank), _cpu_env(cluster, rank)
    return _ascend_argv(cluster, rank), _ascend_env(cluster, rank)


def cpu_env(root: str) -> dict[str, str]:
    """CPU_ENV for an engine that no plan starts: the tests and benchmarks measure what a rank runs with."""
    return {name: value.replace(ROOT, root) for name, value in CPU_ENV.items()}


def weights_path(cluster: Cluster) -> str:
    """The weights folder as a command line names it."""
    path = cluster.model.path
    return path if path.startswith("/") else f"{ROOT}/{path}"


def speculative_config(cluster: Cluster, rank: Rank) -> dict[str, Any] | None:
    """--speculative-config of a rank; None when MTP is off (then no rank has one)."""
    mtp = cluster.mtp
    if not mtp.enabled:
        return None
    config: dict[str, Any] = {"num_speculative_tokens": cluster.draft_tokens(rank.role), "method": mtp.method}
    if mtp.draft_model:
        config["model"] = mtp.draft_model
    if mtp.method in releases.DRAFT_MODEL_METHODS and cluster.topology.engine == "vllm-ascend":
        # An EAGLE drafter runs whole on every rank, whatever the target's tp (vllm-ascend speculative decoding guide).
        config["draft_tensor_parallel_size"] = 1
    # P's one draft only makes the KV layouts agree: nobody verifies it.
    if mtp.draft_sampling == PROBABILISTIC and rank.role != "prefill":
        config["draft_sample_method"] = PROBABILISTIC
    if cluster.topology.engine == "vllm-cpu":
        # The drafter never inherits the target's backend.
        config["attention_backend"] = CPU_ATTENTION
    if mtp.disable_padded_drafter_batch:
        config["disable_padded_drafter_batch"] = True
    return config


def kv_transfer_config(cluster: Cluster, rank: Rank) -> dict[str, Any] | None:
    """--kv-transfer-config of a rank; None without P/D."""
    connector, topology = cluster.topology.connector, cluster.topology
    if connector is None or rank.role == "single":
        return None
    if connector == "NixlConnector":
        return {"kv_connector": connector, "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    sizes = {
        side: {"dp_size": found.dp, "tp_size": found.tp}
        for side, found in (("prefill", topology.prefill), ("decode", topology.decode))
        if found
    }
    return {
        "kv_connector": connector,
        "kv_role": "kv_producer" if rank.role == "prefill" else "kv_consumer",
        "kv_port": str(rank.kv_port),
        "kv_connector_extra_config": sizes,
    }


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _config_flags(cluster: Cluster, rank: Rank, serving: Serving) -> list[str]:
    """The flags that carry JSON, in the order of the reference command line."""
    values: list[tuple[str, Any]] = [("--speculative-config", speculative_config(cluster, rank))]
    if serving.additional_config:
        values.append(("--additional-config", serving.additional_config.model_dump(exclude_none=True) or None))
    values.append(("--compilation-config", compilation_config(cluster, rank.role)))
    values.append(("--kv-transfer-config", kv_transfer_config(cluster, rank)))
    return [part for flag, value in values if value is not None for part in (flag, _json(value))]


def _size_flags(cluster: Cluster, rank: Rank, serving: Serving) -> list[str]:
    """Batch sizes, where stated or derived."""
    flags = []
    for flag, value in (
        ("--max-num-batched-tokens", batched_tokens(cluster, rank.role)),
        ("--max-num-seqs", serving.max_num_seqs),
    ):
        flags += [flag, str(value)] if value is not None else []
    return flags


def _switches(cluster: Cluster, rank: Rank, serving: Serving) -> list[str]:
    """Flags without a sizing meaning, in the order of the reference command line."""
    flags = ["--enforce-eager"] if graph_mode(cluster, rank.role) == "eager" else []
    flags += ["--trust-remote-code"] if cluster.model.trust_remote_code else []
    fraction = memory_fraction(cluster, rank.role)
    flags += ["--gpu-memory-utilization", str(fraction)] if fraction is not None else []
    flags += ["--quantization", cluster.model.quantization] if cluster.model.quantization else []
    if serving.prefix_caching is not None:
        flags += ["--enable-prefix-caching" if serving.prefix_caching else "--no-enable-prefix-caching"]
    return flags


def _seed(cluster: Cluster) -> list[str]:
    return [] if cluster.serving.seed is None else ["--seed", str(cluster.serving.seed)]


def _cpu_argv(cluster: Cluster, rank: Rank) -> list[str]:
    serving, model = cluster.role_serving(rank.role), cluster.model
    # `vllm serve` cannot find its own distribution on CPU (it is named vllm-cpu): start the module.
    argv = [ENGINE_PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", weights_path(cluster)]
    argv += ["--host", rank.address, "--port", str(rank.port), *_seed(cluster)]
    argv += ["--served-model-name", model.name, "--dtype", model.dtype, "--max-model-len", str(model.max_model_len)]
    argv += ["--attention-backend", CPU_ATTENTION]
    argv += [*_size_flags(cluster, rank, serving), *_switches(cluster, rank, serving)]
    kv_bytes = kv_cache_bytes(cluster, rank.role)
    argv += ["--kv-cache-memory-bytes", str(kv_bytes)] if kv_bytes is not None else []
    return argv + _config_flags(cluster, rank, serving)


def _cpu_env(cluster: Cluster, rank: Rank) -> dict[str, str]:
    env = {**CPU_ENV, "MTP_VERIFICATION": cluster.mtp.verification}
    chosen = padding(cluster, rank.role).method
    if rank.role != "prefill":  # where nothing is decoded they mean nothing, and a change would restart it
        env["MTP_ATTENTION"] = cluster.mtp.attention
        env |= {"MTP_PADDING": chosen} if chosen else {}
    if graph_mode(cluster, rank.role) == "piecewise":
        # Graphs between the attention calls without torch.compile.
        env["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"
    if rank.role != "single" and cluster.topology.connector == "NixlConnector":
        env["UCX_TLS"] = "tcp,sm,self"
        env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = rank.address
        env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(rank.side_channel_port)
    return env


def _ascend_argv(cluster: Cluster, rank: Rank) -> list[str]:
    serving, model = cluster.role_serving(rank.role), cluster.model
    topology = cluster.role_topology(rank.role)
    assert topology is not None
    argv = ["vllm", "serve", weights_path(cluster), "--host", rank.address, "--port", str(rank.port)]
    if topology.dp > 1:
        argv += ["--data-parallel-size", str(topology.dp)]
    if topology.dp > rank.ranks:
        argv += ["--data-parallel-rank", str(rank.rank)]
        argv += ["--data-parallel-address", rank.dp_address, "--data-parallel-rpc-port", str(rank.dp_rpc_port)]
    argv += ["--tensor-parallel-size", str(topology.tp)]
    argv += ["--enable-expert-parallel"] if cluster.topology.expert_parallel else []
    argv += [*_seed(cluster), "--served-model-name", model.name]
    argv += ["--dtype", model.dtype] if model.dtype != "auto" else []
    argv += ["--max-model-len", str(model.max_model_len)]
    argv += [*_size_flags(cluster, rank, serving), *_switches(cluster, rank, serving)]
    kv_bytes = kv_cache_bytes(cluster, rank.role)
    argv += ["--kv-cache-memory-bytes", str(kv_bytes)] if kv_bytes is not None else []
    return argv + _config_flags(cluster, rank, serving)


def _ascend_env(cluster: Cluster, rank: Rank) -> dict[str, str]:
    serving = cluster.role_serving(rank.role)
    release = releases.find(cluster.topology.engine, cluster.topology.release)
    env = {**ASCEND_ENV, **(release.env if release else {}), "HCCL_IF_IP": rank.address}
    nic = cluster.host_vars(rank.host).nic
    if nic:
        env.update(dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME"), nic))
    if serving.hccl_buffsize is not None:
        env["HCCL_BUFFSIZE"] = str(serving.hccl_buffsize)
    if rank.devices and rank.ranks == 1:  # a process that starts its ranks itself has the host to itself
        env["ASCEND_RT_VISIBLE_DEVICES"] = ",".join(map(str, rank.devices))
    if rank.role != "single" and (cluster.topology.connector or "").startswith("Mooncake"):
        env.update(MOONCAKE_ENV)
    if release and release.deployable:  # our plugin runs in no other line
        env["MTP_VERIFICATION"] = cluster.mtp.verification
        chosen = padding(cluster, rank.role).method
        env |= {"MTP_PADDING": chosen} if chosen and rank.role != "prefill" else {}
        env |= _patches(cluster, rank)
    return env


def _patches(cluster: Cluster, rank: Rank) -> dict[str, str]:
    """MTP_PATCHES, where a patch is off; without MTP nothing is patched."""
    written = cluster.mtp.patches
    if written is None or not cluster.draft_tokens(rank.role):
        return {}
    on = variable([name for name in PATCH_NAMES if not getattr(written, name)])
    return {"MTP_PATCHES": on} if on else {}
