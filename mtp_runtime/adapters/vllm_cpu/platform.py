"""vLLM's CPU platform with static graphs, in the way other devices bring theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.platforms.cpu import CpuPlatform

from mtp_runtime.adapters.settings import settings
from mtp_runtime.choice import CHUNKED_PREFILL
from mtp_runtime.graphs.slots import graph_slots

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class MtpCpuPlatform(CpuPlatform):  # type: ignore[misc]
    """Brings worker, runner, scheduler and graphs. What is not ours stays vLLM's CPU platform."""

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def opaque_attention_op(cls) -> bool:
        """Yes, as on vLLM's CPU platform, but where whole steps are recorded: then attention is part of the graph.

        Layers ask while they are made. Connectors that move KV layer by layer hook into the opaque operators.
        """
        from vllm.config import CUDAGraphMode, get_current_vllm_config_or_none

        config = get_current_vllm_config_or_none()
        return config is None or config.compilation_config.cudagraph_mode.decode_mode() != CUDAGraphMode.FULL

    @classmethod
    def get_static_graph_wrapper_cls(cls) -> str:
        """What wraps the model."""
        return "mtp_runtime.adapters.vllm_cpu.graphs.TargetGraphs"

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """As vLLM's, which forgets graph sizes; and our classes. Raises ValueError for sizes of no use."""
        from vllm.config import CompilationMode, CUDAGraphMode  # its module asks for the platform

        compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
        sizes, batched = compilation.cudagraph_capture_sizes or [], scheduler.max_num_batched_tokens
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "mtp_runtime.adapters.vllm_cpu.runner.MtpWorker"
        if scheduler.scheduler_cls is None:
            scheduler.scheduler_cls = "mtp_runtime.adapters.vllm_cpu.scheduler.MtpScheduler"
        super().check_and_update_config(vllm_config)
        if compilation.mode == CompilationMode.NONE and compilation.cudagraph_mode != CUDAGraphMode.NONE:
            compilation.cudagraph_capture_sizes = sizes
            check_graphs_possible(vllm_config)
            if compilation.cudagraph_mode.decode_mode() == CUDAGraphMode.FULL:
                check_sizes(sizes, vllm_config.num_speculative_tokens, scheduler.max_num_seqs, batched)
        else:
            compilation.cudagraph_mode = CUDAGraphMode.NONE


def check_graphs_possible(vllm_config: VllmConfig) -> None:
    """Raises ValueError for what a recorded step would leave out or get wrong."""
    model = vllm_config.model_config
    asked = {
        "MTP_ATTENTION=chunked_prefill": settings().attention == CHUNKED_PREFILL,
        "--enable-lora": vllm_config.lora_config is not None,
        "--enable-prompt-embeds": model is not None and model.enable_prompt_embeds,
        "--pipeline-parallel-size": vllm_config.parallel_config.pipeline_parallel_size > 1,
    }
    found = [name for name, is_asked in asked.items() if is_asked]
    if found:
        raise ValueError(f"static graphs do not go with {', '.join(found)}: use --enforce-eager, or leave it out")


def check_sizes(sizes: list[int], k: int, requests: int, batched: int) -> None:
    """Raises ValueError for sizes of whole-step graphs that are no n x (K + 1), and where vLLM may have dropped some.

    vLLM rounds sizes up to multiples and drops those that then exceed the largest, and those above
    max_num_batched_tokens (`batched`): the steps in question run eagerly.
    """
    width = k + 1
    whole = [slots * width for slots in graph_slots(requests, k, settings().padding)]
    wrong = [size for size in sizes if size % width]
    if wrong:
        raise ValueError(
            f"cudagraph_capture_sizes: {', '.join(map(str, wrong))}: no multiple of K + 1 = {width} (K = {k}); for "
            f"{requests} requests use {whole}"
        )
    if batched < whole[-1]:
        raise ValueError(
            f"max_num_batched_tokens {batched}: less than the {whole[-1]} tokens of a full batch at K = {k}, whose "
            f"graph would be left out; use {whole[-1]} or more"
        )
    if not sizes:
        raise ValueError(f"cudagraph_capture_sizes: none for whole-step graphs; at K = {k} use {whole}")
