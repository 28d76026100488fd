"""What the CANN release and the engine change about the rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch", reason="attention tests run in the engine environment")

from attention_calls import CASES, EARLY, EVERY, FLAT, GOOD, LATER, ids, in_float32, of_dtype, plan

from mtp_runtime.attention.call import FiaCall, Shaped
from mtp_runtime.attention.cann import release_of
from mtp_runtime.attention.constraints import RULES, Rule, check

pytestmark = pytest.mark.engine


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
        pytest.param(FLAT, "F25", True, id="not paged"),
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
        assert ids(call, cann_version=cann_version) <= ids(call)
    for call in CASES[rule.id].bad:
        assert ids(call)
        # Where KV need not be paged, rules speak that F25 had silenced.
        if call.paged:
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
