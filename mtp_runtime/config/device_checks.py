"""The checks about what a device holds (R13, R15). Pure."""

from collections.abc import Iterator

from .checks import Finding, serving_key
from .graph_plan import graph_mode
from .placement import Rank
from .schema import Cluster
from .sizes import buffer_mb, derived_fraction, device_gib, kv_cache_bytes, largest_fraction, mtp_headroom_gib

# Heads for one KV head that the MLA operator takes in a graph.
MLA_HEADS = (32, 64, 128)


def mla_heads(cluster: Cluster, mtp_layers: int | None) -> Iterator[Finding]:
    """R13. All heads of an MLA model share one KV head; tp splits the heads."""
    heads = cluster.model.num_attention_heads
    if heads is None or cluster.topology.engine != "vllm-ascend":
        return
    for role in cluster.active_roles():
        layout = cluster.role_topology(role)
        tp = layout.tp if layout else 1
        # Where no mode is stated the engine takes graphs.
        if graph_mode(cluster, role) != "eager" and (heads % tp or heads // tp not in MLA_HEADS):
            message = f"tp {tp} leaves {heads / tp:g} of {heads} heads on a rank of {role}, whose steps run in graphs."
            yield Finding(("topology", role, "tp"), message)


def memory_headroom(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R15. A share that is written must hold with MTP off too: switching on must not need a second edit."""
    size = device_gib(cluster)
    if size is None:
        return
    for role in cluster.active_roles():
        if kv_cache_bytes(cluster, role) is not None:  # then the engine passes over the share
            continue
        written, need = cluster.role_serving(role).gpu_memory_utilization, mtp_headroom_gib(cluster, role)
        needs = f"the drafter and HCCL buffers of {buffer_mb(cluster, role)} MB need {need:.2f} GiB"
        most = largest_fraction(cluster, role)
        if written is not None and (1 - written) * size < need - 1e-6:
            left = f"{role} leaves {(1 - written) * size:.2f} of {size:g} GiB of a device; {needs}: at most {most:g}."
            yield Finding(serving_key(cluster, role, "gpu_memory_utilization"), left)
        elif written is None and cluster.mtp.enabled and derived_fraction(cluster, role) is None:
            message = f"a device of {size:g} GiB is too small for {role} with MTP: {needs}."
            yield Finding(("topology", "device_memory_gib"), message)
