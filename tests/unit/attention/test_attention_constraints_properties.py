"""Any call that keeps every rule passes, and one fault in it breaks exactly its rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch", reason="attention tests run in the engine environment")

from attention_calls import CASES, CAUSAL, EVERY, LATER, ids, judged_by, of_dtype, of_shape, plan
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_runtime.attention.call import BlockTable, FiaCall, Foreign, Mask
from mtp_runtime.attention.findings import HEADS

pytestmark = pytest.mark.engine


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
    passes = call.paged or cann_version in LATER
    assert ids(call, cann_version=cann_version, engine=engine) == (set() if passes else {"F25"})


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
    "no block table": ("F25", lambda c, d: replace(c, block_table=None)),
    "a flat query": ("F24", lambda c, d: of_shape(c, query=(c.query.shape[0], 512), query_rope=(c.query.shape[0], 64))),
}


def place(call: FiaCall) -> st.SearchStrategy[int]:
    return st.integers(0, len(call.ends) - 1)


def prepared(rule: str, call: FiaCall) -> FiaCall:
    """The call, or one with as many slots that the rule is about."""
    slots = len(call.ends)
    if rule == "F08" and call.paged:
        return plan([1] * slots, [3] * slots, form="flat", version=call.version)
    if rule in ("F07", "F19", "F20", "F21", "F25") and not call.paged:
        return plan([16] * slots, version=call.version)
    if rule == "F23":  # version 2 may return it where KV need not be paged
        return replace(call, version="v1")
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
    call = prepared(rule, call)
    assert ids(mutate(call, data), cann_version=judged_by(call, rule)) == {rule}


def test_every_rule_has_a_fault() -> None:
    # These two need a call too large for a property: their cases above stand alone.
    assert {rule for rule, _ in MUTATIONS.values()} == set(CASES) - {"F10", "F11"}
