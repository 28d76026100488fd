"""Static and eager steps agree on every mix of requests, and a replay reads the persistent buffers and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="static graphs run in the engine environment")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor  # noqa: E402
from toy_mixes import counts_of, mixes_of  # noqa: E402
from toy_mla import (  # noqa: E402
    HIDDEN,
    Mix,
    ToyMla,
    attend_segments,
    eager_step,
    make_buffers,
    make_mix,
    rows_written,
    same,
    snapshot,
    static_step,
    toy,
)

from mtp_runtime.attention.tnd import LATENT  # noqa: E402
from mtp_runtime.graphs.capture import CaptureError  # noqa: E402
from mtp_runtime.graphs.padding import InputError, StepBuffers  # noqa: E402
from mtp_runtime.graphs.planner import Graph, PlanError, choose, fits, plan  # noqa: E402
from mtp_runtime.graphs.slots import PLACEHOLDER, SLACK, graph_slots  # noqa: E402
from mtp_runtime.graphs.static import EagerStep, StaticStep, StepGraph  # noqa: E402

pytestmark = pytest.mark.engine

GRAPHS = [Graph(18, 2), Graph(5, 3), Graph(4, 4), Graph(3, 1)]
SEED = st.integers(0, 999)


@pytest.fixture(scope="module")
def watch() -> Iterator[Callable[[Callable[..., None]], None]]:
    """`toy_steps::watch` tells a function which tensors a step reads, each time the step runs, before it reads them."""
    told: list[Callable[..., None]] = []
    library = torch.library.Library("toy_steps", "FRAGMENT")
    library.define("watch(Tensor[] x) -> Tensor")

    def watch(tensors: list[Tensor]) -> Tensor:
        for tell in told:
            tell(tensors)
        return tensors[0].clone()

    library.impl("watch", watch, "CPU")

    def set_watcher(tell: Callable[..., None]) -> None:
        told[:] = [tell]

    yield set_watcher
    library._destroy()


def watched(model: ToyMla) -> Callable[[StepBuffers], Any]:
    def step(buffers: StepBuffers) -> Any:
        ids = torch.ops.toy_steps.watch(list(buffers.tensors().values()))
        return model(replace(buffers, input_ids=ids))

    return step


# The same as the model itself


@pytest.mark.parametrize("kind", ["tnd", "batch-expansion", "drafter"])
@given(st.data(), SEED)
@settings(max_examples=25, deadline=None)
def test_static_and_eager_steps_agree_on_every_mix(kind: str, data: st.DataObject, seed: int) -> None:
    """To the last bit, in what they return and write; a request's rows are those that it has alone.

    Ragged steps run in the same graph as full ones (va#16637: dynamic K ran without a graph, 3 x slower).
    """
    graph, lists, hidden = data.draw(st.sampled_from(GRAPHS)), kind != "batch-expansion", kind == "drafter"
    mix = data.draw(mixes_of(graph, torch.float32 if hidden else None))
    static, model = static_step(graph, lists, hidden), toy(lists=lists)
    eager = eager_step(static, model)
    assert static.can_use(len(mix.counts), sum(mix.counts)) and eager.can_use(len(mix.counts), sum(mix.counts))

    model.fill(seed)
    wanted = eager.replay(mix.plan(graph), mix.inputs)
    caches = snapshot(model)
    model.fill(seed)
    found = static.replay(mix.plan(graph), mix.inputs)
    same(found, wanted)
    for mine, theirs in zip(model.caches, caches, strict=True):
        same(mine, theirs)
    assert static.hits and eager.hits == 1

    start = 0
    for index, count in enumerate(mix.counts[:3]):
        model.fill(seed)
        alone = mix.alone(index)
        single = Graph(1, count)
        buffers = make_buffers(single, torch.float32 if hidden else None)
        out = EagerStep(model, buffers).replay(alone.plan(single), alone.inputs)
        torch.testing.assert_close(found[start : start + count], out, rtol=1e-4, atol=1e-4)
        start += count


def test_sixteen_fresh_requests_fill_a_graph_of_eighteen_slots() -> None:
    """The seed's example: R = 16, d = 2, T = 36. The first step after the hand-off is a graph's too (va#5472, va#16109:
    graph and eager ranks were mixed; va#10973: it was taken for a prefill)."""
    graph = Graph(18, 2)
    static, model = static_step(graph), toy()
    mix = make_mix([1] * 16, range(16), seed=4)
    model.fill(9)
    wanted = eager_step(static, model).replay(mix.plan(graph), mix.inputs)
    model.fill(9)
    before = snapshot(model)
    same(static.replay(mix.plan(graph), mix.inputs), wanted)
    assert static.buffers.actual_seq_lengths == [*range(1, 17), 26, 36]
    assert static.buffers.actual_seq_lengths_kv == [*range(1, 17), 0, 0]
    assert rows_written(before, model.caches) == set(mix.inputs.slot_mapping.tolist())


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_every_step_of_a_server_runs_in_the_graph_that_is_chosen(data: st.DataObject) -> None:
    """va#3909: every graph has a multiple of K + 1 tokens. va#6524 (`queryT(21) != 20` at K = 2, capture sizes that are
    none): the operator gets prefix sums that end in its T. va#7144, #7460: and one table row a slot."""
    requests, k, padding = 4, data.draw(st.integers(1, 3)), data.draw(st.sampled_from([SLACK, PLACEHOLDER]))
    graphs = [Graph(slots, k + 1) for slots in graph_slots(requests, k, padding)]
    least = 1 if padding == SLACK else k + 1
    counts = data.draw(st.lists(st.integers(least, k + 1), max_size=requests))
    mix = make_mix(counts, [3] * len(counts), data.draw(SEED))
    graph = choose(len(counts), sum(counts), graphs)
    assert graph is not None and graph.tokens % (k + 1) == 0
    static, model = static_step(graph), toy()
    model.fill(1)
    before = snapshot(model)
    out = static.replay(mix.plan(graph), mix.inputs)
    assert len(out) == graph.tokens == static.buffers.actual_seq_lengths[-1] and out.isfinite().all()
    assert len(static.buffers.block_table) == len(static.buffers.actual_seq_lengths) == graph.slots
    assert rows_written(before, model.caches) == set(mix.inputs.slot_mapping.tolist())


def test_the_operator_itself_refuses_a_graph_of_a_tokens_number_that_is_no_multiple() -> None:
    """va#6524: seven requests at K = 2 have 21 tokens, and a graph of 20 has no place for them; it is an error that
    names both, and no graph of ours has 20 tokens."""
    cache = toy().caches[0]
    nope, rope = torch.zeros(20, 2, LATENT), torch.zeros(20, 2, cache.shape[2] - LATENT)
    table, kv = torch.zeros(7, 5, dtype=torch.int32), [3] * 7
    with pytest.raises(ValueError, match=r"actual_seq_lengths: .*20"):
        attend_segments(nope, rope, cache, table, list(range(3, 22, 3)), kv)
    sizes = [Graph(slots, 3).tokens for requests in range(1, 40) for slots in graph_slots(requests, 2, SLACK)]
    assert all(size % 3 == 0 for size in sizes)
    assert choose(7, 21, [Graph(6, 3)]) is None and choose(7, 21, [Graph(6, 3), Graph(7, 3)]) == Graph(7, 3)


@pytest.mark.parametrize(("requests", "tokens"), [(6, 12), (5, 5), (19, 19), (4, 8), (100, 200)])
def test_more_than_the_largest_graph_holds_is_no_crash(requests: int, tokens: int) -> None:
    """va#8392, #3597: nothing is chosen, and every graph says so; the step runs eagerly in a shape of its own."""
    graphs = [Graph(slots, 2) for slots in (1, 2, 3)]
    assert choose(requests, tokens, graphs) is None
    steps: list[StepGraph] = [static_step(graph) for graph in graphs]
    assert not any(step.can_use(requests, tokens) for step in steps)
    each = [tokens // requests] * requests
    for step in steps:
        with pytest.raises(PlanError, match=r"needs .* slots or more"):
            plan(each, [9] * requests, step.graph)
    if requests < 19:
        mix = make_mix(each, [4] * requests)
        own = Graph(requests, each[0])
        out = EagerStep(toy(), make_buffers(own)).replay(mix.plan(own), mix.inputs)
        assert out.shape == (tokens, HIDDEN) and out.isfinite().all()


@given(st.sampled_from(GRAPHS), st.integers(0, 20), st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_what_a_graph_says_it_can_use_it_can(graph: Graph, requests: int, tokens: int) -> None:
    static = static_step(graph)
    can = static.can_use(requests, tokens)
    assert can == fits(requests, tokens, graph) == EagerStep(toy(), static.buffers).can_use(requests, tokens)
    if not can:
        return
    counts = [1] * requests
    for index in range(requests):
        counts[index] += min(graph.width - 1, tokens - sum(counts))
    mix = make_mix(counts, [0] * requests)
    assert sum(counts) == tokens and static.replay(mix.plan(graph), mix.inputs).isfinite().all()


# What a replay reads


def test_the_inputs_are_free_once_they_are_copied(watch: Callable[..., None]) -> None:
    """Overwritten and given back while the replay runs, as a scheduler that prepares the next step does."""
    graph, model = Graph(4, 3), ToyMla()
    static = StaticStep(watched(model), make_buffers(graph, torch.float32))
    watch(lambda tensors: None)
    static.capture()
    calls = model.calls
    mix = make_mix([3, 1], [5, 2], hidden=torch.float32)
    model.fill(1)
    wanted = static.replay(mix.plan(graph), mix.inputs)

    def destroy(tensors: list[Tensor]) -> None:
        for tensor in vars(mix.inputs).values():
            tensor.fill_(7)
            tensor.untyped_storage().resize_(0)

    watch(destroy)
    made = mix.plan(graph)
    model.fill(1)
    found = static.replay(made, mix.inputs)
    assert mix.inputs.input_ids.untyped_storage().nbytes() == 0, "the step's inputs are gone"
    same(found, wanted)
    # The plan's lists were copied too.
    made.actual_seq_lengths[:] = made.actual_seq_lengths_kv[:] = [99] * 4
    assert static.buffers.actual_seq_lengths == [3, 4, 8, 12] and static.buffers.actual_seq_lengths_kv == [8, 3, 0, 0]
    assert model.calls == calls


def test_the_output_of_a_step_is_not_that_of_the_next() -> None:
    graph, model = Graph(5, 3), toy()
    static = static_step(graph)
    model.fill(1)
    first, second = (make_mix([3, 2], [4, 4], seed=seed) for seed in (1, 2))
    out = static.replay(first.plan(graph), first.inputs)
    kept = out.clone()
    assert not torch.equal(static.replay(second.plan(graph), second.inputs), kept)
    same(out, kept)


def test_every_step_uses_the_same_memory(watch: Callable[..., None]) -> None:
    graph = Graph(4, 2)
    static = StaticStep(watched(ToyMla()), make_buffers(graph, torch.float32))
    seen: list[list[int]] = []
    watch(lambda tensors: seen.append([tensor.data_ptr() for tensor in tensors]))
    static.capture()
    lists = list(map(id, static.buffers.lists().values()))
    for seed, counts in enumerate(([2, 1], [1], [2, 2, 2, 2], [])):
        mix = make_mix(counts, [5] * len(counts), seed, torch.float32)
        static.replay(mix.plan(graph), mix.inputs)
    addresses = [tensor.data_ptr() for tensor in static.buffers.tensors().values()]
    assert seen == [addresses] * 5 and len(set(addresses)) == 5
    assert list(map(id, static.buffers.lists().values())) == lists


def test_two_graphs_of_a_model_share_its_weights_and_cache_and_no_buffer() -> None:
    model = toy()
    small, large = static_step(Graph(2, 2)), static_step(Graph(4, 2))
    first, second = make_mix([2, 2], [5, 3], seed=1), make_mix([2], [7], seed=2)

    def replay() -> Tensor:
        model.fill(1)
        return small.replay(first.plan(small.graph), first.inputs)

    alone = replay()
    buffers = {name: tensor.clone() for name, tensor in small.buffers.tensors().items()}
    large.replay(second.plan(large.graph), second.inputs)
    for name, tensor in small.buffers.tensors().items():
        same(tensor, buffers[name])
    same(replay(), alone)
    kept = model.embedding.clone()
    try:
        model.embedding.zero_()
        assert not torch.equal(replay(), alone)
    finally:
        model.embedding.copy_(kept)


# Its life


def test_hits_count_replays() -> None:
    graph = Graph(3, 2)
    for step in (StaticStep(toy(), make_buffers(graph)), EagerStep(toy(), make_buffers(graph))):
        step.capture()
        assert step.hits == 0
        for n, counts in enumerate(([2], [1, 2], [])):
            mix = make_mix(counts, [3] * len(counts))
            step.replay(mix.plan(graph), mix.inputs)
            assert step.hits == n + 1
        with pytest.raises(InputError):
            step.replay(plan([2], [4], graph), mix.inputs)
        assert step.hits == 3


def test_before_the_capture_nothing_runs() -> None:
    model, graph = ToyMla(), Graph(3, 2)
    static, mix = StaticStep(model, make_buffers(graph)), make_mix([2], [3])
    assert not static.can_use(1, 2)
    before = snapshot(model)
    with pytest.raises(CaptureError, match="not captured yet"):
        static.replay(mix.plan(graph), mix.inputs)
    with pytest.raises(CaptureError, match="not captured yet"):
        _ = static.operators
    assert rows_written(before, model.caches) == set() and (model.calls, static.hits) == (0, 0)
    assert not static.buffers.actual_seq_lengths_kv[0], "nor was anything padded"
    static.capture()
    assert static.can_use(1, 2) and static.replay(mix.plan(graph), mix.inputs).isfinite().all()


def test_a_second_capture_is_an_error() -> None:
    model = ToyMla()
    static = StaticStep(model, make_buffers(Graph(3, 2)))
    static.capture()
    operators = static.operators
    with pytest.raises(CaptureError, match="captured already"):
        static.capture()
    assert model.calls == 1 and static.operators == operators


def test_a_capture_that_failed_can_be_done_again() -> None:
    model = ToyMla()
    faults = [RuntimeError("out of memory")]

    def step(buffers: StepBuffers) -> Tensor:
        if faults:
            raise faults.pop()
        return model(buffers)

    static = StaticStep(step, make_buffers(Graph(3, 2)))
    with pytest.raises(RuntimeError, match="out of memory"):
        static.capture()
    assert not static.can_use(1, 2)
    static.capture()
    mix = make_mix([2], [3])
    assert static.replay(mix.plan(static.graph), mix.inputs).isfinite().all()


def test_a_capture_writes_no_kv() -> None:
    """It runs on a step of padding, whatever the buffers held."""
    model, mix = ToyMla(), make_mix([2, 2], [5, 5])
    eager = EagerStep(model, make_buffers(Graph(3, 2)))
    eager.replay(mix.plan(eager.graph), mix.inputs)
    model.fill(7)
    before = snapshot(model)
    StaticStep(model, eager.buffers).capture()
    assert rows_written(before, model.caches) == set()


@given(counts_of(Graph(5, 3)), SEED)
@settings(max_examples=25, deadline=None)
def test_a_step_may_return_what_it_likes(counts: list[int], seed: int) -> None:
    """Engines return hidden states, or those and the next depth's, or nothing."""
    static, model = static_nested(), toy()
    mix: Mix = make_mix(counts, [3] * len(counts), seed)
    model.fill(seed)
    found = static.replay(mix.plan(static.graph), mix.inputs)
    model.fill(seed)
    wanted = eager_step(static, model).replay(mix.plan(static.graph), mix.inputs)
    same(found["states"][0], wanted)
    same(found["states"][1], wanted * 2)
    assert found["nothing"] is None


NESTED: list[StaticStep] = []


def static_nested() -> StaticStep:
    if not NESTED:
        model = toy()

        def step(buffers: StepBuffers) -> Any:
            out = model(buffers)
            return {"states": (out, out * 2), "nothing": None}

        NESTED.append(StaticStep(step, make_buffers(Graph(5, 3))))
        NESTED[0].capture()
    return NESTED[0]


def test_a_step_that_returns_nothing_still_writes_its_kv() -> None:
    """As the drafter's pass of a step without drafts."""
    model, graph = toy(), Graph(3, 2)

    def step(buffers: StepBuffers) -> None:
        model(buffers)

    static = StaticStep(step, make_buffers(graph))
    static.capture()
    mix = make_mix([1, 2], [4, 0])
    model.fill(2)
    before = snapshot(model)
    assert static.replay(mix.plan(graph), mix.inputs) is None
    assert rows_written(before, model.caches) == set(mix.inputs.slot_mapping.tolist())
