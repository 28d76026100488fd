"""Greedy answers of the running stack to a fixed set of prompts, and what decode counted meanwhile."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from live_stack import Stack, wait_until

from mtp_runtime.metrics import engine_stats, names
from mtp_runtime.metrics.engine_stats import DraftCounts
from mtp_runtime.model import prompts

PROMPTS = 64
TOKENS = 48
CLIENTS = 6  # more than decode has slots, so that none of them waits for a client


@dataclass(frozen=True)
class Served:
    """Token ids of every prompt's completion, and decode's draft counts (None: it has no such counters)."""

    tokens: list[list[int]]
    counts: DraftCounts | None


def ask(stack: Stack, number: int, **options: Any) -> dict[str, Any]:
    """The choice that answers a prompt greedily."""
    status, body = stack.completion(TOKENS, prompt=prompts.completion(number), return_token_ids=True, **options)
    assert status == 200, body
    choice: dict[str, Any] = json.loads(body)["choices"][0]
    assert len(choice["token_ids"]) == TOKENS
    return choice


def ask_all(stack: Stack) -> Served:
    """All prompts; every one of them is handed over from prefill to decode once."""

    def counted() -> tuple[float, float]:
        now = stack.metrics("decode")
        return now.total(f"{names.NIXL_XFER_TIME}_count") or 0.0, now.total(names.REQUEST_SUCCESS) or 0.0

    transfers, answers = counted()
    before = engine_stats.draft_counts(stack.metrics("decode"))
    with ThreadPoolExecutor(CLIENTS) as pool:
        tokens = [choice["token_ids"] for choice in pool.map(lambda number: ask(stack, number), range(PROMPTS))]
    # An engine counts a request shortly after its answer.
    wanted = (transfers + PROMPTS, answers + PROMPTS)
    wait_until(lambda: counted() == wanted, 20, f"{PROMPTS} KV transfers and answers")
    counts = engine_stats.draft_counts(stack.metrics("decode"))
    return Served(tokens, counts.since(before) if counts else None)
