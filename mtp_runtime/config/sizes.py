"""Memory arithmetic: the KV cache in bytes and tokens, and a device's share for the engine. No engine."""

import math

from mtp_runtime import releases

from .schema import Cluster, Role

# A die of an A3 node: npu-smi shows 65536 MB.
DIE_GIB = 64
# What turning MTP on costs on a die: the layer's weights, its KV and buffers (vllm-ascend#15467, #7907).
DRAFTER_GIB = 1.0
# HCCL's buffer size where HCCL_BUFFSIZE is not set, MB. It takes one to send and one to receive.
HCCL_BUFFSIZE = 200
# The engine's own --gpu-memory-utilization.
ENGINE_FRACTION = 0.9
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def kv_layers(cluster: Cluster) -> int | None:
    """Layers that keep KV: the main ones and, with MTP on, the drafter's. None when the file does not say."""
    layers = cluster.model.num_hidden_layers
    return None if layers is None else layers + int(cluster.mtp.enabled)


def request_blocks(cluster: Cluster, role: Role) -> int:
    """Blocks that one request of full length needs, its K drafts included."""
    release = releases.find(cluster.topology.engine, cluster.topology.release)
    block = release.block_size if release else 16
    return -(-(cluster.model.max_model_len + cluster.draft_tokens(role)) // block)


def block_bytes(cluster: Cluster) -> int | None:
    """Bytes of one block over all layers. None when layers or dtype are not stated."""
    release = releases.find(cluster.topology.engine, cluster.topology.release)
    layers, width = kv_layers(cluster), DTYPE_BYTES.get(cluster.model.dtype)
    if release is None or layers is None or width is None:
        return None
    return release.block_size * layers * cluster.model.kv_elements_per_token_layer * width


def kv_cache_bytes(cluster: Cluster, role: Role) -> int | None:
    """Bytes for --kv-cache-memory-bytes: the stated ones, or for `auto` slots x full context plus the null block."""
    serving = cluster.role_serving(role)
    if serving.kv_cache_bytes != "auto":
        return serving.kv_cache_bytes
    size = block_bytes(cluster)
    if size is None or serving.max_num_seqs is None:
        return None
    return (serving.max_num_seqs * request_blocks(cluster, role) + 1) * size


def device_gib(cluster: Cluster) -> float | None:
    """Memory of a device; None on CPU."""
    if cluster.topology.engine != "vllm-ascend":
        return None
    return float(cluster.topology.device_memory_gib or DIE_GIB)


def buffer_mb(cluster: Cluster, role: Role) -> int:
    """HCCL_BUFFSIZE of a role."""
    return cluster.role_serving(role).hccl_buffsize or HCCL_BUFFSIZE


def mtp_headroom_gib(cluster: Cluster, role: Role) -> float:
    """What must stay free of a device beside the engine's share so that MTP can be on: drafter and HCCL buffers."""
    drafter = 0 if cluster.mtp.method == "ngram" else DRAFTER_GIB  # ngram loads no weights
    return drafter + 2 * buffer_mb(cluster, role) / 1024


def largest_fraction(cluster: Cluster, role: Role) -> float | None:
    """The largest share that leaves the headroom, rounded down to 0.01 (R15); None on CPU."""
    size = device_gib(cluster)
    return None if size is None else _floor(1 - mtp_headroom_gib(cluster, role) / size)


def derived_fraction(cluster: Cluster, role: Role) -> float | None:
    """The share where none is written and MTP is on: the engine's own less the headroom. None = left to the engine.

    Stated KV bytes count instead of a share, and on a device too small for the drafter R15 has spoken.
    """
    size = device_gib(cluster)
    if size is None or not cluster.mtp.enabled or kv_cache_bytes(cluster, role) is not None:
        return None
    found = _floor(ENGINE_FRACTION - mtp_headroom_gib(cluster, role) / size)
    return found if found > 0 else None


def memory_fraction(cluster: Cluster, role: Role) -> float | None:
    """--gpu-memory-utilization: the stated share, else the derived one; None = the engine's choice."""
    return cluster.role_serving(role).gpu_memory_utilization or derived_fraction(cluster, role)


def _floor(share: float) -> float:
    """Rounded down to 0.01; the small term keeps 0.29 from becoming 0.28."""
    return math.floor(share * 100 + 1e-9) / 100
