"""Slack slots in vllm-ascend's model runner: room for them, steps that use them, their lengths at each replay.

With mtp.padding: slack a graph has more slots than the server takes requests. vllm-ascend takes whole-step graphs for
steps in which every request has K + 1 tokens, drops graphs larger than max_num_seqs, and replays each with the lengths
[K + 1, 2 (K + 1), ...] whatever the step holds.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

from mtp_runtime.adapters.counters import Count
from mtp_runtime.adapters.settings import settings
from mtp_runtime.adapters.vllm_ascend.install import has_mtp
from mtp_runtime.graphs.planner import Graph, choose
from mtp_runtime.graphs.slots import SLACK, Slots, slots_for
from mtp_runtime.metrics import names


class SlackRefused(RuntimeError):
    """The engine has not got the graphs that slack padding needs."""


def wanted(vllm_config: Any) -> Slots | None:
    """The one graph that slack padding runs decode steps in; None with another padding, and without whole-step graphs.

    vllm_config: as the scheduler has it, max_num_seqs without slack slots.
    """
    from vllm.config import CUDAGraphMode

    mode = vllm_config.compilation_config.cudagraph_mode
    if settings().padding != SLACK or not has_mtp(vllm_config) or mode != CUDAGraphMode.FULL_DECODE_ONLY:
        return None
    return slots_for(vllm_config.scheduler_config.max_num_seqs, vllm_config.speculative_config.num_speculative_tokens)


def with_room(original: Callable[..., None]) -> Callable[..., None]:
    """Buffers, graph keys and drafter of the runner have a place a slot; the scheduler goes on counting requests."""

    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        self.mtp_slack = wanted(vllm_config)
        if self.mtp_slack:
            vllm_config = copy(vllm_config)
            vllm_config.scheduler_config = copy(vllm_config.scheduler_config)
            vllm_config.scheduler_config.max_num_seqs = self.mtp_slack.slots
        self.mtp_eager_steps = Count(names.PLUGIN_GRAPH_EAGER_STEPS)
        original(self, vllm_config, *args, **kwargs)

    return __init__


def by_slots(original: Callable[..., Any]) -> Callable[..., Any]:
    """A decode step of any mix of 1..K + 1 tokens a request gets a graph with slack slots; one that fits none is
    counted."""

    def _determine_batch_execution_and_padding(
        self: Any,
        num_tokens: int,
        num_reqs: int,
        num_scheduled_tokens_np: Any,
        max_num_scheduled_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        from vllm.config import CUDAGraphMode

        graphs = whole_step_graphs(self)
        step = (num_tokens, num_reqs, num_scheduled_tokens_np, max_num_scheduled_tokens, *args)
        computed = self.input_batch.num_computed_tokens_cpu[:num_reqs]
        decodes = max_num_scheduled_tokens <= self.uniform_decode_query_len and bool((computed > 0).all())
        forced = kwargs.get("force_uniform_decode") is not None or kwargs.get("force_eager")
        if not graphs or not decodes or forced:
            return original(self, *step, **kwargs)
        graph = choose(num_reqs, num_tokens, graphs) if self.mtp_slack else None
        if graph is not None:
            step = (graph.tokens, *step[1:])
            kwargs["force_uniform_decode"] = True
        mode, descriptor, microbatches, across, stats = original(self, *step, **kwargs)
        if mode == CUDAGraphMode.NONE:
            self.mtp_eager_steps.add()
        if stats is not None:
            padding = descriptor.num_tokens - num_tokens
            stats = replace(stats, num_unpadded_tokens=num_tokens, num_paddings=padding)
        return mode, descriptor, microbatches, across, stats

    return _determine_batch_execution_and_padding


def whole_step_graphs(runner: Any) -> list[Graph]:
    """The graphs that the dispatcher knows for decode steps; none before it was told."""
    from vllm.config import CUDAGraphMode

    width = runner.uniform_decode_query_len
    keys = runner.cudagraph_dispatcher.cudagraph_keys[CUDAGraphMode.FULL]
    return [Graph(key.num_tokens // width, width) for key in keys if key.uniform]


def all_captured(original: Callable[..., None]) -> Callable[..., None]:
    def _check_and_update_cudagraph_mode(self: Any, *args: Any, **kwargs: Any) -> None:
        """As vllm-ascend's. Raises SlackRefused unless the graph with slack slots, and no other, will be captured."""
        original(self, *args, **kwargs)
        slack = self.mtp_slack
        found = sorted({graph.tokens for graph in whole_step_graphs(self)})
        if slack and found != [slack.tokens]:
            raise SlackRefused(
                f"patch padding: whole-step graphs of {found or 'no'} tokens, and slack padding needs the one of "
                f"{slack.tokens} ({slack.slots} slots, R05); set compilation_config.cudagraph_capture_sizes: auto, or "
                "mtp.padding: placeholder"
            )

    return _check_and_update_cudagraph_mode


class Launched(NamedTuple):
    """An attention call as vllm-ascend keeps it at capture, in its order."""

    query: Any
    latent: Any
    query_rope: Any
    key_rope: Any
    query_heads: int
    kv_heads: int
    layout: str
    mask: Any
    sparse_mode: int
    scale: float
    block_table: Any
    block_size: int
    kv_lengths: list[int]
    query_lengths: list[int]
    output: Any
    lse: Any
    query_scale: Any
    latent_scale: Any


def own_lengths(original: Callable[..., None]) -> Callable[..., None]:
    def update_graph_params(
        update_stream: Any,
        forward_context: Any,
        num_tokens: int,
        vllm_config: Any = None,
        speculative_config: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """As vllm-ascend's for the drafter, which takes the step's lengths, and without slack; else each layer's call
        gets the lengths of its metadata."""
        from vllm_ascend.ascend_forward_context import _EXTRA_CTX

        if settings().padding != SLACK or speculative_config is None or _EXTRA_CTX.is_draft_model:
            original(update_stream, forward_context, num_tokens, vllm_config, speculative_config, *args, **kwargs)
            return
        _relaunch(update_stream, forward_context.attn_metadata, num_tokens)

    return update_graph_params


def _relaunch(stream: Any, metadata: dict[str, Any], tokens: int) -> None:
    """Give every captured call of the graph of `tokens` tokens the lengths of this step. metadata: layer -> its own."""
    import torch
    from vllm_ascend.compilation.acl_graph import get_graph_params

    kept = get_graph_params()
    calls = zip(kept.attn_params[tokens], kept.handles[tokens], kept.events[tokens], strict=True)
    with torch.npu.stream(stream):
        # The metadata may know more layers (the drafter's) than were captured here; the captured ones are the first.
        for layer, (call, handle, event) in zip(metadata.values(), calls, strict=False):
            torch.npu.graph_task_update_begin(stream, handle)
            _launch(Launched(*call), layer.decode, kept.workspaces.get(tokens))
            torch.npu.graph_task_update_end(stream)
            event.record(stream)


def _launch(call: Launched, decode: Any, workspace: Any) -> None:
    # By the module's name for torch_npu: the patch `attention` puts its checks there.
    from vllm_ascend.attention.mla_v1 import torch_npu

    quantized = {}
    if call.query_scale is not None:
        quantized = {
            "query_quant_mode": 3,
            "key_quant_mode": 0,
            "value_quant_mode": 0,
            "dequant_scale_query": call.query_scale,
            "dequant_scale_key": call.latent_scale,
            "dequant_scale_value": call.latent_scale,
        }
    torch_npu.npu_fused_infer_attention_score_v2.out(
        call.query,
        call.latent,
        call.latent,
        query_rope=call.query_rope,
        key_rope=call.key_rope,
        num_query_heads=call.query_heads,
        num_key_value_heads=call.kv_heads,
        input_layout=call.layout,
        atten_mask=call.mask,
        sparse_mode=call.sparse_mode,
        softmax_scale=call.scale,
        block_table=call.block_table,
        block_size=call.block_size,
        actual_seq_qlen=decode.actual_seq_lengths_q,
        actual_seq_kvlen=decode.seq_lens_list,
        workspace=workspace,
        out=[call.output, call.lse],
        **quantized,
    )
