"""The engine's attention call in TND layout: an NPU's call to the letter, checked before the kernel gets it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the engine environment")
pytest.importorskip("vllm", reason="needs the engine environment")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from mtp_runtime.adapters.settings import settings  # noqa: E402
from mtp_runtime.adapters.vllm_cpu import attention  # noqa: E402
from mtp_runtime.adapters.vllm_cpu.attention import MtpMLAImpl, SegmentsBuilder, SegmentsMetadata  # noqa: E402
from mtp_runtime.attention import tnd  # noqa: E402
from mtp_runtime.attention.call import FiaCall  # noqa: E402
from mtp_runtime.attention.constraints import FiaConstraintError  # noqa: E402
from mtp_runtime.attention.mask import causal_mask  # noqa: E402
from mtp_runtime.graphs.capture import record  # noqa: E402

pytestmark = pytest.mark.engine

HEADS, BLOCK, BLOCKS, SCALE = 2, 16, 12, 0.1


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in an engine process that has just started."""
    for name in ("MTP_DEBUG", "MTP_ATTENTION", "MTP_RUNTIME_FAULT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(MtpMLAImpl, "_checked", set())
    settings.cache_clear()
    yield
    settings.cache_clear()


@pytest.fixture
def debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTP_DEBUG", "1")


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[FiaCall]:
    """The calls that are checked."""
    seen: list[FiaCall] = []
    real = attention.enforce

    def enforce(call: FiaCall, **where: Any) -> None:
        assert where == {"engine": "cpu"}  # the strictest rules but for dtypes
        seen.append(call)
        real(call, **where)

    monkeypatch.setattr(attention, "enforce", enforce)
    return seen


def layer(heads: int = HEADS) -> MtpMLAImpl:
    """An attention layer as vLLM makes it."""
    general = {"kv_cache_dtype": "auto", "attn_type": "decoder", "kv_sharing_target_layer_name": None}
    absent = dict.fromkeys(("alibi_slopes", "sliding_window", "logits_soft_cap", "q_lora_rank", "kv_b_proj"))
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "qk_head_dim": 192}
    return MtpMLAImpl(heads, 576, SCALE, num_kv_heads=1, v_head_dim=128, **general, **absent, **sizes)


def inputs(tokens: int, heads: int = HEADS, dtype: torch.dtype = torch.float32) -> tuple[Any, torch.Tensor]:
    """Query and its rope, and a cache."""
    random = torch.Generator().manual_seed(0)
    query = torch.randn(tokens, heads, 576, generator=random).to(dtype)
    return query.split([512, 64], dim=-1), torch.randn(BLOCKS, BLOCK, 576, generator=random).to(dtype)


def metadata(ends: list[int], kv: list[int], columns: int = 4) -> Any:
    table = torch.arange(len(kv) * columns, dtype=torch.int32).view(-1, columns) % BLOCKS
    lists = {"actual_seq_lengths": ends, "actual_seq_lengths_kv": kv}
    return SimpleNamespace(decode=SegmentsMetadata(table, torch.tensor(kv).int(), None, request_table=table, **lists))


def attend(
    impl: MtpMLAImpl, ends: list[int], kv: list[int], *, tokens: int | None = None, columns: int = 4, **form: Any
) -> torch.Tensor:
    """What the layer makes of segments that end at `ends`. tokens: T, where that is not the last of them."""
    out, lse = impl.forward_mqa(*inputs(tokens or ends[-1], **form), metadata(ends, kv, columns), None)
    assert lse is None
    return out


def sums(*counts: int) -> list[int]:
    return list(accumulate(counts))


GOOD = {
    "one token": (sums(1), [1]),
    "ragged": (sums(4, 1, 3), [20, 33, 3]),
    "slack": (sums(1, 2, 10, 10), [5, 9, 0, 0]),
    "16 tokens": (sums(16, 16), [16, 64]),
    "fewer entries than tokens": (sums(3, 2), [1, 0]),
}
BAD = {
    "falling": ([4, 2, 6], [9, 9, 9], {}, "actual_seq_lengths = [4, 2, 6]: falls from 4 to 2 at entry 1", "F04"),
    "17 tokens": (sums(1, 17), [9, 40], {}, "actual_seq_lengths = [1, 18]: 17 tokens in segment 1", "F06"),
    "empty": (sums(2, 0, 2), [9, 9, 9], {}, "actual_seq_lengths = [2, 2, 4]: 0 tokens in segment 1", "F06"),
    "last above T": ([2, 5], [9, 9], {"tokens": 4}, "actual_seq_lengths = [2, 5]: the last is 5, T is 4", "F05"),
    "last below T": ([2, 3], [9, 9], {"tokens": 4}, "actual_seq_lengths = [2, 3]: the last is 3, T is 4", "F05"),
    "lists differ": ([1, 2], [9], {}, "actual_seq_lengths_kv = 1 entries, actual_seq_lengths has 2", "F09"),
    "KV below 0": ([1, 2], [9, -1], {}, "actual_seq_lengths_kv = [9, -1]: -1 at entry 1", "F07"),
    "KV above the cache": (
        *([1, 2], [9, 193], {"columns": 20}),
        "actual_seq_lengths_kv = [9, 193]: 193 at entry 1, the cache holds 192",
        "F07",
    ),
    "a narrow table": (
        [1],
        [33],
        {"columns": 2},
        "block_table = 2 columns, 33 KV entries in blocks of 16 need 3",
        "F21",
    ),
}


def bad(impl: MtpMLAImpl, name: str) -> torch.Tensor:
    ends, kv, more, *_ = BAD[name]
    return attend(impl, ends, kv, **more)


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_the_engine_sends_passes_and_is_attention(name: str, dtype: torch.dtype, debug: None) -> None:
    ends, kv = GOOD[name]
    out = attend(layer(), ends, kv, dtype=dtype)
    (query, rope), cache = inputs(ends[-1], dtype=dtype)
    expected = tnd.attend(
        query,
        cache[..., :512],
        cache[..., :512],
        query_rope=rope,
        key_rope=cache[..., 512:],
        actual_seq_lengths=ends,
        actual_seq_lengths_kv=kv,
        block_table=metadata(ends, kv).decode.block_table,
        num_heads=HEADS,
        scale=SCALE,
    )
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("switch", ["0", "1"])
def test_a_call_no_npu_would_take_never_reaches_the_kernel(
    name: str, switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTP_DEBUG", switch)
    impl = layer()
    for _ in range(2):  # a shape that was refused is not known as good
        with Watch() as watch, pytest.raises(FiaConstraintError) as caught:
            bad(impl, name)
        assert not watch.calls
        *_, told, rule = BAD[name]
        assert rule in {violation.id for violation in caught.value.violations}
        assert f"{told}. Rule {rule}: " in str(caught.value)


def test_the_error_in_full() -> None:
    with pytest.raises(FiaConstraintError) as caught:
        bad(layer(), "17 tokens")
    assert str(caught.value) == (
        "npu_fused_infer_attention_score would not take this call:\n"
        "  actual_seq_lengths = [1, 18]: 17 tokens in segment 1. Rule F06: one segment has 1..16 query tokens, 0..16 "
        "from CANN 8.5.0 on (source D: docstring of torch_npu 2.10.0.post4; T: CANN's host tiling check, "
        "ops-transformer of 2025-10; O: op-plugin documentation, 7.1.0 to 26.1.0)"
    )


def test_heads_are_checked_too() -> None:
    with pytest.raises(FiaConstraintError, match=r"num_heads = 3\. Rule F14"):
        attend(layer(3), [1], [1], heads=3)


def test_each_shape_is_checked_once(checks: list[FiaCall]) -> None:
    first, second = layer(), layer()
    for _ in range(3):
        attend(first, [2, 4], [9, 9])
        attend(second, [1, 4], [33, 2])  # other lengths, another layer
    assert len(checks) == 1
    attend(first, [2, 5], [9, 9])  # T
    attend(first, [1, 2, 4], [9, 9, 9])  # slots
    attend(first, [2, 4], [9, 9], columns=5)
    attend(first, [2, 4], [9, 9], dtype=torch.bfloat16)
    attend(layer(4), [2, 4], [9, 9], heads=4)
    assert len(checks) == 6


def test_lengths_of_a_known_shape_are_checked_in_debug_mode_alone(
    checks: list[FiaCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    impl = layer()
    attend(impl, sums(9, 9), [20, 20])
    attend(impl, sums(1, 17), [20, 20])
    assert len(checks) == 1
    monkeypatch.setenv("MTP_DEBUG", "1")
    settings.cache_clear()
    impl = layer()
    attend(impl, sums(9, 9), [20, 20])
    attend(impl, sums(9, 9), [20, 20])
    with pytest.raises(FiaConstraintError, match="17 tokens in segment 1"):
        attend(impl, sums(1, 17), [20, 20])
    assert len(checks) == 4


class Watch(TorchDispatchMode):
    """Operators that run inside: all their names, and the arguments of the attention operator."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.calls: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        if str(func) == attention.OPERATORS["tnd"]:
            self.calls.append(kwargs)
        return func(*args, **(kwargs or {}))


def test_the_call_is_that_of_an_npu(checks: list[FiaCall]) -> None:
    with Watch() as watch:
        attend(layer(), [2, 4], [9, 9])
    [call] = checks
    assert (call.version, call.input_layout, call.sparse_mode, call.num_key_value_heads) == ("v1", "TND", 3, 1)
    assert set(call.names) == {
        *("query_rope", "key_rope", "atten_mask", "actual_seq_lengths", "actual_seq_lengths_kv", "block_table"),
        *("num_heads", "scale", "num_key_value_heads", "input_layout", "sparse_mode", "block_size"),
    }
    [given] = watch.calls
    assert given["atten_mask"] is causal_mask()
    assert call.atten_mask is not None and call.atten_mask.is_causal is True


@pytest.mark.parametrize("switch", ["0", "1"])
def test_the_check_runs_no_operator(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTP_DEBUG", switch)
    impl = layer()
    query, cache = inputs(4)
    given = metadata([2, 4], [9, 9])
    with Watch() as watch:
        impl.forward_mqa(query, cache, given, None)
    assert set(watch.names) == {"aten.slice.Tensor", attention.OPERATORS["tnd"]}


def test_a_recorded_graph_holds_the_mask(checks: list[FiaCall]) -> None:
    impl, (query, cache), given = layer(), inputs(12), metadata([2, 12], [9, 0])
    lists = {name: getattr(given.decode, name) for name in ("actual_seq_lengths", "actual_seq_lengths_kv")}
    run = record(lambda: impl.forward_mqa(query, cache, given, None)[0], lists).compile()
    assert len(checks) == 1
    [call] = [node for node in run.graph.nodes if str(node.target) == attention.OPERATORS["tnd"]]
    mask = call.kwargs["atten_mask"]
    assert mask.op == "get_attr"
    assert getattr(run, mask.target).data_ptr() == causal_mask().data_ptr()
    again = run(actual_seq_lengths=[3, 12], actual_seq_lengths_kv=[5, 0])
    assert torch.equal(again, attend(impl, [3, 12], [5, 0]))


def test_requests_of_no_tokens_do_not_reach_the_call() -> None:
    # What vLLM pads a batch with.
    starts = torch.tensor([0, 2, 3, 3, 3], dtype=torch.int32)
    builder = SegmentsBuilder.__new__(SegmentsBuilder)
    table = torch.arange(16, dtype=torch.int32).view(4, 4)
    lengths = torch.tensor([9, 7, 0, 0], dtype=torch.int32)
    segments = builder._build_decode(table, lengths, 9, starts, starts, 3, 2, None)
    out, _ = layer().forward_mqa(*inputs(3), SimpleNamespace(decode=segments), None)
    assert torch.equal(out, attend(layer(), [2, 3], [9, 7]))


@pytest.mark.parametrize("way", ["batch_expansion", "chunked_prefill"])
def test_other_ways_make_no_mask(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTP_ATTENTION", way)
    assert layer()._mask is None


@pytest.mark.parametrize(("value", "debug"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_the_setting(value: str | None, debug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is not None:
        monkeypatch.setenv("MTP_DEBUG", value)
    assert settings().debug is debug


@pytest.mark.parametrize("value", ["2", "true", "yes", "01", " 1"])
def test_another_value_of_the_setting_is_an_error(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTP_DEBUG", value)
    with pytest.raises(ValueError, match=f"^MTP_DEBUG='{value}': use one of 0, 1 or leave it unset$"):
        settings()
