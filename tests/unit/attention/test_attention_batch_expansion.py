"""Batch expansion gives every query token exactly the causal context it would have in one multi-token call."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="attention tests run in the engine environment")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from mtp_runtime.attention.batch_expansion import expand_rows  # noqa: E402

pytestmark = pytest.mark.engine

BLOCK = 4


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=5), st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_rows_attend_to_the_causal_context(requests: list[tuple[int, int]], seed: int) -> None:
    """Requests of (query tokens, tokens before them): row by row equals masked attention request by request."""
    generator = torch.Generator().manual_seed(seed)
    queries = [q for q, _ in requests]
    lengths = torch.tensor([q + before for q, before in requests], dtype=torch.int32)
    starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    pages = 4
    table = torch.randperm(len(requests) * pages, generator=generator).reshape(len(requests), pages).int()
    cache = torch.randn(len(requests) * pages * BLOCK, 8, generator=generator)
    q = torch.randn(sum(queries), 8, generator=generator)

    rows, row_lengths = expand_rows(table, lengths, starts)
    assert rows.dtype == row_lengths.dtype == torch.int32
    assert rows.shape == (sum(queries), pages) and rows.is_contiguous()

    def context(blocks: torch.Tensor, length: int) -> torch.Tensor:
        slots = blocks.long()[:, None] * BLOCK + torch.arange(BLOCK)
        return cache[slots.flatten()[:length]]

    for b, (count, before) in enumerate(requests):
        keys = context(table[b], count + before)
        scores = q[starts[b] : starts[b + 1]] @ keys.T
        hidden = torch.arange(count + before)[None] > torch.arange(count)[:, None] + before
        wanted = scores.masked_fill(hidden, -torch.inf).softmax(1) @ keys
        for j in range(count):
            t = int(starts[b]) + j
            keys = context(rows[t], int(row_lengths[t]))
            torch.testing.assert_close((q[t] @ keys.T).softmax(0) @ keys, wanted[j])
