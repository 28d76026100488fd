"""Padding: nothing of an earlier step reaches a later one, and what does not fit is refused before anything changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="static graphs run in the engine environment")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor  # noqa: E402
from toy_mixes import mixes_of  # noqa: E402
from toy_mla import (  # noqa: E402
    BLOCK,
    BLOCKS,
    COLUMNS,
    HIDDEN,
    LONGEST,
    VOCAB,
    Mix,
    make_buffers,
    make_mix,
    rows_written,
    same,
    snapshot,
    static_step,
    toy,
)

from mtp_runtime.attention.batch_expansion import expand_rows  # noqa: E402
from mtp_runtime.graphs.padding import NO_SLOT, InputError, StepBuffers, StepInputs, pad  # noqa: E402
from mtp_runtime.graphs.planner import Graph, Plan, plan  # noqa: E402

pytestmark = pytest.mark.engine

GRAPHS = [Graph(18, 2), Graph(5, 3), Graph(4, 4), Graph(3, 1)]
SEED = st.integers(0, 999)


def poison(buffers: StepBuffers, seed: int) -> None:
    """Everywhere what another step may have left there, or worse.

    Slots and blocks of any request, one of this step too; hidden states that are no numbers; lists of other lengths.
    """
    generator = torch.Generator().manual_seed(seed)
    graph = buffers.graph
    for tensor, low, high in (
        (buffers.input_ids, 0, VOCAB),
        (buffers.positions, 0, LONGEST),
        (buffers.slot_mapping, 0, BLOCKS * BLOCK),
        (buffers.block_table, 1, BLOCKS),
        (buffers.row_owner, 0, graph.slots),
        (buffers.row_lengths, 1, LONGEST + 1),
    ):
        tensor.random_(low, high, generator=generator)
    if buffers.hidden_states is not None:
        buffers.hidden_states.fill_(torch.nan)
    for values in buffers.lists().values():
        values[:] = torch.randint(0, LONGEST, (graph.slots + seed % 3 - 1,), generator=generator).tolist()


def state(buffers: StepBuffers) -> list[Any]:
    """Everything that a step reads."""
    tensors = [*buffers.tensors().values(), buffers.row_owner, buffers.row_lengths]
    return [*(tensor.tolist() for tensor in tensors), *copy.deepcopy(list(buffers.lists().values()))]


# What a replay reads


@pytest.mark.parametrize("kind", ["tnd", "batch-expansion", "drafter"])
@given(st.data(), SEED)
@settings(max_examples=25, deadline=None)
def test_poison_in_every_buffer_changes_nothing(kind: str, data: st.DataObject, seed: int) -> None:
    """The same output and the same KV to the last bit, and no entry written but the step's own.

    Without it, stale rows made padding write over a neighbour's KV: acceptance fell from 0.665 to 0.0015.
    """
    graph, lists, hidden = data.draw(st.sampled_from(GRAPHS)), kind != "batch-expansion", kind == "drafter"
    mix = data.draw(mixes_of(graph, torch.float32 if hidden else None))
    static, model = static_step(graph, lists, hidden), toy(lists=lists)

    static.buffers.clear()
    model.fill(seed)
    before = snapshot(model)
    wanted = static.replay(mix.plan(graph), mix.inputs)
    caches = snapshot(model)
    assert rows_written(before, caches) == set(mix.inputs.slot_mapping.tolist())
    assert wanted.isfinite().all()

    model.fill(seed)
    poison(static.buffers, seed)
    same(static.replay(mix.plan(graph), mix.inputs), wanted)
    for found, cache in zip(model.caches, caches, strict=True):
        same(found, cache)


def test_a_full_step_before_a_small_one_leaves_no_trace() -> None:
    """Poison as it comes about: eighteen requests, then one."""
    graph = Graph(18, 2)
    static, model = static_step(graph), toy()
    small = make_mix([1, 2], [5, 3], seed=8)
    static.buffers.clear()
    model.fill(3)
    wanted = static.replay(small.plan(graph), small.inputs)
    full = make_mix([2] * 18, [7] * 18, seed=9)
    static.replay(full.plan(graph), full.inputs)
    model.fill(3)
    before = snapshot(model)
    same(static.replay(small.plan(graph), small.inputs), wanted)
    assert rows_written(before, model.caches) == set(small.inputs.slot_mapping.tolist())


def test_padding_with_stale_slots_would_write_over_a_neighbour() -> None:
    """That the tests here see it: the same step with the rows of the step before left behind."""
    graph, model = Graph(4, 2), toy()
    neighbour, own = make_mix([2] * 4, [6] * 4, seed=1), make_mix([2], [6], seed=2)
    buffers = make_buffers(graph)
    pad(buffers, neighbour.plan(graph), neighbour.inputs)
    stale = buffers.slot_mapping.clone()
    pad(buffers, own.plan(graph), own.inputs)
    model.fill(1)
    before = snapshot(model)
    model(buffers)
    assert rows_written(before, model.caches) == set(own.inputs.slot_mapping.tolist())
    buffers.slot_mapping[2:] = stale[2:]
    model.fill(1)
    model(buffers)
    assert rows_written(before, model.caches) - set(own.inputs.slot_mapping.tolist()) == set(stale[2:].tolist())


@given(st.sampled_from(GRAPHS).flatmap(lambda graph: st.tuples(st.just(graph), mixes_of(graph, torch.float32))), SEED)
@settings(max_examples=60, deadline=None)
def test_every_buffer_holds_the_step_and_then_padding(step: tuple[Graph, Mix], seed: int) -> None:
    graph, mix = step
    buffers = make_buffers(graph, torch.float32)
    poison(buffers, seed)
    found = mix.plan(graph)
    lists = list(buffers.lists().values())
    pad(buffers, found, mix.inputs)
    tokens, requests = sum(mix.counts), len(mix.counts)
    for name, given_ in vars(mix.inputs).items():
        buffer, count = getattr(buffers, name), requests if name == "block_table" else tokens
        same(buffer[:count], given_)
        padding = buffer[count:]
        same(padding, torch.full_like(padding, NO_SLOT if name == "slot_mapping" else 0))
    # In place: a graph, and whoever else holds the lists, sees the new values.
    assert lists[0] is buffers.actual_seq_lengths and lists[1] is buffers.actual_seq_lengths_kv
    assert lists == [found.actual_seq_lengths, found.actual_seq_lengths_kv]
    assert lists[1] == [*mix.kv, *[0] * (graph.slots - requests)]
    assert len(lists[0]) == graph.slots and lists[0][-1] == graph.tokens


@given(st.sampled_from(GRAPHS).flatmap(lambda graph: st.tuples(st.just(graph), mixes_of(graph))), SEED)
@settings(max_examples=60, deadline=None)
def test_the_rows_are_those_of_batch_expansion(step: tuple[Graph, Mix], seed: int) -> None:
    """One row a token; a padding row sees one entry of the null block, which every cleared table row names."""
    graph, mix = step
    buffers = make_buffers(graph)
    poison(buffers, seed)
    pad(buffers, mix.plan(graph), mix.inputs)
    tokens = sum(mix.counts)
    starts = torch.tensor([0, *mix.counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    table, lengths = expand_rows(mix.inputs.block_table, torch.tensor(mix.kv, dtype=torch.int32), starts)
    rows = buffers.block_table[buffers.row_owner]
    same(rows[:tokens], table)
    same(buffers.row_lengths[:tokens], lengths)
    assert not rows[tokens:].any() and (buffers.row_lengths[tokens:] == 1).all()


def test_a_block_table_of_fewer_columns_clears_the_others() -> None:
    graph = Graph(4, 2)
    buffers, mix = make_buffers(graph), make_mix([2, 1], [3, 0])
    poison(buffers, 1)
    pad(buffers, mix.plan(graph), replace(mix.inputs, block_table=mix.inputs.block_table[:, :2]))
    assert not mix.inputs.block_table[:, 2:].any() and mix.inputs.block_table[:, :2].any()
    same(buffers.block_table[:2], mix.inputs.block_table)
    assert not buffers.block_table[2:].any()


@pytest.mark.parametrize("graph", GRAPHS, ids=str)
@pytest.mark.parametrize("lists", [True, False])
def test_a_step_of_padding_alone_writes_nothing(graph: Graph, lists: bool) -> None:
    """What an idle rank runs, in the shape of every other step (vLLM#40589, #44185, va#10117)."""
    static, model = static_step(graph, lists), toy(lists=lists)
    poison(static.buffers, 4)
    model.fill(2)
    before = snapshot(model)
    empty = {name: tensor[:0] for name, tensor in static.buffers.tensors().items()}
    out = static.replay(plan([], [], graph), StepInputs(**empty))
    assert out.shape == (graph.tokens, HIDDEN) and out.isfinite().all()
    assert rows_written(before, model.caches) == set()
    poison(static.buffers, 5)
    static.buffers.clear()
    assert (static.buffers.slot_mapping == NO_SLOT).all() and not static.buffers.block_table.any()
    assert static.buffers.actual_seq_lengths_kv == [0] * graph.slots


@pytest.mark.parametrize(("k", "requests"), [(1, 3), (2, 5), (3, 2), (3, 7)])
def test_the_padded_request_count_is_the_graphs(k: int, requests: int) -> None:
    """va#7144, #7460: one entry a slot in both lists and in the table, whatever the number of requests."""
    for slots in range(requests, requests + 4):
        graph = Graph(slots, k + 1)
        buffers, mix = make_buffers(graph), make_mix([k + 1] * requests, [4] * requests)
        poison(buffers, slots)
        pad(buffers, mix.plan(graph), mix.inputs)
        padded = (buffers.actual_seq_lengths, buffers.actual_seq_lengths_kv, buffers.block_table)
        assert [len(entries) for entries in padded] == [slots] * 3
        assert buffers.actual_seq_lengths == list(range(k + 1, graph.tokens + 1, k + 1))
        assert len(buffers.input_ids) == buffers.actual_seq_lengths[-1]


# What is refused

STEP = make_mix([2, 1], [3, 6], hidden=torch.float32)
PER_TOKEN = ("input_ids", "positions", "slot_mapping", "hidden_states")
FIELDS = (*PER_TOKEN, "block_table")
CHANGES: dict[str, tuple[Callable[[Tensor], Tensor | None], str]] = {
    "another type": (lambda given: given.to(torch.int16 if given.dtype != torch.int16 else torch.int8), "int16"),
    "a type twice as wide": (
        lambda given: given.to(torch.float64 if given.is_floating_point() else torch.uint8),
        "recorded with",
    ),
    "a row more": (lambda given: torch.cat((given, given[:1])), "rows, the plan says"),
    "a row less": (lambda given: given[:-1], "rows, the plan says"),
    "no rows": (lambda given: given[:0], "0 rows, the plan says"),
    "the graph's rows": (lambda given: torch.cat([given] * 4)[:8], "rows, the plan says"),
    "a number": (lambda given: given.flatten()[0], r"shape \(\)"),
    "a dimension more": (lambda given: given[..., None], "the graph takes rows of"),
    "missing": (lambda given: None, "recorded with it"),
}
WIDTHS: dict[str, Callable[[Tensor], Tensor]] = {
    "block_table": lambda given: torch.cat((given, given[:, :1]), dim=1),
    "hidden_states": lambda given: torch.cat((given, given[:, :1]), dim=1),
    "hidden_states ": lambda given: given[:, 1:],
    "hidden_states  ": lambda given: given[:, 0],
    "block_table ": lambda given: given[:, 0],
}


def refuses(inputs: StepInputs, made: Plan, message: str, hidden: bool = True) -> None:
    """Refused with that message, by a graph that then is as if nobody had asked."""
    static, model = static_step(Graph(4, 2), hidden=hidden), toy()
    poison(static.buffers, 6)
    before, caches, hits = state(static.buffers), snapshot(model), static.hits
    with pytest.raises(InputError, match=message):
        static.replay(made, inputs)
    assert str(state(static.buffers)) == str(before)
    assert rows_written(caches, model.caches) == set() and static.hits == hits
    # And it still runs.
    good = STEP.inputs if hidden else replace(STEP.inputs, hidden_states=None)
    assert static.replay(STEP.plan(Graph(4, 2)), good).isfinite().all()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("field", FIELDS)
def test_a_wrong_input_is_refused_by_name(field: str, change: str) -> None:
    wrong, says = CHANGES[change]
    inputs = replace(STEP.inputs, **{field: wrong(getattr(STEP.inputs, field))})
    refuses(inputs, STEP.plan(Graph(4, 2)), f"^{field}: .*{says}")


@pytest.mark.parametrize("name", WIDTHS)
def test_rows_of_another_width_are_refused(name: str) -> None:
    field = name.strip()
    inputs = replace(STEP.inputs, **{field: WIDTHS[name](getattr(STEP.inputs, field))})
    refuses(inputs, STEP.plan(Graph(4, 2)), f"^{field}: shape .*takes rows of")


def test_an_input_that_the_graph_was_recorded_without_is_refused() -> None:
    refuses(STEP.inputs, STEP.plan(Graph(4, 2)), "^hidden_states: the graph was recorded without it", hidden=False)


@pytest.mark.parametrize("graph", [Graph(5, 2), Graph(3, 2), Graph(8, 1)], ids=str)
def test_a_plan_of_another_graph_is_refused(graph: Graph) -> None:
    """One of the same number of tokens too."""
    made = plan([1] * 3, [3] * 3, graph) if graph.width == 1 else plan(STEP.counts, STEP.kv, graph)
    refuses(STEP.inputs, made, r"^plan: made for Graph\(")


@pytest.mark.parametrize("name", ["actual_seq_lengths", "actual_seq_lengths_kv"])
@pytest.mark.parametrize("values", [[2, 3], [2, 3, 5, 7, 8], []], ids=str)
def test_a_host_list_of_another_length_is_refused(name: str, values: list[int]) -> None:
    """Its length is part of the graph. A plan can only get such a list from outside `plan`."""
    made = replace(STEP.plan(Graph(4, 2)), **{name: values})
    refuses(STEP.inputs, made, f"^{name}: {len(values)} entries, the graph has 4 slots")


def test_prefix_sums_that_do_not_end_in_the_graphs_tokens_are_refused() -> None:
    """va#6524: the operator takes `queryT` from the last one."""
    made = replace(STEP.plan(Graph(4, 2)), actual_seq_lengths=[2, 3, 5, 7])
    refuses(STEP.inputs, made, "^actual_seq_lengths: ends in 7, not in 8")


def test_more_requests_than_the_table_has_rows_never_get_a_plan() -> None:
    """va#8392, #3597: a plan is refused by its own error, not by a write past a buffer."""
    with pytest.raises(ValueError, match="9 requests, but the graph has 4 slots"):
        plan([2] * 9, [4] * 9, Graph(4, 2))


def test_buffers_have_the_sizes_of_the_graph() -> None:
    buffers = StepBuffers.make(Graph(5, 3), COLUMNS, hidden_size=HIDDEN, dtype=torch.bfloat16)
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in buffers.tensors().items()} == {
        "input_ids": ((15,), torch.int32),
        "positions": ((15,), torch.int64),
        "slot_mapping": ((15,), torch.int64),
        "block_table": ((5, COLUMNS), torch.int32),
        "hidden_states": ((15, HIDDEN), torch.bfloat16),
    }
    assert buffers.actual_seq_lengths == [3, 6, 9, 12, 15] and buffers.actual_seq_lengths_kv == [0] * 5
    assert (buffers.row_lengths == 1).all() and buffers.row_owner.tolist() == [n // 3 for n in range(15)]
    assert StepBuffers.make(Graph(1, 1), 1).hidden_states is None
