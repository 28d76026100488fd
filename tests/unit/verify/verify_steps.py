"""Random engine steps for the tests that compare a form of verification with `mtp_runtime.verify.reference`."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from mtp_runtime.verify import DraftBatch, Noise, Verdict

GRID = 64
"""Probabilities are multiples of 1/64, so that products and comparisons are exact and no rounding decides a case."""


@st.composite
def distributions(draw: st.DrawFn, vocab: int) -> list[float]:
    """A distribution over vocab tokens with zeros in it often."""
    cuts = sorted(draw(st.lists(st.integers(0, GRID), min_size=vocab - 1, max_size=vocab - 1)))
    return [(b - a) / GRID for a, b in zip([0, *cuts], [*cuts, GRID], strict=True)]


@st.composite
def steps(draw: st.DrawFn) -> dict:
    """One engine step: requests with 0..4 drafts each, placeholders among them."""
    vocab = draw(st.integers(2, 5))
    with_probs = draw(st.booleans())
    even = draw(st.none() | st.integers(1, 4))
    requests = []
    for _ in range(draw(st.integers(1, 4))):
        count = draw(st.integers(0, 4)) if even is None else even
        requests.append(
            {
                "drafts": draw(st.lists(st.integers(-1, vocab - 1), min_size=count, max_size=count)),
                "p": [draw(distributions(vocab)) for _ in range(count + 1)],
                "q": [draw(distributions(vocab)) for _ in range(count)] if with_probs else None,
                "chosen": draw(st.lists(st.integers(0, vocab - 1), min_size=count + 1, max_size=count + 1)),
                "accept": [number(draw) for _ in range(count)],
                "pick": number(draw),
            }
        )
    return {"vocab": vocab, "with_probs": with_probs, "requests": requests}


def number(draw: st.DrawFn) -> float:
    """0, or off the grid: a sum may differ in its last bit between the two forms."""
    u = draw(st.integers(0, GRID - 1))
    return u / GRID + 0.0003 if u else 0.0


def tensors(step: dict, pad_to: int = 0) -> tuple[DraftBatch, torch.Tensor, torch.Tensor | None, Noise]:
    """A step as the fast forms take it; pad_to: vocabulary to fill up to with impossible tokens in front."""
    requests, vocab = step["requests"], step["vocab"]
    shift = max(pad_to - vocab, 0)

    def rows(key: str) -> torch.Tensor:
        found = [row for request in requests for row in request[key]]
        matrix = torch.tensor(found, dtype=torch.float32).reshape(len(found), vocab)
        return torch.nn.functional.pad(matrix, (shift, 0))

    drafts = [x + shift if x >= 0 else x for r in requests for x in r["drafts"]]
    batch = DraftBatch.of(torch.tensor(drafts, dtype=torch.int32), [len(r["drafts"]) for r in requests])
    noise = Noise(
        torch.tensor([u for r in requests for u in r["accept"]], dtype=torch.float64),
        torch.tensor([r["pick"] for r in requests], dtype=torch.float64),
    )
    return batch, rows("p"), rows("q") if step["with_probs"] else None, noise


def emitted(verdict: Verdict, shift: int = 0) -> list[list[int]]:
    """Tokens of each request without the padding, which must be at the end only."""
    rows = []
    for row, accepted in zip(verdict.tokens.tolist(), verdict.accepted.tolist(), strict=True):
        assert all(token == -1 for token in row[accepted + 1 :])
        rows.append([token - shift for token in row[: accepted + 1]])
    return rows
