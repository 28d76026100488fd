"""What the sampler assembles beside the verdict: draft probabilities of a batch, log-probabilities of named tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="needs the engine environment")
pytest.importorskip("vllm", reason="needs the engine environment")

from vllm.v1.outputs import LogprobsTensors  # noqa: E402

from mtp_runtime.adapters.vllm_cpu.randomness import cached_draft_probs, worker_generator  # noqa: E402
from mtp_runtime.adapters.vllm_cpu.sampler import name_tokens  # noqa: E402
from mtp_runtime.verify import keyed  # noqa: E402

pytestmark = pytest.mark.engine


def test_a_request_without_draft_probabilities_is_one_hot_and_the_others_keep_theirs() -> None:
    known = torch.rand(2, 2, 5)  # of requests b and a, K = 2
    runner = SimpleNamespace(
        _draft_probs=known,
        _draft_prob_req_ids=["b", "a"],
        input_batch=SimpleNamespace(req_ids=["a", "new", "none", "b"]),
    )
    metadata = SimpleNamespace(num_draft_tokens=[2, 2, 0, 1], draft_token_ids=torch.tensor([1, 2, 3, -1, 4]))
    q = cached_draft_probs(runner, metadata)
    assert q is not None and q.shape == (5, 5)
    assert torch.equal(q[:2], known[1]) and torch.equal(q[4], known[0, 0])
    assert q[2].tolist() == [0, 0, 0, 1, 0]
    assert q[3].sum() == 1, "a placeholder's row is read by nobody, and finite"
    runner._draft_probs = None
    assert cached_draft_probs(runner, metadata) is None


@pytest.mark.parametrize("kept", [0, 2], ids=["alone", "beside a request for the two best"])
def test_named_tokens_beside_the_best(kept: int) -> None:
    """Two requests of two rows; the second names three tokens. The emitted token stays first in every row."""
    values = torch.randn(4, 9).log_softmax(-1)
    emitted = torch.tensor([3, 4, 5, 6])
    best_values, best_ids = values.topk(kept)
    best = LogprobsTensors(
        torch.cat((emitted[:, None], best_ids), 1).int(),
        torch.cat((values.gather(1, emitted[:, None]), best_values), 1),
        torch.zeros(4),
    )
    found = name_tokens(best, values, 2, {1: [7, 0, 8]})
    assert found.logprob_token_ids[:, 0].tolist() == emitted.tolist()
    assert torch.equal(found.logprobs[:, 0], best.logprobs[:, 0])
    assert found.logprob_token_ids[2:, 1:].tolist() == [[7, 0, 8]] * 2
    assert torch.equal(found.logprobs[2:, 1:], values[2:][:, [7, 0, 8]])
    assert torch.equal(found.logprobs[:2, 1 : 1 + kept], best_values[:2])
    assert torch.isneginf(found.logprobs[:2, 1 + kept :]).all()
    assert name_tokens(best, values, 2, {}) is best


@pytest.mark.parametrize("seed", [0, 1, 1024])
def test_streams_resemble_neither_each_other_nor_torchs_own(seed: int) -> None:
    """A draft drawn with the number that later decides about it would be accepted too often."""
    torch.manual_seed(seed)
    worker_generator.cache_clear()
    streams = [worker_generator(stream, torch.device("cpu")) for stream in (keyed.ACCEPT, keyed.DRAFT)]
    numbers = [torch.rand(50_000, generator=g, dtype=torch.float64) for g in streams]
    numbers.append(torch.rand(50_000, dtype=torch.float64))
    worker_generator.cache_clear()
    for i in range(3):
        for j in range(i):
            for lag in range(5):
                pair = torch.stack((numbers[i][lag:], numbers[j][: 50_000 - lag]))
                assert abs(torch.corrcoef(pair)[0, 1]) < 0.03
