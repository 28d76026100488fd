"""Put a step into the persistent buffers of a static graph: the one place where padding happens."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from mtp_runtime.graphs.planner import Graph, Plan, plan

NO_SLOT = -1
"""Slot of a padding token: its KV is written nowhere."""


class InputError(ValueError):
    """An input that the graph cannot take; the message names it."""


@dataclass
class StepInputs:
    """What a step brings. T real tokens, B real requests.

    input_ids [T]; positions [T] int64; slot_mapping [T] int64, where each token's KV goes; block_table [B, P] int32;
    hidden_states [T, H], for a drafter only.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    hidden_states: Tensor | None = None


@dataclass
class StepBuffers:
    """The memory a static graph reads, of one size for its whole life.

    graph: its shape, T = graph.tokens. input_ids [T]; positions [T]; slot_mapping [T]; block_table [slots, P];
    hidden_states [T, H] or None. actual_seq_lengths and actual_seq_lengths_kv: host lists, one entry a slot.
    row_owner [T] int64 and row_lengths [T] int32: slot and visible KV of each token, for batch expansion.
    """

    graph: Graph
    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    hidden_states: Tensor | None
    row_owner: Tensor
    row_lengths: Tensor
    actual_seq_lengths: list[int] = field(default_factory=list)
    actual_seq_lengths_kv: list[int] = field(default_factory=list)

    @classmethod
    def make(
        cls,
        graph: Graph,
        blocks: int,
        ids_dtype: torch.dtype = torch.int32,
        hidden_size: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> StepBuffers:
        """Buffers that hold a step of padding. blocks: columns of the block table."""
        tokens = graph.tokens
        buffers = cls(
            graph,
            torch.zeros(tokens, dtype=ids_dtype),
            torch.zeros(tokens, dtype=torch.int64),
            torch.zeros(tokens, dtype=torch.int64),
            torch.zeros(graph.slots, blocks, dtype=torch.int32),
            None if hidden_size is None else torch.zeros(tokens, hidden_size, dtype=dtype),
            torch.zeros(tokens, dtype=torch.int64),
            torch.zeros(tokens, dtype=torch.int32),
        )
        buffers.clear()
        return buffers

    def clear(self) -> None:
        """A step without requests, as an idle rank and a recording run it."""
        empty = {name: tensor[:0] for name, tensor in self.tensors().items()}
        pad(self, plan([], [], self.graph), StepInputs(**empty))

    def tensors(self) -> dict[str, Tensor]:
        """Name -> persistent tensor."""
        found = {entry.name: getattr(self, entry.name) for entry in fields(StepInputs)}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def lists(self) -> dict[str, list[int]]:
        """Name -> host list."""
        return {
            "actual_seq_lengths": self.actual_seq_lengths,
            "actual_seq_lengths_kv": self.actual_seq_lengths_kv,
        }


def pad(buffers: StepBuffers, plan: Plan, inputs: StepInputs) -> None:
    """Copy a step into the buffers and reset all the rest of them.

    Nothing of an earlier step survives: padding has slot -1, KV length 0, a cleared block table row, and zeros
    elsewhere. Stale rows would make padding write over a neighbour's KV. Raises InputError, naming the input, for
    anything that does not fit; then nothing has changed.
    """
    if plan.graph != buffers.graph:
        raise InputError(f"plan: made for {plan.graph}, the buffers are those of {buffers.graph}")
    for name in buffers.lists():
        values, slots = getattr(plan, name), plan.graph.slots
        if len(values) != slots:
            raise InputError(f"{name}: {len(values)} entries, the graph has {slots} slots")
    if plan.actual_seq_lengths[-1] != plan.graph.tokens:
        raise InputError(f"actual_seq_lengths: ends in {plan.actual_seq_lengths[-1]}, not in {plan.graph.tokens}")
    counts = {"block_table": plan.requests}
    persistent = buffers.tensors()
    for entry in fields(StepInputs):
        name = entry.name
        _check(name, getattr(inputs, name), persistent.get(name), counts.get(name, plan.tokens))
    for name, buffer in persistent.items():
        count = counts.get(name, plan.tokens)
        given = getattr(inputs, name)
        if name == "block_table":
            buffer[:count, : given.shape[1]].copy_(given)
            buffer[:count, given.shape[1] :].zero_()
        else:
            buffer[:count].copy_(given)
        buffer[count:].fill_(NO_SLOT if name == "slot_mapping" else 0)
    # In place: whoever holds the lists sees the new values.
    buffers.actual_seq_lengths[:] = plan.actual_seq_lengths
    buffers.actual_seq_lengths_kv[:] = plan.actual_seq_lengths_kv
    _fill_rows(buffers, plan)


def _fill_rows(buffers: StepBuffers, plan: Plan) -> None:
    """One row a token: the slot it belongs to, and how many KV entries it sees.

    A padding row sees one entry, of the null block that a cleared table row names: softmax over nothing is no number.
    """
    owners, lengths, start = [], [], 0
    for slot, (end, kv) in enumerate(zip(plan.actual_seq_lengths, plan.actual_seq_lengths_kv, strict=True)):
        owners += [slot] * (end - start)
        lengths += range(kv - (end - start) + 1, kv + 1) if kv else [1] * (end - start)
        start = end
    buffers.row_owner.copy_(torch.tensor(owners))
    buffers.row_lengths.copy_(torch.tensor(lengths))


def _check(name: str, given: Any, buffer: Tensor | None, count: int) -> None:
    if buffer is None or given is None:
        if buffer is not None or given is not None:
            raise InputError(f"{name}: the graph was recorded {'without' if buffer is None else 'with'} it")
        return
    if given.dtype != buffer.dtype:
        raise InputError(f"{name}: {given.dtype}, the graph was recorded with {buffer.dtype}")
    narrower = name == "block_table" and given.dim() == 2 and given.shape[1] <= buffer.shape[1]
    if given.dim() != buffer.dim() or (given.shape[1:] != buffer.shape[1:] and not narrower):
        raise InputError(f"{name}: shape {tuple(given.shape)}, the graph takes rows of {tuple(buffer.shape[1:])}")
    if given.shape[0] != count:
        raise InputError(f"{name}: {given.shape[0]} rows, the plan says {count}")
