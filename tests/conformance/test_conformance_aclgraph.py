"""Which graph a step gets, what the real ACLGraphWrapper would capture, and the lengths that a replay gets.

Capture itself is unproven: at the edge a graph is a record of when it was begun and replayed.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any, ClassVar
from unittest.mock import patch

import cpu_runner
import patching
import pytest
import torch
from ascend_layer import configuration as layer_configuration
from ascend_layer import forward, layer, step
from cpu_edge import Fia
from decode_cases import CASES, Case, numbers
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.forward_context import BatchDescriptor, get_forward_context, set_forward_context
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm_ascend.attention import mla_v1
from vllm_ascend.compilation import acl_graph

from mtp_runtime.adapters.counters import totals
from mtp_runtime.adapters.settings import settings
from mtp_runtime.adapters.vllm_ascend import padding
from mtp_runtime.metrics import names


@contextmanager
def made_runner(way: str, k: int, requests: int, sizes: Sequence[int]) -> Iterator[Any]:
    """A patched runner with this padding, ready to capture."""
    layer_configuration()  # kept for the process, and made for no padding
    with patch.dict(os.environ, {"MTP_PADDING": way}), patching.applied(padding.PATCH):
        settings.cache_clear()
        made = cpu_runner.make_runner(cpu_runner.configuration(k, requests, sizes=sizes))
        cpu_runner.give_attention(made)
        yield made
    settings.cache_clear()


@pytest.fixture(scope="module")
def slack() -> Iterator[Any]:
    with made_runner("slack", 1, 16, [36]) as made:
        yield made


@pytest.fixture
def placeholder() -> Iterator[Any]:
    """Graphs for up to 4 of the 16 requests."""
    with made_runner("placeholder", 1, 16, [2, 4, 8]) as made:
        yield made


def eager_steps() -> int:
    return totals()[names.PLUGIN_GRAPH_EAGER_STEPS]


# --- which graph ----------------------------------------------------------------------------------------------------


def test_vllm_s_dispatcher_goes_by_tokens() -> None:
    """Asked for three fresh requests as a decode step, it gives two slots; asked as it is asked, no graph at all."""
    made = cpu_runner.configuration(1, 16, sizes=[2, 4, 8, 16, 32])
    dispatcher = CudagraphDispatcher(made)
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_DECODE_ONLY, 2)
    mode, descriptor = dispatcher.dispatch(num_tokens=3, uniform_decode=True)
    assert (mode, descriptor.num_tokens, descriptor.num_reqs) == (CUDAGraphMode.FULL, 4, 2)
    assert dispatcher.dispatch(num_tokens=3, uniform_decode=False)[0] == CUDAGraphMode.NONE


@pytest.mark.parametrize("counts", [[1] * 3, [1] * 16, [2] * 16, [1, 2] * 8, [2]], ids=str)
def test_with_slack_every_decode_step_has_the_graph(slack: Any, counts: list[int]) -> None:
    before = eager_steps()
    found = cpu_runner.Step(slack, counts, [20] * len(counts))
    assert found.mode == CUDAGraphMode.FULL
    assert found.descriptor == BatchDescriptor(num_tokens=36, num_reqs=18, uniform=True)
    assert eager_steps() == before


def test_a_prompt_is_no_decode_step(slack: Any) -> None:
    """More than K + 1 tokens, or nothing computed yet; neither is counted."""
    before = eager_steps()
    assert cpu_runner.Step(slack, [2, 30], [20, 30]).mode == CUDAGraphMode.NONE
    assert cpu_runner.Step(slack, [2, 1], [20, 1]).mode == CUDAGraphMode.NONE
    assert eager_steps() == before


@pytest.mark.parametrize(
    ("counts", "tokens"), [([2], 2), ([2] * 2, 4), ([2] * 3, 8), ([2] * 4, 8), ([2] * 5, None), ([2, 1], None)], ids=str
)
def test_without_slack_steps_of_equal_requests_have_graphs(
    placeholder: Any, counts: list[int], tokens: int | None
) -> None:
    """A step above the largest graph, or with a request without its drafts, runs eagerly and is counted."""
    before = eager_steps()
    found = cpu_runner.Step(placeholder, counts, [20] * len(counts))
    assert (found.mode, eager_steps() - before) == (
        (CUDAGraphMode.NONE, 1) if tokens is None else (CUDAGraphMode.FULL, 0)
    )
    assert found.descriptor.num_tokens == (tokens or sum(counts))


# --- what is captured -----------------------------------------------------------------------------------------------


class Record:
    """What the stand-ins for the device's graphs saw, in order."""

    seen: ClassVar[list[tuple[Any, ...]]] = []


class RecordedGraph:
    """torch.npu.NPUGraph."""

    def replay(self) -> None:
        Record.seen.append(("replay",))


@contextmanager
def recorded_capture(graph: RecordedGraph, pool: Any = None) -> Iterator[None]:
    """torch.npu.graph."""
    Record.seen.append(("begin",))
    yield
    Record.seen.append(("end",))


@pytest.fixture
def graphs() -> Iterator[list[tuple[Any, ...]]]:
    Record.seen.clear()
    with ExitStack() as stack:
        put = [
            (torch.npu, "NPUGraph", RecordedGraph),
            (torch.npu, "graph", recorded_capture),
            (torch.npu, "synchronize", cpu_runner.Idle),
            (torch.npu, "stream", cpu_runner.Idle),
            (acl_graph, "weak_ref_tensors", lambda tensors: tensors),
            (acl_graph.current_platform, "get_global_graph_pool", lambda: None),
        ]
        for owner, name, value in put:
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(cpu_runner.edge())
        yield Record.seen


def model(runner: Any) -> Callable[..., torch.Tensor]:
    """In place of the target: notes what a whole step's graph would be recorded from."""

    def call(input_ids: torch.Tensor, positions: torch.Tensor, **rest: Any) -> torch.Tensor:
        context = get_forward_context()
        decode = context.attn_metadata and context.attn_metadata[cpu_runner.LAYERS[0]].decode
        lists = decode and (decode.actual_seq_lengths_q, len(decode.seq_lens_list), len(decode.block_table))
        Record.seen.append(("model", len(input_ids), len(positions), context.capturing, lists))
        return torch.zeros(len(input_ids), 64)

    return call


@pytest.fixture
def wrapped(slack: Any, graphs: list[tuple[Any, ...]]) -> Iterator[Any]:
    """The runner with the real wrapper around its model, as `load_model` puts it; without its drafter."""
    slack.update_stream = cpu_runner.Idle()
    # The real wrapper asks the model for whatever it does not have itself.
    made = acl_graph.ACLGraphWrapper(
        model(slack), slack.vllm_config, CUDAGraphMode.FULL, use_eagle=slack.use_eagle, enable_enpu=slack.enable_enpu
    )
    kept, drafter = getattr(slack, "model", None), slack.drafter
    slack.model, slack.drafter = made, None
    with set_current_vllm_config(slack.vllm_config), patch.object(acl_graph, "_graph_params", None):
        acl_graph.set_graph_params([36])
        yield slack
    slack.model, slack.drafter = kept, drafter


UNIFORM = ("model", 36, 36, True, ([*range(2, 37, 2)], 18, 18))


def capture(runner: Any) -> None:
    """As the runner captures each of its dispatcher's keys."""
    for mode, descriptors in runner.cudagraph_dispatcher.get_capture_descs():
        for descriptor in descriptors:
            runner._dummy_run(
                descriptor.num_tokens,
                cudagraph_runtime_mode=mode,
                uniform_decode=descriptor.uniform,
                allow_microbatching=False,
                is_graph_capturing=True,
            )


def test_capture_and_replay(wrapped: Any, graphs: list[tuple[Any, ...]]) -> None:
    """One graph of 36 tokens and 18 slots; an idle rank's dummy step replays the very same."""
    capture(wrapped)
    assert graphs == [("begin",), UNIFORM, ("end",)]
    entries = wrapped.model.concrete_aclgraph_entries
    assert list(entries) == [BatchDescriptor(num_tokens=36, num_reqs=18, uniform=True)]
    graphs.clear()
    # What the worker runs where another rank has requests and this one has none.
    wrapped._dummy_run(num_tokens=wrapped.decode_token_per_req, uniform_decode=True)
    assert graphs == [("replay",)] and len(entries) == 1
    assert wrapped.query_start_loc.np[18] == 36


def test_the_profile_run_is_no_capture(wrapped: Any, graphs: list[tuple[Any, ...]]) -> None:
    wrapped._dummy_run(40, is_profile=True)
    assert graphs == [("model", 40, 40, False, None)] and not wrapped.model.concrete_aclgraph_entries


def test_an_eager_step_passes_the_wrapper(wrapped: Any, graphs: list[tuple[Any, ...]]) -> None:
    capture(wrapped)
    graphs.clear()
    with set_forward_context(
        None, wrapped.vllm_config, num_tokens=5, cudagraph_runtime_mode=CUDAGraphMode.NONE, batch_descriptor=None
    ):
        get_forward_context().capturing = False
        wrapped.model(input_ids=torch.zeros(5), positions=torch.zeros(5))
    assert graphs == [("model", 5, 5, False, None)]


# --- the lengths of a replay ----------------------------------------------------------------------------------------

RAGGED = CASES["K=1, sixteen fresh requests, two slack slots"]
FULL = Case((2,) * 16, RAGGED.kv[:0] + tuple(kv + 1 for kv in RAGGED.kv), 18, 2)


@pytest.fixture
def captured_layer() -> Iterator[None]:
    """A layer's decode call, captured by the real layer for a step of equal requests."""
    done = cpu_runner.Idle
    edges = ("ExternalEvent", "stream", "graph_task_group_begin", "graph_task_group_end")
    with ExitStack() as stack:
        for name in (*edges, "graph_task_update_begin", "graph_task_update_end", "current_stream"):
            stack.enter_context(patch.object(torch.npu, name, done))
        stack.enter_context(patch.object(mla_v1, "weak_ref_tensors", lambda tensors: tensors))
        stack.enter_context(patch.object(acl_graph, "_graph_params", None))
        acl_graph.set_graph_params([36])
        found = numbers(FULL)
        query, latent, rope, metadata = step(FULL, found, 3)
        forward(layer(found.weight), query, latent, rope, metadata, capturing=True)
        Fia.calls.clear()
        yield


def replay_lengths(function: Any, case: Case, **context: Any) -> tuple[list[int], list[int]]:
    """Query and KV lengths that the captured call is given for a step of another case."""
    Fia.calls.clear()
    *_, metadata = step(case, numbers(case), 3)
    speculative = layer_configuration().speculative_config
    with (
        set_forward_context({"layer": metadata}, layer_configuration()),
        patch.object(speculative, "num_speculative_tokens", 1),
    ):
        for name, value in {"capturing": False, "is_draft_model": False, **context}.items():
            setattr(get_forward_context(), name, value)
        function(None, get_forward_context(), 36, layer_configuration(), speculative)
    (call,) = Fia.calls
    return list(call["actual_seq_lengths"]), list(call["actual_seq_lengths_kv"])


def test_a_replay_gets_the_lengths_of_its_step(captured_layer: None) -> None:
    """vllm-ascend's own gives K + 1 tokens to every slot, whatever the step holds."""
    old = patching.as_installed(padding.BUILDER, "AscendMLAImpl.update_graph_params")
    kv = [*RAGGED.kv, 0, 0]
    assert replay_lengths(old, RAGGED) == ([*range(2, 37, 2)], kv)
    with (
        patch.dict(os.environ, {"MTP_PADDING": "slack"}),
        patching.replaced(mla_v1.AscendMLAImpl, "update_graph_params", staticmethod(old)),
        patching.applied(padding.PATCH),
    ):
        settings.cache_clear()
        new = mla_v1.AscendMLAImpl.update_graph_params
        assert replay_lengths(new, RAGGED) == ([*accumulate([1] * 16), 26, 36], kv)
        assert Fia.calls[0]["query"].shape[0] == 36
        # Steps of equal requests get what they got before.
        assert replay_lengths(new, FULL) == replay_lengths(old, FULL)
    settings.cache_clear()


def test_without_slack_a_replay_is_the_engine_s(captured_layer: None) -> None:
    old = patching.as_installed(padding.BUILDER, "AscendMLAImpl.update_graph_params")
    with (
        patch.dict(os.environ, {"MTP_PADDING": "placeholder"}),
        patching.replaced(mla_v1.AscendMLAImpl, "update_graph_params", staticmethod(old)),
        patching.applied(padding.PATCH),
    ):
        settings.cache_clear()
        assert replay_lengths(mla_v1.AscendMLAImpl.update_graph_params, FULL) == replay_lengths(old, FULL)
    settings.cache_clear()
