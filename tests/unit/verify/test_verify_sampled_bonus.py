"""Bonus tokens that were sampled before: the same verdicts as with the target's bonus rows, but for those tokens."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="verification tests run in the engine environment")

from mtp_runtime.verify import STRATEGIES, DraftBatch, Noise, verify_exact  # noqa: E402
from mtp_runtime.verify.sampled_bonus import (  # noqa: E402
    as_columns,
    as_tokens,
    certain_rows,
    chosen_rows,
    exact_tokens,
)

pytestmark = pytest.mark.engine

B, V = 200, 300
COUNTS = {"even, K=1": [1] * B, "even, K=3": [3] * B, "ragged": [0, 1, 2, 3] * (B // 4)}


def drafted(counts: list[int], seed: int) -> tuple[DraftBatch, torch.Tensor, torch.Tensor, torch.Generator]:
    """(batch, probs [R, V], bonus [B], generator): half the drafts likely, some placeholders."""
    g = torch.Generator().manual_seed(seed)
    batch = DraftBatch.of(torch.zeros(sum(counts), dtype=torch.int32), counts)
    probs = (torch.randn(batch.total + B, V, generator=g) * 3).softmax(1)
    tokens = torch.randint(-1, V, (batch.total,), generator=g)
    likely = probs[batch.draft_rows].argmax(1)
    tokens = torch.where(torch.rand(batch.total, generator=g) < 0.6, likely, tokens)
    return DraftBatch.of(tokens.int(), counts), probs, torch.randint(V, (B,), generator=g).int(), g


def with_bonus(batch: DraftBatch, verdict, bonus: torch.Tensor) -> torch.Tensor:
    """What the verdict with real bonus rows emits, the bonus tokens entered."""
    place = torch.arange(batch.width + 1)
    full = (verdict.accepted == batch.counts)[:, None] & (place == verdict.accepted[:, None])
    return torch.where(full, bonus[:, None], verdict.tokens)


@pytest.mark.parametrize("counts", COUNTS)
def test_exact(counts: str) -> None:
    batch, probs, bonus, _ = drafted(COUNTS[counts], 1)
    chosen = probs.argmax(1)
    wanted = with_bonus(batch, verify_exact(batch, chosen), bonus)
    best = chosen[batch.draft_rows]
    for found in (exact_tokens(batch, best, bonus), verify_exact(batch, chosen_rows(batch, best, bonus)).tokens):
        assert found.dtype == torch.int32 and torch.equal(found, wanted)


@pytest.mark.parametrize("has_q", [False, True], ids=["one-hot", "probabilities"])
@pytest.mark.parametrize("method", STRATEGIES)
@pytest.mark.parametrize("counts", COUNTS)
def test_drawn(counts: str, method: str, has_q: bool) -> None:
    batch, probs, bonus, g = drafted(COUNTS[counts], 2)
    q = (torch.randn(batch.total, V, generator=g) * 3).softmax(1) if has_q else None
    noise = Noise.drawn(batch, g)
    rows = certain_rows(batch, probs[batch.draft_rows])
    verdict = STRATEGIES[method](batch, rows, q, noise)
    found = as_tokens(batch, verdict, None, bonus)
    wanted = STRATEGIES[method](batch, probs.clone(), q, noise)
    assert torch.equal(found.accepted, wanted.accepted) and 0 < wanted.accepted.sum() < batch.total
    assert torch.equal(found.tokens, with_bonus(batch, wanted, bonus))


@pytest.mark.parametrize("method", STRATEGIES)
@pytest.mark.parametrize("counts", COUNTS)
def test_columns_that_are_not_tokens(counts: str, method: str) -> None:
    """The 40 best tokens of each row: all that is left of the probabilities, drafts outside them rejected."""
    batch, probs, bonus, g = drafted(COUNTS[counts], 3)
    values, ids = probs[batch.draft_rows].topk(40)
    values = values / values.sum(1, keepdim=True)
    noise = Noise.drawn(batch, g)
    columns = as_columns(batch, ids)
    outside = (ids != batch.tokens[:, None]).all(1)
    assert torch.equal(columns.tokens < 0, outside) and 0 < outside.sum() < batch.total
    found = as_tokens(batch, STRATEGIES[method](columns, certain_rows(batch, values), None, noise), ids, bonus)
    wide = torch.zeros_like(probs[batch.draft_rows]).scatter_(1, ids, values)
    wanted = STRATEGIES[method](batch, certain_rows(batch, wide), None, noise)
    assert torch.equal(found.accepted, wanted.accepted)
    kept = torch.arange(batch.width + 1) < found.accepted[:, None]
    assert torch.equal(found.tokens[kept], wanted.tokens[kept])
    last = found.tokens.gather(1, found.accepted[:, None])[:, 0]
    full = found.accepted == batch.counts
    assert torch.equal(last[full], bonus[full])
    place = batch.at(found.accepted)[~full]
    assert (last[~full, None] == ids[place]).any(1).all() and (last[~full] != batch.tokens[place]).all()
