"""A step of the real AscendEagleProposer, of a real model runner, with every input its MTP layer gets written down.

Replaced at the edge: the MTP layer itself, which needs weights and kernels, by a count (`Layer`); the rest of a runner
as cpu_runner.py says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import cpu_runner
import torch
from torch import Tensor

HIDDEN, VOCABULARY = 64, 256
BLOCK = 128


@dataclass
class Pass:
    """What the layer got at one depth. kv, ends: host lists of the attention metadata; slots: its slot mapping; rows:
    of its block table; tokens: that decode attention is called with in an eager step."""

    input_ids: Tensor
    positions: Tensor
    hidden_states: Tensor
    kv: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    slots: Tensor | None = None
    rows: int = 0
    tokens: int = 0


class Layer:
    """Stands in for the MTP layer: hidden states go up by the token's id, the head picks by their first value."""

    def __init__(self) -> None:
        self.passes: list[Pass] = []

    def __call__(
        self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor, inputs_embeds: None = None
    ) -> tuple[Tensor, Tensor]:
        from vllm.forward_context import get_forward_context

        found = Pass(input_ids.clone(), positions.clone(), hidden_states.clone())
        layers = get_forward_context().attn_metadata
        if layers:
            metadata = layers[cpu_runner.DRAFTER_LAYER]
            found.kv = list(metadata.decode.seq_lens_list)
            found.ends = list(metadata.decode.actual_seq_lengths_q)
            found.slots = metadata.slot_mapping.clone()
            found.rows, found.tokens = len(metadata.decode.block_table), metadata.num_decode_tokens
        self.passes.append(found)
        out = mixed(hidden_states, input_ids, positions)
        return out, out

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(picked(hidden_states), VOCABULARY).float()


def mixed(hidden_states: Tensor, input_ids: Tensor, positions: Tensor) -> Tensor:
    """[T, H]: another value for every token and place."""
    return hidden_states + (3 * input_ids + positions)[:, None].to(hidden_states.dtype)


def picked(hidden_states: Tensor) -> Tensor:
    return hidden_states[:, 0].long() % VOCABULARY


def make_drafter(k: int, requests: int, **kwargs: Any) -> Any:
    """The drafter of a real runner, with the attention group that `initialize_attn_backend` finds for its layer."""
    config = cpu_runner.configuration(k, requests, **kwargs)
    runner = cpu_runner.make_runner(config)
    cpu_runner.give_attention(runner)
    drafter = runner.drafter
    # Asked for by name only where it has an indexer.
    runner.model = torch.nn.Identity()
    drafter.draft_attn_groups, drafter.kv_cache_gid = runner.attn_groups[0], 0
    drafter.block_size = config.cache_config.block_size
    # Indices of 32 bits are the device's; gather on CPU takes 64.
    drafter.positions = drafter.positions.long()
    # A captured graph's parameters are updated on the device; no graph is captured here.
    drafter._update_full_graph_params = lambda *_: None
    return drafter


@dataclass
class Batch:
    """A target step. counts: query tokens of each request; kv: KV lengths with them; accepted: tokens that were kept
    of each (1 and more, the drafts among them); table: block table.
    """

    counts: Sequence[int]
    kv: Sequence[int]
    accepted: Sequence[int]

    def __post_init__(self) -> None:
        total = sum(self.counts)
        self.ends = torch.tensor(self.counts).cumsum(0)
        self.input_ids = torch.arange(10, 10 + total, dtype=torch.int32)
        spans = [range(length - count, length) for count, length in zip(self.counts, self.kv, strict=True)]
        self.positions = torch.tensor([place for span in spans for place in span])
        self.table = torch.arange(100, 100 + 8 * len(self.counts), dtype=torch.int32).view(-1, 8)
        rows = [row for row, count in enumerate(self.counts) for _ in range(count)]
        self.slots = self.table[rows, self.positions // BLOCK].long() * BLOCK + self.positions % BLOCK
        self.hidden_states = torch.arange(total, dtype=torch.bfloat16)[:, None].repeat(1, HIDDEN)
        self.sampled = torch.arange(200, 200 + len(self.counts), dtype=torch.int32)
        # Where each request's last kept token stands among the T.
        rejected = torch.tensor(self.counts) - torch.tensor(self.accepted)
        self.last = self.ends - 1 - rejected

    def drafts(self) -> Tensor:
        """Prefix sums of the drafts that the step carried."""
        return (torch.tensor(self.counts) - 1).cumsum(0).int()


def common_metadata(drafter: Any, batch: Batch) -> Any:
    """What the runner gives its drafter beside the target's step."""
    return _start(drafter, batch)[1]


def _start(drafter: Any, batch: Batch) -> tuple[cpu_runner.Step, Any]:
    from vllm.config import set_current_vllm_config

    runner, requests, total = drafter.runner, len(batch.counts), sum(batch.counts)
    step = cpu_runner.Step(runner, batch.counts, batch.kv)
    table = runner.input_batch.block_table[0]
    table.get_device_tensor()[:requests] = batch.table
    table.slot_mapping.gpu[:total] = batch.slots
    runner.positions[:total] = batch.positions
    runner.query_start_loc.gpu.copy_(runner.query_start_loc.cpu)
    with set_current_vllm_config(drafter.vllm_config), cpu_runner.edge():
        _, common = runner._build_attention_metadata(
            num_tokens=total,
            num_tokens_padded=step.descriptor.num_tokens,
            num_reqs=requests,
            num_reqs_padded=_padded(step),
            max_query_len=max(batch.counts),
            num_scheduled_tokens_np=step.counts,
        )
    return step, common


def run(drafter: Any, batch: Batch) -> tuple[Tensor, list[Pass], Tensor]:
    """Drafts [B, K], the layer's passes, and where the first depth reads: what `propose_draft_token_ids` calls."""
    from vllm.config import set_current_vllm_config

    drafter.model = Layer()
    step, common = _start(drafter, batch)
    with set_current_vllm_config(drafter.vllm_config), cpu_runner.edge(), torch.inference_mode():
        common, _, last, rejected = drafter.prepare_inputs_padded(
            common, SpecDecode(batch.drafts()), torch.tensor(batch.accepted)
        )
        drafts = drafter._propose(
            target_token_ids=batch.input_ids,
            target_positions=batch.positions,
            target_hidden_states=batch.hidden_states,
            next_token_ids=batch.sampled,
            token_indices_to_sample=last,
            common_attn_metadata=common,
            target_model_batch_desc=step.descriptor,
            sampling_metadata=None,
            num_rejected_tokens_gpu=rejected,
            num_scheduled_tokens=sum(batch.counts),
        )
    return drafts, drafter.model.passes, last


def _padded(step: cpu_runner.Step) -> int:
    """Slots of the target's metadata, as `execute_model` pads it for a whole-step graph."""
    from vllm.config import CUDAGraphMode

    runner, requests, graph = step.runner, len(step.counts), step.descriptor
    if step.mode != CUDAGraphMode.FULL:
        return requests
    return runner._pad_query_start_loc_for_fia(
        runner.query_start_loc, graph.num_tokens, graph.num_reqs, requests, step.mode, graph.num_reqs
    )


def dummy(drafter: Any, tokens: int, slots: int, mode: Any) -> list[Pass]:
    """The layer's passes of an idle rank's step of so many tokens, as `_dummy_run` of the runner starts it."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import BatchDescriptor

    runner, drafter.model = drafter.runner, Layer()
    d = tokens // slots
    cpu_runner.Step(runner, [d] * slots, [d] * slots)
    with set_current_vllm_config(drafter.vllm_config), cpu_runner.edge():
        drafter.dummy_run(
            num_tokens=tokens,
            num_reqs=slots,
            aclgraph_runtime_mode=mode,
            batch_descriptor=BatchDescriptor(tokens, slots, uniform=True),
        )
    return drafter.model.passes


@dataclass
class SpecDecode:
    """What `prepare_inputs_padded` reads of vLLM's SpecDecodeMetadata."""

    cu_num_draft_tokens: Tensor
