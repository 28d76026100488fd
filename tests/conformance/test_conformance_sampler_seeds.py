"""Random numbers of the patched sampler: of requests with a seed, and of tensor-parallel workers without one."""

from __future__ import annotations

import pytest
import sampler_edge as edge
import torch
import vllm_ascend.sample.rejection_sampler as verifier
from sampler_edge import make_sampler, patched, sampling, step
from sampler_runner import Request, decode, none

from mtp_runtime.adapters.vllm_ascend.positions import Sampling
from mtp_runtime.verify.seeded import worker_generator

LENGTH = 40
B, K, V = 6, 3, 200


@pytest.fixture(autouse=True)
def plain_config() -> None:
    edge.configure()


def three(length: int) -> int:
    return 3


def ragged(length: int) -> int:
    return length % 4


def test_a_seed_yields_the_same_tokens_alone_in_a_batch_and_with_or_without_drafts() -> None:
    with patched():
        alone = decode([Request(7, none)], LENGTH)[0]
        assert decode([Request(8, none)], LENGTH)[0] != alone
        for drafts in (three, ragged):
            assert decode([Request(7, drafts)], LENGTH)[0] == alone
            others = [Request(None, three), Request(11, ragged), Request(None, none, temperature=0.0)]
            assert decode([others[0], Request(7, drafts), *others[1:]], LENGTH)[1] == alone
    assert Sampling.verified is None and Sampling.sampled is None


def test_after_preemption_the_text_goes_on_as_it_would_have() -> None:
    """A preempted request comes back without drafts; its generator stands anywhere."""
    with patched():
        whole = decode([Request(7, three)], LENGTH)[0]
        begun = Request(7, three)
        decode([begun], 20)
        back = Request(7, none, text=begun.text[:20])
        assert back.generator is not None
        torch.rand(5, generator=back.generator)
        assert decode([back], LENGTH)[0] == whole


def test_without_the_patch_a_seed_depends_on_the_drafts() -> None:
    """What the patch changes: the same comparison fails on the package."""
    assert decode([Request(7, none)], LENGTH)[0] != decode([Request(7, three)], LENGTH)[0]


def test_seeds_where_positions_are_not_known() -> None:
    """With prefill context parallelism: the request's generator yields the numbers, the same alone and in a batch."""
    logits = torch.randn(B * (K + 1), V, generator=torch.Generator().manual_seed(1))
    drafts = torch.zeros(B * K)

    def tokens(requests: list[int]) -> list[list[int]]:
        rows = torch.cat([torch.arange(K + 1) + request * (K + 1) for request in requests])
        size = len(requests)
        generators = {i: torch.Generator().manual_seed(100 + request) for i, request in enumerate(requests)}
        parameters = sampling(torch.ones(size), generators=generators)
        drafted = step(drafts[: size * K], [K] * size)
        return make_sampler()(drafted, None, logits[rows], parameters).sampled_token_ids.tolist()

    with patched():
        together = tokens(list(range(B)))
        assert [tokens([request])[0] for request in range(B)] == together
        assert len({tuple(row) for row in together}) == B


def verify_as_worker(drawn_before: int) -> list[list[int]]:
    """Eight steps of a worker whose torch generator has already been drawn from."""
    torch.manual_seed(5)
    torch.rand(drawn_before)
    worker_generator.cache_clear()
    g = torch.Generator().manual_seed(1)
    found = []
    for _ in range(8):
        drafts = torch.randint(V, (B * K,), generator=g).int()
        logits = torch.randn(B * K, V, generator=g)
        one = step(drafts, [K] * B)
        found += verifier.rejection_sample(
            drafts, [K] * B, K, one.cu_num_draft_tokens, None, logits, drafts[:B, None], sampling(torch.ones(B))
        ).tolist()
    worker_generator.cache_clear()
    return found


def test_workers_of_a_group_draw_the_same_whatever_else_they_drew() -> None:
    """vLLM#17509: other accept counts in other tensor-parallel workers."""
    assert verify_as_worker(0) != verify_as_worker(3), "the package's verification draws from torch's own generator"
    with patched():
        assert verify_as_worker(0) == verify_as_worker(3)
