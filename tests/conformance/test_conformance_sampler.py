"""The real AscendRejectionSampler before and after the patch `sampler`, on CPU tensors.

`sampler_edge.EDGE` says what is replaced at the device's edge. Distributions are tested with the statistics of
`tests/unit/verify` (chi-square of the joint distribution at ALPHA, fixed seeds).
"""

from __future__ import annotations

import pytest
import sampler_edge as edge
import torch
from sampler_edge import make_sampler, patched, sampling, step
from torch import Tensor

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
    for seed in range(6):
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
    assert seen > 6, "drafts were accepted"
