"""A server of a model whose next token is a sum over all tokens before it.

The target and its MTP layer form that sum with the attention operator over paged caches of their own: one entry too
many, too few, stale or of another request changes the token. The MTP layer works out the same token as the target
would, at every depth, so each of its drafts is right unless something fed it wrongly. Steps run in static graphs, as
the engine's do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mtp_runtime.attention import native
from mtp_runtime.attention.tnd import LATENT, ROPE
from mtp_runtime.drafting.proposer import DraftStep, prepare, propose
from mtp_runtime.graphs.padding import StepBuffers, StepInputs
from mtp_runtime.graphs.planner import Graph, choose, plan
from mtp_runtime.graphs.slots import SLACK, draft_slots, graph_slots
from mtp_runtime.graphs.static import EagerStep, StaticStep

native.load()

BLOCK, VOCAB, SIZE = 4, 29, 3
"""Entries of a block; tokens; size of hidden states: the first token, the sum, and the sum weighted by place."""


def next_token(tokens: Sequence[int]) -> int:
    """What follows, without any model. Two sequences with other sums never meet again: 1 + weight is no multiple."""
    return (sum(token * weight(place) for place, token in enumerate(tokens)) + 5 * len(tokens)) % VOCAB


def weight(place: Any) -> Any:
    return 1 + (place + 1) % 5


def to_token(values: Tensor) -> Tensor:
    """A token; VOCAB, which no sum yields, where the values are no numbers."""
    return (values % VOCAB).nan_to_num(VOCAB).long()


def continued(prompt: Sequence[int], length: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < length:
        tokens.append(next_token(tokens))
    return tokens


class SumLayer:
    """Attention that looks at all entries alike, over a cache of its own."""

    def __init__(self, blocks: int) -> None:
        self.cache = torch.full((blocks, BLOCK, LATENT + ROPE), torch.nan)

    def __call__(self, values: Tensor, buffers: StepBuffers) -> Tensor:
        """[T, SIZE]: the sums over what each row sees, its own value included."""
        tokens = len(values)
        latents = torch.cat((values, values.new_zeros(tokens, LATENT - SIZE)), dim=1)
        ropes = values.new_zeros(tokens, ROPE)
        torch.ops.mtp_runtime.write_latent_kv(latents, ropes, self.cache, buffers.slot_mapping)
        mean = torch.ops.mtp_runtime.fused_infer_attention_score(
            values.new_zeros(tokens, 1, LATENT),
            self.cache[..., :LATENT],
            self.cache[..., :LATENT],
            query_rope=ropes[:, None],
            key_rope=self.cache[..., LATENT:],
            actual_seq_lengths=buffers.actual_seq_lengths,
            actual_seq_lengths_kv=buffers.actual_seq_lengths_kv,
            block_table=buffers.block_table,
            num_heads=1,
            scale=1.0,
            block_size=BLOCK,
        )
        return (mean[:, 0, :SIZE] * (buffers.positions + 1)[:, None]).round()


def target_step(layer: SumLayer) -> Callable[[StepBuffers], tuple[Tensor, Tensor]]:
    """The target: [T] what it takes for the next token, and its hidden states."""

    def step(buffers: StepBuffers) -> tuple[Tensor, Tensor]:
        token, place = buffers.input_ids.float(), buffers.positions
        hidden = layer(torch.stack((torch.where(place == 0, token, 0), token, token * weight(place)), dim=1), buffers)
        return to_token(hidden[:, 2] + 5 * (place + 1)), hidden

    return step


def mtp_step(layer: SumLayer) -> Callable[[StepBuffers], tuple[Tensor, Tensor]]:
    """The MTP layer, whose rows hold the token after their place: draft in the first column, and hidden states.

    The very first token it knows from the hidden states alone. Those of another row would shift the draft.
    """

    def step(buffers: StepBuffers) -> tuple[Tensor, Tensor]:
        token, place, given = buffers.input_ids.float(), buffers.positions, buffers.hidden_states
        assert given is not None
        seen = layer(torch.stack((token * 0, token, token * weight(place + 1)), dim=1), buffers)
        total, weighted = seen[:, 1] + given[:, 0], seen[:, 2] + given[:, 0] * weight(0)
        amiss = given[:, 1] + token - total
        draft = weighted + 5 * (place + 2) + 7 * amiss
        return torch.stack((draft, total, weighted), dim=1), torch.stack((given[:, 0], total, weighted), dim=1)

    return step


class Passes:
    """A step function in its graphs, and without one where none fits."""

    def __init__(self, step: Callable[[StepBuffers], Any], graphs: list[Graph], columns: int, static: bool) -> None:
        self.step, self.columns, self.static = step, columns, static
        self.graphs = {graph: self._make(graph) for graph in graphs}
        self.eager = 0

    def _make(self, graph: Graph) -> StaticStep | EagerStep:
        hidden = None if "target" in self.step.__qualname__ else SIZE
        buffers = StepBuffers.make(graph, self.columns, hidden_size=hidden)
        made = StaticStep(self.step, buffers) if self.static else EagerStep(self.step, buffers)
        made.capture()
        return made

    def run(self, ends: list[int], kv: list[int], inputs: StepInputs) -> tuple[Graph | None, Tensor, Tensor]:
        """The graph, and the rows of the step's own tokens."""
        counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        graph = choose(len(counts), sum(counts), self.graphs)
        if graph is None or max(counts) > graph.width:
            self.eager += 1
            rows = torch.zeros(0)
            whole = StepBuffers(Graph(1, 1), **vars(inputs), row_owner=rows, row_lengths=rows)
            whole.actual_seq_lengths, whole.actual_seq_lengths_kv = ends, kv
            return None, *self.step(whole)
        first, second = self.graphs[graph].replay(plan(counts, kv, graph), inputs)
        return graph, first[: sum(counts)], second[: sum(counts)]


@dataclass
class Request:
    """tokens: prompt and answer, the last of them not run yet. drafts: what may follow."""

    tokens: list[int]
    blocks: list[int]
    drafts: list[int] = field(default_factory=list)
    meddled: list[bool] = field(default_factory=list)


Meddle = Callable[[int, int, list[int]], list[int]]
"""(step, request, drafts) -> the drafts that are verified: other ones, or fewer."""


class Server:
    """Requests from their prompts to max_len, K drafts a step. Also the drafter that `propose` asks.

    The prompts run as on a prefill node; the first decode step of a request is its last prompt token, without drafts.
    passes: every pass of the MTP layer, as (depth, what it was given, graph). tried, accepted: per depth, drafts that
    nobody meddled with and whose predecessors all stood, and those of them that stood.
    graph_requests: what the graphs are made for, default the number of prompts. poison: before each step, every KV
    entry that no token of a request stands behind becomes no number.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        k: int,
        max_len: int,
        static: bool = True,
        graph_requests: int | None = None,
        meddle: Meddle | None = None,
        poison: bool = False,
        seed: int = 0,
    ) -> None:
        self.k, self.max_len, self.poison = k, max_len, poison
        self.meddle = meddle or (lambda step, request, drafts: drafts)
        self.columns = -(-max_len // BLOCK)
        blocks = torch.randperm(self.columns * len(prompts), generator=torch.Generator().manual_seed(seed)) + 1
        own = blocks.view(len(prompts), self.columns).tolist()
        self.requests = [Request(list(prompt), row) for prompt, row in zip(prompts, own, strict=True)]
        self.running = list(range(len(prompts)))
        self.target, self.mtp = self.layers(1 + self.columns * len(prompts))
        graphs = [Graph(slots, k + 1) for slots in graph_slots(graph_requests or len(prompts), k, SLACK)]
        later = [Graph(slots, 1) for slots in draft_slots(graph_requests or len(prompts))]
        self.target_passes = Passes(target_step(self.target), graphs, self.columns, static)
        self.first_passes = Passes(mtp_step(self.mtp), graphs, self.columns, static)
        self.later_passes = Passes(mtp_step(self.mtp), later, self.columns, static)
        self.passes: list[tuple[int, DraftStep, Graph | None]] = []
        self.target_graphs: list[Graph | None] = []
        self.tried, self.accepted = [0] * k, [0] * k
        self.steps = 0
        self._prefill()

    def layers(self, blocks: int) -> tuple[SumLayer, SumLayer]:
        return SumLayer(blocks), SumLayer(blocks)

    def acceptance(self) -> list[float]:
        """Conditional acceptance at each depth."""
        return [stood / max(tried, 1) for stood, tried in zip(self.accepted, self.tried, strict=True)]

    def finish(self) -> Server:
        while self.running:
            self.step()
        return self

    def step(self) -> None:
        """Verify, accept, draft anew."""
        if self.poison:
            self.poison_stale()
        requests = [self.requests[index] for index in self.running]
        target = self._target([[request.tokens[-1], *request.drafts] for request in requests])
        found, sampled, last = self._ids, [], []
        for request, end in zip(requests, target.ends, strict=True):
            start = end - 1 - len(request.drafts)
            stood = 0
            for depth, draft in enumerate(request.drafts):
                good = draft == found[start + depth]
                if not request.meddled[depth]:
                    self.tried[depth] += 1
                    self.accepted[depth] += good
                if not good:
                    break
                stood += 1
            sampled.append(found[start + stood])
            last.append(start + stood)
            request.tokens += [*request.drafts[:stood], sampled[-1]]
        self._draft(target, sampled, last)
        self.running = [index for index in self.running if len(self.requests[index].tokens) < self.max_len]
        self.steps += 1

    def run(self, step: DraftStep, depth: int) -> tuple[Tensor, Tensor]:
        """A pass of the MTP layer, as `propose` asks for it."""
        passes = self.later_passes if depth else self.first_passes
        inputs = StepInputs(step.input_ids, step.positions, step.slot_mapping, step.block_table, step.hidden_states)
        graph, logits, states = passes.run(step.ends, step.kv, inputs)
        self.passes.append((depth, step, graph))
        return logits, states

    def pick(self, hidden_states: Tensor) -> Tensor:
        return to_token(hidden_states[:, 0])

    def last_accepted(self, last: list[int], ends: list[int]) -> Tensor:
        return torch.tensor(last, dtype=torch.int32)

    def poison_stale(self) -> None:
        """KV stands behind every token but the last one."""
        for layer in (self.target, self.mtp):
            valid = torch.zeros(layer.cache.shape[:2], dtype=torch.bool)
            for index in self.running:
                request = self.requests[index]
                for place in range(len(request.tokens) - 1):
                    valid[request.blocks[place // BLOCK], place % BLOCK] = True
            layer.cache[~valid] = torch.nan

    def _prefill(self) -> None:
        target = self._target([request.tokens for request in self.requests], first=True)
        ends = [end - 1 for end in target.ends]
        step = prepare(target, torch.tensor([self._ids[end] for end in ends]), torch.tensor(ends))
        self.run(step, 0)
        self.passes.clear()
        self.target_graphs.clear()
        self.target_passes.eager = self.first_passes.eager = 0

    def _target(self, tokens: list[list[int]], first: bool = False) -> DraftStep:
        requests = [self.requests[index] for index in self.running]
        starts = [0 if first else len(request.tokens) - 1 for request in requests]
        places = [range(start, start + len(row)) for start, row in zip(starts, tokens, strict=True)]
        slots = [
            request.blocks[place // BLOCK] * BLOCK + place % BLOCK
            for request, row in zip(requests, places, strict=True)
            for place in row
        ]
        inputs = StepInputs(
            torch.tensor([token for row in tokens for token in row], dtype=torch.int32),
            torch.tensor([place for row in places for place in row]),
            torch.tensor(slots),
            torch.tensor([request.blocks for request in requests], dtype=torch.int32),
        )
        ends = torch.tensor([len(row) for row in tokens]).cumsum(0).tolist()
        kv = [row.stop for row in places]
        graph, ids, hidden = self.target_passes.run(ends, kv, inputs)
        self.target_graphs.append(graph)
        self._ids: list[int] = ids.tolist()
        return DraftStep(inputs.input_ids, inputs.positions, hidden, inputs.slot_mapping, inputs.block_table, ends, kv)

    def _draft(self, target: DraftStep, sampled: list[int], last: list[int]) -> None:
        indices = self.last_accepted(last, target.ends)
        step = prepare(target, torch.tensor(sampled), indices)
        drafts = torch.stack(propose(self, step, indices, self.k, BLOCK, self.max_len), dim=1).tolist()
        for row, index in enumerate(self.running):
            request = self.requests[index]
            # No scheduler takes a draft past max_len.
            own = drafts[row][: self.max_len - len(request.tokens)]
            request.drafts = self.meddle(self.steps, index, list(own))
            request.meddled = [draft != mine for draft, mine in zip(request.drafts, own, strict=False)]


def prompts_of(requests: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 2 to 9 tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 10, (requests,), generator=generator).tolist()
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]
