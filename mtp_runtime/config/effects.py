"""What a change of the configuration will be like, in words. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .impact import Impact

ARTICLE_RATE = 0.85


def expected_length(rate: float, k: int) -> float:
    """Tokens a draft step yields when each of K drafts is accepted with `rate`, and none behind a rejected one."""
    return sum(rate**depth for depth in range(k + 1))


def rate_of(length: float, k: int) -> float:
    """The rate in [0, 1] at which K drafts yield `length` tokens a step: the inverse of expected_length."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_length(middle, k) < length else (low, middle)
    return (low + high) / 2


def effects(impact: Impact, old: dict[str, Any], new: dict[str, Any], rate: float, rate_from: str) -> list[str]:
    """Sentences for the operator. rate: the share of first drafts that are accepted; rate_from: who says so."""
    return [
        *_programs(impact),
        *_drafts(impact, new, rate, rate_from),
        *_steps(impact, new),
        *_clients(impact, old, new),
    ]


def _programs(impact: Impact) -> Iterator[str]:
    restart = [rank for rank in impact.ranks if rank.action.startswith("restart")]
    stop = [rank for rank in impact.ranks if rank.action == "stop"]
    if restart or stop:
        all_of = len([rank for rank in impact.ranks if rank.action != "start"])
        yield f"{len(restart) + len(stop)} of {all_of} ranks stop or restart; requests that run on them end."
    elif impact.changed:
        yield "no rank restarts."
    if any(rank.action == "restart with its group" for rank in impact.ranks):
        yield "a data-parallel group restarts as a whole: one missing rank hangs the others."
    if "router" in impact.services or "front" in impact.services:
        yield "the way in restarts: every request in flight ends."


def _drafts(impact: Impact, new: dict[str, Any], rate: float, rate_from: str) -> Iterator[str]:
    found = {one.name: one for one in impact.settings}
    if "MTP" in found:
        handed_over = any(rank["role"] == "prefill" for rank in new["ranks"])
        why = ", prefill and decode alike: the KV of the drafter's layer is handed over too" * handed_over
        yield f"MTP goes {found['MTP'].new} on every rank{why}."
    if "K" not in found:
        return
    old_k, k = int(found["K"].old or 0), int(found["K"].new or 0)
    yield (
        f"K {old_k} -> {k}: a request verifies {k + 1} token{'s' * (k > 0)} a step instead of {old_k + 1} "
        f"({k - old_k:+d}), and the drafter runs {k} time{'s' * (k != 1)} instead of {old_k}."
    )
    before, after = expected_length(rate, old_k), expected_length(rate, k)
    deeper = "; deeper drafts are accepted less often, so it is less" if k > 1 else ""
    yield (
        f"expected acceptance length {before:.2f} -> {after:.2f} tokens a step, if a draft is accepted with "
        f"{rate:.0%} at every depth ({rate_from}){deeper}."
    )
    yield (
        f"time per token falls where a step takes less than {after / before:.2f} times what it takes now; "
        "measure it: make validate."
    )
    slots = new.get("graphs", {}).get("slots")
    if slots:
        yield f"a full step has {slots} slots x {k + 1} = {slots * (k + 1)} query tokens."


def _steps(impact: Impact, new: dict[str, Any]) -> Iterator[str]:
    found = {one.name: one for one in impact.settings}
    for name in ("verification", "padding"):
        if name in found:
            yield f"{name}: {found[name].new or 'none'} ({new[name]['why']})."
    if "graph mode" in found or "graph sizes, tokens" in found:
        sizes = ", ".join(map(str, new["graphs"]["capture_sizes"]))
        told = f" of {sizes} tokens" if sizes else ", sizes left to the engine"
        mode = new["graphs"]["mode"]
        yield (
            "decode steps run eagerly, no graphs."
            if mode == "eager"
            else f"graphs ({mode or 'the engine decides'}){told}."
        )
    for one in impact.settings:
        if one.name.startswith("KV memory") and isinstance(one.old, int) and isinstance(one.new, int):
            role = one.name.split()[4]
            count = sum(rank["role"] == role for rank in new["ranks"])
            yield (
                f"KV memory of a {role} rank {size(one.old)} -> {size(one.new)} "
                f"({(one.new - one.old) / one.old:+.1%}, {count} rank{'s' * (count != 1)})."
            )


def _clients(impact: Impact, old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    front = new["router"]["front"]
    if old["router"].get("front") != front:
        yield f"clients find it at http://{front['host']}:{front['port']}/v1 now."
    for one in impact.settings:
        if one.name == "model":
            yield f"clients ask for model {one.new} instead of {one.old}."


def size(count: int) -> str:
    """Bytes for people."""
    for unit, width in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= width:
            return f"{count / width:.2f} {unit}"
    return f"{count} B"
