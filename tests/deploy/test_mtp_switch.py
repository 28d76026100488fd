"""K switched on the running stack: only what it touches restarts, and greedy tokens stay the same, through P and D."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from live_stack import ROOT, Stack, make, wait_until

from mtp_runtime.metrics import names
from mtp_runtime.model import prompts

pytestmark = pytest.mark.live

PROMPTS = 64
TOKENS = 48
NEAR_TIE = 1e-4  # logits this close may swap: float32 sums differ with the number of rows in a step
NEAR_TIES_ALLOWED = PROMPTS // 100
OFF_WITH_GAPS = -1  # MTP off, asked again for log-probabilities: they switch the sampler's fast path off
CONFIG = ROOT / "ansible" / "inventories" / "local" / "group_vars" / "all" / "mtp.yml"


@dataclass(frozen=True)
class Answer:
    """Token ids of one greedy completion; with log-probabilities, the gap between the two best ones at each place."""

    tokens: list[int]
    gaps: list[float]


def ask(stack: Stack, number: int, gaps: bool) -> Answer:
    options = {"logprobs": 2} if gaps else {}
    status, body = stack.completion(TOKENS, prompt=prompts.completion(number), return_token_ids=True, **options)
    assert status == 200, body
    choice = json.loads(body)["choices"][0]
    tops = choice["logprobs"]["top_logprobs"] if gaps else []
    best = [sorted(top.values(), reverse=True)[:2] for top in tops]
    assert len(choice["token_ids"]) == TOKENS
    return Answer(choice["token_ids"], [first - second for first, second in best])


def ask_all(stack: Stack, gaps: bool = False) -> list[Answer]:
    """All prompts, four at a time; every one of them is handed over from prefill to decode once."""

    def transfers() -> float:
        return stack.metrics("decode").total(f"{names.NIXL_XFER_TIME}_count") or 0.0

    before = transfers()
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda number: ask(stack, number, gaps), range(PROMPTS)))
    wait_until(lambda: transfers() == before + PROMPTS, 20, f"{PROMPTS} KV transfers")
    return answers


def check_drafts(stack: Stack, k: int) -> None:
    """K drafts a step, most of them accepted; none at all where MTP is off."""
    samples = stack.metrics("decode")
    steps, drafted, accepted = (
        samples.total(name) or 0.0 for name in (names.SPEC_DRAFTS, names.SPEC_DRAFT_TOKENS, names.SPEC_ACCEPTED_TOKENS)
    )
    assert (steps > 0) == (k > 0)
    if k:
        # A request near its end is given fewer drafts than K.
        assert (k - 1) * steps < drafted <= k * steps
        assert accepted > 0.6 * drafted


@pytest.fixture(scope="module")
def answers(stack: Stack) -> Iterator[dict[int, list[Answer]]]:
    """Answers with K = 1, 3, 2, 0, each after `make mtp`; on the way, what restarts and what does not."""
    original, pids = CONFIG.read_bytes(), stack.pids()
    found: dict[int, list[Answer]] = {}
    try:
        for k, restarted in ((1, set()), (3, {"decode-0"}), (2, {"decode-0"}), (0, {"prefill-0", "decode-0"})):
            if restarted:
                make("mtp", CLUSTER="local", K=str(k))
                now = stack.pids()
                # The exporter reads the plan when it starts.
                assert {name for name in pids if now[name] != pids[name]} == restarted | {"exporter"}
                pids = now
            found[k] = ask_all(stack)
            check_drafts(stack, k)
        found[OFF_WITH_GAPS] = ask_all(stack, gaps=True)
        yield found
    finally:
        CONFIG.write_bytes(original)
        make("deploy", CLUSTER="local")


@pytest.mark.parametrize("k", [1, 2, 3])
def test_greedy_tokens_do_not_depend_on_k(answers: dict[int, list[Answer]], k: int) -> None:
    near_ties, wrong = [], []
    for number, (off, on) in enumerate(zip(answers[0], answers[k], strict=True)):
        place = next((i for i, pair in enumerate(zip(off.tokens, on.tokens, strict=True)) if pair[0] != pair[1]), None)
        if place is not None:
            gap = answers[OFF_WITH_GAPS][number].gaps[place]
            (near_ties if gap <= NEAR_TIE else wrong).append((number, place, gap))
    print(f"K={k}: near ties (prompt, place, gap): {near_ties}")
    assert wrong == []
    assert len(near_ties) <= NEAR_TIES_ALLOWED


def test_the_prompts_are_of_mixed_length_and_longer_than_a_block() -> None:
    words = [len(prompts.completion(number).split()) for number in range(PROMPTS)]
    assert min(words) > 16 and max(words) > 5 * min(words)
