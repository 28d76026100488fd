"""vLLM's CPU model runner and worker with static graphs and our drafter."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from mtp_runtime.adapters.counters import Count
from mtp_runtime.adapters.settings import settings
from mtp_runtime.adapters.vllm_cpu.graphs import SlotDispatcher, TargetGraphs
from mtp_runtime.adapters.vllm_cpu.proposer import MtpProposer
from mtp_runtime.adapters.vllm_cpu.randomness import cached_draft_probs
from mtp_runtime.adapters.vllm_cpu.steps import Step, entering
from mtp_runtime.graphs.planner import Graph, choose
from mtp_runtime.graphs.slots import SLACK, draft_slots
from mtp_runtime.metrics import names

log = logging.getLogger("vllm.mtp_runtime")


class MtpModelRunner(CPUModelRunner):  # type: ignore[misc]
    """Runs decode steps in static graphs where the configuration asks for them."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.cudagraph_dispatcher = SlotDispatcher(vllm_config)
        if isinstance(getattr(self, "drafter", None), EagleProposer):
            self.drafter = MtpProposer(vllm_config, device, self)
        self._draft_steps = Count(names.PLUGIN_ENGINE_DRAFT_STEPS)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """As vLLM; verification and drafting learn what the step holds, independently of our own parts."""
        if entering(self, scheduler_output):
            self._draft_steps.add()
        return super().execute_model(scheduler_output, *args, **kwargs)

    def _dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM, between two steps: it holds no drafts."""
        Step.draft_rows = 0
        return super()._dummy_run(*args, **kwargs)

    def _get_spec_decode_draft_probs(self, metadata: Any) -> torch.Tensor | None:
        return cached_draft_probs(self, metadata)

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        """Always: our drafter has a place for drafts past the longest context.

        With one request near it vLLM leaves out the drafter for all of them: zeros are verified as if they were drafts,
        and the layer's KV of the others keeps a hole.
        """
        if isinstance(getattr(self, "drafter", None), MtpProposer):
            return common_attn_metadata is not None
        return bool(super()._input_fits_in_drafter(common_attn_metadata))

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """As vLLM; the model gets its graphs around it."""
        super().load_model(load_dummy_weights)
        if self.compilation_config.cudagraph_mode != CUDAGraphMode.NONE:
            self.model = TargetGraphs(self.model, self.vllm_config)

    def get_model(self) -> torch.nn.Module:
        """The model itself, without graphs around it."""
        return self.model.unwrap() if isinstance(self.model, TargetGraphs) else self.model

    def capture_graphs(self) -> None:
        """Record every graph, once, after the KV cache is there."""
        mode = self.cudagraph_dispatcher.cudagraph_mode
        if mode == CUDAGraphMode.NONE:
            return
        begin = time.perf_counter()
        graphs = self.cudagraph_dispatcher.graphs()
        sizes = sorted(self.compilation_config.cudagraph_capture_sizes or [])
        pieces = sizes if mode.mixed_mode() == CUDAGraphMode.PIECEWISE else []
        drafter = getattr(self, "drafter", None)
        blocks = self.input_batch.block_table[0].get_device_tensor(1).shape[1]
        self.model.capture(graphs, pieces, blocks)
        if isinstance(drafter, MtpProposer):
            depths = draft_slots(self.max_num_reqs)
            drafter.capture(graphs, depths, sorted({*pieces, *(depths if pieces else ())}), blocks)
        shapes = ", ".join(f"{graph.slots} x {graph.width}" for graph in graphs) or ", ".join(map(str, pieces))
        log.info("static graphs (%s): %s, recorded in %.1f s", mode.name, shapes, time.perf_counter() - begin)
        self._warn_of_eager_batches(graphs)

    def _warn_of_eager_batches(self, graphs: list[Graph]) -> None:
        """A full batch with all its drafts should have a graph, and with slack one without any."""
        requests, slack = self.max_num_reqs, settings().padding == SLACK
        for tokens in {graph.width for graph in graphs} | ({1} if graphs and slack else set()):
            if choose(requests, requests * tokens, graphs) is None:
                log.warning("no static graph holds %d requests of %d tokens: such steps run eagerly", requests, tokens)

    def _determine_batch_execution_and_padding(
        self, num_tokens: int, num_reqs: int, num_scheduled_tokens_np: Any, max_num_scheduled_tokens: int, **kwargs: Any
    ) -> Any:
        self.cudagraph_dispatcher.entering(num_reqs, num_tokens, max_num_scheduled_tokens)
        return super()._determine_batch_execution_and_padding(
            num_tokens, num_reqs, num_scheduled_tokens_np, max_num_scheduled_tokens, **kwargs
        )


class MtpWorker(CPUWorker):  # type: ignore[misc]
    """vLLM's CPU worker with our runner."""

    def compile_or_warm_up_model(self) -> Any:
        """As vLLM, then the graphs."""
        times = super().compile_or_warm_up_model()
        self.model_runner.capture_graphs()
        return times


# The worker makes the runner that its module names.
cpu_worker.CPUModelRunner = MtpModelRunner
