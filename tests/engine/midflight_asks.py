"""Requests that are aborted, preempted or end inside a run of drafts. Runs in the engine's process."""

from __future__ import annotations

from typing import Any

import graph_prompts as given
from engine_arms import Run, _sampling
from graph_asks import ENDING, GREEDY, LIMITED, Answer, ask
from graph_watch import core

ABORTED = {"r1": 20, "r4": 15, "r7": None}
"""Request -> which of the mixed prompts its id is used again for, or None."""
PREEMPTED = [8, 9, 10, 11, 12, 13, 8, 7]
"""Mixed prompts of 15 to 64 tokens, most of them about to need another block."""
BLOCKS = 24
"""Left in the pool: the prompts fit, their answers do not."""
STOPS = 9
"""One token in so many stops an answer."""


def stops(number: int) -> list[int]:
    """Token ids that end the answer to a mixed prompt."""
    return list(range(2 + number % STOPS, 745, STOPS))


def midflight(llm: Any) -> dict[str, Any]:
    """All of it."""
    batch = given.mixed()[: given.SEATS]
    stopping = [{**GREEDY, "stop_token_ids": stops(number)} for number in range(len(batch))]
    return {
        "aborted": aborted(llm),
        "preempted": preempted(llm),
        "stopped": ask(llm, batch, stopping),
        "end": ask(llm, batch, ENDING),
        "limited": ask(llm, given.limited(), LIMITED),
        "after": ask(llm, batch, GREEDY),
    }


def aborted(llm: Any) -> dict[str, list[int]]:
    """Request -> answer, of ten of which three are aborted between two steps with drafts. One id is used again at
    once, one a step later."""
    engine, prompts = llm.llm_engine, given.mixed()
    found: dict[str, list[int]] = {}

    def add(name: str, number: int) -> None:
        engine.add_request(name, {"prompt_token_ids": prompts[number]}, _sampling(Run([], GREEDY)))

    def step() -> None:
        for output in engine.step():
            if output.finished:
                assert output.request_id not in found, f"{output.request_id} ended twice"
                found[output.request_id] = list(output.outputs[0].token_ids)

    for number in range(10):
        add(f"r{number}", number)
    for _ in range(3):
        step()
    engine.abort_request(list(ABORTED))
    add("r1", ABORTED["r1"])
    step()
    add("r4", ABORTED["r4"])
    while engine.has_unfinished_requests():
        step()
    return found


def preempted(llm: Any) -> Answer:
    """Answers that do not all fit: most of the KV memory is held meanwhile."""
    pool, prompts = core(llm).scheduler.kv_cache_manager.block_pool, given.mixed()
    held = pool.get_new_blocks(pool.get_num_free_blocks() - BLOCKS)
    try:
        return ask(llm, [prompts[number] for number in PREEMPTED], GREEDY)
    finally:
        pool.free_blocks(held)
