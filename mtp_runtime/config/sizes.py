"""Memory arithmetic of the KV cache. Bytes and tokens, no engine."""

from mtp_runtime import releases

from .schema import Cluster, Role

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
