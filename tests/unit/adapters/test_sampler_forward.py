"""The sampler as the engine calls it, on logits of every type a model may have."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="needs the engine environment")
pytest.importorskip("vllm", reason="needs the engine environment")

from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.sample.sampler import Sampler  # noqa: E402

from loadtests.bench_core import metadata, sampling  # noqa: E402
from mtp_runtime.adapters.vllm_cpu.sampler import MtpRejectionSampler  # noqa: E402

pytestmark = pytest.mark.engine

BATCH, K, VOCAB = 3, 2, 700
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """As vLLM's worker does first."""
    current_platform.import_kernels()


def one_way(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [R, V] with one possible token a row, those tokens [B, K + 1], and drafts that fail in one place."""
    tokens = torch.randint(VOCAB, (BATCH, K + 1), generator=torch.Generator().manual_seed(1))
    logits = torch.full((BATCH * (K + 1), VOCAB), -60.0).scatter_(1, tokens.view(-1, 1), 60.0).to(dtype)
    drafts = tokens[:, :K].clone()
    drafts[1, 0] = (drafts[1, 0] + 1) % VOCAB
    return logits, tokens, drafts.flatten().int()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("seeded", [False, True])
def test_logits_of_every_type(dtype, temperature: float, constrained: bool, seeded: bool) -> None:
    logits, tokens, drafts = one_way(dtype)
    parameters = sampling(BATCH, temperature)
    if constrained:
        parameters = replace(parameters, allowed_token_ids_mask=torch.zeros(BATCH, VOCAB, dtype=torch.bool))
    if seeded and temperature:
        parameters = replace(parameters, generators={i: torch.Generator().manual_seed(i) for i in (0, 2)})
    before = logits.clone()
    sampler = MtpRejectionSampler(Sampler())
    step = metadata(drafts, BATCH, K)
    for _ in range(2):  # the memory kept between steps makes no difference
        found = sampler(step, None, logits, parameters).sampled_token_ids.tolist()
        expected = tokens.tolist()
        expected[1][1:] = [-1, -1]  # the draft fails: the target's token, and nothing behind it
        assert found == expected
    assert torch.equal(logits, before)
