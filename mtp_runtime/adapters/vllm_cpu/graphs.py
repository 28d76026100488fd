"""vLLM's static graph interface on CPU: which graph a step takes, and the model in its graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor, get_forward_context, set_forward_context
from vllm.model_executor.layers.attention.mla_attention import MLAAttention, MLACommonMetadata
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from mtp_runtime.adapters.counters import Count
from mtp_runtime.adapters.settings import InjectedFault, settings
from mtp_runtime.adapters.vllm_cpu.attention import OPERATORS, KvWritten, MtpMLAImpl, SegmentsMetadata
from mtp_runtime.choice import BATCH_EXPANSION, TND
from mtp_runtime.graphs.padding import StepBuffers, StepInputs
from mtp_runtime.graphs.planner import Graph, choose, plan
from mtp_runtime.graphs.static import PiecewiseStep, StaticStep
from mtp_runtime.metrics import names


class SlotDispatcher(CudagraphDispatcher):  # type: ignore[misc]
    """vLLM's dispatcher, asked by slots: a step of any mix of 1..K + 1 tokens a request has a graph.

    vLLM asks by tokens and for uniform steps only. `entering` says what the step holds before `dispatch` is asked.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        self._step = (0, 0, 0)
        self._eager_steps = Count(names.PLUGIN_GRAPH_EAGER_STEPS)

    def graphs(self) -> list[Graph]:
        """The whole-step graphs, in the order of their slots."""
        if self.cudagraph_mode.decode_mode() != CUDAGraphMode.FULL:
            return []
        width = self.uniform_decode_query_len
        return [Graph(size // width, width) for size in sorted(self.compilation_config.cudagraph_capture_sizes or [])]

    def initialize_cudagraph_keys(self, cudagraph_mode: CUDAGraphMode, uniform_decode_query_len: int = 1) -> None:
        """vLLM's keys, and those of the graphs with slack slots, which it takes for too large."""
        super().initialize_cudagraph_keys(cudagraph_mode, uniform_decode_query_len)
        for graph in self.graphs():
            self.add_cudagraph_key(
                CUDAGraphMode.FULL, self._create_padded_batch_descriptor(graph.tokens, True, False, 0)
            )

    def entering(self, requests: int, tokens: int, longest: int) -> None:
        """The step to come: its requests, its tokens, the most tokens of one request."""
        self._step = requests, tokens, longest

    def dispatch(
        self, num_tokens: int, uniform_decode: bool = False, *args: Any, **kwargs: Any
    ) -> tuple[CUDAGraphMode, BatchDescriptor]:
        """As vLLM's. A step that fits no graph runs eagerly and is counted."""
        graphs = self.graphs()
        allowed = kwargs.get("valid_modes")
        if not graphs or (allowed and CUDAGraphMode.FULL not in allowed):
            return super().dispatch(num_tokens, uniform_decode, *args, **kwargs)
        requests, tokens, longest = self._step
        if longest > graphs[0].width:  # a prompt
            return super().dispatch(num_tokens, False, *args, **kwargs)
        graph = choose(requests, tokens, graphs)
        if graph is None:
            self._eager_steps.add()
            return super().dispatch(num_tokens, False, *args, **kwargs)
        # Ranks of a group agree on the largest of their sizes and ask again with it.
        return super().dispatch(max(graph.tokens, num_tokens), True, *args, **kwargs)


class Forward:
    """How a model's layers find their inputs when a static step runs them: vLLM's forward context."""

    def __init__(self, vllm_config: VllmConfig, blocks: int) -> None:
        """blocks: columns of the engine's block table."""
        self._config = vllm_config
        self.blocks = blocks
        layers = vllm_config.compilation_config.static_forward_context
        self.layers = [name for name, layer in layers.items() if isinstance(layer, MLAAttention)]
        self.way = settings().attention

    @contextmanager
    def reading(self, buffers: StepBuffers) -> Iterator[None]:
        """Layers read these buffers."""
        graph = buffers.graph
        decode = SegmentsMetadata(
            buffers.block_table,
            buffers.row_lengths,
            None,
            actual_seq_lengths=buffers.actual_seq_lengths,
            actual_seq_lengths_kv=buffers.actual_seq_lengths_kv,
        )
        if self.way == BATCH_EXPANSION:
            decode.block_table = buffers.block_table[buffers.row_owner]
        metadata = MLACommonMetadata(
            num_reqs=graph.slots,
            max_query_len=graph.width,
            max_seq_len=self._config.model_config.max_model_len,
            num_actual_tokens=graph.tokens,
            query_start_loc=buffers.row_owner,
            slot_mapping=buffers.slot_mapping,
            num_decodes=graph.slots,
            num_decode_tokens=graph.tokens,
            num_prefills=0,
            decode=decode,
        )
        with set_forward_context(
            dict.fromkeys(self.layers, metadata),
            self._config,
            num_tokens=graph.tokens,
            slot_mapping=dict.fromkeys(self.layers, buffers.slot_mapping),
        ):
            yield

    def step(self, model: Callable[..., Any]) -> Callable[[StepBuffers], Any]:
        """The model as a step over buffers."""

        def run(buffers: StepBuffers) -> Any:
            hidden = {} if buffers.hidden_states is None else {"hidden_states": buffers.hidden_states}
            with self.reading(buffers):
                return model(input_ids=buffers.input_ids, positions=buffers.positions, **hidden)

        return run

    def capture(
        self,
        model: Callable[..., Any],
        graph: Graph,
        hidden: tuple[int, torch.dtype] | None,
        writes_only: bool = False,
    ) -> StaticStep:
        """Record a model in one shape. hidden: size and type of the hidden states it takes, or None; writes_only: it
        stops before attention."""
        size, dtype = hidden or (None, torch.float32)
        buffers = StepBuffers.make(graph, self.blocks, hidden_size=size, dtype=dtype)
        static = StaticStep(self.step(model), buffers, uses_lists=self.way == TND and not writes_only)
        static.capture()
        return static


class TargetGraphs:
    """The target model and its graphs, in the place of the model: vLLM's static graph wrapper.

    A call runs the graph that the forward context names, or the model itself.
    """

    def __init__(self, model: Any, vllm_config: VllmConfig) -> None:
        self.model = model
        self._config = vllm_config
        self._full: dict[int, StaticStep] = {}
        self._pieces: dict[int, PiecewiseStep] = {}
        self._replays = Count(names.PLUGIN_GRAPH_REPLAYS)
        self._calls = Count(names.PLUGIN_ATTENTION_DECODE_CALLS)
        self._steps = Count(names.PLUGIN_ATTENTION_DRAFT_STEPS)
        self._layer = ""
        self._operators = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def unwrap(self) -> Any:
        """The model itself."""
        return self.model

    def capture(self, graphs: list[Graph], pieces: list[int], blocks: int) -> None:
        """Record the whole step in these shapes, and the pieces between attention for these numbers of tokens.

        blocks: columns of the engine's block table.
        """
        forward = Forward(self._config, blocks)
        self._layer = forward.layers[0]
        for graph in graphs:
            static = forward.capture(self.model, graph, None)
            self._operators = static.operators.count(OPERATORS[forward.way])
            self._full[graph.tokens] = static
        for tokens in pieces:
            self._pieces[tokens] = capture_pieces(self.model, self._config, tokens, None)

    def __call__(self, **inputs: Any) -> Any:
        """See the class."""
        context = get_forward_context()
        tokens = context.batch_descriptor.num_tokens if context.batch_descriptor else 0
        if context.cudagraph_runtime_mode == CUDAGraphMode.FULL:
            return self._replay(self._full[tokens], inputs, context)
        if context.cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE:
            self._replays.add()
            return self._pieces[tokens].replay(input_ids=inputs["input_ids"], positions=inputs["positions"])
        return self.model(**inputs)

    def _replay(self, static: StaticStep, inputs: dict[str, Tensor], context: Any) -> Tensor:
        if settings().fault == "attention":
            raise InjectedFault("attention")
        decode = context.attn_metadata[self._layer].decode
        ends = decode.actual_seq_lengths
        counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        step = plan(counts, decode.actual_seq_lengths_kv, static.graph)
        result: Tensor = static.replay(
            step,
            StepInputs(
                inputs["input_ids"][: step.tokens],
                inputs["positions"][: step.tokens],
                context.slot_mapping[self._layer][: step.tokens],
                decode.request_table,
            ),
        )
        self._replays.add()
        if decode.holds_drafts:
            self._calls.add(self._operators)
            self._steps.add()
        return result


def capture_pieces(model: Any, vllm_config: VllmConfig, tokens: int, hidden: tuple[int, torch.dtype] | None) -> Any:
    """Record a model with its attention left outside, which reads the forward context of each step."""
    tensors = {"input_ids": torch.zeros(tokens, dtype=torch.int32), "positions": torch.zeros(tokens, dtype=torch.int64)}
    if hidden:
        tensors["hidden_states"] = torch.zeros(tokens, hidden[0], dtype=hidden[1])

    def step(**inputs: Tensor) -> Any:
        with set_forward_context(None, vllm_config, num_tokens=tokens, slot_mapping={}):
            return model(**inputs)

    pieces = PiecewiseStep(step, tensors)
    pieces.capture()
    return pieces


@contextmanager
def writing_only() -> Iterator[None]:
    """Inside, a model's first attention layer writes its KV, and then the model's run ends with KvWritten."""
    MtpMLAImpl.stop_after_write = True
    try:
        yield
    except KvWritten:
        pass
    finally:
        MtpMLAImpl.stop_after_write = False
