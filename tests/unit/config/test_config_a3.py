"""The a3 inventory renders the published command lines, but for the differences listed with a reason."""

import json
from typing import Any

import published_a3
import pytest

from mtp_runtime.config import api
from mtp_runtime.config.differences import DIFFERENCES

PLAN = api.plan("a3")
RANKS = {rank["name"]: rank for rank in PLAN["ranks"]}
WEIGHTS = "/mnt/weights/DeepSeek-R1-W8A8-MTP"
ARGV_DIFFERENCES = {d.name for d in DIFFERENCES if d.kind == "argv"}
ENV_DIFFERENCES = {d.name for d in DIFFERENCES if d.kind == "env"}
# name, node, first node of the group, port, rank in the group, kv_port
CHECKED = (
    ("prefill-0", "192.0.2.11", "192.0.2.11", "7100", "0", "36000"),
    ("prefill-3", "192.0.2.12", "192.0.2.12", "7101", "1", "36100"),
    ("decode-0", "192.0.2.21", "192.0.2.21", "7100", "0", "36200"),
    ("decode-16", "192.0.2.22", "192.0.2.21", "7100", "16", "36200"),
    ("decode-31", "192.0.2.22", "192.0.2.21", "7115", "31", "36200"),
)


def parsed(argv: list[str]) -> list[tuple[str, Any]]:
    """[(flag, value)] in order; switches have the value True, JSON values are read."""
    found: list[tuple[str, Any]] = []
    for word in argv[3:]:
        if word.startswith("--"):
            found.append((word, True))
        else:
            value = json.loads(word) if word.startswith("{") else word
            found[-1] = (found[-1][0], value)
    return found


def published(case: tuple[str, ...]) -> list[str]:
    """The published argv of a rank."""
    name, _, first, port, rank, kv_port = case
    values = {"WEIGHTS": WEIGHTS, "FIRST": first, "PORT": port, "RANK": rank}
    make = published_a3.prefill if name.startswith("prefill") else published_a3.decode
    return make(values, kv_port)


@pytest.mark.parametrize("case", CHECKED, ids=lambda case: case[0])
def test_argv_equals_the_published_one(case: tuple[str, ...]) -> None:
    ours, theirs = RANKS[case[0]]["argv"], published(case)
    assert ours[:3] == theirs[:3] == ["vllm", "serve", WEIGHTS]
    left, right = parsed(ours), parsed(theirs)
    assert [flag for flag, _ in left] == [flag for flag, _ in right]
    differing = {flag for (flag, value), (_, other) in zip(left, right, strict=True) if value != other}
    assert differing == ARGV_DIFFERENCES


@pytest.mark.parametrize("case", CHECKED, ids=lambda case: case[0])
def test_env_equals_the_published_one(case: tuple[str, ...]) -> None:
    env = dict(RANKS[case[0]]["env"])
    theirs = published_a3.PREFILL_ENV if case[0].startswith("prefill") else published_a3.DECODE_ENV
    theirs = {key: {"NODE": case[1], "NIC": "eth0"}.get(value, value) for key, value in theirs.items()}
    devices = env.pop("ASCEND_RT_VISIBLE_DEVICES")
    assert {key: env[key] for key in env if key not in ENV_DIFFERENCES} == theirs
    assert set(env) - set(theirs) == ENV_DIFFERENCES
    low = 8 * int(case[4]) if case[0].startswith("prefill") else int(case[4]) % 16
    width = 8 if case[0].startswith("prefill") else 1
    assert devices == ",".join(str(n) for n in range(low, low + width))


def test_every_difference_has_a_reason() -> None:
    assert all(len(d.reason) > 20 and d.ours and d.published for d in DIFFERENCES)


def test_four_prefill_and_32_decode_ranks() -> None:
    roles = [rank["role"] for rank in PLAN["ranks"]]
    assert roles == ["prefill"] * 4 + ["decode"] * 32
    decode = [rank for rank in PLAN["ranks"] if rank["role"] == "decode"]
    assert [rank["rank"] for rank in decode] == list(range(32))
    assert {rank["group"] for rank in decode} == {0}
    assert [(r["group"], r["rank"], r["host"]) for r in PLAN["ranks"][:4]] == [
        (0, 0, "p0"),
        (0, 1, "p0"),
        (1, 0, "p1"),
        (1, 1, "p1"),
    ]
    for host in ("p0", "p1", "d0", "d1"):
        used = [d for r in PLAN["ranks"] if r["host"] == host for d in r["env"]["ASCEND_RT_VISIBLE_DEVICES"].split(",")]
        assert sorted(map(int, used)) == list(range(16))


def test_router_knows_every_rank() -> None:
    argv = PLAN["router"]["argv"]
    assert argv.count("--prefill") == 4
    assert argv.count("--decode") == 32
    assert all(rank["url"] in argv for rank in PLAN["ranks"])
