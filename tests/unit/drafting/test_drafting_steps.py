"""What the MTP layer is given: the first pass from the target's step, each further depth from the one before."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest

torch = pytest.importorskip("torch", reason="drafting runs in the engine environment")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor  # noqa: E402

from mtp_runtime.drafting.proposer import DraftStep, deepen, prepare  # noqa: E402
from mtp_runtime.graphs.padding import NO_SLOT  # noqa: E402

pytestmark = pytest.mark.engine

BLOCK, COLUMNS = 4, 6
ROOM = BLOCK * COLUMNS


@dataclass
class Verified:
    """A target step and what of it stood: tokens and accepted drafts of each request."""

    step: DraftStep
    counts: list[int]
    stood: list[int]
    sampled: list[int]

    @property
    def starts(self) -> list[int]:
        return [0, *self.step.ends[:-1]]

    def last(self, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor([start + stood for start, stood in zip(self.starts, self.stood, strict=True)], dtype=dtype)


def verified(counts: list[int], stood: list[int], contexts: list[int], seed: int = 0) -> Verified:
    generator = torch.Generator().manual_seed(seed)
    table = (torch.randperm(99, generator=generator)[: COLUMNS * len(counts)] + 1).view(-1, COLUMNS).int()
    places = [range(context, context + count) for context, count in zip(contexts, counts, strict=True)]
    slots = [
        int(row[place // BLOCK]) * BLOCK + place % BLOCK
        for row, own in zip(table, places, strict=True)
        for place in own
    ]
    tokens = sum(counts)
    step = DraftStep(
        torch.randint(1000, (tokens,), generator=generator, dtype=torch.int32),
        torch.tensor([place for own in places for place in own]),
        torch.randn(tokens, 3, generator=generator),
        torch.tensor(slots),
        table,
        torch.tensor(counts).cumsum(0).tolist(),
        [own.stop for own in places],
    )
    sampled = torch.randint(1000, 2000, (len(counts),), generator=generator).tolist()
    return Verified(step, counts, stood, sampled)


@st.composite
def verifieds(draw: st.DrawFn) -> Verified:
    """Ragged requests of 1..5 tokens, any number of whose drafts stood."""
    counts = draw(st.lists(st.integers(1, 5), min_size=1, max_size=8))
    stood = [draw(st.integers(0, count - 1)) for count in counts]
    contexts = [draw(st.integers(0, 12)) for _ in counts]
    return verified(counts, stood, contexts, draw(st.integers(0, 999)))


# The first pass


@given(verifieds(), st.sampled_from([torch.int32, torch.int64]))
@settings(max_examples=100, deadline=None)
def test_each_place_gets_the_token_after_it(case: Verified, dtype: torch.dtype) -> None:
    """Up to the last accepted token of each request, where the sampled one stands; what follows there is rejected."""
    ids = case.step.input_ids.clone()
    first = prepare(case.step, torch.tensor(case.sampled), case.last(dtype))
    for start, stood, sampled in zip(case.starts, case.stood, case.sampled, strict=True):
        assert first.input_ids[start : start + stood].tolist() == ids[start + 1 : start + stood + 1].tolist()
        assert first.input_ids[start + stood] == sampled
    assert first.input_ids.dtype == torch.int32 and first.input_ids.shape == ids.shape
    assert torch.equal(case.step.input_ids, ids), "the target's own tokens are left alone"


@given(verifieds())
@settings(max_examples=50, deadline=None)
def test_the_first_pass_is_the_targets_step_in_all_else(case: Verified) -> None:
    """All tokens, rejected ones too: positions, slots, tables and lengths are those that the target ran with."""
    first = prepare(case.step, torch.tensor(case.sampled), case.last())
    for name in ("positions", "hidden_states", "slot_mapping", "block_table"):
        assert torch.equal(getattr(first, name), getattr(case.step, name))
    assert (first.ends, first.kv) == (case.step.ends, case.step.kv)


def test_the_first_pass_has_one_shape_whatever_was_accepted() -> None:
    counts, shapes = [3, 1, 4, 2], set()
    for stood in product(*map(range, counts)):
        case = verified(counts, list(stood), [5, 0, 7, 12])
        first = prepare(case.step, torch.tensor(case.sampled), case.last())
        tensors = [value for value in vars(first).values() if isinstance(value, Tensor)]
        shapes.add((*(tuple(tensor.shape) for tensor in tensors), *first.ends, *first.kv))
    assert len(shapes) == 1


def test_a_request_without_drafts_takes_what_was_sampled() -> None:
    case = verified([1, 3, 1], [0, 1, 0], [4, 4, 4])
    first = prepare(case.step, torch.tensor(case.sampled), case.last())
    ids = case.step.input_ids
    assert first.input_ids[[0, 1, 2, 4]].tolist() == [case.sampled[0], int(ids[2]), case.sampled[1], case.sampled[2]]


# Each further depth


@given(
    st.lists(st.integers(0, ROOM - 1), min_size=1, max_size=8),
    st.integers(1, ROOM),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 999),
)
@settings(max_examples=150, deadline=None)
def test_a_depth_stands_one_place_further(places: list[int], max_len: int, block: int, seed: int) -> None:
    """Positions, slots through the table and KV lengths, each made anew from the position."""
    generator = torch.Generator().manual_seed(seed)
    requests = len(places)
    columns = -(-ROOM // block)
    table = torch.randint(1, 9999, (requests, columns), generator=generator, dtype=torch.int32)
    drafts, hidden = torch.randint(99, (requests,), generator=generator), torch.randn(requests, 3, generator=generator)
    deeper = deepen(drafts, hidden, torch.tensor(places), table, block, max_len)
    for row, place in enumerate(places):
        following = place + 1
        if following < max_len:
            slot = int(table[row, following // block]) * block + following % block
            assert (deeper.positions[row], deeper.slot_mapping[row], deeper.kv[row]) == (following, slot, following + 1)
        else:
            assert (deeper.positions[row], deeper.slot_mapping[row], deeper.kv[row]) == (0, NO_SLOT, 1)
    assert deeper.ends == list(range(1, requests + 1))
    assert deeper.input_ids.tolist() == drafts.tolist() and deeper.input_ids.dtype == torch.int32
    assert deeper.hidden_states is hidden and deeper.block_table is table
    assert deeper.positions.dtype == deeper.slot_mapping.dtype == torch.int64


def test_lengths_are_made_anew_at_each_depth() -> None:
    """va#10878, #14236: one buffer of lengths for all depths, and acceptance fell. Lists of one depth are its own."""
    table = torch.tensor([[3, 5, 7], [2, 4, 6]], dtype=torch.int32)
    positions, steps = torch.tensor([1, 6]), []
    for _ in range(4):
        steps.append(deepen(torch.tensor([9, 9]), torch.zeros(2, 3), positions, table, 4, 12))
        positions = positions + 1
    assert [step.kv for step in steps] == [[3, 8], [4, 9], [5, 10], [6, 11]]
    assert [step.positions.tolist() for step in steps] == [[2, 7], [3, 8], [4, 9], [5, 10]]
    assert [step.slot_mapping.tolist() for step in steps] == [[14, 19], [15, 24], [20, 25], [21, 26]]
    assert len({id(step.kv) for step in steps}) == len({id(step.ends) for step in steps}) == 4


def test_past_max_len_no_slot_is_written_at_any_depth() -> None:
    """The table has no column for what follows, and none is looked up."""
    table = torch.tensor([[3, 5], [2, 4]], dtype=torch.int32)
    positions = torch.tensor([6, 3])
    for depth in range(1, 5):
        step = deepen(torch.tensor([9, 9]), torch.zeros(2, 3), positions, table, 4, 8)
        positions = positions + 1
        assert step.slot_mapping.tolist() == [23 if depth == 1 else NO_SLOT, 15 + depth]
    step = deepen(torch.tensor([9, 9]), torch.zeros(2, 3), torch.tensor([10**6, 7]), table, 4, 8)
    assert (step.slot_mapping.tolist(), step.kv) == ([NO_SLOT, NO_SLOT], [1, 1])
