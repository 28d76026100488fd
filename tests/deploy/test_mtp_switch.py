"""K switched on the running stack: only what it touches restarts, greedy tokens stay the same through P and D, and the
drafts are accepted as the model's documentation says.

K = 1 is what was deployed and K = 0 is left running, so three switches are enough.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from greedy_answers import PROMPTS, Served, ask, ask_all
from live_stack import CLUSTER, Stack, make
from sampled_answers import SEEDS, sample
from two_sample import same_distribution

from mtp_runtime.model import limits, prompts

pytestmark = [pytest.mark.live, pytest.mark.last]

NEAR_TIE = 1e-4  # logits this close may swap: float32 sums differ with the number of rows in a step
NEAR_TIES_ALLOWED = PROMPTS // 100
SWITCHES = {3: {"decode-0"}, 2: {"decode-0"}, 0: {"prefill-0", "decode-0"}}
"""K and what restarts for it, in this order after K = 1. The exporter reads the plan when it starts, so it does too."""


def switch(stack: Stack, k: int, restarted: set[str]) -> None:
    """`make mtp`, as the operator runs it."""
    before = stack.pids()
    make("mtp", CLUSTER=CLUSTER, K=str(k))
    now = stack.pids()
    assert {name for name in before if now[name] != before[name]} == restarted | {"exporter"}


SAMPLED = (3, 0)
"""The K under which sampled answers are compared."""


@dataclass(frozen=True)
class Answers:
    """K -> what was served greedily, and [SEEDS][tokens] for the K in SAMPLED."""

    greedy: dict[int, Served]
    sampled: dict[int, list[list[int]]]


@pytest.fixture(scope="module")
def answers(stack: Stack, served_as_deployed: Served) -> Answers:
    """K = 0 runs from here on."""
    found = Answers({1: served_as_deployed}, {})
    for k, restarted in SWITCHES.items():
        switch(stack, k, restarted)
        found.greedy[k] = ask_all(stack)
        if k in SAMPLED:
            found.sampled[k] = sample(stack)
    return found


@pytest.fixture(scope="module")
def served(answers: Answers) -> dict[int, Served]:
    """K -> greedy answers."""
    return answers.greedy


def test_sampled_answers_are_distributed_as_without_mtp(answers: Answers) -> None:
    """Joint distribution of the first tokens, one seed an answer, MTP on against off: chi-square, alpha 1e-4.

    What it can see is worked out from its cells and printed; a difference of Cohen's w of 0.35 must be found nine times
    in ten. Finer ones are the business of the tests without a server, which draw 300 000 samples.
    """
    on, off = (answers.sampled[k] for k in SAMPLED)
    found = same_distribution(off, on)
    print(f"{SEEDS} seeds: chi-square {found.statistic:.1f}, {found.freedom} degrees of freedom, p = {found.p:.3f}; ")
    print(f"finds a difference of w = {found.detectable():.3f} nine times in ten")
    assert found.freedom >= 3, "the answers hardly vary: another prompt or temperature is needed"
    assert found.detectable() < 0.35


def test_the_prompts_are_of_mixed_length_and_longer_than_a_block() -> None:
    words = [len(prompts.completion(number).split()) for number in range(PROMPTS)]
    assert min(words) > 16 and max(words) > 5 * min(words)


def first_difference(off: list[int], on: list[int]) -> int | None:
    return next((place for place, pair in enumerate(zip(off, on, strict=True)) if pair[0] != pair[1]), None)


def gap(stack: Stack, number: int, off: list[int], place: int) -> float:
    """Without MTP, how far the two best logits of a prompt's answer lie apart at a place. K = 0 must be running."""
    choice = ask(stack, number, logprobs=2)
    assert choice["token_ids"][:place] == off[:place], f"prompt {number}: K = 0 does not answer as it did before"
    first, second = sorted(choice["logprobs"]["top_logprobs"][place].values(), reverse=True)[:2]
    return float(first - second)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_greedy_tokens_do_not_depend_on_k(stack: Stack, served: dict[int, Served], k: int) -> None:
    near_ties, wrong = [], []
    for number, (off, on) in enumerate(zip(served[0].tokens, served[k].tokens, strict=True)):
        place = first_difference(off, on)
        if place is not None:
            apart = gap(stack, number, off, place)
            (near_ties if apart <= NEAR_TIE else wrong).append((number, place, apart))
    print(f"K={k}: near ties (prompt, place, gap): {near_ties}")
    assert wrong == []
    assert len(near_ties) <= NEAR_TIES_ALLOWED


@pytest.mark.parametrize("k", [1, 2, 3])
def test_k_drafts_a_step(served: dict[int, Served], k: int) -> None:
    counts = served[k].counts
    assert counts is not None and counts.drafts > 0
    # A request near its end is given fewer drafts than K.
    assert (k - 1) * counts.drafts < counts.draft_tokens <= k * counts.drafts


def test_no_draft_without_mtp(served: dict[int, Served]) -> None:
    assert served[0].counts is None or served[0].counts.drafts == 0


def test_drafts_are_accepted_as_documented(served: dict[int, Served]) -> None:
    """The limits that the weights meet without an engine (`docs/model.md`), met by the running stack."""
    one, three = served[1].counts, served[3].counts
    assert one is not None and three is not None
    print(f"acceptance at K=1 {one.rate:.4f}, acceptance length at K=3 {three.length:.3f}")
    assert limits.broken("acceptance_k1_greedy", one.rate) is None
    assert limits.broken("acceptance_length_k3", three.length) is None
