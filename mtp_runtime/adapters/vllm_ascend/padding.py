"""Patch `padding`: the free slots of a whole-step graph are filled by our planner, and slack slots are used.

vllm-ascend makes a step's prefix sums in one of three places, each with a flaw of its own: a segment longer than 16
tokens goes unnoticed, or the last sum is not T. Our planner answers for all three, or says why there is no answer.
Slack slots need more of the model runner: see slack.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from mtp_runtime.adapters.vllm_ascend import slack
from mtp_runtime.adapters.vllm_ascend.patches import Patch, Target
from mtp_runtime.graphs.planner import Graph, plan
from mtp_runtime.graphs.slots import GraphError

BUILDER = "vllm_ascend.attention.mla_v1"
RUNNER = "vllm_ascend.worker.model_runner_v1"
REMEDY = (
    "use mtp.padding: slack with the one capture size that it derives (R05: cudagraph_capture_sizes: auto), or "
    "mtp.padding: placeholder"
)


class PaddingRefused(RuntimeError):
    """A step has no right padding in the graph that the engine chose for it."""

    def __init__(self, what: str, remedy: str = REMEDY) -> None:
        super().__init__(f"patch padding: {what}; {remedy}")


def filled(ends: Sequence[int], slots: int, width: int) -> list[int]:
    """[slots] prefix sums that end in slots x width.

    ends: prefix sums of the requests, each of 1..width tokens. Raises PaddingRefused, naming the operator's rules.
    """
    counts = [end - start for start, end in pairwise([0, *ends])]
    try:
        # KV lengths are kept elsewhere, one a slot, 0 on padding; here they must only hold the step's own tokens.
        return plan(counts, counts, Graph(slots, width)).actual_seq_lengths
    except GraphError as error:
        rules = f"F05: the last prefix sum is T = {slots * width}, F06: a segment has 1..16 tokens"
        raise PaddingRefused(f"{error.what} ({rules}); {error.remedy}") from None


def _with_padded_drafter(original: Callable[..., Any]) -> Callable[..., Any]:
    def pad_actual_seq_len_q_mtp_enable_pad(
        self: Any, num_reqs_pad_size: int, num_reqs: int, actual_seq_lengths_q: list[int], common_attn_metadata: Any
    ) -> list[int]:
        """[slots] prefix sums. Raises PaddingRefused."""
        if len(actual_seq_lengths_q) != num_reqs:
            raise PaddingRefused(
                f"{num_reqs - len(actual_seq_lengths_q)} prefills of {num_reqs} requests in a whole-step graph",
                "use cudagraph_mode FULL_DECODE_ONLY (graph_mode: full), which runs steps with prefills eagerly",
            )
        width = common_attn_metadata.decode_token_per_req
        return filled(actual_seq_lengths_q, num_reqs + num_reqs_pad_size, width)

    return pad_actual_seq_len_q_mtp_enable_pad


def _without_padded_drafter(original: Callable[..., Any]) -> Callable[..., Any]:
    def pad_actual_seq_len_q_mtp_disable_pad(
        self: Any, num_reqs_pad_size: int, num_reqs: int, actual_seq_lengths_q: list[int]
    ) -> list[int]:
        """[T] prefix sums, a slot a token. Raises PaddingRefused unless every request has one token."""
        if num_reqs_pad_size <= 0:
            return actual_seq_lengths_q
        try:
            return filled(actual_seq_lengths_q, num_reqs + num_reqs_pad_size, 1)
        except PaddingRefused:
            raise PaddingRefused(
                f"{actual_seq_lengths_q} leave {num_reqs + num_reqs_pad_size - actual_seq_lengths_q[-1]} tokens for "
                f"{num_reqs_pad_size} free slots: some would have none (F06: a segment has 1..16 tokens)",
                "remove mtp.disable_padded_drafter_batch (R17: it does not go with a full graph)",
            ) from None

    return pad_actual_seq_len_q_mtp_disable_pad


def _query_start_loc(original: Callable[..., int]) -> Callable[..., int]:
    def _pad_query_start_loc_for_fia(
        self: Any,
        query_start_loc: Any,
        num_tokens_padded: int,
        num_reqs_padded: int,
        num_reqs: int,
        cudagraph_runtime_mode: Any = None,
        batch_desc_num_reqs: int | None = None,
    ) -> int:
        """Fill the buffer ([0, prefix sums...]) for a graph of num_tokens_padded tokens; returns its slots.

        As vllm-ascend's for steps that run in no whole-step graph, or hold more than K + 1 tokens of a request.
        Raises PaddingRefused.
        """
        from vllm.config import CUDAGraphMode
        from vllm_ascend.worker.utils import copy_snapshot_to_gpu

        width = self.uniform_decode_query_len
        ends = query_start_loc.np[1 : num_reqs + 1].tolist()
        longest = max((end - start for start, end in pairwise([0, *ends])), default=0)
        if cudagraph_runtime_mode != CUDAGraphMode.FULL or longest > width:
            return original(
                self,
                query_start_loc,
                num_tokens_padded,
                num_reqs_padded,
                num_reqs,
                cudagraph_runtime_mode,
                batch_desc_num_reqs,
            )
        slots = _slots(num_tokens_padded, width, len(query_start_loc.np))
        query_start_loc.np[: slots + 1] = [0, *filled(ends, slots, width)]
        copy_snapshot_to_gpu(query_start_loc)
        return slots

    return _pad_query_start_loc_for_fia


def _slots(tokens: int, width: int, entries: int) -> int:
    """Slots of a graph. Raises PaddingRefused for no n x width, and more slots than there is room for."""
    slots, rest = divmod(tokens, width)
    if rest:
        raise PaddingRefused(
            f"a graph of {tokens} tokens, no multiple of K + 1 = {width} (R04)",
            "list multiples of K + 1 in cudagraph_capture_sizes",
        )
    if slots >= entries:
        raise PaddingRefused(f"a graph of {slots} slots, and the runner has room for {entries - 1}")
    return slots


PATCH = Patch(
    "padding",
    "worker",
    "prefix sums of padded steps by our planner, and slack slots with mtp.padding: slack",
    (
        Target(
            BUILDER,
            "AscendMLAMetadataBuilder.pad_actual_seq_len_q_mtp_enable_pad",
            ("06045324c18dd652",),
            _with_padded_drafter,
        ),
        Target(
            BUILDER,
            "AscendMLAMetadataBuilder.pad_actual_seq_len_q_mtp_disable_pad",
            ("adad72e0881a8536",),
            _without_padded_drafter,
        ),
        Target(RUNNER, "NPUModelRunner._pad_query_start_loc_for_fia", ("29c883a30823465e",), _query_start_loc),
        Target(RUNNER, "NPUModelRunner.__init__", ("041ca95b16ebeecf",), slack.with_room),
        Target(
            RUNNER,
            "NPUModelRunner._determine_batch_execution_and_padding",
            ("a4c5a4ebb384ec5a",),
            slack.by_slots,
        ),
        Target(RUNNER, "NPUModelRunner._check_and_update_cudagraph_mode", ("0c09b6b439a822cd",), slack.all_captured),
        Target(BUILDER, "AscendMLAImpl.update_graph_params", ("92d4725718649d52",), slack.own_lengths),
    ),
)
