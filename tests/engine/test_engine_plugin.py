"""The plugin in a real engine: same tokens as without MTP, our parts run each step with drafts, no silent fallback."""

from __future__ import annotations

import random

import pytest
from engine_arms import Arm, Run, config, start
from two_sample import same_distribution

pytestmark = pytest.mark.engine

TOKENS = 24
LENGTHS = [1, 2, 4, 15, 16, 17, 40, 100]
"""Prompt lengths: shorter than K + 1, around one KV block (16 tokens), several blocks."""
GREEDY = {"temperature": 0.0, "max_tokens": TOKENS}
PENALTIES = {**GREEDY, "repetition_penalty": 1.3, "presence_penalty": 0.4, "min_tokens": 8}
TOP_ONE = {"temperature": 1.5, "top_k": 1, "max_tokens": TOKENS}
"""Sampling with one candidate: stochastic verification with a known answer."""
DRAWN, SAMPLES = {"temperature": 0.7, "top_k": 2, "max_tokens": 4}, 96
SEEDED = {"temperature": 1.0, "top_p": 0.95, "top_k": 50, "seed": 7, "max_tokens": TOKENS}


def prompts() -> list[list[int]]:
    """Fixed random token ids."""
    generator = random.Random(11)
    return [[generator.randrange(2, config()["vocab_size"]) for _ in range(n)] for n in LENGTHS]


RUNS = {
    "alone": lambda p: [Run([x], GREEDY) for x in (p[3], p[7])],
    "batch": lambda p: [Run(p, GREEDY)],
    "logprobs": lambda p: [Run(p[4:7], {**GREEDY, "logprobs": 1})],
    "penalties": lambda p: [Run(p[4:7], PENALTIES)],
    "seeded": lambda p: [Run(p[3:7], SEEDED)] * 2,
    "sampled-logprobs": lambda p: [Run(p[3:5], {**SEEDED, "logprobs": 0})],
    "top-one": lambda p: [Run(p[4:7], TOP_ONE)],
    "drawn": lambda p: [Run([p[4]] * SAMPLES, DRAWN)],
}


@pytest.fixture(scope="module")
def arms() -> dict[int, dict[str, list[dict]]]:
    """K -> name of the run -> answers."""
    given, names = [], [name for name, runs in RUNS.items() for _ in runs(prompts())]
    for _, runs in RUNS.items():
        given += runs(prompts())
    found: dict[int, dict[str, list[dict]]] = {}
    for k, result in zip(range(4), start([Arm(k, given) for k in range(4)]), strict=True):
        assert "error" not in result, result["error"]
        if k:
            assert result["sampler"] == "mtp_runtime.adapters.vllm_cpu.sampler.MtpRejectionSampler"
        found[k] = {name: [] for name in RUNS}
        for name, answer in zip(names, result["answers"], strict=True):
            found[k][name].append(answer)
    return found


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("run", ["alone", "batch", "logprobs", "penalties"])
def test_greedy_tokens_equal_those_without_mtp(arms, k: int, run: str) -> None:
    for off, on in zip(arms[0][run], arms[k][run], strict=True):
        assert on["tokens"] == off["tokens"]
        assert all(len(tokens) == TOKENS for tokens in on["tokens"])


@pytest.mark.parametrize("k", [1, 2, 3])
def test_logprobs_equal_those_without_mtp(arms, k: int) -> None:
    off, on = arms[0]["logprobs"][0]["logprobs"], arms[k]["logprobs"][0]["logprobs"]
    for a, b in zip(off, on, strict=True):
        assert b == pytest.approx(a, abs=1e-4)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_every_step_with_drafts_goes_through_our_parts(arms, k: int) -> None:
    """Counted at the scheduler and by vLLM's own statistics, both apart from the plugin."""
    for name, answers in arms[k].items():
        for answer in answers:
            ours = {key.removeprefix("mtp_runtime_").removesuffix("_total"): v for key, v in answer["ours"].items()}
            steps = answer["scheduled"]["draft_steps"]
            assert steps > 0, name
            assert ours["verify_calls"] == steps, name
            assert ours["attention_draft_steps"] == steps, name
            assert ours["attention_decode_calls"] == steps * config()["num_hidden_layers"], name
            assert ours["engine_draft_steps"] == steps, name
            assert ours["verify_draft_steps"] == answer["scheduled"]["requests_with_drafts"], name
            real = ours["verify_draft_steps"] - ours["verify_placeholder_steps"]
            assert real == answer["engine"]["vllm:spec_decode_num_drafts"], name


def test_nothing_is_counted_without_mtp(arms) -> None:
    for answers in arms[0].values():
        for answer in answers:
            assert set(answer["ours"].values()) == {0}


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_seed_gives_the_same_tokens_again(arms, k: int) -> None:
    first, second = arms[k]["seeded"]
    assert first["tokens"] == second["tokens"]
    assert len({tuple(tokens) for tokens in first["tokens"]}) == len(first["tokens"])
    assert all(0 <= t < config()["vocab_size"] for tokens in first["tokens"] for t in tokens)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_sampling_from_one_candidate_is_greedy(arms, k: int) -> None:
    """The candidate limit reaches every draft position."""
    assert arms[k]["top-one"][0]["tokens"] == arms[0]["top-one"][0]["tokens"]
    assert arms[k]["top-one"][0]["tokens"] == arms[0]["batch"][0]["tokens"][4:7]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_sampled_sequences_are_distributed_as_without_mtp(arms, k: int) -> None:
    """Four tokens of two candidates each, against K = 0."""
    same_distribution(arms[0]["drawn"][0]["tokens"], arms[k]["drawn"][0]["tokens"])


@pytest.mark.parametrize("part", ["verify", "attention"])
def test_a_fault_in_our_part_fails_the_request(part: str) -> None:
    """No silent fallback to vLLM's own part."""
    [result] = start([Arm(1, [Run([prompts()[4]], GREEDY)], {"MTP_RUNTIME_FAULT": part})])
    assert f"MTP_RUNTIME_FAULT={part}" in result["error"]


@pytest.mark.parametrize(
    "env", [{"MTP_VERIFICATION": "traversal"}, {"MTP_RUNTIME_FAULT": "typo"}], ids=["verification", "fault"]
)
def test_a_plugin_that_cannot_register_ends_the_engine(env: dict[str, str]) -> None:
    [result] = start([Arm(1, [], env)])
    [(name, value)] = env.items()
    assert "refusing to serve" in result["error"]
    assert f"{name}={value!r}" in result["error"]
