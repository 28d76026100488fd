"""What FIA takes: every rule against calls that keep it and calls that break it, and nothing but it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="attention tests run in the engine environment")

import numpy as np  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from mtp_runtime.attention.call import V2_NAMES, BlockTable, FiaCall, Foreign, Mask, Shaped  # noqa: E402
from mtp_runtime.attention.cann import RELEASES, release_of  # noqa: E402
from mtp_runtime.attention.constraints import (  # noqa: E402
    RULES,
    SOURCES,
    FiaConstraintError,
    Rule,
    check,
    enforce,
)
from mtp_runtime.attention.findings import HEADS  # noqa: E402
from mtp_runtime.attention.mask import causal_mask  # noqa: E402

pytestmark = pytest.mark.engine

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
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_every_rule_takes_and_refuses(rule: Rule) -> None:
    case = CASES[rule.id]
    assert case.good and case.bad
    for call in case.good:
        assert check(call) == []
        enforce(call)
    for call in case.bad:
        violations = check(call)
        assert rule.id in {v.id for v in violations} <= {rule.id} | case.also, violations
        with pytest.raises(FiaConstraintError) as caught:
            enforce(call)
        assert caught.value.violations == violations
        for violation in violations:
            assert str(violation) in str(caught.value)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_every_error_names_argument_value_rule_and_source(rule: Rule) -> None:
    for call in CASES[rule.id].bad:
        for version in ("v1", "v2"):
            named = replace(call, version=version)
            for violation in (v for v in check(named) if v.id == rule.id):
                text = str(violation)
                assert text.startswith(
                    f"{violation.argument} = {violation.value}. Rule {rule.id}: {rule.text} (source "
                )
                assert all(f"{key}: {SOURCES[key]}" in text for key in rule.source)
                assert violation.value
                if rule.id != "F01":
                    # The other version's names stand nowhere, not even in what a value says.
                    wrong = set(V2_NAMES) if version == "v2" else set(V2_NAMES.values())
                    assert not wrong & set(f"{violation.argument} {violation.value}".replace(",", " ").split())


def test_the_rules_are_in_order_and_complete() -> None:
    assert [rule.id for rule in RULES] == [f"F{n:02}" for n in range(1, len(RULES) + 1)] == list(CASES)
    arguments = {field.name for field in fields(FiaCall)} | {"arguments"}
    for rule in RULES:
        assert rule.argument in arguments
        assert rule.source and set(rule.source) <= set(SOURCES)
    assert set("DMTO") <= {key for rule in RULES for key in rule.source}


def test_one_message_in_full() -> None:
    call = plan([1] * 16 + [52], version="v2")
    with pytest.raises(ValueError) as caught:
        enforce(call)
    assert str(caught.value) == (
        "npu_fused_infer_attention_score_v2 would not take this call:\n"
        "  actual_seq_qlen = [1, 2, 3, 4, ..., 15, 16, 68]: 52 tokens in segment 16. Rule F06: one segment has 1..16 "
        "query tokens, 0..16 from CANN 8.5.0 on (source D: docstring of torch_npu 2.10.0.post4; T: CANN's host tiling "
        "check, ops-transformer of 2025-10; O: op-plugin documentation, 7.1.0 to 26.1.0)"
    )


@pytest.mark.parametrize(
    ("version", "written", "argument", "value"),
    [
        ("v1", "actual_seq_qlen", "actual_seq_lengths", "given as actual_seq_qlen"),
        ("v1", "return_softmax_lse", "softmax_lse_flag", "given as return_softmax_lse"),
        ("v2", "num_heads", "num_query_heads", "given as num_heads"),
        ("v2", "scale", "softmax_scale", "given as scale"),
        ("v2", "seq_lens", "seq_lens", "given"),
    ],
)
def test_a_wrong_name_is_told_with_the_right_one(version: Any, written: str, argument: str, value: str) -> None:
    (violation,) = check(replace(GOOD, version=version, names=(written,)))
    assert (violation.id, violation.argument, violation.value) == ("F01", argument, value)


def test_everything_wrong_is_told_at_once() -> None:
    call = plan(
        [1] * 16 + [20, 16],
        kv=[-5] * 18,
        heads=3,
        sizes=(96, 32),
        kv_heads=2,
        form="NZ",
        block_size=64,
        dtype="float32",
        input_layout="BSH",
        sparse_mode=2,
        atten_mask=Mask((2048, 2048), "float16"),
        block_table=BlockTable((18, 65), "int64"),
        softmax_lse_flag=True,
        names=("seq_lens",),
    )
    violations = check(call)
    assert {v.id for v in violations} == {
        *("F01", "F06", "F07", "F12", "F13", "F14", "F15", "F16", "F17", "F18", "F19", "F20", "F22", "F23")
    }
    assert [v.argument for v in violations if v.id == "F12"] == ["query", "key", "value"]
    with pytest.raises(FiaConstraintError) as caught:
        enforce(call)
    assert str(caught.value).count("\n") == len(violations)


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        pytest.param(plan(heads=3), "F14", id="3 heads"),
        pytest.param(plan(sizes=(100, 64)), "F12", id="head size 100"),
        pytest.param(plan(block_size=7), "F19", id="block size 7"),
        pytest.param(plan([2] * 4, actual_seq_lengths=[2, 6, 4, 8]), "F04", id="falling prefixes"),
        pytest.param(plan([2] * 4, kv=[9] * 3), "F09", id="lists of different length"),
        pytest.param(plan([2, 20, 2]), "F06", id="a segment of 20 tokens"),
    ],
)
def test_what_the_meta_function_lets_through_is_refused(call: FiaCall, rule: str) -> None:
    assert ids(call) == {rule}


@pytest.mark.parametrize(
    ("lengths", "tokens", "rules"),
    [
        pytest.param([*range(1, 17), 26, 36], 36, set(), id="16 x 1 in 18 slots"),
        pytest.param([*range(1, 17), 68], 68, {"F06"}, id="16 x 1 in 17 slots"),
        pytest.param([*range(1, 17), 18, 20], 36, {"F05"}, id="query_start_loc, full decode graph"),
        pytest.param([*range(1, 17), 36], 36, {"F06"}, id="query_start_loc, FULL, 16 x 1"),
        pytest.param([1, 2, 3, 4, 36], 36, {"F06"}, id="query_start_loc, FULL, 4 x 1"),
    ],
)
def test_what_the_public_padding_helpers_return(lengths: list[int], tokens: int, rules: set[str]) -> None:
    call = plan([1] * len(lengths))
    call = of_shape(call, query=(tokens, 128, 512), query_rope=(tokens, 128, 64))
    assert ids(replace(call, actual_seq_lengths=lengths)) == rules


@pytest.mark.parametrize("sparse_mode", [0, 3])
def test_fewer_kv_entries_than_query_tokens_pass(sparse_mode: int) -> None:
    mask = CAUSAL if sparse_mode else None
    assert check(plan([10, 16], [0, 3], sparse_mode=sparse_mode, atten_mask=mask)) == []


EVERY = [None, *(release.first for release in RELEASES)]
EARLY, LATER = [None, "8.2.RC1", "8.3.RC1"], ["8.5.0", "9.0.0", "9.1.0"]


@pytest.mark.parametrize("cann_version", EVERY)
@pytest.mark.parametrize(
    ("call", "rule", "from_850"),
    [
        pytest.param(plan([2, 0, 2]), "F06", True, id="an empty segment"),
        pytest.param(plan([17]), "F06", False, id="17 tokens"),
        pytest.param(plan(block_size=48), "F19", True, id="block size 48"),
        pytest.param(plan(block_size=1024), "F19", True, id="block size 1024"),
        pytest.param(plan(block_size=1040), "F19", False, id="block size 1040"),
        pytest.param(plan(block_size=24), "F19", False, id="block size 24"),
        pytest.param(plan(block_size=0, kv=[0] * 18), "F19", False, id="block size 0"),
        pytest.param(plan(block_size=16, form="NZ"), "F19", True, id="NZ, block size 16"),
        pytest.param(replace(GOOD, softmax_lse_flag=True, version="v2"), "F23", True, id="LSE, version 2"),
        pytest.param(replace(GOOD, softmax_lse_flag=True), "F23", False, id="LSE, version 1"),
        pytest.param(plan([1] * 4097), "F10", False, id="4097 batch elements"),
        pytest.param(replace(GOOD, sparse_mode=4), "F17", False, id="sparse mode 4"),
    ],
)
def test_what_a_release_relaxes(cann_version: str | None, call: FiaCall, rule: str, from_850: bool) -> None:
    assert ids(call, cann_version=cann_version) == (set() if from_850 and cann_version in LATER else {rule})


def test_every_release_is_tested_on_one_side() -> None:
    assert EVERY == EARLY + LATER


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
@pytest.mark.parametrize("cann_version", EVERY[1:])
def test_no_release_is_stricter_than_none(rule: Rule, cann_version: str) -> None:
    for call in CASES[rule.id].good:
        assert check(call, cann_version=cann_version) == []
    for call in CASES[rule.id].bad:
        assert ids(call, cann_version=cann_version) <= ids(call)


@pytest.mark.parametrize(
    ("cann_version", "op_plugin"),
    [
        ("8.2.RC1", "7.1.0"),
        ("8.2.RC2", "7.1.0"),
        ("8.3.RC1", "7.2.0"),
        ("8.3.0", "7.2.0"),
        ("8.5.0", "7.3.0"),
        ("8.5.1", "7.3.0"),
        ("9.0.0", "26.0.0"),
        ("9.1.0", "26.1.0"),
        ("9.1.12", "26.1.0"),
    ],
)
def test_the_line_of_a_version(cann_version: str, op_plugin: str) -> None:
    assert release_of(cann_version).op_plugin == op_plugin


@pytest.mark.parametrize("cann_version", ["8.1.RC1", "8.2.RC0", "8.4.0", "8.5.RC1", "9.2.0", "10.0.0", "26.1.0"])
def test_an_unknown_version_is_an_error(cann_version: str) -> None:
    with pytest.raises(
        ValueError, match=rf"cann_version '{cann_version}' is not known; known are 8\.2\.RC1, .* 9\.1\.0"
    ):
        check(GOOD, cann_version=cann_version)


@pytest.mark.parametrize(
    "cann_version", ["", "8.5", "9.1.x", "8.2.rc1", "v9.1.0", "9.1.0 ", "9.1.0\n", "8.5.0.alpha002", "٩.1.0", 9.1]
)
def test_a_malformed_version_is_an_error(cann_version: Any) -> None:
    with pytest.raises(ValueError, match=r"cann_version .* is malformed; it is written like 8\.2\.RC1 or 9\.1\.0"):
        check(GOOD, cann_version=cann_version)


def in_float32(call: FiaCall) -> FiaCall:
    parts = ("query", "key", "value", "query_rope", "key_rope")
    return of_dtype(call, **{name: "float32" for name in parts if getattr(call, name)})


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_the_cpu_takes_float32_and_nothing_else_changes(rule: Rule) -> None:
    case = CASES[rule.id]
    for cann_version in (None, "9.1.0"):
        for call in (*case.good, *case.bad):
            if "F22" not in (refused := ids(call, cann_version=cann_version)):
                assert ids(call, cann_version=cann_version, engine="cpu") == refused
                assert ids(in_float32(call), cann_version=cann_version, engine="cpu") == refused
                assert ids(in_float32(call), cann_version=cann_version) == refused | {"F22"}


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(plan(dtype="float64"), id="float64"),
        pytest.param(plan(dtype="int8"), id="int8"),
        pytest.param(of_dtype(GOOD, query="float32"), id="mixed"),
        pytest.param(of_dtype(in_float32(GOOD), key_rope="bfloat16"), id="rope"),
    ],
)
def test_the_cpu_takes_no_other_dtype(call: FiaCall) -> None:
    assert ids(call, engine="cpu") == {"F22"}


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 524288), ("float16", 524288), ("float32", 262144)])
def test_the_longest_t(dtype: str, most: int) -> None:
    at, above = (replace(GOOD, query=Shaped((tokens, 128, 512), dtype)) for tokens in (most, most + 1))
    assert "F11" not in ids(at, engine="cpu")
    assert "F11" in ids(above, engine="cpu")


def test_an_engine_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="engine 'cuda' is not known; known are ascend and cpu"):
        check(GOOD, engine="cuda")


@pytest.mark.parametrize(("field", "value"), [("version", "v3"), ("kv_format", "NHWC")])
def test_a_description_cannot_be_built_wrong(field: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{field} '{value}' is not one of"):
        replace(GOOD, **{field: value})


@st.composite
def plans(draw: st.DrawFn) -> FiaCall:
    """Calls that keep every rule, at least two slots each."""
    counts = draw(st.lists(st.integers(1, 16), min_size=2, max_size=40))
    form = draw(st.sampled_from(["ND3", "ND4", "NZ", "flat"]))
    block_size = 128 if form == "NZ" else draw(st.sampled_from([16, 128]))
    blocks = draw(st.integers(1, 50))
    kv = draw(st.lists(st.integers(0, blocks * block_size), min_size=len(counts), max_size=len(counts)))
    causal = draw(st.booleans())
    before = draw(st.sampled_from([(), (1,), (1, 1)]))
    mask = Mask((*before, 2048, 2048), draw(st.sampled_from(["int8", "bool"])), draw(st.sampled_from([True, None])))
    return plan(
        counts,
        kv,
        form=form,
        block_size=block_size,
        blocks=blocks,
        heads=draw(st.sampled_from(HEADS)),
        dtype=draw(st.sampled_from(["bfloat16", "float16"])),
        sparse_mode=3 if causal else 0,
        atten_mask=mask if causal else None,
        input_layout=draw(st.sampled_from(["TND", "TND_NTD"])),
        version=draw(st.sampled_from(["v1", "v2"])),
    )


@given(plans(), st.sampled_from(EVERY), st.sampled_from(["ascend", "cpu"]))
@settings(max_examples=150, deadline=None)
def test_good_plans_pass(call: FiaCall, cann_version: str | None, engine: str) -> None:
    assert check(call, cann_version=cann_version, engine=engine) == []
    enforce(call, cann_version=cann_version, engine=engine)


def with_entry(values: Any, place: int, value: Any) -> list[Any]:
    return [*values[:place], value, *values[place + 1 :]]


def tokens_of(call: FiaCall, more: int) -> FiaCall:
    tokens, heads, size = call.query.shape
    return of_shape(call, query=(tokens + more, heads, size), query_rope=(tokens + more, heads, 64))


Mutation = Callable[[FiaCall, st.DataObject], FiaCall]
MUTATIONS: dict[str, tuple[str, Mutation]] = {
    "a name of no version": ("F01", lambda c, d: replace(c, names=("seq_lens",))),
    "a bool among the lengths": (
        "F02",
        lambda c, d: replace(
            c, actual_seq_lengths=with_entry(c.actual_seq_lengths, d.draw(place(c)), d.draw(st.booleans()))
        ),
    ),
    "lengths on a device": ("F02", lambda c, d: replace(c, actual_seq_lengths_kv=Foreign("torch.Tensor"))),
    "no query lengths": ("F03", lambda c, d: replace(c, actual_seq_lengths=None)),
    "no KV lengths": ("F03", lambda c, d: replace(c, actual_seq_lengths_kv=[])),
    "a sum above the next": ("F04", lambda c, d: fallen(c, d.draw(st.integers(0, len(c.ends) - 2)))),
    "more rows than lengths": ("F05", lambda c, d: tokens_of(c, d.draw(st.integers(1, 500)))),
    "fewer rows than lengths": ("F05", lambda c, d: tokens_of(c, -1)),
    "a long segment": ("F06", lambda c, d: longer(c, d.draw(place(c)), d.draw(st.integers(16, 600)))),
    "a negative KV length": ("F07", lambda c, d: kv_of(c, with_entry(c.kv, d.draw(place(c)), -1))),
    "a KV length above capacity": (
        "F07",
        lambda c, d: kv_of(c, with_entry(c.kv, d.draw(place(c)), c.latent.blocks * c.latent.block_size + 1)),
    ),
    "KV sums that fall": (
        "F08",
        lambda c, d: kv_of(c, with_entry(c.kv, d.draw(st.integers(0, len(c.kv) - 2)), c.kv[-1] + 1)),
    ),
    "KV sums short of the cache": ("F08", lambda c, d: kv_of(c, [*c.kv[:-1], c.kv[-1] + 1])),
    "a KV length more": ("F09", lambda c, d: replace(c, actual_seq_lengths_kv=[*c.kv, c.kv[-1]])),
    "a wide query": ("F12", lambda c, d: of_shape(c, query=(*c.query.shape[:2], d.draw(st.sampled_from([100, 576]))))),
    "no rope of the query": ("F13", lambda c, d: replace(c, query_rope=None)),
    "no rope of the key": ("F13", lambda c, d: replace(c, key_rope=None)),
    "other heads": (
        "F14",
        lambda c, d: replace(c, num_heads=d.draw(st.integers(2, 300).filter(lambda n: n != c.num_heads))),
    ),
    "many KV heads": ("F15", lambda c, d: replace(c, num_key_value_heads=d.draw(st.integers(2, 128)))),
    "another layout": ("F16", lambda c, d: replace(c, input_layout=d.draw(st.sampled_from(["BSH", "NTD_TND"])))),
    "another sparse mode": ("F17", lambda c, d: replace(c, sparse_mode=d.draw(st.sampled_from([1, 2, 4, 9])))),
    "a mask too many or missing": ("F17", lambda c, d: replace(c, atten_mask=None if c.atten_mask else CAUSAL)),
    "another mask": ("F18", lambda c, d: replace(c, sparse_mode=3, atten_mask=replace(CAUSAL, is_causal=False))),
    "another block size": (
        "F19",
        lambda c, d: replace(c, block_size=d.draw(st.integers(0, 2000).filter(lambda n: n not in (16, 128)))),
    ),
    "a table of int64": ("F20", lambda c, d: replace(c, block_table=replace(c.block_table, dtype="int64"))),
    "a table with a row more": ("F20", lambda c, d: rows_of(c, len(c.kv) + 1)),
    "a narrow table": ("F21", lambda c, d: narrow(c)),
    "another dtype": (
        "F22",
        lambda c, d: of_dtype(c, **{d.draw(st.sampled_from(["key", "value", "query_rope", "key_rope"])): "int8"}),
    ),
    "LSE": ("F23", lambda c, d: replace(c, softmax_lse_flag=True)),
    "a flat query": ("F24", lambda c, d: of_shape(c, query=(c.query.shape[0], 512), query_rope=(c.query.shape[0], 64))),
}


def place(call: FiaCall) -> st.SearchStrategy[int]:
    return st.integers(0, len(call.ends) - 1)


def prepared(rule: str, call: FiaCall) -> FiaCall:
    """The call, or one with as many slots that the rule is about."""
    slots = len(call.ends)
    if rule == "F08" and call.paged:
        return plan([1] * slots, [3] * slots, form="flat", version=call.version)
    if rule in ("F07", "F19", "F20", "F21") and not call.paged:
        return plan([16] * slots, version=call.version)
    # Without entries no column is too few.
    return replace(call, actual_seq_lengths_kv=[1, *call.kv[1:]]) if rule == "F21" else call


def kv_of(call: FiaCall, kv: list[int]) -> FiaCall:
    return replace(call, actual_seq_lengths_kv=kv)


def fallen(call: FiaCall, at: int) -> FiaCall:
    return replace(call, actual_seq_lengths=with_entry(call.ends, at, call.ends[at + 1] + 1))


def longer(call: FiaCall, at: int, more: int) -> FiaCall:
    ends = [end + more if i >= at else end for i, end in enumerate(call.ends)]
    return replace(tokens_of(call, more), actual_seq_lengths=ends)


def rows_of(call: FiaCall, rows: int) -> FiaCall:
    return replace(call, block_table=BlockTable((rows, call.block_table.shape[1]), "int32"))


def narrow(call: FiaCall) -> FiaCall:
    needed = -(-max(call.kv) // call.block_size)
    return replace(call, block_table=replace(call.block_table, usable_columns=needed - 1))


@pytest.mark.parametrize("name", MUTATIONS)
@given(plans(), st.data())
@settings(max_examples=25, deadline=None)
def test_one_fault_breaks_exactly_its_rule(name: str, call: FiaCall, data: st.DataObject) -> None:
    rule, mutate = MUTATIONS[name]
    assert ids(mutate(prepared(rule, call), data)) == {rule}


def test_every_rule_has_a_fault() -> None:
    # These two need a call too large for a property: their cases above stand alone.
    assert {rule for rule, _ in MUTATIONS.values()} == set(CASES) - {"F10", "F11"}


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


def test_a_plan_is_checked_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from mtp_runtime.attention.call import FiaCall, Shaped\n"
        "from mtp_runtime.attention.constraints import check\n"
        "cache = Shaped((4, 16, 512), 'bfloat16')\n"
        "print(len(check(FiaCall(Shaped((3, 2, 512), 'bfloat16'), cache, cache))) > 0)"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout == "True\n"


def test_a_check_of_256_slots_takes_well_under_a_millisecond() -> None:
    def seconds() -> float:
        call = plan([2] * 256, [1000] * 256)
        start = time.perf_counter()
        check(call)
        return time.perf_counter() - start

    # The best of many: another program on the machine slows some of them.
    assert min(seconds() for _ in range(50)) < 0.5e-3
