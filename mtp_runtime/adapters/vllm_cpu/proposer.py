"""vLLM's drafter for MTP with our way of proposing, eagerly or in static graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.eagle import EagleProposer

from mtp_runtime.adapters.counters import Count
from mtp_runtime.adapters.vllm_cpu.graphs import Forward, capture_pieces, writing_only
from mtp_runtime.drafting.proposer import DraftStep, prepare, propose
from mtp_runtime.graphs.padding import StepInputs
from mtp_runtime.graphs.planner import Graph, choose, plan
from mtp_runtime.graphs.static import PiecewiseStep, StaticStep
from mtp_runtime.metrics import names


class MtpProposer(EagleProposer):  # type: ignore[misc]
    """Drafts with the model's MTP layer.

    Three sets of graphs: the first pass with up to K + 1 tokens a request, the later depths with one, and the first
    pass that only writes KV, for steps without drafts.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._first: dict[Graph, StaticStep] = {}
        self._later: dict[Graph, StaticStep] = {}
        self._writes: dict[Graph, StaticStep] = {}
        self._pieces: dict[int, PiecewiseStep] = {}
        self._replays = Count(names.PLUGIN_GRAPH_DRAFT_REPLAYS)
        self._eager = Count(names.PLUGIN_GRAPH_EAGER_STEPS)
        self._metadata: CommonAttentionMetadata | None = None
        self._sampling: SamplingMetadata | None = None
        self._probs: list[Tensor] = []

    def initialize_cudagraph_keys(self, cudagraph_mode: CUDAGraphMode) -> None:
        """vLLM's own graphs of the drafter are not used."""
        super().initialize_cudagraph_keys(CUDAGraphMode.NONE)

    def capture(self, first: list[Graph], later: list[int], pieces: list[int], blocks: int) -> None:
        """Record the layer: first passes in these shapes, later depths with these numbers of requests, or pieces.

        blocks: columns of the engine's block table.
        """
        hidden = (self.hidden_size, self.dtype)
        if first:
            forward = Forward(self.vllm_config, blocks)
            self._first = {graph: forward.capture(self.model, graph, hidden) for graph in first}
            if self.num_speculative_tokens > 1:
                graphs = [Graph(requests, 1) for requests in later]
                self._later = {graph: forward.capture(self.model, graph, hidden) for graph in graphs}
            self._writes = {graph: forward.capture(self._write, graph, hidden, writes_only=True) for graph in first}
        self._pieces = {
            tokens: capture_pieces(self.model, self.vllm_config, tokens, hidden) for tokens in sorted(pieces)
        }

    def propose(
        self,
        num_speculative_tokens: int,
        target_token_ids: Tensor,
        target_positions: Tensor,
        target_hidden_states: Tensor,
        next_token_ids: Tensor,
        token_indices_to_sample: Tensor | None,
        common_attn_metadata: CommonAttentionMetadata,
        sampling_metadata: SamplingMetadata,
        mm_embed_inputs: Any = None,
        num_rejected_tokens_gpu: Tensor | None = None,
        slot_mappings: Any = None,
    ) -> Tensor:
        """Drafts [B, num_speculative_tokens]; arguments as vLLM gives them. With 0 the layer only keeps its KV."""
        common = common_attn_metadata
        last = token_indices_to_sample if token_indices_to_sample is not None else common.query_start_loc[1:] - 1
        target = DraftStep(
            target_token_ids.int(),
            target_positions,
            target_hidden_states,
            common.slot_mapping[: len(target_token_ids)],
            common.block_table_tensor.int(),
            common.query_start_loc_cpu[1:].tolist(),
            common.seq_lens.tolist(),
        )
        step = prepare(target, next_token_ids, last)
        self._last_draft_probs, self._probs = None, []
        self._metadata, self._sampling = common, sampling_metadata
        if num_speculative_tokens == 0:
            self._run(step, self._writes, self._write)
            return torch.empty(len(next_token_ids), 0, dtype=torch.int64, device=self.device)
        drafts = propose(self, step, last, num_speculative_tokens, self.block_size, self.max_model_len)
        if self._probs:
            self._last_draft_probs = torch.stack(self._probs, dim=1)
        return torch.stack(drafts, dim=1)

    def run(self, step: DraftStep, depth: int) -> tuple[Tensor, Tensor]:
        """See `drafting.proposer.Drafter`."""
        logit_states, states = self._run(step, self._later if depth else self._first, self.model)
        tokens = len(step.input_ids)  # a graph returns its padding too
        return logit_states[:tokens], states[:tokens]

    def pick(self, hidden_states: Tensor) -> Tensor:
        """See `drafting.proposer.Drafter`."""
        assert self._sampling is not None
        drafts, probs = self._sample_draft_tokens(hidden_states, self._sampling)
        if probs is not None:
            self._probs.append(probs)
        return drafts

    @torch.inference_mode()
    def dummy_run(
        self,
        num_tokens: int,
        use_cudagraphs: bool = True,
        is_graph_capturing: bool = False,
        slot_mappings: dict[str, Tensor] | None = None,
    ) -> None:
        """K passes of padding in the shapes of a real step: a rank that skipped them would leave its group waiting."""
        if not self._first or not use_cudagraphs:
            super().dummy_run(num_tokens, use_cudagraphs, is_graph_capturing, slot_mappings)
            return
        width = self.speculative_config.num_speculative_tokens + 1
        first = choose(0, 0, [graph for graph in self._first if graph.tokens >= num_tokens]) or max(
            self._first, key=lambda graph: graph.slots
        )
        later = min((graph for graph in self._later if graph.slots * width >= num_tokens), default=None, key=_slots)
        for depth in range(width - 1):
            graphs = self._later if depth else self._first
            graph = first if not depth else later or max(self._later, key=_slots)
            static = graphs[graph]
            empty = {name: tensor[:0] for name, tensor in static.buffers.tensors().items()}
            static.replay(plan([], [], graph), StepInputs(**empty))
            self._replays.add()

    def _run(self, step: DraftStep, graphs: dict[Graph, StaticStep], model: Callable[..., Any]) -> Any:
        """One pass: in a graph where the step fits one, else eagerly."""
        counts = [end - start for start, end in zip([0, *step.ends], step.ends, strict=False)]
        if graphs and max(counts) <= next(iter(graphs)).width:
            graph = choose(len(counts), len(step.input_ids), graphs)
            if graph is not None:
                return self._replay(step, counts, graphs[graph])
            self._eager.add()
        size = next((size for size in self._pieces if size >= len(step.input_ids)), None)
        if size is not None and model is self.model:
            self._replays.add()
            return self._eagerly(step, self._pieces[size].replay)
        return self._eagerly(step, model)

    def _replay(self, step: DraftStep, counts: list[int], static: StaticStep) -> Any:
        inputs = StepInputs(step.input_ids, step.positions, step.slot_mapping, step.block_table, step.hidden_states)
        self._replays.add()
        return static.replay(plan(counts, step.kv, static.graph), inputs)

    def _eagerly(self, step: DraftStep, model: Callable[..., Any]) -> Any:
        _, per_layer = self.build_per_group_and_layer_attn_metadata(self._common(step))
        with set_forward_context(
            per_layer,
            self.vllm_config,
            num_tokens=len(step.input_ids),
            slot_mapping=dict.fromkeys(self._draft_attn_layer_names, step.slot_mapping),
        ):
            return model(input_ids=step.input_ids, positions=step.positions, hidden_states=step.hidden_states)

    def _write(self, **inputs: Tensor) -> None:
        with writing_only():
            self.model(**inputs)

    def _common(self, step: DraftStep) -> CommonAttentionMetadata:
        """vLLM's description of a pass: the target's own for the first, made anew for the later depths."""
        given = self._metadata
        assert given is not None
        ends = torch.tensor([0, *step.ends], dtype=torch.int32)
        kv = torch.tensor(step.kv, dtype=torch.int32)
        return given.replace(
            query_start_loc=ends,
            query_start_loc_cpu=ends,
            seq_lens=kv,
            seq_lens_cpu_upper_bound=kv,
            num_reqs=len(step.kv),
            num_actual_tokens=len(step.input_ids),
            max_query_len=int(ends.diff().max()),
            max_seq_len=max(step.kv),
            block_table_tensor=step.block_table,
            slot_mapping=step.slot_mapping,
            is_prefilling=None,
        )


def _slots(graph: Graph) -> int:
    return graph.slots
