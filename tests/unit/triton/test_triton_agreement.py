"""The kernels emit exactly what the readable one-request forms emit: ragged batches, odd vocabularies, cut tiles."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_runtime.verify import DraftBatch, Noise, reference, verify_block, verify_tokenwise
from mtp_runtime.verify.triton import forms
from tests.unit.verify.verify_steps import emitted, steps, tensors

SLOW = settings(max_examples=90, deadline=None)  # the interpreter takes about 0.1 s an example


@pytest.mark.parametrize("name", ["tokenwise", "block"])
@given(step=steps(), padding=st.sampled_from([0, 0, 7, 13]), tile=st.sampled_from([2, 4, 8]))
@SLOW
def test_stochastic_kernels_agree(name: str, step: dict, padding: int, tile: int) -> None:
    slow = getattr(reference, name)
    expected = [slow(r["drafts"], r["p"], r["q"], r["accept"], r["pick"]) for r in step["requests"]]
    batch, probs, draft_probs, noise = tensors(step, padding)
    kept = probs.clone()
    verdict = forms.METHODS[name](batch, probs, draft_probs, noise, tile=tile)
    assert emitted(verdict, max(padding - step["vocab"], 0)) == expected
    assert (verdict.tokens.dtype, verdict.accepted.dtype) == (torch.int32, torch.int64)
    assert torch.equal(probs, kept)


@given(steps())
@SLOW
def test_exact_kernel_agrees(step: dict) -> None:
    batch, *_ = tensors(step)
    chosen = torch.tensor([x for r in step["requests"] for x in r["chosen"]], dtype=torch.int64)
    expected = [reference.exact(r["drafts"], r["chosen"]) for r in step["requests"]]
    assert emitted(forms.verify_exact(batch, chosen)) == expected


def test_what_is_no_token_equals_no_draft() -> None:
    batch = DraftBatch.of(torch.tensor([-1, 0]), [1, 1])
    assert forms.verify_exact(batch, torch.tensor([-1, 1, 0, -1])).accepted.tolist() == [0, 1]


def weights_left(batch: DraftBatch, request: int, accepted: int, p: torch.Tensor, q: torch.Tensor | None, block: bool):
    """What a request's last token is drawn in proportion to, float64."""
    start, row = int(batch.starts[request]), int(batch.first_row[request])
    left = p[row + accepted].double()
    if accepted == int(batch.counts[request]):
        return left
    if q is None:
        return left.index_fill(0, batch.tokens[start + accepted].long(), 0.0)
    scale = 1.0
    for i in range(accepted if block else 0):
        x = int(batch.tokens[start + i])
        scale = min(scale * float(p[row + i, x]) / float(q[start + i, x]), 1.0)
    return (scale * left - q[start + accepted].double()).clamp(min=0)


@pytest.mark.parametrize("name", ["tokenwise", "block"])
@pytest.mark.parametrize("with_probs", [False, True], ids=["one-hot", "probabilities"])
def test_a_whole_vocabulary(name: str, with_probs: bool) -> None:
    """DeepSeek's vocabulary, the shipped tile, K = 15: as many drafts stand as in the torch form, and the token drawn
    is where the cumulative weight passes the number, to a millionth of the total: float32 is enough.
    """
    generator = torch.Generator().manual_seed(3)
    counts = [15, 1]
    probs = (3 * torch.randn(sum(counts) + len(counts), 129_280, generator=generator)).softmax(1)
    rows = DraftBatch.of(torch.zeros(sum(counts), dtype=torch.int32), counts).draft_rows
    batch = DraftBatch.of(probs[rows].argmax(1).int(), counts)
    draft_probs = (0.9 * probs[rows].log()).softmax(1) if with_probs else None
    noise = Noise(torch.full((16,), 0.002).double(), torch.tensor([0.37, 0.81]).double())
    noise.accept[12] = noise.accept[15] = 0.9999
    plain = {"tokenwise": verify_tokenwise, "block": verify_block}[name](batch, probs.clone(), draft_probs, noise)
    verdict = forms.METHODS[name](batch, probs, draft_probs, noise)
    assert verdict.accepted.tolist() == plain.accepted.tolist()
    for request, accepted in enumerate(verdict.accepted.tolist()):
        weights = weights_left(batch, request, accepted, probs, draft_probs, name == "block")
        token = int(verdict.tokens[request, accepted])
        sums = weights.cumsum(0) / weights.sum() - noise.pick[request]
        assert weights[token] > 0
        assert sums[token - 1] < 1e-6
        assert sums[token] > -1e-6
