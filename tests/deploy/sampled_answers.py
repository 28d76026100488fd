"""The first tokens of the running stack's answers to one prompt, sampled with many seeds."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

from live_stack import Stack

from mtp_runtime.model import prompts

SEEDS = 500
TOKENS = 4
CLIENTS = 6
TEMPERATURE = 0.8


def sample(stack: Stack) -> list[list[int]]:
    """[SEEDS][TOKENS] token ids, one answer a seed, through router, prefill and decode."""

    def ask(seed: int) -> list[int]:
        status, body = stack.completion(
            TOKENS, prompt=prompts.completion(0), temperature=TEMPERATURE, seed=seed, return_token_ids=True
        )
        assert status == 200, body
        tokens: list[int] = json.loads(body)["choices"][0]["token_ids"]
        assert len(tokens) == TOKENS
        return tokens

    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(ask, range(SEEDS)))
