"""What a refusal says to do: it fits the case, and one mistake is one message."""

from collections.abc import Callable
from typing import Any

import pytest
from inventory_copy import Copy

from mtp_runtime.config import api, edit
from mtp_runtime.config.problems import ConfigError, Problem

MakeCopy = Callable[[str], Copy]
MODE = "serving.decode.graph_mode"
TORCHAIR = "serving.decode.additional_config.torchair_graph_config"


def problems_of(found: Copy) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        api.check(found.name, found.root)
    return caught.value.problems


REMEDIES: tuple[tuple[str, dict[str, Any], str, str], ...] = (
    ("a3", {"topology.decode.dp": 48}, "R08", "set topology.decode.dp to 32 (one group over 2 hosts) or 16 (a group a"),
    ("a3", {"topology.prefill.tp": 32, "topology.prefill.dp": 1}, "R08", "set topology.prefill.tp to 16 or less"),
    ("a3", {"topology.decode.internal_dp": True}, "R08", "remove topology.decode.internal_dp"),
    ("local", {"model.max_model_len": 9000}, "R20", "set model.max_model_len to 8192 or less"),
    ("a3", {"hosts.all.children.router.hosts": {}}, "R32", "list one host in all.children.router.hosts"),
    ("a3", {"hosts.all.hosts.x9": {"nic": "eth0"}}, "R32", "list x9 in a group of all.children ("),
    ("local", {"serving.single": {"max_num_seqs": 1}}, "R32", "remove serving.single"),
    ("local", {"topology.decode.dp": 2}, "R33", "set topology.decode.dp: 1 (more ranks die at the first request"),
    ("a3", {"model.moe": False}, "R33", "set topology.expert_parallel: false"),
    ("local", {"topology.decode.port": 65535, "topology.decode.dp": 2}, "R30", "lower the first port"),
    (
        "seed-online",
        {"topology.release": "0.9.1", "serving.additional_config": None},
        "R43",
        "set serving.single.additional_config.torchair_graph_config.enabled: true and no other graph key, or "
        "serving.single.graph_mode: eager",
    ),
)


@pytest.mark.parametrize(("base", "edits", "rule", "remedy"), REMEDIES, ids=lambda value: str(value)[:40])
def test_the_remedy_fits_the_case(base: str, edits: dict[str, Any], rule: str, remedy: str, copy: MakeCopy) -> None:
    found = [p for p in problems_of(copy(base).edit(edits)) if p.rule == rule]
    assert any(p.remedy.startswith(remedy) for p in found), [p.remedy for p in found]


def test_one_address_twice_is_a_few_problems(copy: MakeCopy) -> None:
    """Sixteen ranks of a host meet sixteen of another one."""
    found = copy("a3").edit({"hosts.all.hosts.d1": {"ansible_host": "192.0.2.21", "nic": "eth0"}})
    problems = problems_of(found)
    (ports,) = [p for p in problems if p.rule == "R30"]
    assert ports.message == (
        "decode-16 and decode-0 both listen on 192.0.2.21:7100. 15 more like it, the last one: "
        "decode-31 and decode-15 both listen on 192.0.2.21:7115."
    )
    assert ports.remedy.startswith("d1 and d0 are one machine by their ansible_host")
    (devices,) = [p for p in problems if p.rule == "R08"]
    assert devices.remedy.startswith("d0, d1 are one machine by their ansible_host")
    assert len(problems) <= 3


def test_a_few_wrong_sizes_are_told_one_by_one(copy: MakeCopy) -> None:
    sizes = "serving.decode.compilation_config.cudagraph_capture_sizes"
    found = copy("a3")
    assert len(problems_of(found.edit({sizes: [3, 5, 7]}))) == 3
    (one,) = problems_of(found.edit({sizes: [3, 5, 7, 9]}))
    assert "capture size 3 " in one.message and "3 more like it" in one.message and "size 9 " in one.message


def test_a_key_of_another_release_line_breaks_no_rule_but_that(copy: MakeCopy) -> None:
    """R05, R43 and their kind would explain a graph that this line cannot have."""
    found = copy("a3").edit({f"{TORCHAIR}.enabled": True, f"{TORCHAIR}.graph_batch_sizes": [8, 16]})
    assert [(p.rule, p.key.rsplit(".", 1)[1]) for p in problems_of(found)] == [
        ("R46", "enabled"),
        ("R46", "graph_batch_sizes"),
    ]


def test_a_mistyped_host_of_a_group_is_named(copy: MakeCopy) -> None:
    found = copy("a3").edit({"hosts.all.children.decode.hosts": {"d0": None, "d11": None}})
    problems = {p.key: p for p in problems_of(found)}
    assert "did you mean d1?" in problems["all.children.decode.hosts.d11"].message
    assert set(problems) == {"all.children.decode.hosts.d11", "all.hosts.d1"}, "the other one: d1 is in no group"


def test_hosts_are_named_with_what_they_lack(copy: MakeCopy) -> None:
    found = copy("a3").edit({"hosts.all.hosts.d1.address": "0.0.0.0", "hosts.all.hosts.d0.nic": None})
    address, nic = sorted(problems_of(found), key=lambda p: p.rule)
    assert "0.0.0.0 is no address of d1" in address.message
    assert address.remedy == "write the IP address of d1 in the cluster's network as all.hosts.d1.address"
    assert "d0 has no nic" in nic.message
    assert nic.remedy == "write all.hosts.d0.nic, the interface that holds 192.0.2.21"


def test_the_address_that_the_front_should_have_is_named(copy: MakeCopy) -> None:
    found = copy("a3").edit({"serving.router.host": "192.0.2.22", "monitoring.host": "10.9.9.9"})
    by_key = {w.key: w for w in api.check("a3", found.root).warnings}
    front, monitoring = by_key["serving.router.host"], by_key["monitoring.host"]
    assert "it is d1's" in front.message and front.remedy.startswith("write serving.router.host: 192.0.2.11")
    assert "group monitoring" in monitoring.message and "monitoring.host: 192.0.2.11" in monitoring.remedy


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("hosts.all.hosts.d1.address", "10.20.0.300", "should be an IPv4 address, four numbers from 0 to 255"),
        ("hosts.all.hosts.d1.ansible_host", "10.20.0.2222", "should be an IPv4 address"),
        ("monitoring.host", "192.0.2.11:9090", "should be an IPv6 address where it has a colon; ports have keys of"),
    ],
)
def test_a_malformed_address_is_no_host_name(key: str, value: str, words: str, copy: MakeCopy) -> None:
    """More than a pattern in an editor's schema can say."""
    (problem,) = problems_of(copy("a3").edit({key: value}))
    assert (problem.rule, problem.key) == ("C03", key.removeprefix("hosts."))
    assert words in problem.message and value in problem.message


CAPTURE = "serving.decode.compilation_config.cudagraph_capture_sizes"
SHAPES: tuple[tuple[str, dict[str, Any], str, str, str], ...] = (
    ("local", {"topology.release": 0.32}, "topology.release", "valid string, found 0.32", "put it in quotes"),
    ("a3", {"hosts.all.hosts.p0.nic": False}, "all.hosts.p0.nic", "valid string, found false", "put it in quotes"),
    ("local", {"model.name": "a b"}, "model.name", "should be letters, digits and . _ / - only", "write a text of"),
    ("local", {"model.path": "{{ x }}"}, "model.path", "no braces (templates are not read here)", "write a text of"),
    ("local", {"monitoring.host": "a b"}, "monitoring.host", "an IP address or a host name", "write a text of"),
    ("a3", {CAPTURE: 80}, CAPTURE, "should be 'auto' or a list, as in [2, 4], found 80.", ""),
    ("a3", {CAPTURE: [2, "x"]}, f"{CAPTURE}[1]", "should be a valid integer", ""),
    ("local", {"serving.kv_cache_bytes": "8GB"}, "serving.kv_cache_bytes", "should be 'auto' or a valid integer", ""),
    (
        "local",
        {"serving.decode.num_speculative_tokens": 2},
        "serving.decode.num_speculative_tokens",
        "did you mean mtp.num_speculative_tokens?",
        "",
    ),
)


@pytest.mark.parametrize(("base", "edits", "key", "said", "remedy"), SHAPES, ids=lambda value: str(value)[:40])
def test_a_wrong_value_is_explained_in_words(
    base: str, edits: dict[str, Any], key: str, said: str, remedy: str, copy: MakeCopy
) -> None:
    (problem,) = problems_of(copy(base).edit(edits))
    assert problem.key == key and said in problem.message and "pattern" not in problem.message
    assert problem.remedy.startswith(remedy)


def test_what_reads_as_a_boolean_where_a_text_belongs_needs_quotes(copy: MakeCopy) -> None:
    found = copy("a3")
    text = found.file("hosts").read_text()
    found.file("hosts").write_text(text.replace("nic: eth0", "nic: no", 1))
    assert [p.remedy for p in problems_of(found)] == ['write "no" in quotes: nic takes a text']


def test_set_says_how_a_boolean_is_written(copy: MakeCopy) -> None:
    with pytest.raises(ConfigError) as caught:
        edit.set_values("local", ["mtp.enabled=yes"], copy("local").root)
    assert [p.remedy for p in caught.value.problems] == ["write mtp.enabled=true"]
