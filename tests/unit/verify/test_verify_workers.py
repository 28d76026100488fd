"""Tensor-parallel workers hold the same logits and must decide alike without a message between them (vLLM#17509).

Two processes, started apart, with another past of the global generator and another number of threads; what they share
is the seed of the generator that only verification draws from.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import pytest

torch = pytest.importorskip("torch", reason="verification tests run in the engine environment")

from mtp_runtime.verify import (  # noqa: E402
    PLACEHOLDER,
    DraftBatch,
    Noise,
    keyed,
    to_rows,
    verify_block,
    verify_mixed,
    verify_tokenwise,
)

pytestmark = pytest.mark.engine

STEPS, SIZE, VOCAB = 6, 24, 3000


def worker(rank: int, results: Connection) -> None:
    """Verify STEPS steps and send the emitted tokens of each; then the same with the generator everybody draws from."""
    torch.set_num_threads(1 + 3 * rank)
    torch.manual_seed(rank)
    torch.rand(1000 * rank + 1)
    for generator in (torch.Generator().manual_seed(1234), torch.default_generator):
        results.send([step(number, generator, disturbance=rank) for number in range(STEPS)])


def step(number: int, generator: torch.Generator, disturbance: int) -> list[list[list[int]]]:
    """One step: even or ragged, with and without q, both methods, some requests seeded."""
    given = torch.Generator().manual_seed(number)  # what the model would yield, alike in all workers
    counts = [3] * SIZE if number % 2 else torch.randint(4, (SIZE,), generator=given).tolist()
    total = sum(counts)
    logits = torch.randn(total + SIZE, VOCAB, generator=given) * 3
    p = logits.softmax(-1)
    q = (torch.randn(total, VOCAB, generator=given) * 3).softmax(-1) * 0.5
    bare = DraftBatch.of(torch.zeros(total, dtype=torch.int32), counts)
    q += 0.5 * p[bare.draft_rows]
    drafts = torch.multinomial(q, 1, generator=given)[:, 0].int()
    drafts[torch.rand(total, generator=given) < 0.1] = PLACEHOLDER
    batch = DraftBatch.of(drafts, counts)
    key, seeded = torch.arange(SIZE), torch.arange(SIZE) % 4 == 0
    chosen = keyed.race(p, to_rows(batch, key), torch.arange(total + SIZE))
    out = []
    for verify in (verify_tokenwise, verify_block):
        for draft_probs in (None, q):
            torch.rand(7 * disturbance + 1)  # other parts of an engine draw too, not alike
            noise = Noise.drawn(batch, generator)
            out.append(verify_mixed(batch, chosen, seeded, p.clone(), draft_probs, noise, verify).tokens.tolist())
    return out


@pytest.fixture(scope="module")
def workers() -> list[list]:
    """What each of two workers sent."""
    context = multiprocessing.get_context("spawn")
    started = []
    for rank in range(2):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=worker, args=(rank, there), daemon=True)
        process.start()
        there.close()
        started.append((process, here))
    results = [[here.recv(), here.recv()] for _, here in started]
    for process, _ in started:
        process.join(30)
    return results


def test_workers_decide_alike(workers: list[list]) -> None:
    first, second = (sent[0] for sent in workers)
    assert first == second
    lengths = {sum(token >= 0 for token in row) for rows in first for verdict in rows for row in verdict}
    assert lengths == {1, 2, 3, 4}
    assert len({str(rows) for rows in first}) == STEPS


def test_a_generator_that_others_draw_from_would_be_found(workers: list[list]) -> None:
    first, second = (sent[1] for sent in workers)
    assert first != second
