"""Cases a distribution test cannot see: zero probabilities, U = 0, placeholders, mixed batches, wrong shapes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="verification tests run in the engine environment")

from mtp_runtime.verify import DraftBatch, Noise, choose, verify_greedy, verify_mixed, verify_tokenwise  # noqa: E402
from mtp_runtime.verify.batch import expand_to_tokens  # noqa: E402
from mtp_runtime.verify.block import verify_block  # noqa: E402

pytestmark = pytest.mark.engine

METHODS = [verify_tokenwise, verify_block]


def batch(drafts: list[int], counts: list[int], bonus: list[int]) -> DraftBatch:
    """Short form."""
    return DraftBatch(torch.tensor(drafts, dtype=torch.int32), counts, torch.tensor(bonus))


@pytest.mark.parametrize("verify", METHODS)
@pytest.mark.parametrize("with_probs", [False, True])
def test_impossible_draft_is_rejected_at_u_zero(verify, with_probs: bool) -> None:
    p = torch.tensor([[0.0, 0.25, 0.75]])
    q = torch.tensor([[1.0, 0.0, 0.0]]) if with_probs else None
    verdict = verify(batch([0], [1], [2]), p, q, Noise(torch.zeros(1), torch.ones(1, 3)))
    assert verdict.accepted.tolist() == [0]
    assert verdict.tokens.tolist() == [[2, -1]]


@pytest.mark.parametrize("verify", METHODS)
def test_certain_draft_is_accepted_at_the_largest_u(verify) -> None:
    largest = torch.tensor([1 - 2**-53], dtype=torch.float64)
    verdict = verify(batch([1], [1], [2]), torch.tensor([[0.0, 1.0, 0.0]]), None, Noise(largest, torch.ones(1, 3)))
    assert verdict.tokens.tolist() == [[1, 2]]


@pytest.mark.parametrize("verify", METHODS)
def test_one_hot_recovery_never_repeats_the_draft(verify) -> None:
    p = torch.tensor([[0.999, 0.001]]).expand(5000, 2)
    noise = Noise(torch.full((5000,), 0.9999), torch.empty(5000, 2).exponential_())
    verdict = verify(batch([0] * 5000, [1] * 5000, [0] * 5000), p, None, noise)
    assert verdict.accepted.sum() == 0
    assert (verdict.tokens[:, 0] == 1).all()


@pytest.mark.parametrize("verify", METHODS)
@pytest.mark.parametrize("drafts", [[-1, -1], [-1, 0], [0, -1]])
def test_placeholders_are_never_accepted(verify, drafts: list[int]) -> None:
    """Before a placeholder a draft may be accepted; the placeholder yields a token of the whole target distribution."""
    p = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    verdict = verify(batch(drafts, [2], [1]), p, None, Noise(torch.zeros(2), torch.ones(1, 2)))
    assert verdict.accepted.tolist() == [drafts.index(-1)]
    assert verdict.tokens[0].tolist() == [0] * (drafts.index(-1) + 1) + [-1] * (2 - drafts.index(-1))


def test_placeholder_is_never_the_argmax() -> None:
    assert verify_greedy(batch([-1, -1], [2], [5]), torch.tensor([3, 4])).tokens.tolist() == [[3, -1, -1]]


def test_requests_without_drafts_take_the_bonus_token() -> None:
    assert verify_greedy(batch([], [0, 0], [5, 6]), torch.empty(0, dtype=torch.int64)).tokens.tolist() == [[5], [6]]
    ragged = verify_greedy(batch([1], [0, 1, 0], [5, 6, 7]), torch.tensor([1]))
    assert ragged.tokens.tolist() == [[5, -1], [1, 6], [7, -1]]


def test_mixed_batch_gives_each_request_its_own_method() -> None:
    """The greedy request takes the argmax where the other one, with the same numbers, accepts by chance."""
    p = torch.tensor([[0.6, 0.4], [0.6, 0.4]])
    noise = Noise(torch.tensor([0.3, 0.3]), torch.ones(2, 2))
    drafts = batch([1, 1], [1, 1], [0, 0])
    verdict = verify_mixed(drafts, torch.tensor([True, False]), p.argmax(1), p, None, noise, verify_tokenwise)
    assert verdict.tokens.tolist() == [[0, -1], [1, 0]]


def test_shapes_and_names_are_checked() -> None:
    with pytest.raises(ValueError, match="sum to 3"):
        batch([1, 2], [1, 2], [0, 0])
    with pytest.raises(ValueError, match="2 requests"):
        batch([1, 2], [1, 1], [0])
    with pytest.raises(ValueError, match="traversal"):
        choose("traversal", has_draft_probs=False)


def test_auto_takes_block_only_where_it_gains() -> None:
    assert choose("auto", has_draft_probs=False) is verify_tokenwise
    assert choose("auto", has_draft_probs=True) is verify_block
    assert choose("block", has_draft_probs=False) is verify_block


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_request_values_reach_every_draft(dtype) -> None:
    """Ragged, a request without drafts among them; temperature 0 stands for greedy and is read as 1."""
    values, cumulative = torch.tensor([4, 0, 6, 9], dtype=dtype), torch.tensor([2, 3, 3, 6], dtype=torch.int32)
    assert expand_to_tokens(values, cumulative, 0, 0).tolist() == [4, 4, 0, 9, 9, 9]
    replaced = expand_to_tokens(values, cumulative, 0, 1)
    assert replaced.tolist() == [4, 4, 1, 9, 9, 9]
    assert replaced.dtype == dtype
