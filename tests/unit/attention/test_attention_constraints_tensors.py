"""A call described from the tensors and arguments that the operator would get."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="attention tests run in the engine environment")

import numpy as np  # noqa: E402
from attention_calls import CAUSAL, ids  # noqa: E402

from mtp_runtime.attention.call import V2_NAMES, BlockTable, FiaCall, Shaped  # noqa: E402
from mtp_runtime.attention.constraints import check  # noqa: E402
from mtp_runtime.attention.mask import causal_mask  # noqa: E402

pytestmark = pytest.mark.engine


def tensors(
    version: str = "v1", *, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", **changed: Any
) -> FiaCall:
    """A description of 2 slots, 3 tokens and 2 heads, built from real tensors."""
    extra = {key: changed.pop(key) for key in ("look_at_mask", "kv_format", "kv_capacity") if key in changed}
    extra |= {"usable_columns": changed.pop("usable_columns")} if "usable_columns" in changed else {}
    arguments: dict[str, Any] = {
        "query_rope": torch.zeros(3, 2, 64, dtype=dtype, device=device),
        "key_rope": torch.zeros(4, 16, 64, dtype=dtype, device=device),
        "atten_mask": causal_mask(torch.int8, device),
        "block_table": torch.zeros(2, 5, dtype=torch.int32, device=device),
        "actual_seq_lengths": [1, 3],
        "actual_seq_lengths_kv": [33, 0],
        "num_heads": 2,
        "num_key_value_heads": 1,
        "input_layout": "TND",
        "sparse_mode": 3,
        "block_size": 16,
        "scale": 0.1,
        "softmax_lse_flag": False,
    }
    query = changed.pop("query", torch.zeros(3, 2, 512, dtype=dtype, device=device))
    key = changed.pop("key", torch.zeros(4, 16, 512, dtype=dtype, device=device))
    value = changed.pop("value", key)
    arguments = {V2_NAMES.get(name, name) if version == "v2" else name: value for name, value in arguments.items()}
    return FiaCall.from_tensors(query, key, value, version=version, **extra, **(arguments | changed))


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_description_from_tensors(version: str, device: str) -> None:
    call = tensors(version, device=device)
    assert call == FiaCall(
        query=Shaped((3, 2, 512), "bfloat16"),
        key=Shaped((4, 16, 512), "bfloat16"),
        value=Shaped((4, 16, 512), "bfloat16"),
        query_rope=Shaped((3, 2, 64), "bfloat16"),
        key_rope=Shaped((4, 16, 64), "bfloat16"),
        atten_mask=CAUSAL,
        block_table=BlockTable((2, 5), "int32"),
        actual_seq_lengths=[1, 3],
        actual_seq_lengths_kv=[33, 0],
        num_heads=2,
        num_key_value_heads=1,
        input_layout="TND",
        sparse_mode=3,
        block_size=16,
        version=version,
        names=call.names,
    )
    assert check(call) == []


def test_defaults_are_those_of_the_operator() -> None:
    call = FiaCall.from_tensors(*[torch.zeros(3, 2, 512)] * 3)
    assert (call.num_heads, call.num_key_value_heads, call.input_layout) == (1, 0, "BSH")
    assert (call.sparse_mode, call.block_size, call.softmax_lse_flag) == (0, 0, False)
    assert {"F03", "F13", "F14", "F16"} <= ids(call)


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("argument", ["actual_seq_lengths", "actual_seq_lengths_kv"])
@pytest.mark.parametrize(
    ("lengths", "value"),
    [
        (torch.tensor([1, 3]), "a torch.Tensor"),
        (torch.tensor([1, 3], device="meta"), "a torch.Tensor"),
        (np.array([1, 3]), "a numpy.ndarray"),
        (range(1, 3), "a range"),
        ([True, 3], "a list whose entry 0, True is a bool"),
        ([1, 3.0], "a list whose entry 1, 3.0 is a float"),
        ([1, torch.tensor(3)], "a list whose entry 1, tensor(3) is a torch.Tensor"),
        ([np.int32(1), 3], "a list whose entry 0, np.int32(1) is a numpy.int32"),
        ([1, 2**63], "a list whose entry 1, 9223372036854775808 does not fit int64"),
    ],
)
def test_lengths_are_host_lists_of_ints(version: str, argument: str, lengths: Any, value: str) -> None:
    name = V2_NAMES[argument] if version == "v2" else argument
    (violation,) = check(tensors(version, **{name: lengths}))
    assert (violation.id, violation.argument, violation.value) == ("F02", name, value)


def test_the_other_versions_names_are_refused_and_their_values_still_checked() -> None:
    call = tensors("v2", num_heads=3, num_query_heads=2)
    assert ids(call) == {"F01"}
    names = {"actual_seq_lengths": [1, 3], "actual_seq_lengths_kv": [33, 0], "num_heads": 2}
    query, key = torch.zeros(3, 2, 512, dtype=torch.float16), torch.zeros(4, 16, 512, dtype=torch.float16)
    call = FiaCall.from_tensors(query, key, key, version="v2", input_layout="TND", num_key_value_heads=1, **names)
    assert ids(call) >= {"F01"} and not ids(call) & {"F03", "F05", "F14"}
    assert [v.argument for v in check(call) if v.id == "F01"] == [V2_NAMES[name] for name in names]


def test_names_outside_the_rules_pass() -> None:
    assert check(tensors(antiquant_mode=0, antiquant_scale=None, pre_tokens=2**31 - 1, inner_precise=0)) == []
    assert check(tensors("v2", query_quant_mode=0, learnable_sink=None)) == []


def test_five_dimensions_are_nz() -> None:
    key, rope = (torch.zeros(4, 1, size // 16, 128, 16, dtype=torch.bfloat16) for size in (512, 64))
    call = tensors(key=key, key_rope=rope, block_size=128)
    assert call.kv_format == "NZ"
    assert check(call) == []
    assert ids(tensors(key=key, key_rope=rope, block_size=128, kv_format="ND")) == {"F24"}


def test_capacity_and_columns_are_handed_on() -> None:
    assert ids(tensors(kv_capacity=32)) == {"F07"}
    assert ids(tensors(usable_columns=2)) == {"F21"}
    assert check(tensors(usable_columns=3, kv_capacity=33)) == []


def test_a_mask_is_looked_at_when_asked() -> None:
    good, bad = causal_mask().clone(), causal_mask().T
    assert tensors().atten_mask == CAUSAL
    assert tensors(atten_mask=good).atten_mask == tensors(atten_mask=bad).atten_mask == replace(CAUSAL, is_causal=None)
    assert check(tensors(atten_mask=bad)) == []
    assert check(tensors(atten_mask=good, look_at_mask=True)) == []
    assert ids(tensors(atten_mask=bad, look_at_mask=True)) == {"F18"}
    assert check(tensors(atten_mask=None, sparse_mode=0)) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dtypes_of_tensors(dtype: torch.dtype) -> None:
    call = tensors(dtype=dtype)
    assert ids(call) == (set() if dtype == torch.float16 else {"F22"})
    assert check(call, engine="cpu") == []
