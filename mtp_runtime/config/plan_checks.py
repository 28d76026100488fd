"""Checks over a rendered plan: they read the command lines, so a wrong renderer or a hand-edited plan is caught too."""

import json
from collections.abc import Iterator
from typing import Any

from .checks import Finding


def flag(argv: list[str], name: str, default: str | None = None) -> str | None:
    """Value of `--name value` in a command line."""
    return argv[argv.index(name) + 1] if name in argv else default


def _json_flag(argv: list[str], name: str) -> dict[str, Any] | None:
    text = flag(argv, name)
    return None if text is None else dict(json.loads(text))


def k_per_role(plan: dict[str, Any]) -> Iterator[Finding]:
    """R02: MTP on every rank or on none; P has 1, the others the plan's K."""
    for rank in plan["ranks"]:
        config = _json_flag(rank["argv"], "--speculative-config")
        k = config["num_speculative_tokens"] if config else 0
        want = 0 if not plan["mtp"]["enabled"] else 1 if rank["role"] == "prefill" else plan["mtp"]["k"]
        if k != want:
            yield Finding(("mtp", "num_speculative_tokens"), f"{rank['name']} has K = {k}; it must have {want}.")


def kv_extra_config(plan: dict[str, Any]) -> Iterator[Finding]:
    """R07: the sizes each rank announces against the sizes the ranks are started with."""
    real: dict[str, dict[str, int]] = {}
    for rank in plan["ranks"]:
        real[rank["role"]] = {
            "dp_size": int(flag(rank["argv"], "--data-parallel-size", "1") or 1),
            "tp_size": int(flag(rank["argv"], "--tensor-parallel-size", "1") or 1),
        }
    for rank in plan["ranks"]:
        config = _json_flag(rank["argv"], "--kv-transfer-config") or {}
        for role, sizes in config.get("kv_connector_extra_config", {}).items():
            if sizes != real.get(role):
                message = f"{rank['name']} announces {sizes} for {role}; the ranks have {real.get(role)}."
                yield Finding(("topology", role), message)


def rank_cover(plan: dict[str, Any]) -> Iterator[Finding]:
    """R08: ranks of a group cover 0..dp-1 once and agree on one RPC address and port."""
    groups: dict[tuple[str, int], list[list[str]]] = {}
    for rank in plan["ranks"]:
        groups.setdefault((rank["role"], rank["group"]), []).append(rank["argv"])
    for (role, number), members in groups.items():
        dp = int(flag(members[0], "--data-parallel-size", "1") or 1)
        numbers = sorted(number for argv in members for number in _numbers(argv, dp))
        if numbers != list(range(dp)):
            yield Finding(("topology", role, "dp"), f"{role} group {number} has ranks {numbers}, dp is {dp}.")
        meet = {(flag(argv, "--data-parallel-address"), flag(argv, "--data-parallel-rpc-port")) for argv in members}
        if len(meet) != 1:
            text = ", ".join(sorted(f"{address}:{port}" for address, port in meet))
            yield Finding(("topology", role, "rpc_port"), f"{role} group {number} meets at {text}.")


def _numbers(argv: list[str], dp: int) -> list[int]:
    """Data parallel ranks that a process is: the one it is told, or all of them."""
    told = flag(argv, "--data-parallel-rank")
    return list(range(dp)) if told is None else [int(told)]
