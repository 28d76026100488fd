"""TND attention: against plain attention token by token in float64, bit for bit where that is promised, and refusals.

Every cache row that no request may read is NaN, every table entry that none may read is any number.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="attention tests run in the engine environment")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from mtp_runtime.attention import native, tnd  # noqa: E402

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[3]
# Means of numbers up to about 5, weighted by logits up to about 5 that are sums of 576 products. Larger logits have
# larger errors: tolerance grows with the scale.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}


def operator(*tensors: torch.Tensor, **named: Any) -> torch.Tensor:
    """The operator with the kernel that `load` gives it here."""
    native.load()
    return torch.ops.mtp_runtime.fused_infer_attention_score(*tensors, **named)


KERNELS = pytest.mark.parametrize("kernel", [tnd.attend, operator])
needs_native = pytest.mark.usefixtures("compiled")


@pytest.fixture(scope="module")
def compiled() -> None:
    """Skips where there is no C++ compiler."""
    if not native.available():
        pytest.skip(native.why())


@dataclass
class Call:
    """A call, and the segments (tokens, KV length) it was made from."""

    segments: list[tuple[int, int]]
    tensors: dict[str, torch.Tensor]
    numbers: dict[str, Any]

    def run(self, kernel: Callable[..., torch.Tensor], **changes: Any) -> torch.Tensor:
        """The kernel's answer, with some arguments replaced."""
        named = {**self.tensors, **self.numbers, **changes}
        return kernel(named.pop("query"), named.pop("key"), named.pop("value"), **named)

    def slots(self) -> Iterator[tuple[int, int, int]]:
        """First token, tokens and KV length of every slot."""
        begin = 0
        for count, length in self.segments:
            yield begin, count, length
            begin += count

    def plain(self) -> torch.Tensor:
        """Token by token, in float64."""
        t, size = {name: part.double() for name, part in self.tensors.items()}, self.numbers["block_size"]
        q = torch.cat((t["query"], t["query_rope"]), -1)
        cache = torch.cat((t["key"], t["key_rope"]), -1).flatten(0, 1)
        out = torch.zeros_like(t["query"])
        for slot, (begin, count, length) in enumerate(self.slots()):
            blocks = self.tensors["block_table"][slot, : -(-length // size)].long()
            entries = cache[(blocks[:, None] * size + torch.arange(size)).flatten()[:length]]
            for j in range(count):
                seen = entries[: max(0, length - count + 1 + j)]
                if len(seen):
                    logits = self.numbers["scale"] * (q[begin + j] @ seen.T)
                    out[begin + j] = logits.softmax(-1) @ seen[:, : tnd.LATENT]
        return out


def make(
    segments: list[tuple[int, int]],
    heads: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    block: int = 16,
    scale: float = 0.05,
) -> Call:
    """Random segments in a poisoned cache: strided queries, permuted blocks, rubbish in what is not used."""
    generator = torch.Generator().manual_seed(seed)
    tokens, slots = sum(count for count, _ in segments), len(segments)
    pages = [-(-length // block) for _, length in segments]
    columns = max(pages, default=0) + 2
    free = (torch.randperm(sum(pages) + 3, generator=generator)).int()
    table = torch.randint(-(2**31), 2**31 - 1, (slots, columns), generator=generator, dtype=torch.int32)
    cache = torch.full((len(free), block, tnd.LATENT + tnd.ROPE), torch.nan, dtype=dtype)
    for slot, (_, length) in enumerate(segments):
        ids, free = free[: pages[slot]], free[pages[slot] :]
        table[slot, : len(ids)] = ids
        rows = torch.randn(length, cache.shape[2], generator=generator, dtype=torch.float64).to(dtype)
        for page, block_id in enumerate(ids.tolist()):
            part = rows[page * block : (page + 1) * block]
            cache[block_id, : len(part)] = part
    # As the engine has them: the latent part comes out of a batched product by heads, the other out of a wider tensor.
    query = torch.randn(heads, tokens, tnd.LATENT, generator=generator, dtype=torch.float64).to(dtype).transpose(0, 1)
    wide = torch.randn(tokens, heads + 1, tnd.ROPE + 24, generator=generator, dtype=torch.float64).to(dtype)
    ends = torch.tensor([count for count, _ in segments], dtype=torch.int64).cumsum(0).tolist()
    latents = cache[..., : tnd.LATENT]
    return Call(
        segments,
        {
            "query": query,
            "query_rope": wide[:, :heads, 8 : 8 + tnd.ROPE],
            "key": latents,
            "value": latents,
            "key_rope": cache[..., tnd.LATENT :],
            "block_table": table,
        },
        {
            "actual_seq_lengths": ends,
            "actual_seq_lengths_kv": [length for _, length in segments],
            "num_heads": heads,
            "scale": scale,
            "block_size": block,
        },
    )


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Zeros of either sign apart."""
    return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


# Lengths that end within, at and after a block, a tile of the C++ kernel (24) and a chunk (240).
LENGTHS = st.one_of(st.integers(0, 40), st.sampled_from([47, 48, 49, 239, 240, 241, 300, 479, 480, 481, 500]))
SEGMENTS = st.lists(st.tuples(st.integers(1, 16), LENGTHS), min_size=1, max_size=5)


@KERNELS
@given(SEGMENTS, st.sampled_from([1, 2, 16]), st.sampled_from([0.05, 0.3]), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_agrees_with_attention_token_by_token(
    kernel: Callable[..., torch.Tensor], segments: list[tuple[int, int]], heads: int, scale: float, seed: int
) -> None:
    """Ragged segments, empty slots, more tokens than entries."""
    call = make(segments, heads, seed, scale=scale)
    out = call.run(kernel)
    assert out.dtype == torch.float32 and out.is_contiguous()
    torch.testing.assert_close(out.double(), call.plain(), atol=TOLERANCE[torch.float32] * scale / 0.05, rtol=0)


@KERNELS
def test_a_token_without_entries_yields_zeros(kernel: Callable[..., torch.Tensor]) -> None:
    """Slack slots of a graph (10 tokens, KV 0), and the first tokens of a segment longer than its KV."""
    call = make([(1, 33), (10, 0), (4, 2), (0, 0), (0, 7), (16, 0)], heads=2)
    out = call.run(kernel)
    assert out[1:11].count_nonzero() == out[11:13].count_nonzero() == out[15:].count_nonzero() == 0
    torch.testing.assert_close(out.double(), call.plain(), atol=TOLERANCE[torch.float32], rtol=0)
    assert make([(3, 0), (2, 0)], heads=2).run(kernel).count_nonzero() == 0
    assert make([], heads=2).run(kernel).shape == (0, 2, tnd.LATENT)
    assert make([(0, 5)], heads=2).run(kernel).shape == (0, 2, tnd.LATENT)


@KERNELS
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("block", [16, 5, 128])
def test_types_and_block_sizes(kernel: Callable[..., torch.Tensor], dtype: torch.dtype, block: int) -> None:
    """Half types are computed in float32 and rounded once; float64 is for the form in torch alone."""
    call = make([(3, 300), (1, 17), (9, 0), (16, 260)], heads=2, dtype=dtype, block=block)
    if dtype == torch.float64 and kernel is operator:
        with pytest.raises(ValueError, match=r"^query: must be float32, bfloat16 or float16"):
            call.run(kernel)
        return
    out = call.run(kernel)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), call.plain(), atol=TOLERANCE[dtype], rtol=0)


@KERNELS
def test_long_segments_and_many_heads(kernel: Callable[..., torch.Tensor]) -> None:
    """More rows than the C++ kernel takes at once."""
    call = make([(40, 70), (3, 3)], heads=16)
    torch.testing.assert_close(call.run(kernel).double(), call.plain(), atol=TOLERANCE[torch.float32], rtol=0)


@KERNELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_may_be_another_tensor(kernel: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    """Twice the keys yields twice the answer."""
    call = make([(3, 300), (1, 17)], heads=2, dtype=dtype)
    twice = torch.zeros(len(call.tensors["key"]), 16, 520, dtype=dtype)[..., 4:516].copy_(call.tensors["key"] * 2)
    assert torch.equal(call.run(kernel, value=twice), call.run(kernel) * 2)


@KERNELS
def test_a_fault_stays_with_its_tokens(kernel: Callable[..., torch.Tensor]) -> None:
    """NaN in an entry: every token that sees it is NaN, no other request is, and in C++ no earlier token either."""
    call = make([(4, 50), (4, 50)], heads=2)
    block = call.tensors["block_table"][0, 48 // 16]
    call.tensors["key"][block, 48 % 16, 7] = torch.nan
    out = call.run(kernel)
    assert out[2:4].isnan().any(-1).all()
    if kernel is operator and native.available():
        assert not out[:2].isnan().any()
    assert not out[4:].isnan().any()


@needs_native
@given(SEGMENTS, st.sampled_from([1, 2, 3, 16]), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_a_token_is_the_same_in_any_company(segments: list[tuple[int, int]], heads: int, seed: int) -> None:
    """Bit for bit: its request alone, its token alone, its head alone, one block of entries at a time."""
    call = make(segments, heads, seed)
    out = call.run(operator)
    for slot, (begin, count, length) in enumerate(call.slots()):
        part = slice(begin, begin + count)
        table = call.tensors["block_table"][slot : slot + 1]

        def alone(tokens: slice, length: int, heads: slice, table: torch.Tensor = table) -> torch.Tensor:
            query, rope = (call.tensors[name][tokens, heads] for name in ("query", "query_rope"))
            return call.run(
                operator,
                query=query,
                query_rope=rope,
                block_table=table,
                actual_seq_lengths=[len(query)],
                actual_seq_lengths_kv=[length],
                num_heads=query.shape[1],
            )

        assert same_bits(alone(part, length, slice(None)), out[part])
        for j in {0, count // 2, count - 1}:
            token = slice(begin + j, begin + j + 1)
            assert same_bits(alone(token, max(0, length - count + 1 + j), slice(None)), out[token])
        assert same_bits(alone(part, length, slice(heads - 1, heads)), out[part, heads - 1 :])


@needs_native
@pytest.mark.parametrize("segments", [[(1, 2000)], [(4, 1999)], [(4, 900), (1, 3), (2, 0)], [(2, 50)] * 9])
def test_threads_do_not_change_a_bit(segments: list[tuple[int, int]]) -> None:
    """Few slots are shared by threads, many are dealt out to them."""
    call = make(segments, heads=2)
    before = torch.get_num_threads()
    answers = []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            answers.append(call.run(operator))
    finally:
        torch.set_num_threads(before)
    assert same_bits(answers[0], answers[1]) and same_bits(answers[0], answers[2])


class Counter(TorchDispatchMode):
    """Counts operators that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += not func.is_view
        return func(*args, **(kwargs or {}))


def test_operators_do_not_grow_with_the_batch() -> None:
    """The form in torch is a batched one."""
    counts = []
    for batch in (1, 4, 32):
        call = make([(1 + i % 4, 20 + i) for i in range(batch)], heads=2)
        with Counter() as counter:
            call.run(tnd.attend)
        counts.append(counter.seen)
    assert counts[0] == counts[1] == counts[2] < 60


WRONG: dict[str, tuple[str, Callable[[Call], dict[str, Any]]]] = {
    "layout": ("input_layout", lambda c: {"input_layout": "BSND"}),
    "sparse mode": ("sparse_mode", lambda c: {"sparse_mode": 0}),
    "KV heads": ("num_key_value_heads", lambda c: {"num_key_value_heads": 2}),
    "heads": ("num_heads", lambda c: {"num_heads": 3}),
    "block size": ("block_size", lambda c: {"block_size": 128}),
    "query type": ("query", lambda c: {"query": c.tensors["query"].int()}),
    "query rank": ("query", lambda c: {"query": c.tensors["query"][0]}),
    "rope type": ("query_rope", lambda c: {"query_rope": c.tensors["query_rope"].half()}),
    "rope tokens": ("query_rope", lambda c: {"query_rope": c.tensors["query_rope"][1:]}),
    "key type": ("key", lambda c: dict.fromkeys(("key", "value"), c.tensors["key"].half())),
    "key size": ("key", lambda c: dict.fromkeys(("key", "value"), c.tensors["key"][..., :100])),
    "key rope type": ("key_rope", lambda c: {"key_rope": c.tensors["key_rope"].half()}),
    "key rope blocks": ("key_rope", lambda c: {"key_rope": c.tensors["key_rope"][1:]}),
    "value blocks": ("value", lambda c: {"value": c.tensors["key"][1:]}),
    "value type": ("value", lambda c: {"value": c.tensors["key"].half()}),
    "mask": ("atten_mask", lambda c: {"atten_mask": torch.ones(4, 4, dtype=torch.bool)}),
    "table type": ("block_table", lambda c: {"block_table": c.tensors["block_table"].long()}),
    "table rows": ("block_table", lambda c: {"block_table": c.tensors["block_table"][1:]}),
    "id below": (
        "block_table",
        lambda c: {"block_table": c.tensors["block_table"].index_fill(1, torch.tensor([1]), -1)},
    ),
    "id above": (
        "block_table",
        lambda c: {"block_table": c.tensors["block_table"].index_fill(1, torch.tensor([1]), 99)},
    ),
    "falling": ("actual_seq_lengths", lambda c: {"actual_seq_lengths": [4, 3, 6]}),
    "negative": ("actual_seq_lengths", lambda c: {"actual_seq_lengths": [-1, 3, 6]}),
    "short of T": ("actual_seq_lengths", lambda c: {"actual_seq_lengths": [2, 3, 5]}),
    "beyond T": ("actual_seq_lengths", lambda c: {"actual_seq_lengths": [2, 3, 7]}),
    "lists differ": ("actual_seq_lengths_kv", lambda c: {"actual_seq_lengths_kv": [20, 30]}),
    "KV negative": ("actual_seq_lengths_kv", lambda c: {"actual_seq_lengths_kv": [20, -1, 40]}),
    "KV beyond the table": ("actual_seq_lengths_kv", lambda c: {"actual_seq_lengths_kv": [20, 30, 81]}),
}


@KERNELS
@pytest.mark.parametrize("fault", WRONG)
def test_refuses_by_name(kernel: Callable[..., torch.Tensor], fault: str) -> None:
    """What does not fit is refused by the argument's name, before anything is read."""
    call = make([(2, 20), (1, 30), (3, 40)], heads=2)
    name, changes = WRONG[fault]
    with pytest.raises(ValueError, match=rf"^{name}: "):
        call.run(kernel, **changes(call))


def test_operator_refuses_scattered_dimensions_and_other_sizes() -> None:
    """Whichever kernel it runs."""
    call = make([(2, 20)], heads=2)
    with pytest.raises(ValueError, match=r"^query: the last dimension must be contiguous"):
        call.run(operator, query=call.tensors["query"].repeat_interleave(2, dim=-1)[..., ::2])
    with pytest.raises(ValueError, match=r"^query_rope: must be"):
        call.run(operator, query_rope=call.tensors["query_rope"][..., :32], key_rope=call.tensors["key_rope"][..., :32])


def test_schema_and_shapes() -> None:
    """Names of torch_npu's operator, and what compilers and fake tensors ask of an operator."""
    native.load()
    call = make([(2, 20), (1, 30)], heads=2)
    tensors = {name: part.contiguous() for name, part in call.tensors.items()}
    tensors["value"] = tensors["key"] = tensors["key"].nan_to_num()
    positional = tuple(tensors.pop(name) for name in ("query", "key", "value"))
    named = {**tensors, "key_rope": tensors["key_rope"].nan_to_num(), **call.numbers}
    torch.library.opcheck(torch.ops.mtp_runtime.fused_infer_attention_score.default, positional, named)
    cache = torch.zeros(3, 16, 576)
    latents = (torch.randn(2, 512), torch.randn(2, 1, 64), cache, torch.tensor([5, -1]))
    torch.library.opcheck(torch.ops.mtp_runtime.write_latent_kv.default, latents)
    for name, schema in native.SCHEMAS.items():
        assert str(getattr(torch.ops.mtp_runtime, name).default._schema) == f"mtp_runtime::{name}{schema}"


def write_operator(*arguments: torch.Tensor) -> None:
    native.load()
    torch.ops.mtp_runtime.write_latent_kv(*arguments)


WRITERS = pytest.mark.parametrize("write", [tnd.write_latent_kv, write_operator])


@WRITERS
@given(st.lists(st.integers(-2, 47), max_size=8, unique_by=lambda slot: slot if slot >= 0 else object()), st.booleans())
@settings(max_examples=60, deadline=None)
def test_writes_rows_that_have_a_slot(write: Callable[..., None], slots: list[int], short: bool) -> None:
    """Every other row of the cache stays as it is, NaN included; the cache may be a layer's part of a tensor."""
    layers = torch.full((3, 2, 16, 576), torch.nan)
    cache, wanted = layers[:, 1], layers[:, 1].clone()
    kv_c, k_pe = torch.randn(len(slots), 600)[:, 8:520], torch.randn(len(slots), 1, 64)
    for token, slot in enumerate(slots):
        if slot >= 0:
            wanted[slot // 16, slot % 16] = torch.cat((kv_c[token], k_pe[token, 0]))
    mapping = torch.tensor(slots, dtype=torch.int32 if short else torch.int64)
    write(kv_c, k_pe if short else k_pe[:, 0], cache, mapping)
    assert same_bits(cache, wanted)
    assert layers[:, 0].isnan().all()


@WRITERS
def test_write_refuses_by_name(write: Callable[..., None]) -> None:
    """Rows that do not exist, other types and other shapes."""
    kv_c, k_pe, cache, slots = torch.randn(2, 512), torch.randn(2, 64), torch.zeros(3, 16, 576), torch.tensor([0, 1])
    with pytest.raises(IndexError):
        write(kv_c, k_pe, cache, torch.tensor([0, 48]))
    wrong = {
        "kv_c": (kv_c.half(), k_pe, cache, slots),
        "k_pe": (kv_c, k_pe[:1], cache, slots),
        "cache": (kv_c, k_pe[:, :32].contiguous(), cache, slots),
        "slot_mapping": (kv_c, k_pe, cache, slots[:1]),
    }
    for name, arguments in wrong.items():
        with pytest.raises(ValueError, match=rf"^{name}: "):
            write(*arguments)
    with pytest.raises(ValueError, match=r"^slot_mapping: "):
        write(kv_c, k_pe, cache, slots.double())


def test_write_in_torch_looks_at_no_value() -> None:
    """Fake tensors have none: a branch or a copy to the host would raise."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        tnd.write_latent_kv(
            torch.empty(2, 512), torch.empty(2, 1, 64), torch.empty(3, 16, 576), torch.empty(2, dtype=torch.int64)
        )


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


FALLEN_BACK = """
import torch
from mtp_runtime.attention import native
assert not native.load() and not native.available(), native.why()
print(native.why())
cache, query = torch.randn(2, 16, 576), torch.randn(3, 2, 576)
out = torch.ops.mtp_runtime.fused_infer_attention_score(
    query[..., :512], cache[..., :512], cache[..., :512], query_rope=query[..., 512:], key_rope=cache[..., 512:],
    actual_seq_lengths=[3], actual_seq_lengths_kv=[20], block_table=torch.tensor([[1, 0]], dtype=torch.int32),
    num_heads=2, scale=0.05)
assert out.shape == (3, 2, 512)
torch.ops.mtp_runtime.write_latent_kv(query[:, 0, :512], query[:, 0, 512:], cache, torch.tensor([3, -1, 4]))
assert torch.equal(cache[0, 3], query[0, 0]) and torch.equal(cache[0, 4], query[2, 0])
"""


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("exit 127", "no C++ compiler"), ('[ "$1" = --version ] || { echo "x.cpp:1: error: boom" >&2; exit 1; }', "boom")],
)
def test_without_compiler_the_operators_run_in_torch(tmp_path: Path, compiler: str, reason: str) -> None:
    """Same operators, one line in the log that says why."""
    done = run_python(FALLEN_BACK, CXX=script(tmp_path / "cxx", compiler), MTP_KERNEL_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert reason in done.stdout
    lines = [line for line in done.stderr.splitlines() if "TND attention" in line]
    assert len(lines) == 1 and reason in lines[0]


@needs_native
def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    """The compiler here is slow and hands out what the real one made; a library once built needs no compiler."""
    cache, built = tmp_path / "cache", native.why().removeprefix("C++: ")
    compiler = script(
        tmp_path / "cxx",
        f'[ "$1" = --version ] && echo slow && exit\necho run >> {tmp_path}/runs\nsleep 2\n'
        f'while [ "$1" != -o ]; do shift; done\ncp {built} "$2"',
    )
    environment = {**os.environ, "CXX": compiler, "MTP_KERNEL_CACHE": str(cache)}
    command = [sys.executable, "-m", "mtp_runtime.attention.native"]
    started = [
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    (library,) = cache.glob("*.so")
    assert all(str(library) in line for line in said)
    assert (tmp_path / "runs").read_text() == "run\n"
    later = run_python(
        "from mtp_runtime.attention import native; assert native.load(); print(native.why())",
        CXX="/nonexistent",
        MTP_KERNEL_CACHE=str(cache),
    )
    assert str(library) in later.stdout, later.stderr
