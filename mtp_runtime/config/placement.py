"""Which rank runs where: pure arithmetic over a cluster that passed the schema."""

from dataclasses import dataclass

from .schema import Cluster, Role

# Devices a CPU host is taken to have: one group of ranks fits on one host whatever its size.
UNLIMITED = 1 << 30


@dataclass(frozen=True)
class Rank:
    """One engine process.

    index counts the role's ranks over all groups, rank counts inside its data-parallel group,
    local counts the role's ranks on the host. devices: device numbers, empty on CPU. ranks: data parallel ranks that
    the process starts, more than one with internal_dp.
    """

    name: str
    role: Role
    host: str
    address: str
    index: int
    group: int
    rank: int
    local: int
    port: int
    dp_address: str
    dp_rpc_port: int | None
    kv_port: int | None
    side_channel_port: int | None
    devices: tuple[int, ...]
    ranks: int = 1


def ranks_per_host(cluster: Cluster, role: Role) -> int:
    """Ranks of one group that a host takes."""
    topology = cluster.role_topology(role)
    assert topology is not None
    devices = cluster.topology.devices_per_host or UNLIMITED
    return min(topology.dp, max(devices // topology.tp, 1))


def hosts_per_group(cluster: Cluster, role: Role) -> int:
    """Hosts a data-parallel group spreads over."""
    topology = cluster.role_topology(role)
    assert topology is not None
    return -(-topology.dp // ranks_per_host(cluster, role))


def place(cluster: Cluster) -> list[Rank]:
    """All ranks, P before D before single, in host order. Hosts that fill no whole group get none (R08 says so)."""
    ranks: list[Rank] = []
    used: dict[str, int] = {}
    before = 0
    for role in cluster.active_roles():
        hosts = cluster.host_names(role)
        span = hosts_per_group(cluster, role)
        groups = [hosts[i : i + span] for i in range(0, len(hosts) - span + 1, span)]
        for number, members in enumerate(groups):
            ranks += _place_group(cluster, role, number, members, used, derived_kv_port(cluster, before))
            before += 1
    return ranks


def derived_kv_port(cluster: Cluster, group: int) -> int | None:
    """kv_port of the n-th group of ranks, P first: clear of the ports that the devices' transport takes (R01).

    None without Mooncake, and where the devices of a host are not known.
    """
    devices = cluster.topology.devices_per_host
    if devices is None or not (cluster.topology.connector or "").startswith("Mooncake"):
        return None
    # A range ends at kv_port + devices: the next hundred after it.
    return lowest_kv_port(devices) + group * 100 * (devices // 100 + 1)


def lowest_kv_port(devices: int) -> int:
    """The transport takes any of 20000 .. 20000 + 1000 x devices."""
    return 20000 + 1000 * devices


def _place_group(
    cluster: Cluster, role: Role, number: int, members: list[str], used: dict[str, int], kv_port: int | None
) -> list[Rank]:
    """Ranks of one data-parallel group; `used` counts the devices taken on each machine."""
    topology = cluster.role_topology(role)
    assert topology is not None
    per_host = ranks_per_host(cluster, role)
    with_devices = cluster.topology.devices_per_host is not None
    processes = 1 if topology.internal_dp else topology.dp
    starts = topology.dp // processes
    width = topology.tp * starts
    ranks = []
    for rank in range(processes):
        host, local = members[rank // per_host], rank % per_host
        overrides = cluster.host_vars(host)
        index = number * processes + rank
        machine = cluster.machine(host)
        start = used.get(machine, 0)
        used[machine] = start + width
        side = overrides.side_channel_port or topology.side_channel_port
        ranks.append(
            Rank(
                name=f"{role}-{index}",
                role=role,
                host=host,
                address=cluster.address(host),
                index=index,
                group=number,
                rank=rank,
                local=local,
                port=(overrides.rank_port or topology.port) + local,
                dp_address=cluster.address(members[0]),
                dp_rpc_port=topology.rpc_port,
                kv_port=overrides.kv_port or topology.kv_port or kv_port,
                side_channel_port=None if side is None else side + local,
                devices=tuple(range(start, start + width)) if with_devices else (),
                ranks=starts,
            )
        )
    return ranks
