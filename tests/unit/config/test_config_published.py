"""Every inventory with a published counterpart renders its command lines, but for the differences that are listed."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from published import PUBLISHED, Published

from mtp_runtime.config import api
from mtp_runtime.config.differences import DIFFERENCES

CLUSTERS = tuple(dict.fromkeys(case.cluster for case in PUBLISHED))
SERVER = ["python", "-m", "vllm.entrypoints.openai.api_server"]


@cache
def plan(cluster: str) -> dict[str, Any]:
    return api.plan(cluster)


def rank_of(case: Published) -> dict[str, Any]:
    """The rendered rank of a published one."""
    return next(dict(rank) for rank in plan(case.cluster)["ranks"] if rank["name"] == case.rank)


def parsed(argv: list[str]) -> dict[str, Any]:
    """Flag -> value; switches are True, JSON is taken apart by dots, underscores in flags are dashes."""
    found: dict[str, Any] = {}
    if argv[:3] == SERVER:
        found["(program)"], words = " ".join(SERVER), argv[3:]
    else:
        found["(program)"], found["--model"], words = " ".join(argv[:2]), argv[2], argv[3:]
    flag = ""
    for word in words:
        if word.startswith("--"):
            name, given, value = word.partition("=")
            flag = name.replace("_", "-")
            assert flag not in found, word
            found[flag] = value if given else True
        else:
            found[flag] = word
    flat: dict[str, Any] = {}
    for name, value in found.items():
        flat |= dict(leaves(name, json.loads(value))) if str(value).startswith("{") else {name: value}
    return flat


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a JSON object under dotted names; booleans written as text count as booleans."""
    if not isinstance(value, dict):
        yield name, value
        return
    for key, below in value.items():
        yield from leaves(f"{name}.{key}", below)


def listed(cluster: str, kind: str, names: set[str]) -> set[str]:
    """The listed difference of each name that differs; the name itself where none is listed."""
    known = [d.name for d in DIFFERENCES if d.kind == kind and cluster in d.clusters]
    return {next((k for k in known if name == k or name.startswith(f"{k}.")), name) for name in names}


def differing(ours: dict[str, Any], theirs: dict[str, Any]) -> set[str]:
    return {name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)}


def argv_differences(case: Published) -> set[str]:
    return listed(case.cluster, "argv", differing(parsed(rank_of(case)["argv"]), parsed(case.argv())))


def env_differences(case: Published) -> set[str]:
    """Empty where the source has no environment."""
    env = dict(rank_of(case)["env"])
    devices = env.pop("ASCEND_RT_VISIBLE_DEVICES", None)
    assert devices == case.devices
    return listed(case.cluster, "env", differing(env, case.environment())) if case.env else set()


def ident(case: Published) -> str:
    return f"{case.cluster}-{case.rank}"


@pytest.mark.parametrize("case", PUBLISHED, ids=ident)
def test_argv_equals_the_published_one(case: Published) -> None:
    known = {d.name for d in DIFFERENCES if d.kind == "argv" and case.cluster in d.clusters}
    assert argv_differences(case) <= known


@pytest.mark.parametrize("case", PUBLISHED, ids=ident)
def test_env_equals_the_published_one(case: Published) -> None:
    known = {d.name for d in DIFFERENCES if d.kind == "env" and case.cluster in d.clusters}
    assert env_differences(case) <= known


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_every_listed_difference_is_one(cluster: str) -> None:
    found = {("argv", name) for case in PUBLISHED if case.cluster == cluster for name in argv_differences(case)}
    found |= {("env", name) for case in PUBLISHED if case.cluster == cluster for name in env_differences(case)}
    assert found == {(d.kind, d.name) for d in DIFFERENCES if cluster in d.clusters}


def test_every_difference_has_a_reason() -> None:
    assert all(len(d.reason) > 20 and d.ours and d.published and d.clusters for d in DIFFERENCES)
    assert {cluster for d in DIFFERENCES for cluster in d.clusters} == set(CLUSTERS)


def test_flags_of_a3_stand_in_the_published_order() -> None:
    for case in PUBLISHED[:5]:
        ours, theirs = (
            [w.split("=")[0] for w in argv if w.startswith("--")] for argv in (rank_of(case)["argv"], case.argv())
        )
        assert ours == theirs


def test_four_prefill_and_32_decode_ranks() -> None:
    ranks = plan("a3")["ranks"]
    assert [rank["role"] for rank in ranks] == ["prefill"] * 4 + ["decode"] * 32
    decode = [rank for rank in ranks if rank["role"] == "decode"]
    assert [rank["rank"] for rank in decode] == list(range(32))
    assert {rank["group"] for rank in decode} == {0}
    assert [(r["group"], r["rank"], r["host"]) for r in ranks[:4]] == [
        (0, 0, "p0"),
        (0, 1, "p0"),
        (1, 0, "p1"),
        (1, 1, "p1"),
    ]


@pytest.mark.parametrize("cluster", ["a3", "a3-v31", "a3-v32"])
def test_the_ranks_of_a_node_share_its_dies(cluster: str) -> None:
    for host in ("p0", "p1", "d0", "d1"):
        ranks = [rank for rank in plan(cluster)["ranks"] if rank["host"] == host]
        used = [die for rank in ranks for die in rank["env"]["ASCEND_RT_VISIBLE_DEVICES"].split(",")]
        assert sorted(map(int, used)) == list(range(16))


def test_router_knows_every_rank() -> None:
    argv = plan("a3")["router"]["argv"]
    assert argv.count("--prefill") == 4
    assert argv.count("--decode") == 32
    assert all(rank["url"] in argv for rank in plan("a3")["ranks"])
