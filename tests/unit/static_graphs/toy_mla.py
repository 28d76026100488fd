"""A small MLA model on our operators and a real paged cache: in these tests it is the engine's model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mtp_runtime.attention import native
from mtp_runtime.attention.tnd import LATENT, ROPE
from mtp_runtime.graphs.padding import StepBuffers, StepInputs
from mtp_runtime.graphs.planner import Graph, Plan, plan
from mtp_runtime.graphs.static import EagerStep, StaticStep

native.load()

BLOCK, BLOCKS, COLUMNS = 4, 90, 5
"""Entries of a block; blocks of a cache, the first of them the null block; columns of a block table."""
VOCAB, HIDDEN, HEADS, LAYERS = 50, 24, 2, 2
LONGEST = BLOCK * COLUMNS


class ToyMla(nn.Module):
    """Embedding, then per layer: norm, rotary positions, KV write, attention, a projection and a gated MLP.

    lists: attention as one call in TND layout, which takes the host lists; without, one row a token (batch expansion).
    calls counts how often Python entered the model.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, lists: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)

        def weights(*shape: int) -> nn.Parameter:
            values = torch.randn(*shape, generator=generator) / shape[-1] ** 0.5
            return nn.Parameter(values.to(dtype), requires_grad=False)

        width = LATENT + ROPE
        self.lists, self.calls = lists, 0
        self.embedding = weights(VOCAB, HIDDEN)
        self.mix = weights(HIDDEN, HIDDEN)
        self.layers = nn.ParameterList(
            [weights(HEADS * width, HIDDEN), weights(width, HIDDEN), weights(HIDDEN, HEADS * LATENT)][part]
            for _ in range(LAYERS)
            for part in range(3)
        )
        self.gates = nn.ParameterList(weights(2 * HIDDEN, HIDDEN) for _ in range(LAYERS))
        turns = torch.outer(torch.arange(LONGEST), 100.0 ** -torch.linspace(0, 1, ROPE // 2))
        self.angles = torch.cat((turns.cos(), turns.sin()), dim=-1).to(dtype)
        self.caches = [torch.empty(BLOCKS, BLOCK, width, dtype=dtype) for _ in range(LAYERS)]
        self.fill(0)

    def fill(self, seed: int) -> None:
        """Make every entry of the caches something that was there before the step."""
        generator = torch.Generator().manual_seed(seed)
        for cache in self.caches:
            cache.copy_(torch.randn(cache.shape, generator=generator))

    def forward(self, buffers: StepBuffers) -> Tensor:
        """[T, HIDDEN] of a step."""
        self.calls += 1
        hidden = self.embedding[buffers.input_ids.long()]
        if buffers.hidden_states is not None:
            hidden = hidden + buffers.hidden_states @ self.mix
        for layer, cache in enumerate(self.caches):
            query, latent, out = self.layers[3 * layer : 3 * layer + 3]
            normed = nn.functional.rms_norm(hidden, (HIDDEN,))
            turn = self.angles[buffers.positions]
            q = (normed @ query.t()).unflatten(-1, (HEADS, -1))
            nope, rope = q[..., :LATENT], rotate(q[..., LATENT:], turn[:, None])
            kv_c, k_pe = (normed @ latent.t()).split([LATENT, ROPE], dim=-1)
            torch.ops.mtp_runtime.write_latent_kv(kv_c, rotate(k_pe, turn), cache, buffers.slot_mapping)
            attended = self.attend(nope, rope, cache, buffers)
            hidden = hidden + attended.flatten(1) @ out.t()
            gate, up = (hidden @ self.gates[layer].t()).chunk(2, dim=-1)
            hidden += nn.functional.silu(gate) * up
        return hidden

    def attend(self, nope: Tensor, rope: Tensor, cache: Tensor, buffers: StepBuffers) -> Tensor:
        if not self.lists:
            return attend_rows(torch.cat((nope, rope), dim=-1), cache, buffers)
        return attend_segments(
            nope, rope, cache, buffers.block_table, buffers.actual_seq_lengths, buffers.actual_seq_lengths_kv
        )


def rotate(values: Tensor, turn: Tensor) -> Tensor:
    (a, b), (cos, sin) = values.chunk(2, dim=-1), turn.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def attend_segments(
    nope: Tensor, rope: Tensor, cache: Tensor, table: Tensor, ends: list[int], lengths: list[int]
) -> Tensor:
    return torch.ops.mtp_runtime.fused_infer_attention_score(
        nope,
        cache[..., :LATENT],
        cache[..., :LATENT],
        query_rope=rope,
        key_rope=cache[..., LATENT:],
        actual_seq_lengths=ends,
        actual_seq_lengths_kv=lengths,
        block_table=table,
        num_heads=nope.shape[1],
        scale=0.1,
        block_size=cache.shape[1],
    )


def attend_rows(query: Tensor, cache: Tensor, buffers: StepBuffers) -> Tensor:
    """Batch expansion: a row a token, with the table of its slot and the entries that it sees."""
    table = buffers.block_table[buffers.row_owner].long()
    entries = cache[table].flatten(1, 2).float()
    hidden = torch.arange(entries.shape[1]) >= buffers.row_lengths[:, None]
    scores = (query.float() @ entries.mT * 0.1).masked_fill(hidden[:, None], -torch.inf)
    return (scores.softmax(-1) @ entries[..., :LATENT]).to(query.dtype)


@dataclass
class Mix:
    """A step of some requests: tokens and KV length of each, what the step brings, and where its KV goes."""

    counts: list[int]
    kv: list[int]
    inputs: StepInputs

    def plan(self, graph: Graph) -> Plan:
        return plan(self.counts, self.kv, graph)

    def alone(self, index: int) -> Mix:
        """One request of it."""
        start = sum(self.counts[:index])
        rows = slice(start, start + self.counts[index])
        inputs = self.inputs
        return Mix(
            [self.counts[index]],
            [self.kv[index]],
            StepInputs(
                inputs.input_ids[rows],
                inputs.positions[rows],
                inputs.slot_mapping[rows],
                inputs.block_table[index : index + 1],
                None if inputs.hidden_states is None else inputs.hidden_states[rows],
            ),
        )


def make_mix(counts: Sequence[int], contexts: Sequence[int], seed: int = 0, hidden: torch.dtype | None = None) -> Mix:
    """Requests of so many tokens after so many, with blocks of their own in any order.

    hidden: type of the hidden states that a drafter's step brings.
    """
    generator = torch.Generator().manual_seed(seed)
    blocks = (torch.randperm(BLOCKS - 1, generator=generator) + 1).tolist()
    kv = [context + count for context, count in zip(contexts, counts, strict=True)]
    table = torch.zeros(len(counts), COLUMNS, dtype=torch.int32)
    positions, slots = [], []
    for row, (context, length) in enumerate(zip(contexts, kv, strict=True)):
        own = [blocks.pop() for _ in range(-(-length // BLOCK))]
        table[row, : len(own)] = torch.tensor(own)
        positions += range(context, length)
        slots += [own[p // BLOCK] * BLOCK + p % BLOCK for p in range(context, length)]
    tokens = len(positions)
    return Mix(
        list(counts),
        kv,
        StepInputs(
            torch.randint(VOCAB, (tokens,), generator=generator, dtype=torch.int32),
            torch.tensor(positions, dtype=torch.int64),
            torch.tensor(slots, dtype=torch.int64),
            table,
            None if hidden is None else torch.randn(tokens, HIDDEN, generator=generator).to(hidden),
        ),
    )


def make_buffers(graph: Graph, hidden: torch.dtype | None = None) -> StepBuffers:
    if hidden is None:
        return StepBuffers.make(graph, COLUMNS)
    return StepBuffers.make(graph, COLUMNS, hidden_size=HIDDEN, dtype=hidden)


MODELS: dict[Any, ToyMla] = {}
STEPS: dict[Any, StaticStep] = {}


def toy(dtype: torch.dtype = torch.float32, lists: bool = True) -> ToyMla:
    """One model of each kind: tests fill its caches themselves."""
    if (dtype, lists) not in MODELS:
        MODELS[dtype, lists] = ToyMla(dtype, lists)
    return MODELS[dtype, lists]


def static_step(
    graph: Graph, lists: bool = True, hidden: bool = False, dtype: torch.dtype = torch.float32
) -> StaticStep:
    """A captured step of `toy`, one for all tests: a replay depends on no earlier one, as they show."""
    kind = graph, lists, hidden, dtype
    if kind not in STEPS:
        STEPS[kind] = StaticStep(toy(dtype, lists), make_buffers(graph, dtype if hidden else None), uses_lists=lists)
        STEPS[kind].capture()
    return STEPS[kind]


def eager_step(static: StaticStep, model: ToyMla) -> EagerStep:
    """The same model, run by Python on buffers of its own."""
    given = static.buffers.hidden_states
    return EagerStep(model, make_buffers(static.graph, None if given is None else given.dtype))


def snapshot(model: ToyMla) -> list[Tensor]:
    return [cache.clone() for cache in model.caches]


def rows_written(before: Sequence[Tensor], after: Sequence[Tensor]) -> set[int]:
    """Slots, counted over all blocks, whose entry is another one in any layer."""
    return {
        slot
        for old, new in zip(before, after, strict=True)
        for slot in (old != new).flatten(0, 1).any(-1).nonzero().flatten().tolist()
    }


def same(first: Tensor, second: Tensor) -> None:
    """To the last bit."""
    assert (first.dtype, first.shape) == (second.dtype, second.shape)
    assert torch.equal(bits(first), bits(second)), f"{first} is not {second}"


def bits(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)
