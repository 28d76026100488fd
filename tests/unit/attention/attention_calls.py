"""Calls of the operator for tests: one whose parts fit each other, and for every rule calls that keep and break it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from mtp_runtime.attention.call import V2_NAMES, BlockTable, FiaCall, Foreign, Mask, Shaped
from mtp_runtime.attention.cann import RELEASES
from mtp_runtime.attention.constraints import check

EVERY = [None, *(release.first for release in RELEASES)]
EARLY, LATER = [None, "8.2.RC1", "8.3.RC1"], ["8.5.0", "9.0.0", "9.1.0"]
CAUSAL = Mask((2048, 2048), "int8", True)
SLACK = [1] * 16 + [10, 10]
"""16 requests of one token in a graph of 18 slots and 36 tokens."""


def plan(
    counts: list[int] = SLACK,
    kv: list[int] | None = None,
    *,
    heads: int = 128,
    sizes: tuple[int, int] = (512, 64),
    kv_heads: int = 1,
    block_size: int = 128,
    blocks: int = 64,
    columns: int | None = None,
    form: str = "ND3",
    dtype: str = "bfloat16",
    **fields: Any,
) -> FiaCall:
    """A call whose parts fit each other. counts, kv: of each slot. form: of the cache, ND3, ND4, NZ or flat."""
    kv = [100] * (len(counts) - 1) + [0] if kv is None else kv
    tokens, slots, flat = sum(counts), len(counts), form == "flat"

    def cache(size: int) -> Shaped:
        shapes = {
            "ND3": (blocks, block_size, size),
            "ND4": (blocks, kv_heads, block_size, size),
            "NZ": (blocks, kv_heads, size // 16, block_size, 16),
            "flat": (sum(kv), kv_heads, size),
        }
        return Shaped(shapes[form], dtype)

    latent, rope = sizes
    call = FiaCall(
        query=Shaped((tokens, heads, latent), dtype),
        key=cache(latent),
        value=cache(latent),
        query_rope=Shaped((tokens, heads, rope), dtype),
        key_rope=cache(rope),
        actual_seq_lengths=list(accumulate(counts)),
        actual_seq_lengths_kv=list(accumulate(kv)) if flat else kv,
        num_heads=heads,
        num_key_value_heads=kv_heads,
        input_layout="TND",
        sparse_mode=3,
        atten_mask=CAUSAL,
        block_table=None if flat else BlockTable((slots, blocks + 1 if columns is None else columns), "int32"),
        block_size=0 if flat else block_size,
        kv_format="NZ" if form == "NZ" else "ND",
    )
    return replace(call, **fields)


def ids(call: FiaCall, **where: Any) -> set[str]:
    return {violation.id for violation in check(call, **where)}


def judged_by(call: FiaCall, rule: str) -> str | None:
    """The strictest CANN version at which a rule sees a call: before 8.5.0, KV that is not paged is F25's alone."""
    return None if call.paged or rule == "F25" else "8.5.0"


def of_dtype(call: FiaCall, **dtypes: str) -> FiaCall:
    return replace(call, **{name: replace(getattr(call, name), dtype=dtype) for name, dtype in dtypes.items()})


def of_shape(call: FiaCall, **shapes: tuple[int, ...]) -> FiaCall:
    return replace(call, **{name: replace(getattr(call, name), shape=shape) for name, shape in shapes.items()})


@dataclass(frozen=True)
class Case:
    """Calls about one rule. also: other rules that a bad call cannot but break."""

    good: tuple[FiaCall, ...]
    bad: tuple[FiaCall, ...]
    also: frozenset[str] = frozenset()


GOOD = plan()
FLAT = plan([2] * 4, [9, 0, 4, 3], form="flat")
V1_NAMES = ("actual_seq_lengths", "actual_seq_lengths_kv", "num_heads", "scale", "softmax_lse_flag", "sparse_mode")
LATER_NAMES = tuple(V2_NAMES.get(name, name) for name in V1_NAMES)

CASES = {
    "F01": Case(
        good=(replace(GOOD, names=V1_NAMES), replace(GOOD, names=LATER_NAMES, version="v2"), GOOD),
        bad=(
            replace(GOOD, names=LATER_NAMES),
            replace(GOOD, names=V1_NAMES, version="v2"),
            replace(GOOD, names=("seq_lens",)),
            replace(GOOD, names=("antiquant_mode",), version="v2"),
        ),
    ),
    "F02": Case(
        good=(replace(GOOD, actual_seq_lengths=tuple(accumulate(SLACK))),),
        bad=(
            replace(GOOD, actual_seq_lengths=Foreign("torch.Tensor")),
            replace(GOOD, actual_seq_lengths_kv=Foreign("numpy.ndarray")),
            replace(GOOD, actual_seq_lengths=range(1, 19)),
            replace(GOOD, actual_seq_lengths=[True, *list(accumulate(SLACK))[1:]]),
            replace(GOOD, actual_seq_lengths_kv=[100.0] * 18),
            replace(GOOD, actual_seq_lengths_kv=[np.int64(100)] * 18),
            replace(GOOD, actual_seq_lengths_kv=[2**63] * 18),
            replace(GOOD, actual_seq_lengths=[-(2**63) - 1] * 18),
        ),
    ),
    "F03": Case(
        good=(GOOD, FLAT),
        bad=(
            replace(GOOD, actual_seq_lengths=None),
            replace(GOOD, actual_seq_lengths_kv=None),
            replace(GOOD, actual_seq_lengths=[]),
            replace(FLAT, actual_seq_lengths_kv=()),
        ),
    ),
    "F04": Case(
        good=(plan([16] * 4), plan([1]), plan([1, 16, 1])),
        bad=(
            plan([2] * 4, actual_seq_lengths=[2, 6, 4, 8]),
            plan([2] * 4, actual_seq_lengths=[-1, 4, 6, 8]),
            plan([2] * 4, actual_seq_lengths=[2, 4, 9, 8]),
        ),
    ),
    "F05": Case(
        good=(plan([2] * 18), plan(SLACK)),
        bad=(
            plan([2] * 4, actual_seq_lengths=[2, 4, 6, 7]),
            plan([2] * 4, actual_seq_lengths=[2, 4, 6, 9]),
        ),
    ),
    "F06": Case(
        good=(plan([1]), plan([16])),
        bad=(plan([17]), plan([2, 0, 2]), plan([0, 2]), plan([1] * 16 + [52]), plan([4, 2000])),
    ),
    "F07": Case(
        good=(
            plan(blocks=4, kv=[512] * 17 + [0]),
            plan([10], [0]),
            plan(kv=[1000] * 18, kv_capacity=1000),
            plan(kv=[512] * 18, blocks=4, form="NZ"),
        ),
        bad=(
            plan(blocks=4, kv=[512] * 17 + [513]),
            plan(kv=[-1] * 18),
            plan(kv=[1001] * 18, kv_capacity=1000),
            plan(kv=[513] * 18, blocks=4, form="NZ"),
            plan(kv=[513] * 18, blocks=4, form="ND4"),
        ),
    ),
    "F08": Case(
        good=(FLAT, plan([1], [5], form="flat")),
        bad=(
            replace(FLAT, actual_seq_lengths_kv=[9, 8, 13, 16]),
            replace(FLAT, actual_seq_lengths_kv=[-1, 9, 13, 16]),
            replace(FLAT, actual_seq_lengths_kv=[9, 9, 13, 15]),
            replace(FLAT, actual_seq_lengths_kv=[9, 0, 4, 16]),
        ),
    ),
    "F09": Case(
        good=(GOOD, FLAT),
        bad=(
            replace(GOOD, actual_seq_lengths_kv=[100] * 17),
            replace(GOOD, actual_seq_lengths_kv=[100] * 19),
            replace(FLAT, actual_seq_lengths_kv=[9, 16]),
        ),
    ),
    "F10": Case(good=(plan([1] * 4096),), bad=(plan([1] * 4097), plan([1] * 65536))),
    # Lists short enough for F10 cannot reach a T that is too long.
    "F11": Case(
        good=(plan([16] * 4096),),
        bad=(plan([1] * 32, query=Shaped((2**19 + 1, 128, 512), "bfloat16")),),
        also=frozenset({"F05", "F13"}),
    ),
    "F12": Case(
        good=(GOOD, plan(form="ND4"), plan(form="NZ"), FLAT),
        bad=(
            plan(sizes=(100, 64)),
            of_shape(GOOD, query=(36, 128, 100)),
            of_shape(GOOD, key=(64, 128, 576)),
            of_shape(GOOD, value=(64, 128, 128)),
            plan(sizes=(256, 64), form="NZ"),
            plan(sizes=(192, 64), form="ND4"),
            of_shape(FLAT, value=(16, 1, 128)),
        ),
    ),
    "F13": Case(
        good=(GOOD, plan(form="NZ"), FLAT),
        bad=(
            replace(GOOD, query_rope=None),
            replace(GOOD, key_rope=None),
            replace(GOOD, query_rope=None, key_rope=None),
            plan(sizes=(512, 32)),
            of_shape(GOOD, query_rope=(35, 128, 64)),
            of_shape(GOOD, query_rope=(36, 64, 64)),
            of_shape(GOOD, key_rope=(64, 16, 64)),
            of_shape(GOOD, key_rope=(64, 1, 128, 64, 1)),
            plan(sizes=(512, 128), form="NZ"),
        ),
    ),
    "F14": Case(
        good=tuple(plan(heads=heads) for heads in (1, 2, 4, 8, 16, 32, 64, 128)),
        bad=(plan(heads=3), plan(heads=0), plan(heads=256), replace(GOOD, num_heads=64)),
    ),
    "F15": Case(
        good=(GOOD, plan(heads=1, num_key_value_heads=0)),
        bad=(
            replace(GOOD, num_key_value_heads=0),
            replace(GOOD, num_key_value_heads=128),
            plan(kv_heads=2, form="ND4"),
            plan(kv_heads=2, form="NZ"),
            plan([2], [3], kv_heads=8, form="flat"),
            replace(plan(kv_heads=2, form="ND4"), num_key_value_heads=1),
        ),
    ),
    "F16": Case(
        good=(replace(GOOD, input_layout="TND_NTD"),),
        bad=tuple(replace(GOOD, input_layout=name) for name in ("BSH", "BNSD", "NTD_TND", "tnd", "")),
    ),
    "F17": Case(
        good=(GOOD, replace(GOOD, sparse_mode=0, atten_mask=None)),
        bad=(
            replace(GOOD, sparse_mode=0),
            replace(GOOD, atten_mask=None),
            replace(GOOD, sparse_mode=1),
            replace(GOOD, sparse_mode=2),
            replace(GOOD, sparse_mode=4),
        ),
    ),
    "F18": Case(
        good=tuple(
            replace(GOOD, atten_mask=Mask((*before, 2048, 2048), dtype, seen))
            for before in ((), (1,), (1, 1))
            for dtype in ("int8", "bool")
            for seen in (True, None)
        ),
        bad=tuple(
            replace(GOOD, atten_mask=mask)
            for mask in (
                Mask((2048, 2048), "int8", False),
                Mask((2048, 2048), "bfloat16"),
                Mask((2048, 2048), "uint8", True),
                Mask((2048, 1024), "int8"),
                Mask((18, 2048, 2048), "int8"),
                Mask((1, 1, 1, 2048, 2048), "int8"),
                Mask((2048,), "int8"),
                Mask((128, 128), "bool", False),
            )
        ),
    ),
    "F19": Case(
        good=(plan(block_size=16), plan(block_size=128), plan(form="NZ"), FLAT, replace(FLAT, block_size=7)),
        bad=(
            plan(block_size=7),
            plan(block_size=64),
            plan(block_size=0, kv=[0] * 18),
            plan(block_size=16, form="NZ"),
            replace(GOOD, block_size=7),
            replace(GOOD, block_size=0),
            plan(block_size=1024),
        ),
    ),
    "F20": Case(
        good=(GOOD, replace(GOOD, block_table=BlockTable((18, 1), "int32"))),
        bad=tuple(
            replace(GOOD, block_table=table)
            for table in (
                BlockTable((18, 64), "int64"),
                BlockTable((17, 64), "int32"),
                BlockTable((19, 64), "int32"),
                BlockTable((18 * 64,), "int32"),
                BlockTable((1, 18, 64), "int32"),
            )
        ),
    ),
    "F21": Case(
        good=(
            plan(kv=[512] * 18, columns=4),
            plan(kv=[0] * 18, columns=0),
            plan(kv=[512] * 18, block_table=BlockTable((18, 64), "int32", usable_columns=4)),
        ),
        bad=(
            plan(kv=[512] * 17 + [513], columns=4),
            plan(kv=[1] * 18, columns=0),
            plan(kv=[512] * 18, block_table=BlockTable((18, 64), "int32", usable_columns=3)),
            plan(kv=[65] * 18, columns=4, block_size=16),
        ),
    ),
    "F22": Case(
        good=(plan(dtype="bfloat16"), plan(dtype="float16")),
        bad=(
            plan(dtype="float32"),
            plan(dtype="int8"),
            of_dtype(GOOD, query="float16"),
            of_dtype(GOOD, key="int8", value="int8"),
            of_dtype(GOOD, query_rope="float32"),
            of_dtype(GOOD, key_rope="float16"),
        ),
    ),
    "F23": Case(
        good=(GOOD, replace(GOOD, version="v2")),
        bad=(replace(GOOD, softmax_lse_flag=True), replace(GOOD, softmax_lse_flag=True, version="v2")),
    ),
    "F24": Case(
        good=(GOOD, plan(form="ND4"), plan(form="NZ"), FLAT),
        bad=(
            of_shape(GOOD, query=(18, 2, 128, 512), query_rope=(18, 2, 128, 64)),
            of_shape(GOOD, key=(64 * 128, 512), key_rope=(64 * 128, 64)),
            of_shape(GOOD, value=(64, 1, 512, 128, 1)),
            of_shape(GOOD, value=(65, 128, 512)),
            replace(plan(form="NZ"), kv_format="ND"),
            of_shape(plan(form="NZ"), key=(64, 1, 64, 128, 8), key_rope=(64, 1, 8, 128, 8)),
            plan(
                kv=[1] * 18,
                block_size=16,
                key=Shaped((64, 128, 512), "bfloat16"),
                key_rope=Shaped((64, 128, 64), "bfloat16"),
            ),
            replace(GOOD, block_size=16),
            replace(FLAT, kv_format="NZ"),
        ),
    ),
    "F25": Case(
        good=(GOOD, plan(form="ND4"), plan(form="NZ")),
        bad=(FLAT, *(replace(plan(form=form), block_table=None) for form in ("ND3", "ND4", "NZ"))),
    ),
}


def in_float32(call: FiaCall) -> FiaCall:
    parts = ("query", "key", "value", "query_rope", "key_rope")
    return of_dtype(call, **{name: "float32" for name in parts if getattr(call, name)})
