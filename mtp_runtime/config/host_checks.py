"""The checks about hosts, their addresses and what lies on them (R48, R49, R50, W05). Pure."""

from collections.abc import Iterator
from pathlib import PurePosixPath

from .addresses import Number, is_documentation, is_loopback, number_of
from .checks import Finding, unknown_hosts
from .placement import Rank
from .problems import KeyPath, dotted
from .schema import ROLES, THIS_MACHINE, Cluster

ASCEND = "vllm-ascend"


def rank_hosts(cluster: Cluster) -> list[str]:
    """Hosts of the groups that run ranks."""
    return list(dict.fromkeys(host for role in ROLES for host in cluster.host_names(role)))


def host_path(cluster: Cluster, host: str) -> KeyPath:
    """Where hosts.yml says something about a host, else where it names it first."""
    entries = [(path, entry) for path, name, entry in cluster.host_entries() if name == host]
    return next((path for path, entry in entries if entry is not None), entries[0][0])


def address_path(cluster: Cluster, host: str) -> KeyPath:
    """The key that gives a host's address: `address`, else ansible_host, else the host itself."""
    found = cluster.host_key(host, "address") or cluster.host_key(host, "ansible_host")
    return found or host_path(cluster, host)


def _own_address(cluster: Cluster, host: str) -> str:
    key = dotted((*host_path(cluster, host)[1:], "address"))
    return f"write the IP address of {host} in the cluster's network as {key}"


def host_addresses(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R48."""
    machines = {cluster.machine(host) for host in cluster.all_hosts()}
    unknown = unknown_hosts(cluster)
    seen: dict[str, str] = {}
    for host in rank_hosts(cluster):
        if host in unknown:
            continue  # R32 names it
        address, key = cluster.address(host), address_path(cluster, host)
        number, remedy = number_of(address), _own_address(cluster, host)
        if number is not None and number.is_unspecified:
            message = f"{address} is no address of {host}: the ranks of other hosts could not reach it."
            yield Finding(key, message, remedy)
        elif len(machines) > 1 and is_loopback(address):
            message = f"{address} of {host} is loopback: the other hosts of the cluster could not reach its ranks."
            yield Finding(key, message, remedy)
        elif number is None and cluster.topology.engine == ASCEND:
            message = f"{host} has the name {address} as its address; its ranks bind HCCL to it (HCCL_IF_IP), "
            message += "which takes an IP address only."
            yield Finding(key, message, remedy)
        other = seen.setdefault(str(number or address), host)
        if cluster.machine(other) != cluster.machine(host):
            message = f"{host} has the address {address}, and so has {other}, which is another machine."
            yield Finding(key, message, remedy)


def network_interfaces(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R49."""
    if cluster.topology.engine != ASCEND:
        return
    unknown = unknown_hosts(cluster)
    hosts = [host for host in rank_hosts(cluster) if host not in unknown]
    nics = {host: cluster.host_vars(host).nic for host in hosts}
    with_one = [host for host, nic in nics.items() if nic]
    for host, nic in nics.items():
        if with_one and not nic:
            key = dotted((*host_path(cluster, host)[1:], "nic"))
            message = f"{host} has no nic, {with_one[0]} has {nics[with_one[0]]}: without it {host} would look for "
            message += "one by itself (HCCL_, GLOO_ and TP_SOCKET_IFNAME)."
            remedy = f"write {key}, the interface that holds {cluster.address(host)}"
            yield Finding(host_path(cluster, host), message, remedy)


def absolute_paths(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R50."""
    keys = [("model", "path"), ("model", "manifest"), ("mtp", "draft_model")]
    remote = any(cluster.machine(host) != THIS_MACHINE for host in rank_hosts(cluster))
    for section, name in keys:
        written = getattr(getattr(cluster, section), name)
        if written is None or PurePosixPath(written).is_absolute():
            continue
        if written.startswith("~"):
            yield Finding((section, name), f"{written} has a ~, which nothing here puts a home folder in for.")
        elif remote and cluster.topology.engine == ASCEND:
            message = f"{written} is no absolute path. Nothing of this repository lies on the hosts, and they fetch "
            yield Finding((section, name), message + "no weights by a name (HF_HUB_OFFLINE=1).")


def example_addresses(cluster: Cluster) -> list[str]:
    """Hosts whose address is one of the documentation's: nobody has it, so it is still to be written."""
    return [host for host in cluster.all_hosts() if is_documentation(cluster.address(host))]


def front_addresses(cluster: Cluster, mtp_layers: int | None) -> Iterator[Finding]:
    """W05: an address of the way in or of monitoring that is not, as far as the files say, one of its host."""
    names = ("host", "backend_host", "metrics_host")
    places: dict[str, list[KeyPath]] = {
        "router": [("serving", "router", name) for name in names],
        "monitoring": [("monitoring", "host")],
    }
    for group, keys in places.items():
        for host in cluster.host_names(group)[:1]:
            own = number_of(cluster.address(host))
            for key in keys:
                yield from _not_own(cluster, host, own, key)


def _not_own(cluster: Cluster, host: str, own: Number, key: KeyPath) -> Iterator[Finding]:
    address = _value(cluster, key)
    number, group = number_of(address), "router" if key[0] == "serving" else "monitoring"
    if number is None or own is None or number == own or number.is_unspecified:
        return
    name = ".".join(map(str, key))
    if not number.is_loopback:
        others = [one for one in cluster.all_hosts() if number_of(cluster.address(one)) == number]
        whose = f"; it is {others[0]}'s" if others else ""
        message = f"{address} is not the address of {host}, the host of group {group}{whose}: nothing could listen "
        yield Finding(key, message + "there.", f"write {name}: {own}, or check that {host} has {address} too")
    elif key == ("serving", "router", "host") and not own.is_loopback:
        message = f"{address} is loopback: clients on other machines do not reach the front on {host}."
        yield Finding(key, message, f"write {name}: {own}, unless clients come from {host} itself")


def _value(cluster: Cluster, key: KeyPath) -> str:
    found: object = cluster
    for part in key:
        found = getattr(found, str(part))
    return str(found)
