"""The checks about release lines (R18, R33, R46, W04): what each knows is said in mtp_runtime/releases.py. Pure."""

from collections.abc import Iterator

from pydantic import BaseModel

from mtp_runtime import releases
from mtp_runtime.graphs.slots import MAX_K

from .checks import K_KEY, Finding, serving_key
from .placement import Rank
from .problems import KeyPath
from .schema import Cluster


def release(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R33."""
    topology = cluster.topology
    found = releases.find(topology.engine, topology.release)
    if found is None:
        known = ", ".join(releases.versions(topology.engine))
        message = f"release {topology.release!r} of {topology.engine} is not known; valid: {known}."
        yield Finding(("topology", "release"), message)
        return
    if topology.connector and topology.connector not in found.connectors:
        valid = ", ".join(found.connectors) or "none, it has no P/D here"
        yield Finding(("topology", "connector"), f"{topology.connector} does not run on {found.line}; valid: {valid}.")
    if found.engine == "vllm-ascend" and topology.devices_per_host is None:
        message = "vllm-ascend needs devices_per_host (16 on an A3 node)."
        yield Finding(("topology", "devices_per_host"), message, "set topology.devices_per_host: 16 on A3 nodes")
    if found.engine == "vllm-ascend" and topology.runner == "supervisor":
        message = "vllm-ascend runs in containers; supervisor is for vllm-cpu."
        yield Finding(("topology", "runner"), message, "set topology.runner: container, or leave it out")
    for role in cluster.active_roles():
        layout = cluster.role_topology(role)
        for name, most in (("dp", found.max_dp), ("tp", found.max_tp)):
            size = getattr(layout, name)
            if most and size > most:
                message = f"{role} has {name} {size}; {found.line} runs {name} {most} only."
                remedy = f"set topology.{role}.{name}: {most} (more ranks die at the first request: all_gatherv)"
                yield Finding(("topology", role, name), message, remedy)
    if cluster.topology.expert_parallel and not cluster.model.moe:
        remedy = "set topology.expert_parallel: false, or model.moe: true where the model has experts"
        message = "expert_parallel with a model without experts."
        yield Finding(("topology", "expert_parallel"), message, remedy)


def scheduler_mode(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R18. With MTP off too: switching on must not need a second edit. Above MAX_K R03 speaks."""
    found = releases.find(cluster.topology.engine, cluster.topology.release)
    if found is None or cluster.mtp.method not in releases.MTP_METHODS:
        return
    if found.max_k < cluster.mtp.k <= MAX_K:
        more = releases.named(r for r in releases.RELEASES if r.engine == found.engine and r.max_k > found.max_k)
        message = f"K = {cluster.mtp.k} on {found.line}, whose MTP drafts {found.max_k} token a step; "
        yield Finding(K_KEY, message + f"lines with more: {more}.")
    if not found.has("additional_config.ascend_scheduler_config"):
        return
    reported = set()
    for role in cluster.active_roles():
        config = cluster.role_serving(role).additional_config
        chosen = config.ascend_scheduler_config if config else None
        scheduler = releases.V0 if chosen and chosen.enabled else releases.V1
        key = serving_key(cluster, role, "additional_config", "ascend_scheduler_config", "enabled")
        if scheduler not in found.schedulers and key not in reported:
            reported.add(key)
            (needed,) = found.schedulers
            message = f"{role} has the {scheduler.upper()} scheduler; MTP on {found.line} needs {needed.upper()}: "
            yield Finding(key, message + f"enabled: {str(needed == releases.V0).lower()}.")


def render_only(cluster: Cluster, mtp_layers: int | None) -> Iterator[Finding]:
    """W04."""
    found = releases.find(cluster.topology.engine, cluster.topology.release)
    if found and not found.deployable:
        yield Finding(("topology", "release"), f"{found.rendered_only}.")


def release_keys(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R46."""
    found = releases.find(cluster.topology.engine, cluster.topology.release)
    if found is None:
        return
    written: dict[KeyPath, str] = {}
    for role in cluster.active_roles():
        for name in _written(cluster.role_serving(role)):
            written[serving_key(cluster, role, *name.split("."))] = name
    if cluster.mtp.disable_padded_drafter_batch:
        written["mtp", "disable_padded_drafter_batch"] = "disable_padded_drafter_batch"
    if cluster.mtp.patches is not None:
        written["mtp", "patches"] = "patches"
    for key, name in written.items():
        if not found.has(name):
            shown = name.removeprefix("additional_config.")
            yield Finding(key, f"{shown} is no key of {found.line}; lines that have it: {releases.lines_with(name)}.")


def _written(model: BaseModel, above: str = "") -> Iterator[str]:
    """Dotted names of everything below a model that has a value, nested ones by their leaves where there are any."""
    for field in type(model).model_fields:
        value, name = getattr(model, field), f"{above}{field}"
        if isinstance(value, BaseModel):
            yield from list(_written(value, f"{name}.")) or [name]
        elif value is not None:
            yield name
