"""Nothing in verification waits for a device or grows with the batch: what static graphs and busy devices need.

Shapes follow from shapes alone (run on fake tensors, which have no values), no value travels between host and device
(run on the meta device, every operation watched), and no Python loop goes over requests or positions (read from the
source, and the number of operations counted).
"""

from __future__ import annotations

import ast
import collections
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="verification tests run in the engine environment")

from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from mtp_runtime.verify import (  # noqa: E402
    DraftBatch,
    Noise,
    batch,
    block,
    chunks,
    exact,
    keyed,
    recover,
    strategy,
    to_rows,
    tokenwise,
    verify_block,
    verify_exact,
    verify_greedy,
    verify_mixed,
    verify_tokenwise,
)

pytestmark = pytest.mark.engine


class Inputs:
    """Tensors of the right shapes for `size` requests of at most `width` drafts; the values are never read."""

    def __init__(self, device: str, size: int, width: int, total: int, vocab: int = 1000) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        rows = total + size
        tokens, cumulative = empty(total, dtype=torch.int32), empty(size, dtype=torch.int32)
        self.batch = DraftBatch(tokens, cumulative, width)
        self.p, self.q = empty(rows, vocab), empty(total, vocab)
        self.noise = Noise(empty(total, dtype=torch.float64), empty(size, dtype=torch.float64))
        self.chosen, self.key = empty(rows, dtype=torch.int64), empty(rows, dtype=torch.int64)
        self.exact, self.values = empty(size, dtype=torch.bool), empty(size)


CALLS: dict[str, Callable[[Inputs], Any]] = {
    "exact": lambda i: verify_exact(i.batch, i.chosen),
    "greedy": lambda i: verify_greedy(i.batch, i.p),
    "tokenwise-one-hot": lambda i: verify_tokenwise(i.batch, i.p, None, i.noise),
    "tokenwise": lambda i: verify_tokenwise(i.batch, i.p, i.q, i.noise),
    "block-one-hot": lambda i: verify_block(i.batch, i.p, None, i.noise),
    "block": lambda i: verify_block(i.batch, i.p, i.q, i.noise),
    "mixed-tokenwise": lambda i: verify_mixed(i.batch, i.chosen, i.exact, i.p, None, i.noise, verify_tokenwise),
    "mixed-block": lambda i: verify_mixed(i.batch, i.chosen, i.exact, i.p, i.q, i.noise, verify_block),
    "race": lambda i: keyed.race(i.p, i.key, i.key),
    "uniform": lambda i: keyed.uniform(i.key, i.key, keyed.ACCEPT),
    "to-rows": lambda i: to_rows(i.batch, i.values),
}
SHAPES = {"even": (3, 2, 6), "ragged": (3, 2, 4), "wide": (3, 15, 4), "no-drafts": (3, 2, 0), "empty": (0, 2, 0)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("call", [*CALLS, "drawn"])
def test_shapes_follow_from_shapes(call: str, shape: str) -> None:
    """A fake tensor refuses .item(), nonzero and boolean masks, which depend on values."""
    with FakeTensorMode(allow_non_fake_inputs=False):
        inputs = Inputs("cpu", *SHAPES[shape])
        if call == "drawn":
            Noise.drawn(inputs.batch, torch.Generator())
        else:
            CALLS[call](inputs)


def test_a_shape_that_depends_on_values_is_found() -> None:
    with FakeTensorMode(allow_non_fake_inputs=False):
        inputs = Inputs("cpu", *SHAPES["ragged"])
        with pytest.raises(DynamicOutputShapeException):
            inputs.p[inputs.chosen >= 0]


class Watch(TorchDispatchMode):
    """Counts operations, and names those that move a value between host and device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.copies: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        host = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.device.type == "cpu"]
        read = func.overloadpacket == torch.ops.aten._local_scalar_dense
        if read or any(x.dim() for x in host) or (host and func.overloadpacket == torch.ops.aten._to_copy):
            self.copies.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("call", CALLS)
def test_nothing_travels_between_host_and_device(call: str, shape: str) -> None:
    """A copy from the host's memory makes the host wait."""
    inputs = Inputs("meta", *SHAPES[shape])
    with Watch() as watch:
        CALLS[call](inputs)
    assert watch.copies == []


@pytest.mark.parametrize("count", [1, 3])
def test_a_copy_from_the_host_is_found(count: int) -> None:
    with Watch() as watch:
        torch.arange(count).to("meta")
    assert watch.copies


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("even", [True, False])
def test_operations_do_not_grow_with_requests_or_drafts(call: str, even: bool) -> None:
    counts = set()
    for size, width in ((2, 2), (9, 2), (2, 15), (40, 7)):
        inputs = Inputs("meta", size, width, size * width - (not even), vocab=recover.TILE)
        with Watch() as watch:
            CALLS[call](inputs)
        counts.add(watch.count)
    assert len(counts) == 1


# The source.

FAST = [batch, block, chunks, exact, keyed, recover, strategy, tokenwise]
WAITING = {"item", "tolist", "cpu", "numpy", "nonzero", "unique", "masked_select", "argwhere", "synchronize"}
MADE = {"tensor", "as_tensor", "from_numpy", "scalar_tensor"}
LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def loops(module: ModuleType) -> list[str]:
    """The functions of a module that loop."""
    found = []
    for function in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(function, ast.FunctionDef) and any(isinstance(node, LOOPS) for node in ast.walk(function)):
            found.append(function.name)
    return found


@pytest.mark.parametrize("module", FAST, ids=lambda module: module.__name__.rpartition(".")[2])
def test_no_loop_goes_over_requests_or_positions(module: ModuleType) -> None:
    """What remains goes over pieces of the vocabulary, whose number its size bounds, and over the hash's two words and
    two rounds."""
    allowed = {recover: ["residual_tiles"], chunks: ["chunks"], keyed: ["race", "_mix32_"]}
    assert loops(module) == allowed.get(module, [])


@pytest.mark.parametrize("module", FAST, ids=lambda module: module.__name__.rpartition(".")[2])
def test_nothing_in_the_source_waits_for_values(module: ModuleType) -> None:
    """Tensors of Python numbers (which hide from the watch above) are made where the host counts drafts only."""
    used = collections.Counter(
        node.attr for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Attribute)
    )
    assert [name for name in used if name in WAITING] == []
    assert sum(used[name] for name in MADE) == (1 if module is batch else 0)
    assert module is not batch or "torch.tensor" in inspect.getsource(DraftBatch.of)


@pytest.mark.parametrize("rows", [1, 3, 100, 5000])
@pytest.mark.parametrize("vocab", [7, 512, 129_280])
def test_pieces_cover_the_vocabulary_and_stay_few(rows: int, vocab: int) -> None:
    """Each at most CHUNK elements or one tile a row wide; none cuts a tile."""
    pieces = list(chunks.chunks(rows, vocab, recover.TILE))
    assert [piece.start for piece in pieces] == [0, *[piece.stop for piece in pieces[:-1]]]
    assert pieces[-1].stop == vocab
    assert all(piece.start % recover.TILE == 0 for piece in pieces)
    widest = max(chunks.CHUNK // rows, recover.TILE)
    assert all(piece.stop - piece.start <= widest for piece in pieces)
    assert len(pieces) <= -(-vocab // recover.TILE)


# The caller's surroundings.


def test_results_do_not_depend_on_the_default_dtype() -> None:
    """Engines set it to bfloat16 while they build a model."""

    def run() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        out = []
        for counts in ([3, 3, 3], [3, 0, 2]):
            total = sum(counts)
            drafts = DraftBatch.of(torch.randint(-1, 700, (total,), generator=generator), counts)
            p = torch.rand(total + 3, 700, generator=generator, dtype=torch.float32).pow(20)
            q = p[:total] / p[:total].sum(1, keepdim=True)
            p = p / p.sum(1, keepdim=True)
            noise = Noise.drawn(drafts, generator)
            for verify in (verify_tokenwise, verify_block):
                for probs in (None, q):
                    out.append(verify(drafts, p.clone(), probs, noise).tokens)
            out.append(keyed.race(p, torch.arange(total + 3), torch.arange(total + 3)))
        return out

    wanted = run()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = run()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
