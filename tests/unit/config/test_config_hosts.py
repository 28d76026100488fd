"""Hosts as people list them: in the groups only, under two names, for two roles at once."""

from collections.abc import Callable
from typing import Any

import pytest
from inventory_copy import DELETE, Copy
from typer.testing import CliRunner

from mtp_runtime.cli.main import app
from mtp_runtime.config import api
from mtp_runtime.config.explain import explain
from mtp_runtime.config.problems import ConfigError, Problem

MakeCopy = Callable[[str], Copy]
GROUPS = {"prefill": ("p0", "p1"), "decode": ("d0", "d1"), "router": ("p0",), "monitoring": ("p0",)}


def node(number: int) -> dict[str, str]:
    return {"ansible_host": f"192.0.2.{number}", "address": f"192.0.2.{number}", "nic": "eth0"}


def problems_of(found: Copy) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        api.check(found.name, found.root)
    return caught.value.problems


def in_groups_only(found: Copy) -> Copy:
    """The same hosts without all.hosts: each one's variables stand at its first group."""
    hosts = api.load_checked(found.name, found.root).hosts.all.hosts
    left = {host: entry.model_dump(exclude_none=True) for host, entry in hosts.items() if entry is not None}
    edits: dict[str, Any] = {"hosts.all.hosts": DELETE}
    for group, names in GROUPS.items():
        edits[f"hosts.all.children.{group}.hosts"] = {host: left.pop(host, None) for host in names}
    return found.edit(edits)


def test_hosts_in_the_groups_only_are_the_same_cluster(copy: MakeCopy) -> None:
    found = in_groups_only(copy("a3"))
    assert api.plan("a3", found.root) == api.plan("a3")


def test_an_address_of_the_network_is_right_on_several_machines(copy: MakeCopy) -> None:
    """R40 asks for loopback where the cluster is this machine only."""
    found = in_groups_only(copy("a3")).edit({"serving.router.metrics_host": "192.0.2.11"})
    assert api.load_checked("a3", found.root).monitoring.host == "192.0.2.11"


def test_a_host_variable_is_named_where_it_stands(copy: MakeCopy) -> None:
    found = in_groups_only(copy("a3")).edit({"hosts.all.children.prefill.hosts.p0.kv_port": 35000})
    (port,) = problems_of(found)
    lines = found.file("hosts").read_text().splitlines()
    assert (port.rule, port.key, port.value) == ("R01", "all.children.prefill.hosts.p0.kv_port", "35000")
    assert "35000" in lines[port.line - 1]
    found.edit({"hosts.all.children.prefill.hosts.p0.kv_port": 36000})
    written = {row.key: row.overridden for row in explain(api.load_checked("a3", found.root))}
    assert written["kv_port of prefill on p0"] == "hosts.yml: all.children.prefill.hosts.p0.kv_port"


def test_set_names_the_group_that_a_host_stands_in(copy: MakeCopy) -> None:
    found = in_groups_only(copy("a3"))
    where = ("--inventories", str(found.root))
    refused = CliRunner().invoke(app, ["set", "a3", "all.hosts.d1.kv_port=36300", *where])
    assert refused.exit_code == 2
    assert "there is no host d1 in all.hosts; did you mean all.children.decode.hosts?" in refused.stderr
    both = [f"all.children.decode.hosts.{host}.kv_port=36300" for host in ("d0", "d1")]
    assert CliRunner().invoke(app, ["set", "a3", *both, *where]).exit_code == 0
    assert api.load_checked("a3", found.root).host_vars("d1").kv_port == 36300


def test_an_override_of_a_host_with_two_roles_is_named_where_it_stands(copy: MakeCopy) -> None:
    found = copy("local").edit({"hosts.all.children.decode.hosts.localhost": {"side_channel_port": 8350}})
    assert ("R37", "all.children.decode.hosts.localhost.side_channel_port") in [
        (p.rule, p.key) for p in problems_of(found)
    ]


def one_node(found: Copy, decode: str) -> Copy:
    """a3 on one node: P on h0 with 8 dies, D with 8, their ranges 100 apart."""
    groups = {"prefill": "h0", "decode": decode, "router": "h0", "monitoring": "h0"}
    return found.edit(
        {
            "hosts.all.hosts": {name: node(11) for name in ("h0", decode)},
            **{f"hosts.all.children.{group}.hosts": {host: None} for group, host in groups.items()},
            "topology.prefill": {"dp": 1, "tp": 8, "port": 7100, "kv_port": 36000},
            "topology.decode": {"dp": 8, "tp": 1, "port": 7200, "rpc_port": 12321, "kv_port": 36100},
            "serving.decode.additional_config.finegrained_tp_config.lmhead_tensor_parallel_size": 8,
        }
    )


@pytest.mark.parametrize("decode", ["h0", "h1"])
def test_roles_on_one_machine_have_ranges_and_devices_of_their_own(decode: str, copy: MakeCopy) -> None:
    """One inventory host for both roles, or two that are one machine."""
    found = one_node(copy("a3"), decode)
    ranks = api.plan("a3", found.root)["ranks"]
    devices = [number for rank in ranks for number in rank["env"]["ASCEND_RT_VISIBLE_DEVICES"].split(",")]
    assert sorted(map(int, devices)) == list(range(16))
    for port in (36000, 36016):
        found.edit({"topology.decode.kv_port": port})
        assert [(p.rule, p.key) for p in problems_of(found)] == [("R01", "topology.decode.kv_port")]
    found.edit({"topology.decode.kv_port": 36017, "topology.prefill.tp": 16})
    (devices_short,) = problems_of(found)
    assert devices_short.rule == "R08"
    named = "h0" if decode == "h0" else "h0, h1"
    assert devices_short.message == f"the ranks on {named} need 24 devices; a host has 16."
