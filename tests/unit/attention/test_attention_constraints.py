"""What FIA takes: every rule against calls that keep it and calls that break it, and nothing but it."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="attention tests run in the engine environment")

from attention_calls import CASES, CAUSAL, GOOD, ids, judged_by, of_shape, plan

from mtp_runtime.attention.call import V2_NAMES, BlockTable, FiaCall, Mask
from mtp_runtime.attention.constraints import RULES, SOURCES, FiaConstraintError, Rule, check, enforce

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_every_rule_takes_and_refuses(rule: Rule) -> None:
    case = CASES[rule.id]
    assert case.good and case.bad
    for call in case.good:
        enforce(call, cann_version=judged_by(call, rule.id))
    for call in case.bad:
        where = {"cann_version": judged_by(call, rule.id)}
        violations = check(call, **where)
        assert rule.id in {v.id for v in violations} <= {rule.id} | case.also, violations
        with pytest.raises(FiaConstraintError) as caught:
            enforce(call, **where)
        assert caught.value.violations == violations
        for violation in violations:
            assert str(violation) in str(caught.value)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_every_error_names_argument_value_rule_and_source(rule: Rule) -> None:
    for call in CASES[rule.id].bad:
        for version in ("v1", "v2"):
            named = replace(call, version=version)
            violations = check(named, cann_version=judged_by(call, rule.id))
            for violation in (v for v in violations if v.id == rule.id):
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


@pytest.mark.parametrize(("field", "value"), [("version", "v3"), ("kv_format", "NHWC")])
def test_a_description_cannot_be_built_wrong(field: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{field} '{value}' is not one of"):
        replace(GOOD, **{field: value})


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
