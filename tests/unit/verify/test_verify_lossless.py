"""Lossless is a claim about a distribution, so it is tested as one.

A Markov target and drafter over 3 tokens, with a forbidden transition each. N requests are verified at once; each
emission is continued from the target to K + 1 tokens, and the joint distribution of all K + 1 must be the target's.
Chi-square over the 3^(K+1) sequences, alpha = 1e-4 a test, N = 400 000: a rule that accepts one draft in a hundred
too often fails (last test), fixed seeds.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="verification tests run in the engine environment")

from mtp_runtime.verify import DraftBatch, Noise, verify_tokenwise  # noqa: E402
from mtp_runtime.verify.block import verify_block  # noqa: E402

pytestmark = pytest.mark.engine

SIZE, VOCAB, ALPHA = 400_000, 3, 1e-4
TARGET = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.0, 0.4], [0.1, 0.1, 0.8]], dtype=torch.float64)
DRAFTER = torch.tensor([[0.5, 0.3, 0.2], [0.3, 0.3, 0.4], [0.4, 0.0, 0.6]], dtype=torch.float64)


def sample(rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One token a row."""
    return torch.multinomial(rows, 1, generator=generator)[:, 0]


def emit(verify, depth: int, one_hot: bool, seed: int) -> tuple[torch.Tensor, float]:
    """Sequences [SIZE, depth + 1] made with `verify`, and the mean number of accepted drafts."""
    generator = torch.Generator().manual_seed(seed)
    state = torch.zeros(SIZE, dtype=torch.int64)  # all begin after token 0
    drafts, target, draft_probs = [], [], []
    for _ in range(depth):
        target.append(TARGET[state])
        draft_probs.append(DRAFTER[state])
        # A one-hot drafter's draft is a function of the context; which one does not matter.
        state = (state + 1) % VOCAB if one_hot else sample(DRAFTER[state], generator)
        drafts.append(state)
    batch = DraftBatch(torch.stack(drafts, 1).flatten(), [depth] * SIZE, sample(TARGET[state], generator))
    noise = Noise(
        torch.rand(SIZE * depth, dtype=torch.float64, generator=generator),
        torch.empty(SIZE, VOCAB, dtype=torch.float64).exponential_(generator=generator),
    )
    q = None if one_hot else torch.stack(draft_probs, 1).flatten(0, 1)
    verdict = verify(batch, torch.stack(target, 1).flatten(0, 1), q, noise)
    tokens = verdict.tokens.long()
    for i in range(1, depth + 1):
        missing = tokens[:, i] < 0
        tokens[missing, i] = sample(TARGET[tokens[missing, i - 1]], generator)
    return tokens, verdict.accepted.double().mean().item()


def p_value(tokens: torch.Tensor) -> float:
    """Chi-square test of the joint distribution; 0 when a sequence of probability 0 occurred."""
    depth = tokens.shape[1]
    expected, observed_index = TARGET[0], tokens[:, 0]
    for i in range(1, depth):
        expected = (expected.reshape(-1, VOCAB)[:, :, None] * TARGET).flatten()
        observed_index = observed_index * VOCAB + tokens[:, i]
    observed = torch.bincount(observed_index, minlength=VOCAB**depth).double()
    possible = expected > 0
    if observed[~possible].sum() > 0:
        return 0.0
    wanted = expected[possible] * SIZE
    statistic = ((observed[possible] - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor((possible.sum().item() - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, statistic / 2).item()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("one_hot", [True, False], ids=["one-hot", "probabilities"])
@pytest.mark.parametrize("verify", [verify_tokenwise, verify_block])
def test_emitted_tokens_follow_the_target(verify, one_hot: bool, depth: int) -> None:
    tokens, accepted = emit(verify, depth, one_hot, seed=10 * depth + one_hot)
    assert p_value(tokens) > ALPHA
    assert 0 < accepted < depth


def test_block_accepts_as_often_one_hot_and_more_with_probabilities() -> None:
    """The paper's claim; standard error of each mean about 0.0015."""
    for one_hot in (True, False):
        tokenwise = emit(verify_tokenwise, 3, one_hot, seed=5)[1]
        block = emit(verify_block, 3, one_hot, seed=6)[1]
        if one_hot:
            assert abs(block - tokenwise) < 0.008
        else:
            assert block > tokenwise + 0.01


def test_the_test_catches_a_one_percent_bias() -> None:
    def eager(batch, target, draft_probs, noise):
        return verify_tokenwise(batch, target, draft_probs, Noise(noise.uniform - 0.01, noise.race))

    assert p_value(emit(eager, 2, one_hot=True, seed=7)[0]) < ALPHA
    assert p_value(emit(eager, 2, one_hot=False, seed=8)[0]) < ALPHA


def test_the_test_catches_the_product_rule() -> None:
    """Accepting while the product of p / q exceeds the product of U, as vllm-ascend does, is not lossless."""

    def product(batch, target, draft_probs, noise):
        depth = batch.width
        column = batch.tokens.long()[:, None]
        ratio = (target.gather(1, column) / draft_probs.gather(1, column)).reshape(-1, depth).clamp(max=1)
        hits = ratio.cumprod(1) >= noise.uniform.reshape(-1, depth).cumprod(1)
        last = (hits * torch.arange(1, depth + 1)).amax(1, keepdim=True)
        passed = torch.arange(depth) < last
        return verify_tokenwise(batch, target, draft_probs, Noise((~passed).flatten() * 1e9, noise.race))

    assert p_value(emit(product, 3, one_hot=False, seed=9)[0]) < ALPHA
