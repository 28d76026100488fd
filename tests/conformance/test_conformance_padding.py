"""Prefix sums of padded steps: vllm-ascend's own, which go wrong, and ours, through its real classes on CPU."""

import os
from collections.abc import Iterator, Sequence
from copy import copy
from itertools import accumulate, pairwise
from typing import Any
from unittest.mock import patch

import cpu_runner
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from patching import applied, as_installed
from vllm.config import CUDAGraphMode

from mtp_runtime.adapters.settings import settings as plugin_settings
from mtp_runtime.adapters.vllm_ascend import padding
from mtp_runtime.graphs.planner import Graph, fits
from mtp_runtime.graphs.slots import slots_for

BUILDER = "AscendMLAMetadataBuilder"
ONES = [1] * 16


@pytest.fixture(scope="module", autouse=True)
def slack_padding() -> Iterator[None]:
    plugin_settings.cache_clear()
    with patch.dict(os.environ, {"MTP_PADDING": "slack"}):
        yield
    plugin_settings.cache_clear()


@pytest.fixture(scope="module")
def runner() -> Iterator[Any]:
    """K = 1, 16 requests, 18 slots."""
    with applied(padding.PATCH):
        made = cpu_runner.make_runner(cpu_runner.configuration(1, 16, sizes=[36]))
        cpu_runner.give_attention(made)
        yield made


def right(ends: Sequence[int], kv: Sequence[int], requests: int, tokens: int) -> bool:
    """The operator's rules, and no KV for padding."""
    lengths = [end - start for start, end in pairwise([0, *ends])]
    return (
        ends[-1] == tokens
        and all(1 <= length <= 16 for length in lengths)
        and len(ends) == len(kv)
        and not any(kv[requests:])
    )


# --- through the metadata builder -----------------------------------------------------------------------------------


def builder(vllm_config: Any, k: int) -> Any:
    """The real metadata builder of a server with this K."""
    vllm_config = copy(vllm_config)
    vllm_config.speculative_config = copy(vllm_config.speculative_config)
    vllm_config.speculative_config.num_speculative_tokens = k
    return cpu_runner.attention_group(vllm_config).get_metadata_builder()


def build(made: Any, counts: Sequence[int], slots: int, width: int, unpadded_drafter: bool = False) -> Any:
    """`build` of a decode step that is to be padded; its decode metadata. KV lengths are 100, 101, ..., a prefill's
    its own tokens."""
    from vllm_ascend.attention.attention_v1 import AscendAttentionState
    from vllm_ascend.attention.utils import AscendCommonAttentionMetadata
    from vllm_ascend.ops import rotary_embedding

    requests, tokens = len(counts), sum(counts)
    starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    kv = torch.tensor([100 + n if count <= width else count for n, count in enumerate(counts)], dtype=torch.int32)
    common = AscendCommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=kv,
        _seq_lens_cpu=kv,
        num_reqs=requests,
        num_actual_tokens=tokens,
        max_query_len=max(counts),
        max_seq_len=int(kv.max()),
        block_table_tensor=torch.full((requests, 4), 7, dtype=torch.int32),
        slot_mapping=torch.arange(tokens),
        decode_token_per_req=width,
        actual_seq_lengths_q=list(range(width, 4096, width)),
        positions=torch.zeros(4096, dtype=torch.int64),
        attn_state=AscendAttentionState.SpecDecoding,
        # With the drafter unpadded it counts slots of one token, else tokens.
        graph_pad_size=slots if unpadded_drafter else slots * width,
    )
    table = torch.ones(8, 64)
    speculative = made.speculative_config
    with (
        cpu_runner.edge(),
        patch.object(speculative, "disable_padded_drafter_batch", unpadded_drafter),
        patch.object(rotary_embedding, "_cos_cache", table),
        patch.object(rotary_embedding, "_sin_cache", table),
        patch.object(rotary_embedding, "_cos_mla", torch.ones(4096, 1, 1, 64)),
        patch.object(rotary_embedding, "_sin_mla", torch.ones(4096, 1, 1, 64)),
    ):
        return made.build(0, common).decode


@pytest.fixture(scope="module")
def builders(runner: Any) -> dict[int, Any]:
    return {k: builder(runner.vllm_config, k) for k in (1, 2, 3, 7)}


def as_before(made: Any, helper: str) -> Any:
    """The builder with vllm-ascend's own helper."""
    old = as_installed(padding.BUILDER, f"{BUILDER}.{helper}")
    return patch.object(type(made), helper, old)


def test_a_case_that_was_right(builders: dict[int, Any]) -> None:
    with as_before(builders[1], "pad_actual_seq_len_q_mtp_enable_pad"):
        assert build(builders[1], ONES, 18, 2).actual_seq_lengths_q == [*range(1, 17), 26, 36]
    found = build(builders[1], ONES, 18, 2)
    assert found.actual_seq_lengths_q == [*range(1, 17), 26, 36]
    assert found.seq_lens_list == [*range(100, 116), 0, 0]
    assert found.block_table[:, 0].tolist() == [7] * 16 + [0, 0]


def test_a_long_segment_was_not_noticed_and_is_refused(builders: dict[int, Any]) -> None:
    with as_before(builders[3], "pad_actual_seq_len_q_mtp_enable_pad"):
        assert build(builders[3], ONES, 17, 4).actual_seq_lengths_q == [*range(1, 17), 68]
    with pytest.raises(padding.PaddingRefused) as refused:
        build(builders[3], ONES, 17, 4)
    told = str(refused.value)
    assert "52 tokens of padding for free slots: 1" in told and "F06" in told and "R05" in told
    assert "needs 20 slots or more" in told and "mtp.padding: placeholder" in told
    # What it says helps:
    found = build(builders[3], ONES, 20, 4)
    assert right(found.actual_seq_lengths_q, found.seq_lens_list, 16, 80)


def test_prefills_have_no_place_in_a_whole_step_graph(builders: dict[int, Any]) -> None:
    with pytest.raises(padding.PaddingRefused, match="1 prefills of 3 requests"):
        build(builders[1], [2, 2, 40], 30, 2)


def test_an_unpadded_drafter(builders: dict[int, Any]) -> None:
    """vllm-ascend's own example has an empty segment: 6, 6."""
    with as_before(builders[1], "pad_actual_seq_len_q_mtp_disable_pad"):
        found = build(builders[1], [1, 1, 2, 1], 8, 1, unpadded_drafter=True)
        assert found.actual_seq_lengths_q == [1, 2, 4, 5, 6, 6, 7, 8]
    with pytest.raises(padding.PaddingRefused, match=r"3 tokens for 4 free slots.*F06.*R17"):
        build(builders[1], [1, 1, 2, 1], 8, 1, unpadded_drafter=True)
    found = build(builders[1], [1, 1, 1], 8, 1, unpadded_drafter=True)
    assert found.actual_seq_lengths_q == [1, 2, 3, 4, 5, 6, 7, 8] and found.seq_lens_list[3:] == [0] * 5


@given(st.data(), st.sampled_from([1, 2, 3, 7]), st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_every_step_is_right_or_refused(builders: dict[int, Any], data: Any, k: int, free: int) -> None:
    counts = data.draw(st.lists(st.integers(1, k + 1), min_size=1, max_size=64))
    graph = Graph(len(counts) + free, k + 1)
    # Without a slot of padding vllm-ascend pads nothing, and there is nothing to pad only where all have K + 1 tokens.
    assume(free)
    if not fits(len(counts), sum(counts), graph):
        with pytest.raises(padding.PaddingRefused, match=r"F05.*F06"):
            build(builders[k], counts, graph.slots, graph.width)
        return
    found = build(builders[k], counts, graph.slots, graph.width)
    assert found.actual_seq_lengths_q[: len(counts)] == list(accumulate(counts))
    assert right(found.actual_seq_lengths_q, found.seq_lens_list, len(counts), graph.tokens)
    assert len(found.actual_seq_lengths_q) == graph.slots == len(found.block_table)


@given(st.integers(1, 64), st.sampled_from([1, 2, 3, 7]))
@settings(max_examples=25, deadline=None)
def test_the_worst_step_fits_with_slack_slots(builders: dict[int, Any], requests: int, k: int) -> None:
    slots = slots_for(requests, k)
    found = build(builders[k], [1] * requests, slots.slots, k + 1)
    assert right(found.actual_seq_lengths_q, found.seq_lens_list, requests, slots.tokens)


# --- through the model runner ---------------------------------------------------------------------------------------


class Buffer:
    """A CpuGpuBuffer's three views, of any size."""

    def __init__(self, counts: Sequence[int], entries: int) -> None:
        self.cpu = torch.zeros(entries, dtype=torch.int32)
        self.gpu, self.np = self.cpu.clone(), self.cpu.numpy()
        self.np[: len(counts) + 1] = [0, *accumulate(counts)]


def pad(made: Any, function: Any, counts: Sequence[int], tokens: int, slots: int, mode: CUDAGraphMode) -> list[int]:
    """Prefix sums as written for the device; the server's graph mode is `mode`, the step runs in a whole graph."""
    buffer = Buffer(counts, 64)
    with patch.object(made.compilation_config, "cudagraph_mode", mode), cpu_runner.edge():
        found = function(made, buffer, tokens, slots, len(counts), CUDAGraphMode.FULL, slots)
    assert torch.equal(buffer.cpu[: found + 1], buffer.gpu[: found + 1])
    return [int(end) for end in buffer.gpu[1 : found + 1]]


DECODE, MIXED = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL
RUNNER_CASES = [
    (ONES, DECODE, [*range(1, 17), 18, 20]),  # does not end in T
    (ONES, MIXED, [*range(1, 17), 36]),  # a segment of 20
    ([1] * 4, MIXED, [1, 2, 3, 4, 36]),  # a segment of 32
]


@pytest.mark.parametrize(("counts", "mode", "before"), RUNNER_CASES)
def test_what_the_runner_writes(runner: Any, counts: list[int], mode: CUDAGraphMode, before: list[int]) -> None:
    old = as_installed(padding.RUNNER, "NPUModelRunner._pad_query_start_loc_for_fia")
    assert pad(runner, old, counts, 36, 18, mode) == before
    assert not right(before, [0] * len(before), 0, 36)
    after = pad(runner, type(runner)._pad_query_start_loc_for_fia, counts, 36, 18, mode)
    assert right(after, [0] * 18, 0, 36) and after[: len(counts)] == list(accumulate(counts))


def test_what_the_runner_refuses(runner: Any) -> None:
    ours = type(runner)._pad_query_start_loc_for_fia
    with pytest.raises(padding.PaddingRefused, match=r"18 tokens of padding for free slots: 1.*F06.*R05"):
        pad(runner, ours, ONES, 34, 17, DECODE)
    with pytest.raises(padding.PaddingRefused, match=r"35 tokens, no multiple of K \+ 1 = 2 \(R04\)"):
        pad(runner, ours, ONES, 35, 18, DECODE)
    with pytest.raises(padding.PaddingRefused, match="graph of 64 slots, and the runner has room for 63"):
        pad(runner, ours, ONES, 128, 64, DECODE)


def test_a_step_outside_graphs_is_left_to_the_engine(runner: Any) -> None:
    """Prompts, and steps that are not padded at all."""
    old = as_installed(padding.RUNNER, "NPUModelRunner._pad_query_start_loc_for_fia")
    ours = type(runner)._pad_query_start_loc_for_fia
    assert pad(runner, ours, [2, 40], 44, 2, MIXED) == pad(runner, old, [2, 40], 44, 2, MIXED) == [2, 42, 44]
    buffers = [Buffer(ONES, 64), Buffer(ONES, 64)]
    with cpu_runner.edge():
        slots = [f(runner, b, 20, 16, 16, CUDAGraphMode.NONE, None) for f, b in zip((old, ours), buffers, strict=True)]
    assert slots[0] == slots[1] and np.array_equal(buffers[0].np, buffers[1].np)


STEPS = [ONES, [2] * 16, [1] * 4, [2] * 3, [1, 2] * 8, [1], [2, 1, 1]]


@pytest.mark.parametrize("counts", STEPS, ids=str)
def test_a_step_from_dispatch_to_metadata(runner: Any, counts: list[int]) -> None:
    """Stale tables and slot mappings do not survive: padding reads no KV and writes none."""
    kv = [100 + n for n in range(len(counts))]
    step = cpu_runner.Step(runner, counts, kv)
    assert (step.mode, step.descriptor.num_tokens, step.descriptor.num_reqs) == (CUDAGraphMode.FULL, 36, 18)
    decode = step.metadata().decode
    assert right(decode.actual_seq_lengths_q, decode.seq_lens_list, len(counts), 36)
    assert decode.actual_seq_lengths_q[: len(counts)] == list(accumulate(counts))
    assert decode.seq_lens_list == kv + [0] * (18 - len(counts))
    table = runner.input_batch.block_table[0]
    rows = table.get_device_tensor()[:18]
    assert not rows[len(counts) :].any() and bool((rows[: len(counts)] == cpu_runner.STALE).all())
    assert decode.block_table.data_ptr() == rows.data_ptr() and decode.block_table.shape == rows.shape
    mapped = table.slot_mapping.gpu[:36]
    assert bool((mapped[sum(counts) :] == -1).all()) and bool((mapped[: sum(counts)] == cpu_runner.STALE).all())


@given(st.lists(st.integers(1, 2), min_size=1, max_size=16))
@settings(max_examples=40, deadline=None)
def test_every_mix_of_a_slack_graph(runner: Any, counts: list[int]) -> None:
    decode = cpu_runner.Step(runner, counts, [10] * len(counts)).metadata().decode
    assert right(decode.actual_seq_lengths_q, decode.seq_lens_list, len(counts), 36)
