"""The real drafter's inputs against ours: same tokens, places and slots at every depth, and where lengths differ.

Where they differ ours is right: a depth's KV length is its position + 1 (vLLM itself takes the rejected tokens off
before its second depth; compare TRT-LLM#17240, va#10878). Tests named `fault` show vllm-ascend 0.23's, which no patch
of ours corrects.
"""

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from cpu_runner import edge
from real_drafter import BLOCK, Batch, Pass, common_metadata, dummy, make_drafter, mixed, picked, run
from torch import Tensor

from mtp_runtime.attention.call import BlockTable, FiaCall, Shaped
from mtp_runtime.attention.constraints import check
from mtp_runtime.drafting.proposer import DraftStep, prepare, propose
from mtp_runtime.graphs.padding import NO_SLOT
from tests.unit.attention.attention_calls import plan

REQUESTS, MAX_LEN = 4, 1024


@functools.cache
def drafter(k: int, mode: str = "NONE") -> Any:
    sizes = () if mode == "NONE" else tuple((k + 1) * slots for slots in range(1, REQUESTS + 1))
    return make_drafter(k, REQUESTS, mode=mode, sizes=sizes)


class Ours:
    """Our steps with the same count for a layer."""

    def __init__(self, batch: Batch, k: int) -> None:
        self.steps: list[DraftStep] = []
        kv, ends = list(batch.kv), batch.ends.tolist()
        target = DraftStep(batch.input_ids, batch.positions, batch.hidden_states, batch.slots, batch.table, ends, kv)
        step = prepare(target, batch.sampled, batch.last)
        self.drafts = torch.stack(propose(self, step, batch.last, k, BLOCK, MAX_LEN), 1)

    def run(self, step: DraftStep, depth: int) -> tuple[Tensor, Tensor]:
        self.steps.append(step)
        out = mixed(step.hidden_states, step.input_ids, step.positions)
        return out, out

    def pick(self, hidden_states: Tensor) -> Tensor:
        return picked(hidden_states)


def batches(k: int) -> list[Batch]:
    """Every acceptance of a full request beside a request without drafts and one that kept all."""
    d = k + 1
    found = [Batch((d, d, d), (40, 300, 200), kept) for kept in itertools.product((1, d), range(1, d + 1), (d,))]
    return [*found, Batch((d, 1, d), (40, 8, BLOCK + 1), (1, 1, d)), Batch((1, 1), (1, 129), (1, 1))]


def near_the_end(k: int) -> list[Batch]:
    """Requests whose last token, or one of whose depths, is the last of the context; all drafts were accepted."""
    d = k + 1
    return [Batch((d, d), (40, MAX_LEN - short), (d, d)) for short in range(k + 1)]


CASES = [
    pytest.param(k, batch, id=f"K{k}-{batch.counts}-{batch.kv}-{batch.accepted}")
    for k in (1, 2, 3)
    for batch in (*batches(k), *near_the_end(k))
]
# Past the end theirs counts on from 1 and ours stays there: of drafts that no scheduler takes.
ALL = [
    case
    for case in CASES
    if case.values[1].counts == case.values[1].accepted and (case.values[0] < 3 or case.values[1].kv[-1] < MAX_LEN)
]
REJECTED = [case for case in CASES if case.values[1].counts != case.values[1].accepted and case.values[0] > 1]


def rejected(batch: Batch) -> list[int]:
    return [count - kept for count, kept in zip(batch.counts, batch.accepted, strict=True)]


@pytest.mark.parametrize("k, batch", CASES)
def test_tokens_places_and_slots_agree(k: int, batch: Batch) -> None:
    drafts, passes, last = run(drafter(k), batch)
    ours = Ours(batch, k)
    assert last.tolist() == batch.last.tolist()
    assert len(passes) == len(ours.steps) == k
    assert drafts.tolist() == ours.drafts.tolist()
    assert_first(passes[0], ours.steps[0], batch)
    for theirs, step in zip(passes[1:], ours.steps[1:], strict=True):
        requests = len(batch.counts)
        assert theirs.input_ids[:requests].tolist() == step.input_ids.tolist()
        assert theirs.positions[:requests].tolist() == step.positions.tolist()
        assert torch.equal(theirs.hidden_states[:requests], step.hidden_states)
        assert theirs.slots is not None and theirs.slots[:requests].tolist() == step.slot_mapping.tolist()
        assert theirs.ends == step.ends


def assert_first(theirs: Pass, ours: DraftStep, batch: Batch) -> None:
    """All tokens of the target's step; what follows a request's last kept token is nobody's."""
    starts = [0, *batch.ends[:-1].tolist()]
    kept = [i for start, count in zip(starts, batch.accepted, strict=True) for i in range(start, start + count)]
    assert theirs.input_ids[kept].tolist() == ours.input_ids[kept].tolist()
    assert theirs.positions.tolist() == ours.positions.tolist()
    assert torch.equal(theirs.hidden_states, ours.hidden_states)
    assert theirs.slots is not None and theirs.slots.tolist() == ours.slot_mapping.tolist()
    assert (theirs.ends, theirs.kv) == (ours.ends, ours.kv)


@pytest.mark.parametrize("k, batch", ALL)
def test_lengths_agree_where_all_was_accepted(k: int, batch: Batch) -> None:
    _, passes, _ = run(drafter(k), batch)
    assert [found.kv for found in passes] == [step.kv for step in Ours(batch, k).steps]


@pytest.mark.parametrize("k, batch", REJECTED)
def test_fault_rejected_tokens_stay_in_the_lengths_of_later_depths(k: int, batch: Batch) -> None:
    """Each rejected token is one stale KV entry that every later depth looks at. Ours ends at the position."""
    _, passes, _ = run(drafter(k), batch)
    for theirs, step in zip(passes[1:], Ours(batch, k).steps[1:], strict=True):
        assert step.kv == (step.positions + 1).tolist()
        assert [a - b for a, b in zip(theirs.kv, step.kv, strict=True)] == rejected(batch)


@pytest.mark.parametrize("k", (2, 3))
def test_fault_a_request_near_the_end_that_lost_a_draft_looks_at_one_token(k: int) -> None:
    """The length with the rejected tokens passes max_model_len, so it is cut to 1, though the position is inside."""
    batch = Batch((k + 1, k + 1), (40, MAX_LEN), (k + 1, 1))
    _, passes, _ = run(drafter(k), batch)
    step = Ours(batch, k).steps[1]
    assert step.positions[1] == MAX_LEN - k < MAX_LEN and step.kv[1] == MAX_LEN - k + 1
    assert passes[1].positions[1] == MAX_LEN - k and passes[1].slots is not None and passes[1].slots[1] != NO_SLOT
    assert passes[1].kv[1] == 1


@pytest.mark.parametrize("k", (2, 3))
def test_past_the_end_nothing_is_written(k: int) -> None:
    batch = Batch((k + 1, k + 1), (40, MAX_LEN), (k + 1, k + 1))
    _, passes, _ = run(drafter(k), batch)
    for theirs, step in zip(passes[1:], Ours(batch, k).steps[1:], strict=True):
        assert theirs.slots is not None and theirs.slots[1] == step.slot_mapping[1] == NO_SLOT
        assert theirs.positions[1] == step.positions[1] == 0


FULL = "FULL_DECODE_ONLY"


@pytest.mark.parametrize("k", (1, 2, 3))
@pytest.mark.parametrize("requests", range(1, REQUESTS + 1))
def test_an_idle_rank_runs_the_same_padded_shape(k: int, requests: int) -> None:
    """As many passes of as many tokens as the busy ranks: expert parallel collectives match (vLLM#40589)."""
    from vllm.config import CUDAGraphMode

    d = k + 1
    batch = Batch((d,) * requests, (40,) * requests, (1,) * requests)
    for mode, real in ((FULL, drafter(k, FULL)), ("NONE", drafter(k))):
        _, passes, _ = run(real, batch)
        busy = [len(found.input_ids) for found in passes]
        idle = [len(found.input_ids) for found in dummy(real, requests * d, requests, CUDAGraphMode[mode_of(mode)])]
        assert busy == idle == [requests * d] * k


def mode_of(mode: str) -> str:
    return "FULL" if mode == FULL else mode


@pytest.mark.parametrize("k", (1, 2, 3))
def test_lengths_in_a_graph(k: int) -> None:
    """Depth 0 has a slot for each d tokens; a later depth one for every token of the graph, empty behind the batch."""
    d, batch = k + 1, Batch((k + 1,) * 3, (40, 300, 200), (k + 1,) * 3)
    _, passes, _ = run(drafter(k, FULL), batch)
    assert passes[0].ends == [d, 2 * d, 3 * d] and passes[0].kv == [40, 300, 200]
    for depth, found in enumerate(passes[1:], 1):
        assert found.ends == list(range(1, 3 * d + 1))
        assert found.kv == [40 + depth, 300 + depth, 200 + depth, *[0] * (3 * d - 3)]


@pytest.mark.parametrize("k", (2, 3))
def test_fault_later_depths_are_captured_with_other_lists_than_they_are_run_with(k: int) -> None:
    """The capture's dummy step has a slot for each d tokens at every depth, the real one a slot a token. What a device
    makes of lists of another length at replay is not seen here.
    """
    from vllm.config import CUDAGraphMode

    real, d = drafter(k, FULL), k + 1
    captured = dummy(real, REQUESTS * d, REQUESTS, CUDAGraphMode.FULL)
    _, replayed, _ = run(real, Batch((d,) * REQUESTS, (40,) * REQUESTS, (d,) * REQUESTS))
    assert len(captured[0].ends) == len(replayed[0].ends) == REQUESTS
    for one, other in zip(captured[1:], replayed[1:], strict=True):
        assert (len(one.ends), len(other.ends)) == (REQUESTS, REQUESTS * d)


@pytest.mark.parametrize("mode", [FULL, "NONE"])
@pytest.mark.parametrize("k", (1, 2, 3))
def test_no_call_of_the_drafter_is_one_that_the_patch_attention_refuses(k: int, mode: str) -> None:
    """At no depth, captured, replayed or eager; a graph's calls have its tokens as queries. Later depths too: refused,
    a server with K > 1 would not start."""
    from vllm.config import CUDAGraphMode

    real, d = drafter(k, mode), k + 1
    captured = dummy(real, REQUESTS * d, REQUESTS, CUDAGraphMode.FULL) if mode == FULL else []
    _, replayed, _ = run(real, Batch((d,) * 3, (40, 300, 200), (1, d, d)))
    assert len(replayed) == k and len(captured) == (k if mode == FULL else 0)
    for found in (*captured, *replayed):
        tokens = len(found.input_ids) if mode == FULL else found.tokens
        call = plan([1], heads=8)
        table = BlockTable((found.rows, 8), "int32", None)
        wanted = {"actual_seq_lengths": found.ends, "actual_seq_lengths_kv": found.kv, "block_table": table}
        shapes = {name: replace(part, shape=(tokens, *part.shape[1:])) for name, part in queries(call).items()}
        assert check(replace(call, **wanted, **shapes)) == []
        # The check sees these lists: one token more, and the last sum is not T.
        more = {name: replace(part, shape=(tokens + 1, *part.shape[1:])) for name, part in queries(call).items()}
        assert [broken.id for broken in check(replace(call, **wanted, **more))] == ["F05"]


def queries(call: FiaCall) -> dict[str, Shaped]:
    assert call.query_rope is not None
    return {"query": call.query, "query_rope": call.query_rope}


@pytest.mark.parametrize("k, batch", CASES)
def test_unpadded_inputs_hold_kept_tokens_only(k: int, batch: Batch) -> None:
    """`disable_padded_drafter_batch`: lengths are right there, as the rejected tokens are gone before depth 0."""
    common = common_metadata(drafter(k), batch)
    sampled = [[1] * kept for kept in batch.accepted]
    with edge():
        found, indices = drafter(k).prepare_inputs(common, sampled, [count - 1 for count in batch.counts])
    starts = [0, *batch.ends[:-1].tolist()]
    kept = [i for start, count in zip(starts, batch.accepted, strict=True) for i in range(start, start + count)]
    assert indices.tolist() == kept
    assert found.query_start_loc_cpu.tolist() == [0, *torch.tensor(batch.accepted).cumsum(0).tolist()]
    assert found.seq_lens_cpu.tolist() == (batch.positions[batch.last] + 1).tolist()
    assert found.slot_mapping[: len(kept)].tolist() == batch.slots[kept].tolist()
