"""What the acceptance benchmark works out for given drafts is what the methods do on average."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="verification tests run in the engine environment")

from loadtests.bench_acceptance import expected_accepted  # noqa: E402
from mtp_runtime.verify import DraftBatch, Noise, verify_block, verify_tokenwise  # noqa: E402

pytestmark = pytest.mark.engine

COPIES, K, VOCAB = 100_000, 3, 7


@pytest.mark.parametrize("seed", range(3))
def test_expected_accepted_drafts_are_the_mean_of_many(seed: int) -> None:
    """N = 100 000 uniform draws on the same drafts; the mean lies within 4 standard errors."""
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.rand(rows, VOCAB, generator=generator).softmax(-1) for rows in (K + 1, K))
    drafts = torch.multinomial(q, 1, generator=generator)[:, 0]
    one = DraftBatch.of(drafts, [K])
    many = DraftBatch.of(drafts.repeat(COPIES), [K] * COPIES)
    for method, expected in zip((verify_tokenwise, verify_block), expected_accepted(one, p, q), strict=True):
        noise = Noise.drawn(many, generator)
        accepted = method(many, p.repeat(COPIES, 1), q.repeat(COPIES, 1), noise).accepted.double()
        assert abs(accepted.mean() - expected[0]) < 4 * accepted.std() / COPIES**0.5
