"""Calls of the attention operator: the real schemas and meta functions take ours, and much that we refuse; the patch
`attention` refuses it before the operator gets it, in the real layer."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ascend_layer import configuration, forward, layer, step
from cpu_edge import Fia
from decode_cases import CASES, numbers
from fia_calls import ask, in_version
from torch._subclasses.fake_tensor import FakeTensorMode
from vllm.forward_context import get_forward_context, set_forward_context
from vllm_ascend.attention import mla_v1
from vllm_ascend.compilation import acl_graph

from mtp_runtime.adapters.settings import settings
from mtp_runtime.adapters.vllm_ascend import attention, slack
from mtp_runtime.attention.call import OPERATORS, SCHEMA, FiaCall
from mtp_runtime.attention.constraints import RULES, check
from mtp_runtime.attention.remedies import REMEDIES, FiaCallRefused
from tests.unit.attention.attention_calls import CASES as RULE_CASES
from tests.unit.attention.attention_calls import judged_by, plan

VERSIONS = ("v1", "v2")
OTHER_RELEASE = Path(__file__).resolve().parents[2] / ".local/conformance/vllm-ascend-0.23.0.post1"


def test_our_argument_names_are_the_schemas() -> None:
    for version, operator in OPERATORS.items():
        schema = getattr(torch.ops.npu, operator).default._schema
        assert SCHEMA[version] == {argument.name for argument in schema.arguments}


GOOD = [call for case in RULE_CASES.values() for call in case.good]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("layout", ["TND", "TND_NTD"])
def test_the_real_operator_takes_our_calls(version: str, layout: str) -> None:
    seen = 0
    for call in GOOD:
        if call.names or not call.num_key_value_heads:
            continue
        tokens, heads, size = call.query.shape
        out, _ = ask(in_version(call, version, input_layout=layout))
        assert out.shape == ((tokens, heads, size) if layout == "TND" else (heads, tokens, size))
        assert str(out.dtype) == f"torch.{call.query.dtype}" and out.device.type == "meta"
        seen += 1
    assert seen > 50


@pytest.mark.parametrize("version", VERSIONS)
def test_fake_tensors_too(version: str) -> None:
    """What torch.compile sees."""
    with FakeTensorMode():
        out, _ = ask(in_version(plan(), version), device="cpu")
    assert out.shape == (36, 128, 512)


ACCEPTED = {
    "3 heads": (plan(heads=3), "F14"),
    "block size 7": (plan(block_size=7), "F19"),
    "falling prefix sums": (plan([2] * 4, actual_seq_lengths=[2, 6, 4, 8]), "F04"),
    "a 20-token segment": (plan([1] * 16 + [20]), "F06"),
    "head size 100": (plan(sizes=(100, 64)), "F12"),
    "lists of different length": (plan([2] * 4, [9] * 3, block_table=plan([2] * 4).block_table), "F09"),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("what", ACCEPTED)
def test_the_real_operator_takes_what_it_must_not_get(what: str, version: str) -> None:
    call, rule = ACCEPTED[what]
    assert {violation.id for violation in check(call)} == {rule}
    ask(in_version(call, version))


REFUSED_BY_THE_PACKAGE = {
    # Names, and lists that are none of int64: the schema.
    **dict.fromkeys(
        [("F01", place) for place in range(4)] + [("F02", place) for place in (4, 6, 7)], "match any schema"
    ),
    ("F14", 1): "should be greater than 0",
    ("F16", 1): "queryDims.3. must be 4",
    ("F16", 3): "is not supported",
    ("F16", 4): "is not supported",
    ("F24", 0): "queryDims.4. must be 3",
    ("F25", 2): "Page Attention not enabled",
    ("F25", 3): "Page Attention not enabled",
}
"""Rule and place of its bad call -> what the real schema or meta function says."""


@pytest.mark.parametrize("rule", RULE_CASES)
def test_what_the_real_operator_refuses_itself(rule: str) -> None:
    """All else that our rules refuse, it takes: nothing else stands before the device."""
    for place, call in enumerate(RULE_CASES[rule].bad):
        assert rule in {violation.id for violation in check(call, cann_version=judged_by(call, rule))} or rule == "F23"
        for version in (call.version,) if rule == "F01" else VERSIONS:
            told = REFUSED_BY_THE_PACKAGE.get((rule, place))
            if told is None:
                ask(in_version(call, version))
            else:
                with pytest.raises(RuntimeError, match=told):
                    ask(in_version(call, version))


def test_every_rule_has_a_remedy() -> None:
    assert list(REMEDIES) == [rule.id for rule in RULES] and all(REMEDIES.values())


# The patch, in the real layer.

CASE = CASES["K=3, ragged, slack"]


@pytest.fixture(params=["0", "1"], ids=["once a shape", "debug"])
def debug(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    monkeypatch.setenv("MTP_DEBUG", request.param)
    yield from _patched()
    settings.cache_clear()


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MTP_DEBUG", "0")
    yield from _patched()
    settings.cache_clear()


def _patched() -> Iterator[Any]:
    """The patch as a worker applies it, taken back afterwards."""
    settings.cache_clear()
    attention.cann_version.cache_clear()
    Fia.calls.clear()
    functions = [mla_v1.AscendMLAImpl._forward_decode, mla_v1.AscendMLAImpl.update_graph_params]
    with patch.object(mla_v1, "torch_npu", mla_v1.torch_npu):
        attention.PATCH.apply()
        assert isinstance(mla_v1.torch_npu, attention.CheckedPackage)
        try:
            yield settings().debug
        finally:
            for function in functions:
                vars(function).pop("mtp_runtime", None)
            attention.cann_version.cache_clear()


def test_both_releases_have_the_functions_that_were_read() -> None:
    text = (OTHER_RELEASE / "vllm_ascend/attention/mla_v1.py").read_text()
    attention.PATCH.check()
    for target in attention.PATCH.targets:
        target.check(text)


def decode(**changes: Any) -> torch.Tensor:
    """A step through the real layer, with parts of its metadata replaced."""
    found = numbers(CASE)
    query, latent, rope, meta = step(CASE, found, 3)
    for name, value in changes.items():
        setattr(meta.decode, name, value)
    return forward(layer(found.weight), query, latent, rope, meta)


PLAN = CASE.plan
KV = PLAN.actual_seq_lengths_kv
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a 20-token segment": (
        {"actual_seq_lengths_q": [1, 5, 7, 10, 11, 13, 15, 16, 36]},
        r"actual_seq_qlen = \[1, 5, 7, 10, \.\.\., 15, 16, 36\]: 20 tokens in segment 8\. Rule F06: .*"
        r"Remedy: .*mtp\.padding: placeholder",
    ),
    "falling prefix sums": (
        {"actual_seq_lengths_q": [1, 5, 4, 10, 11, 17, 23, 30, 36]},
        "falls from 5 to 4.*F04.*Remedy",
    ),
    "the last prefix sum": ({"actual_seq_lengths_q": [1, 5, 7, 10, 11, 17, 23, 30, 35]}, "last is 35, T is 36.*F05"),
    "KV beyond the cache": (
        {"seq_lens_list": [10**6, *KV[1:]]},
        "actual_seq_kvlen = .*F07.*Remedy: lower max_model_len",
    ),
    "one KV length short": ({"seq_lens_list": KV[:-1]}, "actual_seq_kvlen = 8 entries, actual_seq_qlen has 9.*F09"),
    "a tensor of lengths": ({"seq_lens_list": torch.tensor(KV)}, "actual_seq_kvlen = a torch.Tensor.*F02"),
    "a long block table": ({"block_table": torch.zeros(10, 4, dtype=torch.int32)}, r"shape \[10, 4\], 9 batch.*F20"),
    "a mask of another shape": ({"attn_mask": torch.ones(512, 512, dtype=torch.int8)}, r"shape \[512, 512\].*F18"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_call_of_the_layer_is_refused(what: str, debug: bool) -> None:
    changes, told = WRONG[what]
    with pytest.raises(FiaCallRefused, match=told) as refused:
        decode(**changes)
    assert str(refused.value).startswith("npu_fused_infer_attention_score_v2 would not take this call:")
    assert not Fia.calls, "the operator was not called"


def test_right_calls_pass_unchanged(debug: bool) -> None:
    bare = decode()
    assert len(Fia.calls) == 1 and torch.equal(bare, decode())


def test_debug_mode_checks_every_call(debug: bool) -> None:
    """Without it the first call of each shape is checked, whatever the lengths are later."""
    decode()
    late = {"actual_seq_lengths_q": [1, 5, 7, 10, 11, 13, 15, 16, 36]}
    if debug:
        with pytest.raises(FiaCallRefused, match="F06"):
            decode(**late)
    else:
        decode(**late)
        with pytest.raises(FiaCallRefused, match="F09"):
            decode(seq_lens_list=KV[:-1])
    assert len(Fia.calls) == (1 if debug else 2)


def test_the_machines_cann_version_decides(patched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment of no tokens: from 8.5.0 on. The stubs know no version: the strictest rules."""
    empty = {"actual_seq_lengths_q": [1, 5, 7, 10, 11, 11, 23, 30, 36]}
    with pytest.raises(FiaCallRefused, match="F06"):
        decode(**empty)
    monkeypatch.setattr(importlib.import_module("torch_npu.npu.utils"), "get_cann_version", lambda *_: "8.5.0")
    attention.cann_version.cache_clear()
    decode(**empty)
    assert attention.cann_version() == "8.5.0"


def test_other_layouts_and_quantised_caches_pass_by(patched: None) -> None:
    checks = attention.Checks()
    part = torch.empty(1, 3, 1, 512, device="meta")
    checks.check(part, part, part, {"input_layout": "BNSD_NBSD"})
    quantised = {"input_layout": "TND_NTD", "dequant_scale_query": part}
    checks.check(part, part, part, quantised)
    with pytest.raises(FiaCallRefused):
        checks.check(part, part, part, {**quantised, "dequant_scale_query": None})


class Done:
    """A stream, an event or a task group of the device: nothing waits."""

    def __init__(self, *_: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def __enter__(self) -> Done:
        return self

    def __exit__(self, *_: object) -> None:
        return None


@pytest.fixture
def graphs() -> Iterator[acl_graph.GraphParams]:
    """vllm-ascend's own record of a captured graph of T tokens; streams, events and task groups at the edge."""
    with ExitStack() as stack:
        for name in ("ExternalEvent", "stream", "graph_task_group_begin", "graph_task_group_end"):
            stack.enter_context(patch.object(torch.npu, name, Done))
        for name in ("graph_task_update_begin", "graph_task_update_end", "current_stream"):
            stack.enter_context(patch.object(torch.npu, name, Done))
        stack.enter_context(patch.object(mla_v1, "weak_ref_tensors", lambda tensors: tensors))
        stack.enter_context(patch.object(acl_graph, "_graph_params", None))
        acl_graph.set_graph_params([PLAN.graph.tokens])
        yield acl_graph.get_graph_params()


def capture(**changes: Any) -> torch.Tensor:
    """As `decode`, while a graph is captured."""
    found = numbers(CASE)
    query, latent, rope, meta = step(CASE, found, 3)
    for name, value in changes.items():
        setattr(meta.decode, name, value)
    return forward(layer(found.weight), query, latent, rope, meta, capturing=True)


def test_capture_is_checked(debug: bool, graphs: acl_graph.GraphParams) -> None:
    with pytest.raises(FiaCallRefused, match="F06"):
        capture(**WRONG["a 20-token segment"][0])
    assert not Fia.calls and graphs.workspaces[PLAN.graph.tokens] is None, "nor was the workspace asked for"
    assert torch.equal(capture(), decode())


def update(graphs: acl_graph.GraphParams, width: int) -> None:
    """The real update of a captured graph, for a step of CASE and a configuration with K = width - 1."""
    speculative = configuration().speculative_config
    *_, meta = step(CASE, numbers(CASE), 3)
    with (
        set_forward_context({"layer": meta}, configuration()),
        patch.object(speculative, "num_speculative_tokens", width - 1),
    ):
        context = get_forward_context()
        context.is_draft_model, context.capturing = False, False
        mla_v1.AscendMLAImpl.update_graph_params(None, context, PLAN.graph.tokens, configuration(), speculative)


def test_update_of_a_graph_is_checked(debug: bool, graphs: acl_graph.GraphParams) -> None:
    capture()
    Fia.calls.clear()
    update(graphs, CASE.width)
    (call,) = Fia.calls
    # What vllm-ascend puts in place of the step's own lengths: K + 1 tokens a slot, so ragged steps need the other
    # patch, or placeholders.
    assert call["actual_seq_lengths"] == [4 * (slot + 1) for slot in range(9)]
    Fia.calls.clear()
    # T is no multiple of K + 1 any more: va#6524.
    with pytest.raises(FiaCallRefused, match=r"last is 35, T is 36\..*F05"):
        update(graphs, 5)
    assert not Fia.calls


def test_update_with_slack_padding_is_checked(
    debug: bool, graphs: acl_graph.GraphParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our other patch's own update, which hands over the step's lengths."""
    capture()
    monkeypatch.setenv("MTP_PADDING", "slack")
    settings.cache_clear()
    relaunch = slack.own_lengths(mla_v1.AscendMLAImpl.update_graph_params)
    *_, meta = step(CASE, numbers(CASE), 3)
    speculative = configuration().speculative_config
    with set_forward_context({"layer": meta}, configuration()):
        context = get_forward_context()
        context.is_draft_model, context.capturing = False, False
        Fia.calls.clear()
        relaunch(None, context, PLAN.graph.tokens, configuration(), speculative)
        assert Fia.calls[0]["actual_seq_lengths"] == PLAN.actual_seq_lengths
        meta.decode.actual_seq_lengths_q = WRONG["a 20-token segment"][0]["actual_seq_lengths_q"]
        if debug:
            with pytest.raises(FiaCallRefused, match="F06"):
                relaunch(None, context, PLAN.graph.tokens, configuration(), speculative)
        else:
            relaunch(None, context, PLAN.graph.tokens, configuration(), speculative)
    assert len(Fia.calls) == (1 if debug else 2)


def test_from_tensors_is_the_plans_description() -> None:
    """The call the real layer makes, described, is the call our plan describes."""
    Fia.calls.clear()
    decode()
    call = dict(Fia.calls[0])
    parts = [call.pop(name) for name in ("query", "key", "value")]
    described = FiaCall.from_tensors(*parts, look_at_mask=True, **call)
    assert not check(described)
    assert described.atten_mask is not None and described.atten_mask.is_causal
    assert (described.actual_seq_lengths, described.actual_seq_lengths_kv) == (PLAN.actual_seq_lengths, KV)
