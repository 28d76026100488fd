"""Who listens where, and the rules about it: R01, R30, R36, R37, R40. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from .addresses import number_of
from .checks import Finding
from .placement import Rank, lowest_kv_port
from .problems import KeyPath
from .schema import ROLES, THIS_MACHINE, Cluster, Role


@dataclass(frozen=True)
class Listener:
    """One listening socket. machine: equal for inventory hosts that are one machine."""

    host: str
    machine: str
    address: str
    port: int
    owner: str
    key: KeyPath

    def meets(self, other: "Listener") -> bool:
        """Both could not be bound at once."""
        if self.machine != other.machine or self.port != other.port:
            return False
        return self.address == other.address or bool({self.address, other.address} & {"0.0.0.0", "::"})


def listeners(cluster: Cluster, ranks: list[Rank]) -> list[Listener]:
    """Everything of a cluster that listens."""
    found: list[Listener] = []

    def add(host: str, address: str, port: int, owner: str, key: KeyPath) -> None:
        address = "127.0.0.1" if address == "localhost" else address
        found.append(Listener(host, cluster.machine(host), address, port, owner, key))

    heads = set()
    for rank in ranks:
        add(rank.host, rank.address, rank.port, rank.name, host_key(cluster, rank, "port"))
        if rank.side_channel_port is not None and cluster.topology.connector == "NixlConnector":
            key = host_key(cluster, rank, "side_channel_port")
            add(rank.host, rank.address, rank.side_channel_port, f"{rank.name} side channel", key)
        if rank.dp_rpc_port is not None and rank.ranks == 1 and (rank.role, rank.group) not in heads:
            heads.add((rank.role, rank.group))
            key = ("topology", rank.role, "rpc_port")
            add(rank.host, rank.dp_address, rank.dp_rpc_port, f"{rank.role} group {rank.group} RPC", key)
    router, monitoring = cluster.serving.router, cluster.monitoring
    for host in cluster.host_names("router"):
        add(host, router.host, router.port, "router front", ("serving", "router", "port"))
        add(host, router.backend_host, router.backend_port, "router", ("serving", "router", "backend_port"))
        add(host, router.metrics_host, router.metrics_port, "router metrics", ("serving", "router", "metrics_port"))
    for host in cluster.host_names("monitoring"):
        add(host, monitoring.host, monitoring.prometheus_port, "Prometheus", ("monitoring", "prometheus_port"))
        add(host, monitoring.host, monitoring.exporter_port, "exporter", ("monitoring", "exporter_port"))
    return found


def host_key(cluster: Cluster, rank: Rank, name: str) -> KeyPath:
    """Where a rank's port is written: at its host or in its role's layout."""
    own = cluster.host_key(rank.host, "rank_port" if name == "port" else name)
    return own or ("topology", rank.role, name)


def kv_port_range(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R01."""
    devices = cluster.topology.devices_per_host
    if devices is None or not (cluster.topology.connector or "").startswith("Mooncake"):
        return
    lowest = lowest_kv_port(devices)
    everyone = listeners(cluster, ranks)
    # Ranks of one role on a host share its range, those of another role or inventory host on the machine do not.
    seen: dict[tuple[Role, str, int], str] = {}
    for rank in ranks:
        if rank.kv_port is None or (rank.role, rank.host, rank.kv_port) in seen:
            continue
        key = host_key(cluster, rank, "kv_port")
        low, high = rank.kv_port, rank.kv_port + devices
        if low < lowest:
            yield Finding(key, f"kv_port {low} on {rank.host} is below {lowest} ({devices} devices).")
        if high > 65535:
            yield Finding(key, f"kv_port range {low}..{high} on {rank.host} ends above 65535.")
        machine = cluster.machine(rank.host)
        for (role, host, taken), where in seen.items():
            if where == machine and abs(taken - low) <= devices:
                message = f"kv_port ranges of {role} ({taken}, {host}) and {rank.role} ({low}, {rank.host}) overlap"
                yield Finding(key, f"{message} on one machine.")
        for other in everyone:
            if other.machine == machine and low <= other.port <= high:
                message = f"kv_port range {low}..{high} on {rank.host} covers port {other.port} of {other.owner}."
                yield Finding(key, message)
        seen[rank.role, rank.host, rank.kv_port] = machine


def unique_ports(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R30. A wildcard address meets every address of its machine."""
    seen: dict[tuple[str, int], list[Listener]] = {}
    for this in listeners(cluster, ranks):
        if this.port > 65535:
            message = f"{this.owner} would get port {this.port}; the highest is 65535."
            yield Finding(this.key, message, "lower the first port, from which the ranks of a host count up")
        neighbours = seen.setdefault((this.machine, this.port), [])
        for other in neighbours:
            if this.meets(other):
                message = f"{this.owner} and {other.owner} both listen on {this.address}:{this.port}."
                yield Finding(this.key, message, _apart(this, other))
                break
        neighbours.append(this)


def _apart(this: Listener, other: Listener) -> str:
    """What to do about two that meet; empty: the rule's remedy."""
    if this.host == other.host:
        return ""
    same = f"{this.host} and {other.host} are one machine by their ansible_host or ansible_connection"
    return f"{same}: correct the one that is not, or give one of the two another port"


def transport_ports(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R36."""
    connector = cluster.topology.connector or ""
    reported = set()
    for rank in ranks:
        needs = []
        if rank.role != "single" and connector.startswith("Mooncake") and rank.kv_port is None:
            needs.append("kv_port")
        if rank.role != "single" and connector == "NixlConnector" and rank.side_channel_port is None:
            needs.append("side_channel_port")
        layout = cluster.role_topology(rank.role)
        if layout and layout.dp > rank.ranks and rank.dp_rpc_port is None:
            needs.append("rpc_port")
        for name in needs:
            if (rank.role, rank.host, name) not in reported:
                reported.add((rank.role, rank.host, name))
                yield Finding(("topology", rank.role, name), f"{rank.role} on {rank.host} has no {name}.")


def host_overrides(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R37."""
    for host in {host: None for role in ROLES for host in cluster.host_names(role)}:
        roles = [role for role in ROLES if host in cluster.host_names(role)]
        for name in ("rank_port", "kv_port", "side_channel_port"):
            key = cluster.host_key(host, name)
            if len(roles) > 1 and key is not None:
                yield Finding(key, f"{name} of host {host}, which runs {' and '.join(roles)}.")


def keyless_addresses(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R40: the router behind the front, its metrics, Prometheus and the exporter answer without a key."""
    one_machine = {cluster.machine(host) for host in cluster.all_hosts()} <= {THIS_MACHINE}
    for key in (("serving", "router", "backend_host"), ("serving", "router", "metrics_host"), ("monitoring", "host")):
        address = _value(cluster, key)
        number = number_of(address)
        if number is not None and number.is_unspecified:
            yield Finding(key, f"{address} is every address of the host, and what listens there checks no key.")
        elif one_machine and not (number.is_loopback if number is not None else address == "localhost"):
            yield Finding(key, f"{address} is no loopback address, and what listens there checks no key.")


def _value(cluster: Cluster, key: KeyPath) -> str:
    """A text value of the cluster files."""
    found: object = cluster
    for name in key:
        found = getattr(found, str(name))
    return str(found)
