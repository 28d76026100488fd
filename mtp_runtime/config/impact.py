"""What differs between two plans: which programs restart, and which settings of a decode step change. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from .arguments import engine_arguments

Action = Literal["start", "stop", "restart", "restart with its group", "unchanged"]
ASCEND = "vllm-ascend"


@dataclass(frozen=True)
class RankChange:
    """What happens to one rank, and why."""

    name: str
    role: str
    host: str
    action: Action
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Setting:
    """One setting before and after; None where there is none."""

    name: str
    old: Any
    new: Any


@dataclass(frozen=True)
class Impact:
    """ranks: all of them; services: program beside the ranks -> why it restarts; settings: those that differ."""

    ranks: tuple[RankChange, ...]
    services: dict[str, tuple[str, ...]]
    settings: tuple[Setting, ...]

    @property
    def changed(self) -> bool:
        """Would a deployment change anything?"""
        return bool(self.services or self.settings) or any(rank.action != "unchanged" for rank in self.ranks)


def compare(old: dict[str, Any], new: dict[str, Any]) -> Impact:
    """From one plan to another one. The old one may be of an earlier version and lack what that one did not say."""
    settings = tuple(
        Setting(name, before, after)
        for (name, before), (_, after) in zip(_settings(old), _settings(new), strict=True)
        if before != after
    )
    return Impact(tuple(_ranks(old, new)), dict(_services(old, new)), settings)


def differences(old: dict[str, Any], new: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, old, new) of every leaf that differs; None where there is none."""
    for key in (*old, *(key for key in new if key not in old)):
        before, after = old.get(key), new.get(key)
        name = f"{path}.{key}" if path else str(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from differences(before, after, name)
        elif before != after:
            yield name, before, after


def arguments_of(rank: dict[str, Any]) -> dict[str, Any]:
    """A rank's arguments; those of an earlier version's plan that are not known any more as one text."""
    try:
        return engine_arguments(rank["argv"])
    except ValueError:
        return {"command line": " ".join(rank["argv"])}


def _ranks(old: dict[str, Any], new: dict[str, Any]) -> Iterator[RankChange]:
    before, after = ({rank["name"]: rank for rank in plan["ranks"]} for plan in (old, new))
    reasons = {name: tuple(_reasons(before[name], rank)) for name, rank in after.items() if name in before}
    # The death of one rank hangs its whole group there: they restart together.
    groups = {(after[name]["role"], after[name]["group"]) for name, why in reasons.items() if why}
    groups |= {(rank["role"], rank["group"]) for name, rank in after.items() if name not in before}
    for name, rank in after.items():
        action: Action = "unchanged"
        if name not in before:
            action = "start"
        elif reasons[name]:
            action = "restart"
        elif new["engine"] == ASCEND and (rank["role"], rank["group"]) in groups:
            action = "restart with its group"
        yield RankChange(name, rank["role"], rank["host"], action, reasons.get(name, ()))
    for name, rank in before.items():
        if name not in after:
            yield RankChange(name, rank["role"], rank["host"], "stop", ())


def _reasons(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    for name in ("host", "address"):
        if old[name] != new[name]:
            yield f"{name} {old[name]} -> {new[name]}"
    if old["argv"][:3] != new["argv"][:3] and "serve" not in old["argv"][:2] + new["argv"][:2]:
        yield "another program"
    for key, before, after in differences(arguments_of(old), arguments_of(new)):
        yield f"{key} {said(before)} -> {said(after)}"
    for key, before, after in differences(old["env"], new["env"]):
        yield f"{key} {said(before)} -> {said(after)}"


def _services(old: dict[str, Any], new: dict[str, Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    router = ("argv", "env", "host", "backend", "metrics")
    found = {
        "router": ({k: old["router"].get(k) for k in router}, {k: new["router"].get(k) for k in router}),
        "front": (
            {"address": old["router"].get("front"), "router": old["router"].get("backend")},
            {"address": new["router"].get("front"), "router": new["router"].get("backend")},
        ),
        "monitoring": (old.get("targets", {}), new.get("targets", {})),
    }
    for name, (before, after) in found.items():
        reasons = tuple(_reason(key, one, other) for key, one, other in differences(before, after))
        if reasons:
            yield name, reasons


def _reason(key: str, old: Any, new: Any) -> str:
    if key == "argv":
        return _moved(old, new)
    if key == "vllm":  # what monitoring looks at: one entry a rank
        return _counted(old or [], new or [])
    return f"{key} {said(old)} -> {said(new)}"


def _counted(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> str:
    """How many ranks monitoring looks at that it did not before, and the other way round."""
    before, after = ({one["instance"]: one for one in side} for side in (old, new))
    added, removed = len(after.keys() - before.keys()), len(before.keys() - after.keys())
    changed = sum(before[name] != one for name, one in after.items() if name in before)
    moved = f", {changed} changed" if changed else ""
    return f"{added} target{'s' * (added != 1)} added, {removed} removed{moved}"


def _moved(old: Any, new: Any) -> str:
    """What a list of words lost and gained."""
    old, new = old or [], new or []
    gone, came = [w for w in old if w not in new], [w for w in new if w not in old]
    return f"command line: {' '.join(map(str, gone)) or 'nothing'} -> {' '.join(map(str, came)) or 'nothing'}"


def _settings(plan: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Name and value of everything that says how a step runs, in an order for people."""
    mtp, graphs = plan.get("mtp", {}), plan.get("graphs", {})
    arguments: dict[str, dict[str, Any]] = {}
    for rank in plan["ranks"]:
        arguments.setdefault(rank["role"], arguments_of(rank))
    decoding = arguments.get("decode") or arguments.get("single") or {}
    yield "model", plan.get("model", {}).get("name")
    yield "engine", f"{plan.get('engine')} {plan.get('release')}"
    yield "MTP", "on" if mtp.get("enabled") else "off"
    yield "K", mtp.get("k", 0)
    yield "drafter", mtp.get("method")
    yield "draft sampling", mtp.get("draft_sampling")
    yield "verification", plan.get("verification", {}).get("method")
    yield "attention", mtp.get("attention")
    yield "padding", plan.get("padding", {}).get("method")
    yield "graph mode", graphs.get("mode")
    yield "graph sizes, tokens", graphs.get("capture_sizes") or None
    yield "requests in a batch", decoding.get("max_num_seqs")
    yield "slots of a full step", graphs.get("slots")
    yield "tokens one step may take", decoding.get("max_num_batched_tokens")
    yield "longest context, tokens", decoding.get("max_model_len")
    for role in ("prefill", "decode", "single"):
        yield f"ranks of {role}", sum(rank["role"] == role for rank in plan["ranks"])
        yield f"KV memory of a {role} rank, bytes", arguments.get(role, {}).get("kv_cache_memory_bytes")
        yield f"share of device memory, {role}", arguments.get(role, {}).get("gpu_memory_utilization")


def said(value: Any) -> str:
    """A value as a reason names it."""
    if value is None:
        return "(none)"
    if isinstance(value, dict) and set(value) == {"host", "port"}:
        return f"{value['host']}:{value['port']}"
    return str(value).lower() if isinstance(value, bool) else str(value)
