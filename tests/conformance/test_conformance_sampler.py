"""The real AscendRejectionSampler before and after the patch `sampler`, on CPU tensors.

`sampler_edge.EDGE` says what is replaced at the device's edge. Distributions are tested with the statistics of
`tests/unit/verify` (chi-square of the joint distribution at ALPHA, fixed seeds).
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import sampler_edge as edge
import torch
from sampler_edge import make_sampler, patched, sampling, step
from sampler_law import AGREE, FILTERED, by_forward, filtered_logits
from torch import Tensor
from verify_statistics import ALPHA, THREE, exact_reach, p_of_lengths, p_of_tokens, play
from vllm_ascend.ascend_config import get_ascend_config

from mtp_runtime.adapters.settings import settings
from mtp_runtime.adapters.vllm_ascend import sampler
from mtp_runtime.adapters.vllm_ascend.sampler import method_for
from mtp_runtime.verify import DraftBatch, Noise

KS = (1, 2, 3, 7)
B, V = 24, 97


@pytest.fixture(autouse=True)
def plain_config() -> None:
    edge.configure()


def both(logits: Tensor, drafts: Tensor, counts: list[int], parameters, draft_probs=None) -> tuple[Tensor, Tensor]:
    """Tokens of the real class's forward without and with the patch."""
    old = make_sampler()(step(drafts, counts), draft_probs, logits.clone(), parameters).sampled_token_ids
    with patched():
        new = make_sampler()(step(drafts, counts), draft_probs, logits.clone(), parameters).sampled_token_ids
    assert new.dtype == old.dtype == torch.int32 and new.shape == old.shape
    return old, new


LOGITS = {
    "random": lambda g, n: torch.randn(n, V, generator=g) * 3,
    "ties everywhere": lambda g, n: torch.randint(3, (n, V), generator=g).float(),
    "all equal": lambda g, n: torch.zeros(n, V),
    "not numbers": lambda g, n: torch.where(
        torch.rand(n, V, generator=g) < 0.2,
        torch.tensor([torch.nan, torch.inf, -torch.inf])[torch.randint(3, (n, V), generator=g)],
        torch.randn(n, V, generator=g),
    ),
    "bfloat16": lambda g, n: torch.randn(n, V, generator=g).bfloat16(),
}


def counts_of(kind: str, k: int, generator: torch.Generator) -> list[int]:
    """Drafts of each request; ragged: 0..K, each of them, K at least once."""
    if kind == "even":
        return [k] * B
    return [k, 0, *torch.randint(k + 1, (B - 2,), generator=generator).tolist()]


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("lying", ["even", "ragged"])
@pytest.mark.parametrize("kind", LOGITS)
def test_greedy_is_token_identical(kind: str, lying: str, k: int) -> None:
    """Most drafts are the argmax, some others, some placeholders, and one block of placeholders alone."""
    seen = 0
    for seed in range(4):
        g = torch.Generator().manual_seed(100 * seed + k)
        counts = counts_of(lying, k, g)
        logits = LOGITS[kind](g, sum(counts) + B)
        metadata = step(torch.zeros(sum(counts)), counts)
        best = logits.nan_to_num(0.0).argmax(-1)[metadata.target_logits_indices]
        drafts = torch.where(
            torch.rand(len(best), generator=g) < 0.75, best, torch.randint(-1, V, best.shape, generator=g)
        )
        drafts[:k] = -1
        old, new = both(logits, drafts, counts, sampling(torch.zeros(B)))
        assert torch.equal(old, new)
        seen += int((new[:, 1] >= 0).sum())
    assert seen > 4, "drafts were accepted"


# N of each K: the joint test then finds a total variation of 1 % with a probability of 0.99 (`test_verify_lossless`).
MANY = {1: 150_000, 2: 200_000, 3: 300_000}
LAWS = {
    "one-hot, K=1": ("auto", True, 1),
    "one-hot, K=2": ("auto", True, 2),
    "one-hot, K=3": ("auto", True, 3),
    "one-hot, K=3, block": ("block", True, 3),
    "probabilities, K=2": ("tokenwise", False, 2),
    "probabilities, K=3, block": ("auto", False, 3),
}


@pytest.mark.parametrize("law", LAWS)
def test_drawn_tokens_have_the_targets_law(law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a temperature, with tokens the target forbids; the accepted lengths are those of the method, no shorter."""
    asked, one_hot, k = LAWS[law]
    method = "block" if "block" in law else "tokenwise"
    monkeypatch.setenv("MTP_VERIFICATION", asked)
    settings.cache_clear()
    with patched():
        played = play(by_forward(make_sampler()), THREE, k, one_hot, MANY[k], seed=10 * k + one_hot)
    assert p_of_tokens(THREE, played.tokens) > ALPHA
    assert p_of_lengths(exact_reach(method, THREE, k, one_hot), played.accepted) > ALPHA


def test_the_package_has_the_same_law_token_by_token() -> None:
    """Before and after are equal in distribution: both pass the same test."""
    played = play(by_forward(make_sampler()), THREE, 2, True, MANY[2], seed=21)
    assert p_of_tokens(THREE, played.tokens) > ALPHA
    assert p_of_lengths(exact_reach("tokenwise", THREE, 2, True), played.accepted) > ALPHA


def test_the_test_finds_a_bias_of_one_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    """An acceptance threshold that is off by 0.012 moves 1 % of the first tokens: found."""

    def drawn(batch: DraftBatch, generator: torch.Generator) -> Noise:
        noise = Noise.drawn(batch, generator)
        return Noise((noise.accept - 0.012).clamp(min=0), noise.pick)

    monkeypatch.setattr(sampler, "Noise", SimpleNamespace(drawn=drawn))
    with patched():
        played = play(by_forward(make_sampler()), THREE, 1, True, MANY[1], seed=11)
    first = torch.bincount(played.tokens[:, 0], minlength=3) / MANY[1]
    off = (first - THREE.target[0]).abs().sum().item() / 2
    assert 0.008 < off < 0.012
    assert p_of_tokens(THREE, played.tokens) < ALPHA


def test_ragged_batches_with_placeholders_have_the_targets_law() -> None:
    """0..2 drafts a request, a third of the drafts placeholders."""
    with patched():
        played = play(by_forward(make_sampler()), THREE, 2, True, MANY[2], seed=7, ragged=True, holes=1 / 3)
    assert p_of_tokens(THREE, played.tokens) > ALPHA
    assert (played.accepted <= torch.where(played.drafts < 0, torch.arange(2), 2).amin(1)).all()


def test_limits_are_the_packages_own() -> None:
    """Temperature, top-k and top-p through the package's functions: what is left is the law, of drafts and bonus."""
    tail = (0.01, 0.04)  # top-k 3 of 4 takes the first, top-p 0.9 the second

    def logits(target: Tensor) -> Tensor:
        return filtered_logits(target, tail)

    with patched():
        method = by_forward(make_sampler(), logits=logits, top_k=3, top_p=0.9)
        played = play(method, FILTERED, 2, True, MANY[2], seed=3)
    assert p_of_tokens(FILTERED, played.tokens) > ALPHA
    assert p_of_lengths(exact_reach("tokenwise", FILTERED, 2, True), played.accepted) > ALPHA


@pytest.mark.parametrize("ours", [False, True], ids=["theirs", "ours"])
def test_block_verification_of_the_package_is_biased_and_ours_is_not(ours: bool) -> None:
    """p = (.5, .9, .9) at the drafts, one-hot q: the package keeps the first draft in 94 % of the cases, not in 50."""
    edge.configure(rejection_sampler_config={"enable_block_verify": True})
    with patched() if ours else nullcontext():
        own = make_sampler()
        assert not ours or method_for(get_ascend_config(), False, 3) == "block"
        played = play(by_forward(own), AGREE, 3, True, 100_000, seed=5)
    wanted = (played.drafts == 1).all(1)
    kept = (played.accepted[wanted] > 0).double().mean().item()
    if ours:
        assert abs(kept - 0.5) < 0.01
        assert p_of_tokens(AGREE, played.tokens) > ALPHA
    else:
        assert abs(kept - 0.94) < 0.01
        assert p_of_tokens(AGREE, played.tokens) < 1e-30
