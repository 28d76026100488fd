"""Recording a step: what replays as it ran, and what is refused."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="static graphs run in the engine environment")

from torch import Tensor, nn  # noqa: E402
from toy_mla import (  # noqa: E402
    BLOCK,
    LATENT,
    ROPE,
    ToyMla,
    attend_segments,
    eager_step,
    make_buffers,
    make_mix,
    same,
    snapshot,
    static_step,
    toy,
)

from mtp_runtime.graphs.capture import CaptureError, record  # noqa: E402
from mtp_runtime.graphs.planner import Graph  # noqa: E402
from mtp_runtime.graphs.static import StaticStep  # noqa: E402

pytestmark = pytest.mark.engine

GRAPH = Graph(5, 3)
WAYS = {"tnd": True, "batch-expansion": False}
# Engines run their models in both. Of inference tensors the dispatcher shows composed operators, not their parts.
MODES = {"plain": contextlib.nullcontext, "inference": torch.inference_mode}


@pytest.fixture(scope="module", autouse=True)
def live_operators() -> Iterator[None]:
    """`toy_capture::peek` looks at values inside, as an engine's operators may."""
    library = torch.library.Library("toy_capture", "FRAGMENT")
    library.define("peek(Tensor x) -> Tensor")
    library.impl("peek", lambda x: x + x.tolist()[0] + float(x.numpy()[1]), "CPU")
    yield
    library._destroy()


def replayed(step: Callable[[], Any], change: Callable[[], Any]) -> list[Any]:
    """What the recorded step returns in two runs after `change`."""
    run = record(step, {}).compile()
    change()
    with torch.no_grad():
        return [run(), run()]


# The step of a model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", WAYS)
def test_a_replay_is_the_eager_step_to_the_last_bit(way: str, dtype: torch.dtype) -> None:
    static, model = static_step(GRAPH, WAYS[way], dtype=dtype), toy(dtype, WAYS[way])
    eager = eager_step(static, model)
    mix = make_mix([3, 1, 2], [6, 9, 0], seed=1)
    model.fill(1)
    wanted = eager.replay(mix.plan(GRAPH), mix.inputs)
    caches = snapshot(model)
    model.fill(1)
    same(static.replay(mix.plan(GRAPH), mix.inputs), wanted)
    for found, cache in zip(model.caches, caches, strict=True):
        same(found, cache)


@pytest.mark.parametrize("way", WAYS)
def test_a_replay_enters_none_of_the_models_python(way: str) -> None:
    static, model = static_step(GRAPH, WAYS[way]), toy(lists=WAYS[way])
    mix = make_mix([3, 1], [4, 4])
    before = model.calls
    first = static.replay(mix.plan(GRAPH), mix.inputs)
    assert model.calls == before
    model.forward = model.attend = None  # type: ignore[assignment]
    try:
        same(static.replay(mix.plan(GRAPH), mix.inputs), first)
    finally:
        del model.forward, model.attend
    eager_step(static, model).replay(mix.plan(GRAPH), mix.inputs)
    assert model.calls == before + 1, "the counter counts"


def test_recording_runs_the_step_once() -> None:
    model = ToyMla()
    StaticStep(model, make_buffers(GRAPH)).capture()
    assert model.calls == 1


def test_inference_mode_records_the_same_operators() -> None:
    """And what was recorded outside of it runs inside."""
    mix = make_mix([3, 1], [4, 4])
    wanted = static_step(GRAPH).replay(mix.plan(GRAPH), mix.inputs)
    with torch.inference_mode():
        model = ToyMla()
        static = StaticStep(model, make_buffers(GRAPH))
        static.capture()
        for cache, other in zip(model.caches, toy().caches, strict=True):
            cache.copy_(other)
        same(static.replay(mix.plan(GRAPH), mix.inputs), wanted)
        same(static_step(GRAPH).replay(mix.plan(GRAPH), mix.inputs), wanted)
    assert static.operators == static_step(GRAPH).operators


def test_every_layer_is_recorded() -> None:
    operators = static_step(GRAPH).operators
    assert operators.count("mtp_runtime.fused_infer_attention_score.default") == 2
    assert operators.count("mtp_runtime.write_latent_kv.default") == 2


def test_weights_are_read_where_they_lie() -> None:
    """As a captured graph does: new values in the old memory count in the next replay."""
    weight, x = nn.Parameter(torch.ones(3)), torch.arange(3.0)
    run = record(lambda: x @ weight.sin(), {}).compile()
    with torch.no_grad():
        weight.fill_(0.5)
        same(run(), x @ torch.full((3,), 0.5).sin())


# What is refused, and by which name


x, mask, order = torch.arange(1.0, 4.0), torch.tensor([True, False, True]), torch.arange(3)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "item": (lambda: x * x.sum().item(), "aten._local_scalar_dense.default"),
    "float": (lambda: x * float(x[0]), "aten._local_scalar_dense.default"),
    "branch on a value": (lambda: x if x.sum() > 0 else -x, "aten._local_scalar_dense.default"),
    "length from a value": (lambda: torch.arange(int(order[2])), "aten._local_scalar_dense.default"),
    "tolist": (lambda: x * x.tolist()[0], "Tensor.tolist"),
    "numpy": (lambda: x * float(x.numpy()[0]), "Tensor.numpy"),
    "numpy by its protocol": (lambda: __import__("numpy").asarray(x), "Tensor.__array__"),
    "dlpack": (lambda: torch.from_dlpack(x), "Tensor.__dlpack__"),
    "equal": (lambda: torch.equal(x, x), "aten.equal.default"),
    "nonzero": (lambda: x.nonzero(), "aten.nonzero.default"),
    "where of a mask": (lambda: torch.where(mask), "aten.nonzero.default"),
    "boolean mask": (lambda: x[mask], "aten.index.Tensor"),
    "mask of bytes": (lambda: x[mask.byte()], "aten.index.Tensor"),
    "boolean mask behind an index": (lambda: torch.ones(2, 3)[torch.tensor([0, 1]), mask[:2]], "aten.index.Tensor"),
    "masked_select": (lambda: x.masked_select(mask), "aten.masked_select.default"),
    "unique": (lambda: x.unique(), "aten._unique2.default"),
    "bincount": (lambda: order.bincount(), "aten.bincount.default"),
    "repeat_interleave": (lambda: order.repeat_interleave(order), "aten.repeat_interleave.Tensor"),
    "rand": (lambda: x + torch.rand(3), "aten.rand.default"),
    "randint": (lambda: torch.randint(9, (3,)), "aten.randint.default"),
    "randn_like": (lambda: torch.randn_like(x), "aten.randn_like.default"),
    "dropout": (lambda: torch.empty(3).bernoulli_(0.5), "aten.bernoulli_.float"),
    "multinomial": (lambda: torch.multinomial(x, 1), "aten.multinomial.default"),
    "exponential": (lambda: torch.empty(3).exponential_(), "aten.exponential_.default"),
    "a shape changed in place": (lambda: (x * 2).unsqueeze_(0), "aten.unsqueeze_.default"),
    "a transposition in place": (lambda: torch.zeros(2, 3).t_(), "aten.t_.default"),
    "memory changed in place": (lambda: (x * 2).resize_(2), "aten.resize_.default"),
    "another memory": (lambda: (x * 2).set_(x), "aten.set_.source_Tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("mode", MODES)
def test_what_depends_on_values_or_chance_is_refused_by_name(mode: str, name: str) -> None:
    step, operator = REFUSED[name]
    with MODES[mode](), pytest.raises(CaptureError) as refused:
        record(step, {})
    assert str(refused.value).startswith(f"{operator} cannot be part of a static graph ("), refused.value


@pytest.mark.parametrize("name", ["item", "tolist", "boolean mask", "rand"])
def test_a_model_with_such_an_operator_has_no_graph(name: str) -> None:
    step, operator = REFUSED[name]

    class Model(ToyMla):
        def attend(self, *args: Any) -> Tensor:
            step()
            return super().attend(*args)

    static = StaticStep(Model(), make_buffers(GRAPH))
    with pytest.raises(CaptureError, match=operator.replace(".", r"\.")):
        static.capture()
    assert not static.can_use(1, 3)


def test_an_operator_may_look_at_values_inside() -> None:
    values = torch.arange(3.0)
    for found in replayed(lambda: torch.ops.toy_capture.peek(values) * 2, lambda: values.add_(5)):
        same(found, (values + 5 + 6) * 2)


def test_a_step_that_fails_leaves_no_mode_behind() -> None:
    with pytest.raises(CaptureError):
        record(REFUSED["item"][0], {})
    assert x.tolist() == [1, 2, 3] and torch.rand(3).shape == (3,) and x[mask].tolist() == [1, 3]


# Host lists


def attention(ends: list[int], lengths: list[int]) -> Callable[[], Tensor]:
    """One call in TND layout over persistent tensors."""
    generator = torch.Generator().manual_seed(3)
    nope, rope = (torch.randn(6, 2, size, generator=generator) for size in (LATENT, ROPE))
    cache = torch.randn(7, BLOCK, LATENT + ROPE, generator=generator)
    table = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)
    return lambda: attend_segments(nope, rope, cache, table, ends, lengths)


def test_host_lists_take_new_values_at_each_replay() -> None:
    ends, lengths = [3, 6], [3, 9]
    step = attention(ends, lengths)
    run = record(step, {"actual_seq_lengths": ends, "actual_seq_lengths_kv": lengths}).compile()
    for new_ends, new_lengths in (([1, 6], [1, 5]), ([6, 6], [12, 4]), ([2, 6], [7, 0]), ([3, 6], [3, 9])):
        found = run(actual_seq_lengths=new_ends, actual_seq_lengths_kv=new_lengths)
        ends[:], lengths[:] = new_ends, new_lengths
        same(found, step())


def test_a_host_list_that_no_operator_took_is_an_error() -> None:
    ends, lengths = [3, 6], [3, 9]
    lists = {"actual_seq_lengths": ends, "actual_seq_lengths_kv": lengths}
    with pytest.raises(CaptureError, match="no operator took the host list actual_seq_lengths, actual_seq_lengths_kv"):
        record(lambda: x * 2, lists)
    with pytest.raises(CaptureError, match="no operator took the host list blocks"):
        record(attention(ends, lengths), lists | {"blocks": [1]})
    with pytest.raises(CaptureError, match="no operator took"):
        StaticStep(toy(lists=False), make_buffers(GRAPH)).capture()


@pytest.mark.parametrize("given", [[3, 9], [3, 5], [6]])
def test_a_host_list_with_another_value_is_an_error(given: list[int]) -> None:
    """The step worked out a list of its own: a replay would give the operator something else."""
    lists = {"actual_seq_lengths": [3, 6], "actual_seq_lengths_kv": given}
    with pytest.raises(CaptureError, match=r"actual_seq_lengths_kv: the step gave \[3, 8\], not the host list"):
        record(attention([3, 6], [3, 8]), lists)


def test_one_call_of_many_with_another_value_is_an_error() -> None:
    lists = {"actual_seq_lengths": [3, 6], "actual_seq_lengths_kv": [3, 9]}
    good, bad = attention([3, 6], [3, 9]), attention([3, 6], [4, 9])
    with pytest.raises(CaptureError, match="actual_seq_lengths_kv"):
        record(lambda: good() + bad(), lists)


# Operators of every form: each program reads `a`, which changes between recording and replay


def out_operator(a: Tensor) -> Tensor:
    out = torch.ones(3, 4)
    torch.add(a, 1, out=out[:, :])
    return out * 2


def out_without_memory(a: Tensor) -> Tensor:
    out = torch.empty(0)
    torch.mul(a, a, out=out)
    return out + 1


def two_outs(a: Tensor) -> Tensor:
    values, indices = torch.empty(3), torch.empty(3, dtype=torch.int64)
    torch.max(a, dim=1, out=(values, indices))
    return values + indices


def written_view(a: Tensor) -> Tensor:
    whole = a * 1
    part = whole[1:, ::2]
    whole[0] = 7
    part += 5
    part[1].zero_()
    return whole


def written_base(a: Tensor) -> Tensor:
    whole = a + 0
    before, views = whole.sum(), whole.unbind()
    whole.mul_(2)
    return torch.stack([*views, before.expand(4), views[0]])


def put_by_mask(a: Tensor) -> Tensor:
    out = a.clone()
    out[a > 0] = -1
    out.index_put_((torch.tensor([0, 2]), torch.tensor([1, 1])), torch.tensor(9.0), accumulate=True)
    return out


def constant_that_is_written(a: Tensor) -> Tensor:
    """Each run of the step makes a new one."""
    total = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for row in a:
        total += row
    return total


def constants_that_die(a: Tensor) -> Tensor:
    """Each gives its memory and its id to the next one."""
    for n in range(40):
        a = a + torch.tensor(float(n)) * torch.tensor([1.0, n, 0.0, -n])
    return a


def persistent_tensors_that_die(a: Tensor) -> Tensor:
    for n in range(40):
        a = a + torch.frombuffer(bytearray(struct.pack("4f", n, 1.5, -n, n * n)), dtype=torch.float32)
    return a


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "several results, a view of them": lambda a: [part * 2 for part in a.split([1, 3], dim=1)],
    "several results, some unused": lambda a: torch.topk(a, 2).indices,
    "several results, some of them none": lambda a: torch.native_layer_norm(a, [4], None, None, 1e-5)[:2],
    "several results, named": lambda a: torch.sort(a, dim=1, descending=True),
    "results of results": lambda a: [half.chunk(2, 0)[0].sum() for half in a.chunk(2, 1)],
    "a list of tensors": lambda a: torch.cat([a, a[:1], torch.ones(1, 4)]),
    "a list with holes": lambda a: a[:, torch.tensor([2, 0])],
    "out": out_operator,
    "out that gets its memory": out_without_memory,
    "several outs": two_outs,
    "writes to a view": written_view,
    "writes to what has views": written_base,
    "writes by mask and place": put_by_mask,
    "a constant that is written": constant_that_is_written,
    "the same result twice": lambda a: (a * 2, a * 2),
    "what it was given": lambda a: (a, {"key": [a[0], 5, None]}),
    "scalars and types": lambda a: (2**a, torch.where(a > 0, a.bfloat16(), 0.5), a.long() / 3, a.to(torch.int32) * 1.5),
    "an attribute": lambda a: a.data.detach() + a.real,
    "conjugates": lambda a: torch.view_as_real(torch.view_as_complex(a.view(3, 2, 2)).conj() * 1j),
    "imaginary part of a conjugate": lambda a: torch.view_as_complex(a.view(3, 2, 2)).conj().imag * 1,
    "strings": lambda a: nn.functional.gelu(a, approximate="tanh") + torch.einsum("ij,kj->ik", a, a).sum(),
}
FORMS |= {form.__name__: form for form in (constants_that_die, persistent_tensors_that_die)}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("mode", MODES)
def test_operators_of_every_form_are_recorded_right(mode: str, name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    form = FORMS[name]
    with MODES[mode]():
        a = torch.randn(3, 4, generator=generator)
        found = replayed(lambda: form(a), lambda: a.copy_(torch.randn(3, 4, generator=generator)))
        wanted = torch.utils._pytree.tree_flatten(form(a))
    for result in found:
        values, spec = torch.utils._pytree.tree_flatten(result)
        assert len(values) == len(wanted[0]) and (spec == wanted[1] or name.endswith("named"))
        for value, want in zip(values, wanted[0], strict=True):
            if isinstance(want, Tensor):
                same(value, want)
            else:
                assert value == want


def test_the_results_of_two_replays_do_not_share_memory() -> None:
    a = torch.ones(3)
    run = record(lambda: a * 2, {}).compile()
    first = run()
    a.add_(1)
    second = run()
    assert first.tolist() == [2, 2, 2] and second.tolist() == [4, 4, 4]


def test_a_write_to_the_cache_through_a_view_is_replayed() -> None:
    """As engines write: a view of a view of the cache, at places that are known only when it runs."""
    cache, slots, values = torch.zeros(5, BLOCK, 3), torch.tensor([2, 9]), torch.ones(2, 3)

    def step() -> Tensor:
        flat = cache.view(-1, 3)
        flat[slots, :2] = values[:, :2]
        flat[slots, 2:] = values[:, 2:] * 2
        return cache[0].sum()

    run = record(step, {}).compile()
    cache.zero_()
    slots.copy_(torch.tensor([3, 19]))
    values.fill_(4)
    assert run() == 16
    wanted = torch.zeros(5 * BLOCK, 3)
    wanted[[3, 19]] = torch.tensor([4.0, 4, 8])
    same(cache, wanted.view(5, BLOCK, 3))
    assert run() == 16


def test_a_sum_that_goes_on_from_step_to_step_is_replayed() -> None:
    total, a = torch.zeros(3), torch.ones(3)
    run = record(lambda: total.add_(a) * 2, {}).compile()
    a.fill_(10)
    assert [run().tolist() for _ in range(2)] == [[22] * 3, [42] * 3]
    assert total.tolist() == [21] * 3
