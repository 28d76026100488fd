"""Pieces: the operators that an engine keeps opaque run live between the recorded ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="static graphs run in the engine environment")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from toy_mla import (  # noqa: E402
    HEADS,
    HIDDEN,
    LATENT,
    ROPE,
    VOCAB,
    Mix,
    ToyMla,
    attend_segments,
    make_buffers,
    make_mix,
    rotate,
    rows_written,
    same,
    snapshot,
)

from mtp_runtime.graphs.capture import CaptureError  # noqa: E402
from mtp_runtime.graphs.padding import InputError  # noqa: E402
from mtp_runtime.graphs.planner import Graph  # noqa: E402
from mtp_runtime.graphs.static import EagerStep, PiecewiseStep  # noqa: E402

pytestmark = pytest.mark.engine

TOKENS = 8


class Context:
    """An engine's forward context: what its attention reads and no graph sees. live counts the calls."""

    mix: Mix | None = None
    live = 0


def live_attention(nope: Tensor, rope: Tensor, kv_c: Tensor, k_pe: Tensor, layer: int) -> Tensor:
    """Writes and reads the cache for the tokens of the current step; without one (a recording), nothing."""
    out = torch.zeros_like(nope)
    Context.live += 1
    if Context.mix is None:
        return out
    mix, cache = Context.mix, MODEL.caches[layer]
    tokens = sum(mix.counts)
    ends = torch.tensor(mix.counts).cumsum(0).tolist()
    torch.ops.mtp_runtime.write_latent_kv(kv_c[:tokens], k_pe[:tokens], cache, mix.inputs.slot_mapping)
    out[:tokens] = attend_segments(nope[:tokens], rope[:tokens], cache, mix.inputs.block_table, ends, mix.kv)
    return out


class PiecewiseMla(ToyMla):
    """The model with its attention outside."""

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        self.calls += 1
        hidden = self.embedding[input_ids.long()]
        for layer in range(len(self.caches)):
            query, latent, out = self.layers[3 * layer : 3 * layer + 3]
            normed = nn.functional.rms_norm(hidden, (HIDDEN,))
            turn = self.angles[positions]
            q = (normed @ query.t()).unflatten(-1, (HEADS, -1))
            nope, rope = q[..., :LATENT], rotate(q[..., LATENT:], turn[:, None])
            kv_c, k_pe = (normed @ latent.t()).split([LATENT, ROPE], dim=-1)
            attended = torch.ops.toy_pieces.attend(nope, rope, kv_c, rotate(k_pe, turn), layer)
            hidden = hidden + attended.flatten(1) @ out.t()
            gate, up = (hidden @ self.gates[layer].t()).chunk(2, dim=-1)
            hidden += nn.functional.silu(gate) * up
        return hidden


MODEL = PiecewiseMla()


@pytest.fixture(scope="module")
def pieces() -> Iterator[PiecewiseStep]:
    library = torch.library.Library("toy_pieces", "FRAGMENT")
    library.define("attend(Tensor nope, Tensor rope, Tensor kv_c, Tensor k_pe, int layer) -> Tensor")
    library.impl("attend", live_attention, "CPU")
    step = PiecewiseStep(MODEL, tensors())
    step.capture()
    yield step
    library._destroy()


def tensors() -> dict[str, Tensor]:
    return {"input_ids": torch.zeros(TOKENS, dtype=torch.int32), "positions": torch.zeros(TOKENS, dtype=torch.int64)}


def run(pieces: PiecewiseStep, mix: Mix, seed: int) -> Tensor:
    MODEL.fill(seed)
    Context.mix = mix
    try:
        out: Tensor = pieces.replay(input_ids=mix.inputs.input_ids, positions=mix.inputs.positions)
    finally:
        Context.mix = None
    return out


@st.composite
def steps(draw: st.DrawFn) -> Mix:
    """Up to TOKENS tokens, of one request or of many."""
    counts: list[int] = []
    while sum(counts) < TOKENS and draw(st.booleans() if counts else st.just(True)):
        counts.append(draw(st.integers(1, TOKENS - sum(counts))))
    contexts = draw(st.lists(st.integers(0, 12), min_size=len(counts), max_size=len(counts)))
    return make_mix(counts, contexts, draw(st.integers(0, 999)))


@given(mix=steps(), seed=st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_any_requests_run_as_in_the_model_itself(pieces: PiecewiseStep, mix: Mix, seed: int) -> None:
    """Tokens bind the graph, requests and lengths do not: the live operator sees those of the step that runs."""
    pieces.tensors["input_ids"].random_(0, VOCAB)
    pieces.tensors["positions"].random_(0, 20)
    calls, hits, live = MODEL.calls, pieces.hits, Context.live
    out = run(pieces, mix, seed)
    caches, tokens = snapshot(MODEL), sum(mix.counts)
    assert (MODEL.calls, pieces.hits, Context.live) == (calls, hits + 1, live + len(MODEL.caches))
    assert out.shape == (TOKENS, HIDDEN) and out.isfinite().all()

    whole = EagerStep(REFERENCE, make_buffers(Graph(2 * len(mix.counts), TOKENS)))
    REFERENCE.fill(seed)
    before = snapshot(REFERENCE)
    wanted = whole.replay(mix.plan(whole.graph), mix.inputs)
    torch.testing.assert_close(out[:tokens], wanted[:tokens], rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(caches, REFERENCE.caches, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert rows_written(before, caches) == set(mix.inputs.slot_mapping.tolist())


REFERENCE = ToyMla()


def test_rows_behind_the_step_are_cleared(pieces: PiecewiseStep) -> None:
    mix = make_mix([2, 1], [5, 4])
    wanted = run(pieces, mix, 3)
    for tensor in pieces.tensors.values():
        tensor.fill_(11)
    same(run(pieces, mix, 3), wanted)
    assert [tensor[3:].any().item() for tensor in pieces.tensors.values()] == [False, False]
    assert pieces.tensors["positions"][:3].tolist() == [5, 6, 4]


def test_the_opaque_operators_stay_in_the_graph(pieces: PiecewiseStep) -> None:
    assert pieces.operators.count("toy_pieces.attend.default") == len(MODEL.caches)
    # Each layer's own; the look-up of rotary angles is shared.
    assert pieces.operators.count("aten.index.Tensor") == 2


def test_the_live_operator_sees_what_is_there_when_it_runs(pieces: PiecewiseStep) -> None:
    """The same inputs with another context are another step."""
    mix = make_mix([2, 1], [5, 4])
    first = run(pieces, mix, 3)
    longer = Mix(mix.counts, [mix.kv[0] - 1, mix.kv[1]], mix.inputs)
    assert not torch.equal(run(pieces, longer, 3)[:2], first[:2])
    same(run(pieces, longer, 3)[2], first[2])
    assert not torch.equal(run(pieces, mix, 4)[:3], first[:3])


WRONG = {
    "more tokens than the graph has": ({"input_ids": torch.zeros(9, dtype=torch.int32)}, "input_ids: torch.int32"),
    "another type": ({"input_ids": torch.zeros(3, dtype=torch.int64)}, "input_ids: torch.int64"),
    "a dimension more": ({"positions": torch.zeros(3, 1, dtype=torch.int64)}, "positions: torch.int64"),
    "a number": ({"positions": torch.tensor(3)}, "positions: torch.int64"),
    "other rows": ({"positions": torch.zeros(4, dtype=torch.int64)}, "input_ids, positions: 3, 4 rows"),
    "a stranger": ({"hidden_states": torch.zeros(3)}, "hidden_states: the graph takes input_ids, positions"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_by_name(pieces: PiecewiseStep, name: str) -> None:
    change, says = WRONG[name]
    good = {"input_ids": torch.ones(3, dtype=torch.int32), "positions": torch.ones(3, dtype=torch.int64)}
    pieces.replay(**good)
    before, hits = {name: tensor.clone() for name, tensor in pieces.tensors.items()}, pieces.hits
    with pytest.raises(InputError, match=says):
        pieces.replay(**good | change)
    with pytest.raises(InputError, match="input_ids: the graph takes input_ids, positions"):
        pieces.replay(input_ids=good["input_ids"])
    for name, tensor in pieces.tensors.items():
        same(tensor, before[name])
    assert pieces.hits == hits


def test_before_the_capture_nothing_runs_and_a_second_is_an_error(pieces: PiecewiseStep) -> None:
    step = PiecewiseStep(MODEL, tensors())
    with pytest.raises(CaptureError, match="not captured yet"):
        step.replay(**tensors())
    with pytest.raises(CaptureError, match="not captured yet"):
        _ = step.operators
    step.capture()
    with pytest.raises(CaptureError, match="captured already"):
        step.capture()
    assert step.operators == pieces.operators


def test_a_piece_that_looks_at_values_is_refused() -> None:
    step = PiecewiseStep(lambda input_ids, positions: input_ids[positions > 0], tensors())
    with pytest.raises(CaptureError, match=r"aten\.index\.Tensor"):
        step.capture()
