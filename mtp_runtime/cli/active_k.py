"""`mtpctl active-k CLUSTER [N]`: read and set how many drafts the running servers of a cluster make.

Nothing restarts, and requests that run go on. All servers that decode get the same number, or none does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mtp_runtime.cli.canary import call
from mtp_runtime.cli.deployed import Deployed
from mtp_runtime.metrics.plan import Engine

PATH = "/v1/mtp/active_k"
# An engine answers between two steps, and the prefill of a long prompt is one.
TIMEOUT_S = 60.0
GONE, NO_ROUTE, MTP_OFF = 0, 404, 409
"""HTTP statuses; 0: no answer."""


@dataclass(frozen=True, slots=True)
class Rank:
    """A server that decodes: its K, or the trouble with it. loaded_k is 0 where MTP is off."""

    instance: str
    active_k: int = 0
    loaded_k: int = 0
    trouble: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Every rank as it is now. refused: the request was wrong and nothing was changed; failed: something broke."""

    ranks: tuple[Rank, ...]
    refused: str | None = None
    failed: str | None = None

    def as_dict(self, cluster: str) -> dict[str, Any]:
        """For --json."""
        return {"cluster": cluster, "ok": not (self.refused or self.failed), **asdict(self)}


def read(deployed: Deployed, timeout_s: float = TIMEOUT_S) -> Outcome:
    """Asks every rank."""
    ranks = tuple(_ask(engine, deployed.key(), timeout_s=timeout_s) for engine in deployed.plan.decoding)
    return Outcome(ranks, failed=_troubles(ranks))


def change(deployed: Deployed, wanted: int) -> Outcome:
    """Sets the active K of every rank. Where one fails, those before it are set back."""
    before = read(deployed)
    if before.failed:
        return replace(before, failed=f"{before.failed}; nothing was changed")
    loaded = min(rank.loaded_k for rank in before.ranks)
    if not loaded:
        return replace(before, refused=f"MTP is off: make mtp CLUSTER={deployed.plan.cluster} K=... turns it on")
    if not 0 <= wanted <= loaded:
        return replace(before, refused=f"{wanted}: use 0 to {loaded}, the K that is loaded")
    engines, now = deployed.plan.decoding, []
    for engine in engines:
        now.append(_ask(engine, deployed.key(), wanted))
        if now[-1].trouble:
            return _undo(deployed, engines[: len(now)], before.ranks, now[-1])
    return Outcome(tuple(now))


def _undo(deployed: Deployed, changed: Sequence[Engine], before: Sequence[Rank], broken: Rank) -> Outcome:
    """Sets ranks back to what they were; the broken one too, as it may have heard what it did not answer."""
    back = [_ask(engine, deployed.key(), old.active_k) for engine, old in zip(changed, before, strict=False)]
    lost = [rank.instance for rank in back if rank.trouble]
    result = "the others are set back" if lost in ([], [broken.instance]) else f"not set back: {', '.join(lost)}"
    return Outcome((*back, *before[len(back) :]), failed=f"{broken.instance}: {broken.trouble}; {result}")


def _ask(engine: Engine, key: str, wanted: int | None = None, timeout_s: float = TIMEOUT_S) -> Rank:
    """Reads, or sets, the K of one rank."""
    body = None if wanted is None else {"active_k": wanted}
    answer = call(engine.url + PATH, key, body, timeout_s)
    if answer.status == MTP_OFF:
        return Rank(engine.instance)
    try:
        found = json.loads(answer.body)
        if answer.status == 200:
            return Rank(engine.instance, int(found["active_k"]), int(found["loaded_k"]))
        text = str(found["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = answer.body.strip()[:200]
    if answer.status == GONE:
        return Rank(engine.instance, trouble=f"no answer on {engine.url}: {text}")
    if answer.status == NO_ROUTE:
        return Rank(engine.instance, trouble=f"{engine.url} runs an older version; make deploy starts the new one")
    return Rank(engine.instance, trouble=f"HTTP {answer.status} on {engine.url}: {text}")


def _troubles(ranks: Sequence[Rank]) -> str | None:
    return "; ".join(f"{rank.instance}: {rank.trouble}" for rank in ranks if rank.trouble) or None
