"""Cases random steps meet too rarely: numbers at the ends of their range, nothing left to draw from, fine numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpreterBuilder

from mtp_runtime.verify import DraftBatch, Noise, Verdict, reference, verify_block, verify_tokenwise
from mtp_runtime.verify.triton import forms

pytestmark = pytest.mark.parametrize("verify", forms.METHODS.values(), ids=forms.METHODS)

P = [[0.0, 0.25, 0.75], [0.5, 0.5, 0.0]]


def run(verify, drafts: list[int], p: list, q: list | None = None, accept: float = 0.0, pick: float = 0.0) -> Verdict:
    """One request."""
    batch = DraftBatch.of(torch.tensor(drafts, dtype=torch.int64), [len(drafts)])
    noise = Noise(torch.full((len(drafts),), accept).double(), torch.tensor([pick], dtype=torch.float64))
    return verify(batch, torch.tensor(p), None if q is None else torch.tensor(q), noise, tile=2)


@pytest.mark.parametrize("q", [None, [[1.0, 0.0, 0.0]]])
def test_impossible_draft_is_rejected_at_u_zero(verify, q) -> None:
    assert run(verify, [0], P, q, accept=0.0, pick=0.9).tokens.tolist() == [[2, -1]]


def test_draft_its_drafter_calls_impossible_is_rejected(verify) -> None:
    assert run(verify, [1], P, [[1.0, 0.0, 0.0]]).accepted.tolist() == [0]


@pytest.mark.parametrize("q", [None, [[0.0, 1.0, 0.0]]])
def test_certain_draft_is_accepted_at_the_largest_u(verify, q) -> None:
    """2^-53 below 1, which float32 rounds to 1; the bonus token is then the last possible one, not the last."""
    p = [[0.0, 1.0, 0.0], [0.5, 0.5, 0.0]]
    largest = 1 - 2**-53
    batch = DraftBatch.of(torch.tensor([1]), [1])
    noise = Noise(torch.tensor([largest]).double(), torch.tensor([largest]).double())
    noise.accept.fill_(largest)
    noise.pick.fill_(largest)
    verdict = verify(batch, torch.tensor(p), None if q is None else torch.tensor(q), noise, tile=2)
    assert verdict.tokens.tolist() == [[1, 1]]


@pytest.mark.parametrize("drafts", [[-1, -1], [-1, 0], [0, -1]])
@pytest.mark.parametrize("q", [None, [[0.5, 0.5], [0.5, 0.5]]])
def test_placeholders_are_never_accepted(verify, drafts: list[int], q) -> None:
    """Before a placeholder a draft may be accepted; the placeholder yields a token of the whole target distribution."""
    verdict = run(verify, drafts, [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], q)
    stood = drafts.index(-1)
    assert verdict.accepted.tolist() == [stood]
    assert verdict.tokens.tolist() == [[0] * (stood + 1) + [-1] * (2 - stood)]


def test_nothing_left_beside_the_draft(verify) -> None:
    """Rejected through rounding alone: p is drawn from, as there is nothing else."""
    almost = [[0.0, 1 - 2**-20, 0.0], [1.0, 0.0, 0.0]]
    assert run(verify, [1], almost, accept=1 - 2**-24).tokens.tolist() == [[1, -1]]
    same = [[0.25, 0.25, 0.5]]
    assert run(verify, [2], [*same, P[0]], [[0.5, 0.25, 0.75]], accept=0.99, pick=0.3).tokens.tolist() == [[1, -1]]


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning:triton")
def test_a_draft_of_almost_no_draft_probability(verify) -> None:
    """p / q overflows float32 at the second draft; the third still stands or falls by its own ratio."""
    q = [[0.0, 1.0], [1e-42, 1.0], [0.5, 0.5]]
    p = [[0.5, 0.5], [0.5, 0.5], [0.0, 1.0], [1.0, 0.0]]
    assert run(verify, [1, 0, 1], p, q, accept=0.4).tokens.tolist() == [[1, 0, 1, 0]]
    assert run(verify, [1, 0, 0], p, q, accept=0.4).tokens.tolist() == [[1, 0, 1, -1]]
    # Nor does 0 x infinity revive a prefix with an impossible draft: on a device min(NaN, 1) is 1.
    assert run(verify, [0, 0], [p[2], p[1], p[3]], [[1.0, 0.0], q[1]]).tokens.tolist() == [[1, -1, -1]]


def test_numbers_are_finer_than_float32(verify) -> None:
    """n / 64 - 2^-30 is n / 64 in float32, where token n begins; once in a new tile, once inside one."""
    p = [[1 / 64] * 64]
    for token in (48, 47):
        assert run(verify, [], p, pick=token / 64).tokens.tolist() == [[token]]
        assert run(verify, [], p, pick=token / 64 - 2**-30).tokens.tolist() == [[token - 1]]


@pytest.mark.parametrize("pick", [0.1, 0.9])
def test_recovery_behind_a_prefix_of_small_weight(verify, pick: float) -> None:
    """w = 1/2 after the first draft: block by block only token 0 is left, token by token 0 and 1 are."""
    p = [[0.25, 0.75, 0.0], [0.25, 0.25, 0.5], [1.0, 0.0, 0.0]]
    q = [[0.5, 0.5, 0.0], [0.0, 0.125, 0.875]]
    batch = DraftBatch.of(torch.tensor([0, 2]), [2])
    noise = Noise(torch.tensor([0.05, 0.9]).double(), torch.tensor([pick]).double())
    slow = next(getattr(reference, name) for name in forms.METHODS if forms.METHODS[name] is verify)
    expected = slow([0, 2], p, q, [0.05, 0.9], pick)
    assert len(expected) == 2
    assert verify(batch, torch.tensor(p), torch.tensor(q), noise, tile=2).tokens.tolist() == [[*expected, -1]]


def test_a_batch_without_drafts_or_requests(verify) -> None:
    nothing = Noise(torch.empty(0).double(), torch.tensor([0.1, 0.6]).double())
    empty = DraftBatch.of(torch.empty(0, dtype=torch.int32), [0, 0])
    tokens = verify(empty, torch.tensor(P), torch.empty(0, 3), nothing).tokens
    assert tokens.tolist() == [[1], [1]]
    none = DraftBatch.of(torch.empty(0, dtype=torch.int32), [])
    assert verify(none, torch.empty(0, 3), None, Noise(nothing.accept, nothing.accept)).tokens.shape == (0, 1)


def test_scattered_addresses_are_valid_behind_masks(verify, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ascend's compiler reads them before it masks (test_triton_language.py). The last request ends the tensors."""
    batch = DraftBatch(torch.tensor([-1, 1, 0]), torch.tensor([2, 3, 3], dtype=torch.int32), 3)
    probs, draft_probs = torch.rand(6, 5), torch.rand(3, 5)
    noise = Noise(torch.rand(3).double(), torch.rand(3).double())
    load, seen = InterpreterBuilder.create_masked_load, []

    def checked(self, pointers, mask, *args):
        addresses = np.sort(pointers.data.ravel().astype(np.int64))
        if len(addresses) > 1 and (np.diff(addresses) != 4).any() and (np.diff(addresses) != 8).any():
            seen.append(addresses)
        return load(self, pointers, mask, *args)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", checked)
    verify(batch, probs, draft_probs, noise, tile=8)
    assert len(seen) >= 2 * batch.size
    for addresses in seen:
        assert any(
            tensor.data_ptr() <= addresses[0] and addresses[-1] < tensor.data_ptr() + tensor.nbytes
            for tensor in (probs, draft_probs)
        )


@pytest.mark.filterwarnings("ignore:torch.searchsorted:UserWarning")
def test_tensors_may_have_gaps(verify) -> None:
    """A column of a wider tensor each, where one without gaps gives another answer."""
    tokens, cumulative = torch.tensor([[1, 0], [0, 1], [1, 0]])[:, 0], torch.tensor([[1, 0], [3, 1]])[:, 0]
    probs = torch.tensor([[[0.0, 0.5], [1.0, 0.5]], [[0.5, 0.0], [0.5, 1.0]]]).repeat(3, 1, 1)[:5, :, 0]
    noise = Noise(torch.tensor([[0.4, 0.9]] * 3).double()[:, 0], torch.tensor([[0.2, 0.9]] * 2).double()[:, 0])
    plain = {"tokenwise": verify_tokenwise, "block": verify_block}
    expected = next(plain[name] for name in plain if forms.METHODS[name] is verify)
    wanted = expected(DraftBatch(tokens, cumulative, 2), probs.clone(), None, noise)
    found = verify(DraftBatch(tokens, cumulative, 2), probs, None, noise)
    assert torch.equal(found.tokens, wanted.tokens)
    assert forms.verify_exact(DraftBatch(tokens, cumulative, 2), torch.tensor([[1, 0]] * 5)[:, 0]).tokens.tolist() == [
        [1, 1, -1],
        [1, -1, -1],
    ]


class Waits(TorchDispatchMode):
    """Operations whose result the host has to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in str(func) for name in ("_local_scalar_dense", "nonzero", "masked_select", "item", "equal")):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("with_probs", [False, True], ids=["one-hot", "probabilities"])
def test_nothing_waits_for_the_device(verify, with_probs: bool) -> None:
    batch = DraftBatch(torch.tensor([0, 1, -1]), torch.tensor([2, 2, 3]), 2)
    noise = Noise(torch.rand(3).double(), torch.rand(3).double())
    with Waits() as waits:
        verify(batch, torch.rand(6, 5), torch.rand(3, 5) if with_probs else None, noise, tile=4)
    assert not waits.seen
