"""A simplified graph does the same with fewer nodes: random programs, and the cases that decide."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="static graphs run in the engine environment")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor, fx, nn  # noqa: E402
from toy_mla import LAYERS, ToyMla, make_buffers, same  # noqa: E402

from mtp_runtime.graphs.capture import Recording, record  # noqa: E402
from mtp_runtime.graphs.planner import Graph  # noqa: E402
from mtp_runtime.graphs.simplify import simplify  # noqa: E402

pytestmark = pytest.mark.engine


# Random programs


@dataclass
class World:
    """What a program finds: two inputs that change from step to step, and two weights."""

    inputs: list[Tensor]
    weights: list[nn.Parameter]

    @classmethod
    def make(cls) -> World:
        generator = torch.Generator().manual_seed(2)

        def values() -> Tensor:
            return torch.randn(2, 3, generator=generator)

        weights = [nn.Parameter(values(), requires_grad=False) for _ in range(2)]
        return cls([values(), values()], weights)

    def state(self) -> list[Tensor]:
        return [*self.inputs, *self.weights]

    def change(self, seed: int) -> None:
        """The next step's inputs."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.inputs:
            tensor.copy_(torch.randn(2, 3, generator=generator))


def like(a: Tensor, b: Tensor) -> Tensor:
    """b in a form that goes with a."""
    return b if a.shape == b.shape else b.mean()


PURE: list[Callable[[Tensor, Tensor], Any]] = [
    lambda a, b: a + like(a, b),
    lambda a, b: a * 0.5,
    lambda a, b: a.sin(),
    lambda a, b: a - like(a, b),
    lambda a, b: a.sum(),
    lambda a, b: torch.zeros(2, 3),
    lambda a, b: torch.tensor([0.25, 0.5]),
    lambda a, b: torch.cat([a.flatten(), b.flatten()])[:6],
    lambda a, b: a.max(dim=0) if a.dim() else a,
    lambda a, b: a[torch.tensor([0, 0])] if a.dim() else a,
    lambda a, b: a.clone(),
]
VIEWS: list[Callable[[Tensor, Tensor], Any]] = [
    lambda a, b: a.view(a.shape),
    lambda a, b: a.detach(),
    lambda a, b: a[:] if a.dim() else a,
    lambda a, b: a[:1] if a.dim() else a,
    lambda a, b: a.t() if a.dim() == 2 else a.unsqueeze(0),
    lambda a, b: a.reshape(-1),
    lambda a, b: a.expand(a.shape),
    lambda a, b: a.contiguous(),
    lambda a, b: a.chunk(2) if a.dim() else a,
    lambda a, b: torch.ops.aten.alias(a),
]
IN_PLACE: list[Callable[[Tensor, Tensor], Any]] = [
    lambda a, b: a.add_(like(a, b).sin()),
    lambda a, b: a.mul_(0.5),
    lambda a, b: a.copy_(like(a, b)),
    lambda a, b: a.zero_(),
    lambda a, b: a.index_fill_(0, torch.tensor([0]), 0.125) if a.dim() else a.fill_(3),
    lambda a, b: torch.cos(like(a, b).expand(a.shape), out=a),
]
KINDS = (PURE, VIEWS, IN_PLACE)


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[int, int, int, int]]:
    """Instructions (kind, operator, operand, operand), operands counted from the newest value."""
    kind = st.sampled_from([0, 0, 0, 1, 1, 2])
    one = st.tuples(kind, st.integers(0, 10), st.integers(0, 6), st.integers(0, 6))
    program = draw(st.lists(one, min_size=1, max_size=14))
    # Models repeat themselves.
    return program + program[: draw(st.integers(0, len(program)))]


def run_program(program: Sequence[tuple[int, int, int, int]], world: World) -> list[Tensor]:
    values: list[Tensor] = world.state()
    for kind, operator, first, second in program:
        operators = KINDS[kind]
        result = operators[operator % len(operators)](
            values[-1 - first % len(values)], values[-1 - second % len(values)]
        )
        results = [result] if isinstance(result, Tensor) else list(result)
        values += [value for value in results if value.is_floating_point()]
    return values[-4:]


def mutable(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function" and writes(node)]


def writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def calls(recording: Recording) -> list[str]:
    return [str(node.target) for node in recording.graph.nodes if node.op == "call_function"]


@given(programs())
@settings(max_examples=150, deadline=None)
def test_random_programs_do_the_same_before_and_after(program: list[tuple[int, int, int, int]]) -> None:
    """Results and everything the step wrote, over several steps, to the last bit; every write stays."""
    eager, raw, simple = World.make(), World.make(), World.make()
    with torch.no_grad():
        run_program(program, eager)
    plain = record(lambda: run_program(program, raw), {})
    simplified = record(lambda: run_program(program, simple), {})
    before = mutable(simplified.graph), len(calls(simplified))
    simplify(simplified)
    assert mutable(simplified.graph) == before[0]
    assert len(calls(simplified)) <= before[1]
    runs = [lambda: run_program(program, eager), plain.compile(), simplified.compile()]
    for seed in range(3):
        for world in (eager, raw, simple):
            world.change(seed)
        with torch.no_grad():
            wanted, *found = [run() for run in runs]
        for results, world in zip(found, (raw, simple), strict=True):
            for value, want in zip([*results, *world.state()], [*wanted, *eager.state()], strict=True):
                same(value, want)


# The cases that decide


def simplified(step: Callable[[], Any]) -> tuple[list[str], list[str], fx.GraphModule]:
    """Operators before, operators after, and what runs them."""
    recording = record(step, {})
    before = calls(recording)
    simplify(recording)
    return before, calls(recording), recording.compile()


def weight(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=torch.float32), requires_grad=False)


def test_repeated_look_ups_are_done_once() -> None:
    angles, positions, x = torch.randn(9, 4), torch.tensor([3, 1]), torch.ones(2, 4)

    def step() -> Tensor:
        out = x
        for _ in range(5):
            cos, sin = angles[positions].chunk(2, dim=-1)
            out = out * torch.cat((cos, sin), dim=-1)
        return out

    before, after, run = simplified(step)
    assert [before.count(name) for name in ("aten.index.Tensor", "aten.split.Tensor", "aten.cat.default")] == [5, 5, 5]
    assert [after.count(name) for name in ("aten.index.Tensor", "aten.split.Tensor", "aten.cat.default")] == [1, 1, 1]
    positions.copy_(torch.tensor([8, 0]))
    same(run(), step())


def test_the_layers_of_a_model_share_their_rotary_look_up() -> None:
    model, buffers = ToyMla(), make_buffers(Graph(3, 2))
    recording = record(lambda: model(buffers), buffers.lists())
    before, written = calls(recording), mutable(recording.graph)
    after = calls(simplify(recording))
    # One look-up more is that of the embedding.
    assert before.count("aten.index.Tensor") == 1 + LAYERS and after.count("aten.index.Tensor") == 2
    # The transposed weights are weights.
    assert before.count("aten.t.default") >= 4 * LAYERS and not after.count("aten.t.default")
    assert mutable(recording.graph) == written and "mtp_runtime.write_latent_kv.default" in written
    assert len(after) <= len(before) - 4 * LAYERS - (LAYERS - 1)


def test_repeats_of_what_is_written_stay() -> None:
    """x is read, written and read again; so is a view of it; and two equal new tensors, one of which is written."""
    x, y = torch.ones(3), torch.ones(3)

    def step() -> list[Tensor]:
        first, view = x * 2, x[1:]
        half = view * 0.5
        x.add_(y)
        fresh, written = torch.zeros(3), torch.zeros(3)
        written.add_(7)
        return [first, x * 2, half, x[1:] * 0.5, fresh, written, y * 3, y * 3]

    before, after, run = simplified(step)
    assert before.count("aten.mul.Tensor") == 6 and after.count("aten.mul.Tensor") == 5
    assert after.count("aten.zeros.default") == 2
    found, wanted = run(), [4, 6, 1, 1.5, 0, 7, 3, 3]
    assert [result[0].item() for result in found] == wanted
    assert x[0] == 3


def test_a_write_whose_result_nobody_takes_stays() -> None:
    cache, slots, a = torch.zeros(4, 3), torch.tensor([2]), torch.ones(1, 3)

    def step() -> Tensor:
        cache[slots] = a
        a.sin()
        return a * 2

    before, after, run = simplified(step)
    assert "aten.sin.default" in before and "aten.sin.default" not in after
    slots.fill_(1)
    run()
    assert cache.sum(1).tolist() == [0, 3, 3, 0]


def test_only_what_depends_on_weights_alone_is_folded() -> None:
    w, v, table, x = weight(1, 2, 3), weight(4, 5, 6), torch.tensor([1.0, 1, 1]), torch.tensor([1.0, 0, 0])

    def step() -> list[Tensor]:
        return [w.exp() + v.exp(), (w * v).sum() * x, w * table, table.cos(), x.sin(), w.view(3, 1).t() @ x]

    before, after, run = simplified(step)
    gone = {"aten.exp.default", "aten.add.Tensor", "aten.sum.default", "aten.view.default", "aten.t.default"}
    assert set(before) - set(after) == gone
    assert sorted(after) == sorted(
        ["aten.mul.Tensor"] * 2 + ["aten.cos.default", "aten.sin.default", "aten.mv.default"]
    )
    first = run()
    for kept in (table, x):
        kept.copy_(torch.tensor([7.0, 8, 9]))
    for found, want in zip(run(), step(), strict=True):
        same(found, want)
    same(run()[0], first[0])


def test_a_weight_that_the_step_writes_is_not_folded() -> None:
    w, v = weight(1, 2, 3), weight(1, 1, 1)

    def step() -> Tensor:
        scaled = w * 2
        w.add_(v * 1)
        return scaled

    _, after, run = simplified(step)
    assert after == ["aten.mul.Tensor", "aten.add_.Tensor"]
    assert [run()[0].item() for _ in range(3)] == [4, 6, 8]
    assert w[0] == 5


def test_a_folded_value_that_the_step_writes_is_made_anew() -> None:
    w, x = weight(1, 2, 3), torch.ones(3)

    def step() -> Tensor:
        total = w * 2
        total += x
        return total

    _, after, run = simplified(step)
    assert after == ["aten.mul.Tensor", "aten.add_.Tensor"]
    assert [run()[0].item() for _ in range(3)] == [3, 3, 3]


def test_views_that_change_nothing_go_and_the_others_stay() -> None:
    x = torch.arange(6.0).view(2, 3)

    def step() -> list[Tensor]:
        plain = x.detach()[:].view(2, 3).expand(2, 3).contiguous()
        return [plain + 0, x.t() + 0, x.view(3, 2) + 0, x[:, :2] + 0, x[1:] + 0, x.view(torch.int32) + 0]

    before, after, run = simplified(step)
    # detach, [:], view, expand, and the first half of [:, :2]
    assert len(before) - len(after) == 5
    for found, want in zip(run(), step(), strict=True):
        same(found, want)


def test_views_of_the_same_shape_elsewhere_in_the_memory_stay() -> None:
    square, row = torch.arange(9.0).view(3, 3), torch.arange(6.0)

    def step() -> list[Tensor]:
        return [square.t() + 0, row[:3].as_strided((3,), (1,), 3) + 0, row[:3].as_strided((3,), (2,)) + 0]

    _, after, run = simplified(step)
    assert after.count("aten.t.default") == 1 and after.count("aten.as_strided.default") == 2
    for found, want in zip(run(), step(), strict=True):
        same(found, want)


def test_a_conjugate_is_a_view_that_changes_its_values() -> None:
    turns = torch.view_as_complex(torch.tensor([[1.0, 2.0], [3.0, -4.0]]))
    _, after, run = simplified(lambda: [turns.conj() * 1, turns.conj().imag + 0])
    assert "aten._conj.default" in after
    turns.mul_(1j)
    wanted = [turns.conj() * 1, turns.conj().imag + 0]
    same(torch.view_as_real(run()[0]), torch.view_as_real(wanted[0].resolve_conj()))
    same(run()[1], wanted[1])


def test_a_constant_is_held_and_not_copied_unless_the_step_writes_it() -> None:
    x = torch.ones(2)

    def step() -> list[Tensor]:
        sums = torch.tensor([0.0, 0.0])
        sums += x
        return [x * torch.tensor([2.0, 3.0]), sums]

    before, after, run = simplified(step)
    assert before.count("aten.lift_fresh_copy.default") == 2 and after.count("aten.lift_fresh_copy.default") == 1
    assert [[part.tolist() for part in run()] for _ in range(2)] == [[[2, 3], [1, 1]]] * 2


def test_arguments_that_python_takes_for_equal_are_not_merged() -> None:
    x, n = torch.tensor([1.5, 2.5]), torch.tensor([1, 2])

    def step() -> list[Tensor]:
        return [n + 1, n + 1.0, n * True, n * 1, x.sum(0, True), x.sum(0, False), x.to(torch.int32), x.to(torch.int64)]

    _, _, run = simplified(step)
    for found, want in zip(run(), step(), strict=True):
        same(found, want)


def test_what_runs_is_in_the_order_of_the_step() -> None:
    x = torch.zeros(3)

    def step() -> list[Tensor]:
        seen = []
        for _ in range(4):
            seen.append(x.view(3) * 2)
            x.add_(1)
        return seen

    _, _, run = simplified(step)
    assert [part[0].item() for part in run()] == [8, 10, 12, 14]


# Operators of an engine, which see more than their arguments


@pytest.fixture
def seen() -> Iterator[list[float]]:
    """`toy_simplify::live` adds a number that each call makes larger, and declares no write."""
    found: list[float] = []
    library = torch.library.Library("toy_simplify", "FRAGMENT")
    library.define("live(Tensor x) -> Tensor")

    def live(x: Tensor) -> Tensor:
        found.append(float(x[0]))
        return x + len(found)

    library.impl("live", live, "CPU")
    yield found
    library._destroy()


def test_an_engines_operators_are_neither_merged_nor_folded_nor_dropped(seen: list[float]) -> None:
    w, x = weight(10, 20), torch.tensor([1.0, 2.0])
    live = torch.ops.toy_simplify.live

    def step() -> list[Tensor]:
        live(x)
        return [live(x), live(x), live(w)]

    _, after, run = simplified(step)
    assert after.count("toy_simplify.live.default") == 4
    seen.clear()
    assert [part[0].item() for part in run()] == [3, 4, 14]
    assert seen == [1, 1, 1, 10]


def test_simplify_changes_its_argument_and_leaves_a_sound_graph() -> None:
    x = torch.ones(3)
    recording = record(lambda: x.view(3).detach() * 2, {})
    untouched = copy.copy(calls(recording))
    assert simplify(recording) is recording
    recording.graph.lint()
    assert calls(recording) != untouched
