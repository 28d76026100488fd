"""The checks behind the serving rules: each yields what breaks its rule in a cluster. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from mtp_runtime import releases
from mtp_runtime.graphs.slots import MAX_SEGMENT

from .graph_plan import batched_tokens, graph_mode
from .placement import Rank, hosts_per_group, ranks_per_host
from .problems import KeyPath
from .schema import GROUPS, ROLES, Cluster, Role
from .sizes import block_bytes, kv_cache_bytes, request_blocks

K_KEY: KeyPath = ("mtp", "num_speculative_tokens")
# From this K on the warning about drafts of a reused layer is the strong one.
DEEP_K = 3


@dataclass(frozen=True)
class Finding:
    """What is wrong, at which key (path into the merged files). remedy: of this case; empty, the rule's."""

    key: KeyPath
    message: str
    remedy: str = ""


def serving_key(cluster: Cluster, role: Role, *keys: str) -> KeyPath:
    """Path of a serving key as it is in force for a role: the role's own entry when it has one."""
    over = getattr(cluster.serving, role)
    if over and keys[0] in over.model_fields_set:
        return ("serving", role, *keys)
    return ("serving", *keys)


def decoding_roles(cluster: Cluster) -> list[Role]:
    """Active roles that decode, so have drafts of their own."""
    return [role for role in cluster.active_roles() if role != "prefill"]


def k_when_on(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R02: MTP on with nothing to draft."""
    if cluster.mtp.enabled and cluster.mtp.num_speculative_tokens == 0:
        yield Finding(K_KEY, "MTP is on but K is 0: decode would draft nothing while prefill drafts.")


def tnd_limit(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R03. A value written for later, with MTP off, must hold too: switching on must not need a second edit."""
    k = cluster.mtp.k
    if k + 1 > MAX_SEGMENT:
        yield Finding(K_KEY, f"K = {k} gives {k + 1} query tokens a request; at most {MAX_SEGMENT} fit.")


def k_known(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R44. K was looked up in the weights before the rules are asked."""
    if cluster.mtp.enabled and cluster.mtp.num_speculative_tokens is None:
        where = f"{cluster.model.path}/config.json"
        yield Finding(K_KEY, f"num_speculative_tokens is not written, and {where} names no num_nextn_predict_layers.")


def layer_reused(cluster: Cluster, mtp_layers: int | None) -> Iterator[Finding]:
    """W01."""
    if _reuses(cluster, mtp_layers) and cluster.mtp.k < DEEP_K:
        yield Finding(K_KEY, _reuse(cluster.mtp.k, mtp_layers))


def layer_reused_deep(cluster: Cluster, mtp_layers: int | None) -> Iterator[Finding]:
    """W02."""
    if _reuses(cluster, mtp_layers) and cluster.mtp.k >= DEEP_K:
        measured = "Do not keep it unmeasured: K = 3 pays on the model of this repository, which was trained at three "
        measured += "depths (docs/model.md, docs/measurements.md); weights trained at one depth lose more at each."
        yield Finding(K_KEY, f"{_reuse(cluster.mtp.k, mtp_layers)} {measured}")


def _reuses(cluster: Cluster, mtp_layers: int | None) -> bool:
    """The weights are known to have fewer MTP layers than K asks for depths."""
    own = cluster.mtp.method in releases.MTP_METHODS
    return cluster.mtp.enabled and own and mtp_layers is not None and 1 <= mtp_layers < cluster.mtp.k


def _reuse(k: int, mtp_layers: int | None) -> str:
    plural = "" if mtp_layers == 1 else "s"
    return (
        f"K = {k} with {mtp_layers} MTP layer{plural}: it drafts from its own output, and fewer drafts are accepted at "
        "each depth, while each costs a drafter step and a token to verify."
    )


def rank_cover(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R08, before placing: whole groups and enough devices."""
    devices = cluster.topology.devices_per_host
    for role in cluster.active_roles():
        topology, hosts = cluster.role_topology(role), cluster.host_names(role)
        assert topology is not None
        span = hosts_per_group(cluster, role)
        if len(hosts) % span:
            message = f"{role}: dp {topology.dp} x tp {topology.tp} needs {span} hosts a group, not {len(hosts)}."
            yield Finding(("topology", role, "dp"), message, _fitting_dp(cluster, role))
        if span > 1 and topology.dp % ranks_per_host(cluster, role):
            message = f"{role}: dp {topology.dp} does not fill {span} hosts of {ranks_per_host(cluster, role)} ranks."
            yield Finding(("topology", role, "dp"), message, _fitting_dp(cluster, role))
        if topology.internal_dp and (role != "single" or span > 1):
            message = f"{role}: internal_dp is for single, on one host; here it is {role} on {span}."
            yield Finding(("topology", role, "internal_dp"), message, f"remove topology.{role}.internal_dp")
        if devices is not None and topology.tp > devices:
            message = f"{role}: tp {topology.tp} is more than the {devices} devices of a host."
            yield Finding(("topology", role, "tp"), message, f"set topology.{role}.tp to {devices} or less")
    used: dict[str, int] = {}
    for rank in ranks:
        machine = cluster.machine(rank.host)
        used[machine] = used.get(machine, 0) + len(rank.devices)
    for machine, count in used.items():
        if devices is not None and count > devices:
            names = ", ".join(dict.fromkeys(rank.host for rank in ranks if cluster.machine(rank.host) == machine))
            message = f"the ranks on {names} need {count} devices; a host has {devices}."
            remedy = "lower dp or tp of what runs there, or move a role to hosts of its own"
            if ", " in names:
                same = f"{names} are one machine by their ansible_host or ansible_connection"
                remedy = f"{same}: correct the one that is not, or {remedy}"
            yield Finding(("topology", "devices_per_host"), message, remedy)


def _fitting_dp(cluster: Cluster, role: Role) -> str:
    """The sizes that fill the hosts of a role with its tp."""
    topology, hosts = cluster.role_topology(role), len(cluster.host_names(role))
    devices = cluster.topology.devices_per_host
    assert topology is not None and devices is not None
    here = max(devices // topology.tp, 1)
    one = f"{here * hosts} (one group over {hosts} hosts)" if hosts > 1 else f"{here}"
    each = f" or {here} (a group a host)" if hosts > 1 else ""
    return f"set topology.{role}.dp to {one}{each}, or list as many hosts in group {role} as the message says"


# Keys of additional_config that belong to one role.
ROLE_KEYS: dict[str, Role] = {
    "recompute_scheduler_enable": "decode",
    "enable_balance_scheduling": "single",
    "layer_sharding": "prefill",
}


def role_keys(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R09."""
    for role in cluster.active_roles():
        config = cluster.role_serving(role).additional_config
        for name, only in ROLE_KEYS.items():
            if config and getattr(config, name) and role != only:
                key = serving_key(cluster, role, "additional_config", name)
                yield Finding(key, f"{name} is set for {role}; it is for {only} only.")


def finegrained_tp(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R10."""
    for role in cluster.active_roles():
        config = cluster.role_serving(role).additional_config
        sizes = config.finegrained_tp_config.model_dump() if config and config.finegrained_tp_config else {}
        for name, size in sizes.items():
            key = serving_key(cluster, role, "additional_config", "finegrained_tp_config", name)
            for message in _finegrained_size(cluster, role, name, size) if size else ():
                yield Finding(key, message)


def _finegrained_size(cluster: Cluster, role: Role, name: str, size: int) -> Iterator[str]:
    """What is wrong with the tensor parallel size of one module."""
    topology, config = cluster.role_topology(role), cluster.role_serving(role).additional_config
    release = releases.find(cluster.topology.engine, cluster.topology.release)
    assert topology is not None and config is not None
    if not cluster.model.moe:
        yield f"{name} is for models with experts only."
    if topology.dp % size:
        yield f"dp {topology.dp} of {role} is no multiple of {size}."
    if name == "oproj_tensor_parallel_size":
        mode = graph_mode(cluster, role)
        if role != "decode" or topology.tp != 1 or mode == "eager":
            eager = " and runs eager" if mode == "eager" else ""
            yield f"{name} needs decode, tp 1 and graphs; {role} has tp {topology.tp}{eager}."
    if release and name in release.recompute_tp and not config.recompute_scheduler_enable:
        only = "" if role == "decode" else ", which only decode may have"
        yield f"{name} of {role} needs recompute_scheduler_enable{only}."


def shared_expert_overlap(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R11."""
    for role in cluster.active_roles():
        config, topology = cluster.role_serving(role).additional_config, cluster.role_topology(role)
        if config is None or topology is None or not config.multistream_overlap_shared_expert:
            continue
        if topology.tp == 1:
            continue
        key = serving_key(cluster, role, "additional_config", "multistream_overlap_shared_expert")
        if not config.enable_shared_expert_dp:
            yield Finding(key, f"{role} has tp {topology.tp} and no enable_shared_expert_dp.")
        elif not cluster.topology.expert_parallel:
            message = f"{role} has tp {topology.tp}, and enable_shared_expert_dp does nothing without expert_parallel."
            yield Finding(key, message)


def flashcomm1(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R47."""
    for role in cluster.active_roles():
        config, topology = cluster.role_serving(role).additional_config, cluster.role_topology(role)
        if config is None or topology is None:
            continue
        if config.enable_dsa_cp and not config.enable_flashcomm1:
            key = serving_key(cluster, role, "additional_config", "enable_dsa_cp")
            yield Finding(key, f"enable_dsa_cp of {role} without enable_flashcomm1.")
        key = serving_key(cluster, role, "additional_config", "enable_flashcomm1")
        if config.enable_flashcomm1 and topology.tp == 1:
            yield Finding(key, f"enable_flashcomm1 of {role}, which has tp 1.")
        elif config.enable_flashcomm1 and cluster.model.moe and not cluster.topology.expert_parallel:
            yield Finding(key, f"enable_flashcomm1 of {role} with a model with experts and without expert_parallel.")


def method(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R19."""
    name, key = cluster.mtp.method, ("mtp", "method")
    known = releases.find(cluster.topology.engine, cluster.topology.release)
    if name not in releases.METHODS:
        valid = ", ".join(known.methods if known else releases.METHODS)
        yield Finding(key, f"unknown method {name!r}; valid: {valid}.")
    elif known and name not in known.methods:
        message = f"method {name!r} does not run on {known.line}; "
        yield Finding(key, message + f"valid: {', '.join(known.methods)}.")


def draft_sampling(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R39. Refused with MTP off too: switching on must not need a second edit."""
    wanted = cluster.mtp.draft_sampling
    known = releases.find(cluster.topology.engine, cluster.topology.release)
    if known and wanted not in known.draft_sampling:
        message = f"draft_sampling {wanted} is not known to run on {known.line}; "
        yield Finding(("mtp", "draft_sampling"), message + f"valid: {', '.join(known.draft_sampling)}.")


def attention(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R41. Refused with MTP off too: switching on must not need a second edit."""
    wanted = cluster.mtp.attention
    known = releases.find(cluster.topology.engine, cluster.topology.release)
    if known and wanted not in known.attention:
        message = f"attention {wanted} does not run on {known.line}; "
        yield Finding(("mtp", "attention"), message + f"valid: {', '.join(known.attention)}.")


def model_len(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R20. Where the scheduler gives no draft past max_model_len, the model needs positions for that many only."""
    model, key = cluster.model, ("model", "max_model_len")
    found = releases.find(cluster.topology.engine, cluster.topology.release)
    beyond = 0 if found is None or found.clamps_drafts else cluster.draft_tokens("decode")
    limit = model.max_position_embeddings
    if limit and model.max_model_len + beyond > limit:
        extra = f" plus {beyond} drafts" if beyond else ""
        message = f"max_model_len {model.max_model_len}{extra} is above the model's {limit} positions."
        remedy = f"set model.max_model_len to {limit - beyond} or less; model.max_position_embeddings is what the "
        yield Finding(key, message, remedy + "weights' config.json says")
    size = block_bytes(cluster)
    for role in cluster.active_roles():
        k = cluster.draft_tokens(role)
        if model.max_model_len <= k + 1:
            message = f"max_model_len {model.max_model_len} leaves no room for {k} drafts on {role}."
            yield Finding(key, message, f"set model.max_model_len to {k + 2} or more, or lower K")
        given = kv_cache_bytes(cluster, role)
        need = None if size is None else (request_blocks(cluster, role) + 1) * size
        if given is not None and need is not None and given < need:
            message = f"{given} bytes hold no request of {model.max_model_len} tokens and {k} drafts on {role}; "
            yield Finding(serving_key(cluster, role, "kv_cache_bytes"), message + f"{need} are needed.")


def pd_connector(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R31."""
    has = {role: bool(cluster.host_names(role) or cluster.role_topology(role)) for role in ROLES}
    key, connector = ("topology", "connector"), cluster.topology.connector
    if has["single"] and (has["prefill"] or has["decode"]):
        yield Finding(("topology", "single"), "single and prefill/decode in one cluster.")
    elif has["prefill"] != has["decode"]:
        missing = "decode" if has["prefill"] else "prefill"
        yield Finding(("topology", missing), f"{missing} is missing; prefill and decode come together.")
    elif has["prefill"] and connector is None:
        yield Finding(key, "prefill and decode without a connector: no KV would be handed over.")
    elif has["single"] and connector is not None:
        yield Finding(key, f"connector {connector} without prefill and decode.")
    elif not any(has.values()):
        yield Finding(("topology",), "nothing to serve: no prefill and decode, and no single.")


def groups(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R32."""
    for role in ROLES:
        hosts, layout = cluster.host_names(role), cluster.role_topology(role)
        if hosts and layout is None:
            remedy = f"write topology.{role} (dp, tp, port), or remove the group {role} from hosts.yml"
            message = f"group {role} has hosts, but topology.{role} is missing."
            yield Finding(("topology", role), message, remedy)
        if layout is not None and not hosts:
            remedy = f"list hosts in all.children.{role}.hosts, or remove topology.{role}"
            message = f"topology.{role} is set, but group {role} has no hosts."
            yield Finding(("hosts", "all", "children", role), message, remedy)
        if getattr(cluster.serving, role) is not None and layout is None and not hosts:
            message = f"serving.{role} has settings, but nothing runs {role}."
            yield Finding(("serving", role), message, f"remove serving.{role}, or give {role} hosts and a layout")
    for group in ("router", "monitoring"):
        count = len(cluster.host_names(group))
        if count != 1:
            remedy = f"list one host in all.children.{group}.hosts"
            message = f"group {group} needs one host; {count} are listed."
            yield Finding(("hosts", "all", "children", group), message, remedy)
    for host in cluster.hosts.all.hosts:
        if not any(host in cluster.host_names(group) for group in GROUPS):
            remedy = f"list {host} in a group of all.children ({', '.join(GROUPS)}), or remove it"
            yield Finding(("hosts", "all", "hosts", host), f"host {host} is in no group.", remedy)
    for host, path in unknown_hosts(cluster).items():
        near = get_close_matches(host, cluster.hosts.all.hosts, n=1)
        meant = f"; did you mean {near[0]}?" if near else "."
        message = f"group {path[-3]} lists host {host}, of which hosts.yml says nothing else{meant}"
        yield Finding(path, message, f"correct the name, or write {host} and its address into all.hosts")


def unknown_hosts(cluster: Cluster) -> dict[str, KeyPath]:
    """Hosts that are only named in a group, where other hosts are described in all.hosts; and where they are named."""
    entries = list(cluster.host_entries())
    said = {*cluster.hosts.all.hosts, "localhost", *(host for _, host, entry in entries if entry is not None)}
    found: dict[str, KeyPath] = {}
    for path, host, _ in entries:
        if cluster.hosts.all.hosts and host not in said:
            found.setdefault(host, path)
    return found


def whole_prompt(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R34."""
    found = releases.find(cluster.topology.engine, cluster.topology.release)
    if found is None or found.chunked_prefill:
        return
    for role in cluster.active_roles():
        tokens = batched_tokens(cluster, role)
        if tokens is None or tokens < cluster.model.max_model_len:
            key = serving_key(cluster, role, "max_num_batched_tokens")
            message = f"max_num_batched_tokens {tokens} of {role} is below max_model_len {cluster.model.max_model_len}."
            yield Finding(key, message)


def kv_bytes(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R35."""
    for role in cluster.active_roles():
        serving = cluster.role_serving(role)
        key = serving_key(cluster, role, "kv_cache_bytes")
        if serving.kv_cache_bytes is None and cluster.topology.engine == "vllm-cpu":
            yield Finding(key, f"kv_cache_bytes of {role} is missing; the engine would take whole GiB.")
        if serving.kv_cache_bytes == "auto" and kv_cache_bytes(cluster, role) is None:
            message = f"auto of {role} needs model.num_hidden_layers, a stated model.dtype and max_num_seqs."
            yield Finding(key, message)


def draft_model(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R38."""
    mtp, key = cluster.mtp, ("mtp", "draft_model")
    if mtp.method in releases.DRAFT_MODEL_METHODS and not mtp.draft_model:
        yield Finding(key, f"method {mtp.method} needs draft_model.")
    elif mtp.method not in releases.DRAFT_MODEL_METHODS and mtp.draft_model:
        yield Finding(key, f"method {mtp.method} drafts with the model itself; draft_model would be ignored.")
