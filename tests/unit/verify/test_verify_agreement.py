"""The fast, batched forms emit exactly what the readable one-request forms emit, ragged batches included."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="verification tests run in the engine environment")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from mtp_runtime.verify import DraftBatch, Noise, reference, verify_greedy, verify_tokenwise  # noqa: E402
from mtp_runtime.verify.block import verify_block  # noqa: E402

pytestmark = pytest.mark.engine

GRID = 64
"""Probabilities are multiples of 1/64, so that products and comparisons are exact and no rounding decides a case."""


@st.composite
def distributions(draw: st.DrawFn, vocab: int) -> list[float]:
    """A distribution over vocab tokens with zeros in it often."""
    cuts = sorted(draw(st.lists(st.integers(0, GRID), min_size=vocab - 1, max_size=vocab - 1)))
    return [(b - a) / GRID for a, b in zip([0, *cuts], [*cuts, GRID], strict=True)]


@st.composite
def steps(draw: st.DrawFn, placeholders: bool = True) -> dict:
    """One engine step: requests with 0..4 drafts each."""
    vocab = draw(st.integers(2, 5))
    with_probs = draw(st.booleans())
    requests = []
    for _ in range(draw(st.integers(1, 4))):
        count = draw(st.integers(0, 4))
        requests.append(
            {
                "drafts": draw(st.lists(st.integers(-placeholders, vocab - 1), min_size=count, max_size=count)),
                "p": [draw(distributions(vocab)) for _ in range(count)],
                "q": [draw(distributions(vocab)) for _ in range(count)] if with_probs else None,
                "argmax": draw(st.lists(st.integers(0, vocab - 1), min_size=count, max_size=count)),
                "uniform": [u / GRID for u in draw(st.lists(st.integers(0, GRID - 1), min_size=count, max_size=count))],
                "race": draw(st.lists(st.floats(0.01, 9), min_size=vocab, max_size=vocab)),
                "bonus": draw(st.integers(0, vocab - 1)),
            }
        )
    return {"vocab": vocab, "with_probs": with_probs, "requests": requests}


def tensors(step: dict) -> tuple[DraftBatch, torch.Tensor, torch.Tensor | None, Noise]:
    """A step as the fast forms take it."""
    requests = step["requests"]

    def flat(key: str) -> torch.Tensor:
        rows = [row for request in requests for row in request[key]]
        return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), -1)

    tokens = torch.tensor([x for r in requests for x in r["drafts"]], dtype=torch.int32)
    batch = DraftBatch(tokens, [len(r["drafts"]) for r in requests], torch.tensor([r["bonus"] for r in requests]))
    noise = Noise(flat("uniform")[:, 0] if len(tokens) else torch.zeros(0), torch.tensor([r["race"] for r in requests]))
    target = flat("p") if len(tokens) else torch.zeros(0, step["vocab"])
    draft_probs = (flat("q") if len(tokens) else torch.zeros(0, step["vocab"])) if step["with_probs"] else None
    noise.race = noise.race.double()
    return batch, target, draft_probs, noise


def emitted(verdict) -> list[list[int]]:
    """Tokens of each request without the padding, which must be at the end only."""
    rows = []
    for row, accepted in zip(verdict.tokens.tolist(), verdict.accepted.tolist(), strict=True):
        assert all(token == -1 for token in row[accepted + 1 :])
        rows.append(row[: accepted + 1])
    return rows


@given(steps())
@settings(max_examples=300, deadline=None)
def test_tokenwise_agrees(step: dict) -> None:
    batch, target, draft_probs, noise = tensors(step)
    expected = [
        reference.tokenwise(r["drafts"], r["p"], r["q"], r["uniform"], r["race"], r["bonus"]) for r in step["requests"]
    ]
    assert emitted(verify_tokenwise(batch, target, draft_probs, noise)) == expected


@given(steps(placeholders=False))
@settings(max_examples=300, deadline=None)
def test_block_agrees(step: dict) -> None:
    for request in step["requests"]:  # off the grid: a sum may differ in its last bit between the two forms
        request["uniform"] = [u + 0.0003 if u else 0.0 for u in request["uniform"]]
    batch, target, draft_probs, noise = tensors(step)
    expected = [
        reference.block(r["drafts"], r["p"], r["q"], r["uniform"], r["race"], r["bonus"]) for r in step["requests"]
    ]
    assert emitted(verify_block(batch, target, draft_probs, noise)) == expected


@given(steps())
@settings(max_examples=200, deadline=None)
def test_greedy_agrees(step: dict) -> None:
    batch, *_ = tensors(step)
    argmax = torch.tensor([x for r in step["requests"] for x in r["argmax"]], dtype=torch.int64)
    expected = [reference.greedy(r["drafts"], r["argmax"], r["bonus"]) for r in step["requests"]]
    assert emitted(verify_greedy(batch, argmax)) == expected
