"""Sampling parameters in a real engine: every one of them reaches every verified position, seeds keep their promise.

What a parameter does is judged by the engine itself without MTP: greedy answers must be the same tokens. Seeded answers
must not depend on K, on the drafter, on the batch, on its order or on preemption.
"""

from __future__ import annotations

import itertools
import re

import pytest
from engine_arms import Arm, Run, start
from test_engine_plugin import DRAWN, GREEDY, SAMPLES, prompts
from two_sample import same_distribution

pytestmark = pytest.mark.engine

LONG = {"temperature": 1.0, "max_tokens": 64}
SEEDS = [{**LONG, "seed": 100 + i} for i in range(6)]
PATTERN = r"[a-z]{4}( [a-z]{2,6}){3}[.]"
FORBIDDEN = list(range(2, 90))
BAD_WORDS = [[t] for t in range(2, 40)] + [[a, b] for a in range(100, 130) for b in range(100, 130)]
GREEDY_RUNS = {
    "bias": {**GREEDY, "logit_bias": {5: 6.0, 300: 5.0, **dict.fromkeys(range(400, 600), -20.0)}},
    "bad-words": {**GREEDY, "bad_words_token_ids": BAD_WORDS},
    "allowed": {**GREEDY, "allowed_token_ids": list(range(90, 500))},
    "min-tokens": {**GREEDY, "stop_token_ids": FORBIDDEN, "min_tokens": 8},
    "together": {
        **GREEDY,
        "logit_bias": {5: 3.0},
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "bad_words_token_ids": BAD_WORDS,
        "allowed_token_ids": list(range(2, 700)),
        "stop_token_ids": [7],
        "min_tokens": 8,
    },
}
NAMED = [5, 300, 7]
MIN_P_ONE = {"temperature": 1.5, "min_p": 1.0, "max_tokens": 24}


def greedy_runs() -> list[Run]:
    """One run a parameter; then all of them, and no parameter, in one batch; then what the tests below name."""
    some = prompts()[4:7]
    runs = [Run(some, sampling) for sampling in GREEDY_RUNS.values()]
    mixed = [GREEDY, *GREEDY_RUNS.values()]
    named = Run(some, {**GREEDY, "logprob_token_ids": NAMED})
    return [*runs, Run([prompts()[6]] * len(mixed), mixed), Run(some, MIN_P_ONE), Run(some, GREEDY), named]


def seeded_prompts() -> list[list[int]]:
    """Six prompts of 90 tokens: together more than the small cache holds with their answers."""
    base = prompts()[7]
    return [base[i : i + 90] for i in range(6)]


def seeded_runs() -> list[Run]:
    """The same requests in one batch, in reverse, alone, and beside greedy and unseeded ones."""
    p = seeded_prompts()
    beside = [SEEDS[0], GREEDY, LONG, SEEDS[3], LONG]
    return [
        Run(p, SEEDS),
        Run(p[::-1], SEEDS[::-1]),
        *(Run([p[i]], [SEEDS[i]]) for i in (0, 3)),
        Run([p[0], p[1], p[2], p[3], p[4]], beside),
    ]


def scored_run() -> Run:
    """Sampled in several ways, and greedily, with log-probabilities, which one forward pass can confirm."""
    sampling = [{**LONG, "logprobs": 0, "seed": 5}, {**LONG, "logprobs": 0}, {**GREEDY, "logprobs": 0}]
    sampling.append({**LONG, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "logprobs": 0})
    return Run(seeded_prompts()[: len(sampling)], sampling, rescore=True)


@pytest.fixture(scope="module")
def arms() -> dict[str, list[dict]]:
    """Name of the engine -> answers of its runs."""
    drawn = Run([prompts()[4]] * SAMPLES, DRAWN)
    text = Run(prompts()[4:7], {**GREEDY, "max_tokens": 40, "ignore_eos": False, "detokenize": True, "regex": PATTERN})
    with_text = {"skip_tokenizer_init": False}
    wanted = {
        "off": Arm(0, [*greedy_runs(), drawn, text], engine=with_text),
        "k1": Arm(1, [*greedy_runs(), *seeded_runs(), scored_run()]),
        "k3": Arm(3, [*greedy_runs(), *seeded_runs(), text], engine=with_text),
        "drawn-drafts": Arm(3, [*greedy_runs(), *seeded_runs(), scored_run(), drawn], draft_sampling="probabilistic"),
        "drawn-drafts-k2": Arm(
            2, [*seeded_runs(), drawn], draft_sampling="probabilistic", env={"MTP_VERIFICATION": "tokenwise"}
        ),
        "preempted": Arm(3, seeded_runs(), engine={"kv_cache_memory_bytes": 27 << 20}),
    }
    found = dict(zip(wanted, start(list(wanted.values())), strict=True))
    for name, result in found.items():
        assert "error" not in result, f"{name}: {result['error']}"
    return {name: result["answers"] for name, result in found.items()}


@pytest.mark.parametrize("arm", ["k1", "k3", "drawn-drafts"])
def test_greedy_answers_under_constraints_equal_those_without_mtp(arms, arm: str) -> None:
    names = [*GREEDY_RUNS, "mixed"]
    for name, off, on in zip(names, arms["off"], arms[arm], strict=False):
        assert on["tokens"] == off["tokens"], name
        assert on["engine"]["vllm:spec_decode_num_drafts"] > 0, name
    plain = arms["off"][len(names) + 1]["tokens"]
    for name, off in zip(GREEDY_RUNS, arms["off"], strict=False):
        assert off["tokens"] != plain, f"{name} changes nothing here: the comparison shows nothing"


def test_constraints_hold_on_every_token(arms) -> None:
    for arm in ("k1", "k3", "drawn-drafts"):
        bias, bad_words, allowed, min_tokens = (answer["tokens"] for answer in arms[arm][:4])
        assert all(not 400 <= t < 600 for tokens in bias for t in tokens)
        for tokens in bad_words:
            assert all(not 2 <= t < 40 for t in tokens)
            assert all(not (100 <= a < 130 and 100 <= b < 130) for a, b in itertools.pairwise(tokens))
        assert all(90 <= t < 500 for tokens in allowed for t in tokens)
        assert all(t not in FORBIDDEN for tokens in min_tokens for t in tokens[:8])
        assert all(len(tokens) >= 8 for tokens in min_tokens)


@pytest.mark.parametrize("arm", ["off", "k1", "k3", "drawn-drafts"])
def test_min_p_of_one_leaves_the_best_token(arms, arm: str) -> None:
    position = len(GREEDY_RUNS) + 1
    assert arms[arm][position]["tokens"] == arms["off"][position + 1]["tokens"]


@pytest.mark.parametrize("arm", ["k1", "k3", "drawn-drafts"])
def test_log_probabilities_of_named_tokens_equal_those_without_mtp(arms, arm: str) -> None:
    off, on = (arms[name][len(GREEDY_RUNS) + 3]["all_logprobs"] for name in ("off", arm))
    for expected, found in zip(off, on, strict=True):
        assert len(found) == len(expected) == GREEDY["max_tokens"]
        for one, other in zip(expected, found, strict=True):
            assert set(NAMED) <= set(one)
            assert {t: other[t] for t in one} == pytest.approx(one, abs=1e-4)


def seeded_answers(arms, arm: str) -> list[dict]:
    """The answers to `seeded_runs`."""
    skip = 0 if arm in ("preempted", "drawn-drafts-k2") else len(greedy_runs())
    return arms[arm][skip : skip + len(seeded_runs())]


@pytest.mark.parametrize("arm", ["k1", "k3", "drawn-drafts", "drawn-drafts-k2", "preempted"])
def test_a_seed_gives_the_same_tokens_in_any_company(arms, arm: str) -> None:
    """Float32: across batches logits differ in their last bits, which no race here is close enough to notice."""
    expected = seeded_answers(arms, "k1")[0]["tokens"]
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    batch, reverse, first, fourth, beside = (answer["tokens"] for answer in seeded_answers(arms, arm))
    assert batch == expected
    assert reverse[::-1] == expected
    assert [first[0], fourth[0]] == [expected[0], expected[3]]
    assert [beside[0], beside[3]] == [expected[0], expected[3]]
    assert beside[2] != beside[4], "unseeded requests must differ"


def test_preemption_took_place(arms) -> None:
    assert seeded_answers(arms, "preempted")[0]["engine"]["vllm:num_preemptions"] > 0
    assert seeded_answers(arms, "k3")[0]["engine"]["vllm:num_preemptions"] == 0


@pytest.mark.parametrize("arm", ["k1", "k3", "drawn-drafts", "preempted"])
def test_drafts_were_accepted_and_rejected(arms, arm: str) -> None:
    """Else the seeded answers would show nothing."""
    engine = seeded_answers(arms, arm)[0]["engine"]
    accepted, drafted = (engine[f"vllm:spec_decode_num_{what}_tokens"] for what in ("accepted", "draft"))
    assert 0.1 < accepted / drafted < 0.98


@pytest.mark.parametrize("arm", ["k1", "drawn-drafts"])
def test_log_probabilities_belong_to_the_emitted_tokens(arms, arm: str) -> None:
    """Those of the raw logits, whatever the constraints, at accepted, recovered and bonus tokens alike."""
    answer = arms[arm][len(greedy_runs()) + len(seeded_runs())]
    for reported, found in zip(answer["logprobs"], answer["rescored"], strict=True):
        assert reported == pytest.approx(found, abs=2e-3)


@pytest.mark.parametrize("arm", ["drawn-drafts", "drawn-drafts-k2"])
def test_drawn_drafts_leave_the_distribution_alone(arms, arm: str) -> None:
    """Block verification (K = 3) and token by token (K = 2) with real draft probabilities, against K = 0."""
    same_distribution(arms["off"][len(greedy_runs())]["tokens"], arms[arm][-1]["tokens"])


def test_a_grammar_holds_with_drafts(arms) -> None:
    """The bitmask applies at every verified position, and drafts that break the grammar never reach it (vLLM#27969,
    vLLM#44297)."""
    off, on = arms["off"][-1], arms["k3"][-1]
    assert on["tokens"] == off["tokens"]
    assert all(re.fullmatch(PATTERN, text) for text in on["text"]), on["text"]
    assert on["engine"]["vllm:spec_decode_num_drafts"] > 0
