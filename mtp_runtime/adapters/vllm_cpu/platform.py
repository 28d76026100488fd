"""vLLM's CPU platform with static graphs, in the way other devices bring theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm import envs
from vllm.platforms.cpu import CpuPlatform

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
        """Attention stays one opaque operator only where graphs are split at it."""
        return bool(envs.VLLM_USE_BREAKABLE_CUDAGRAPH)

    @classmethod
    def get_static_graph_wrapper_cls(cls) -> str:
        """What wraps the model."""
        return "mtp_runtime.adapters.vllm_cpu.graphs.TargetGraphs"

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """As vLLM's, which forgets graph sizes; and our classes."""
        from vllm.config import CompilationMode, CUDAGraphMode  # its module asks for the platform

        compilation = vllm_config.compilation_config
        sizes = compilation.cudagraph_capture_sizes
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "mtp_runtime.adapters.vllm_cpu.runner.MtpWorker"
        if vllm_config.scheduler_config.scheduler_cls is None:
            vllm_config.scheduler_config.scheduler_cls = "mtp_runtime.adapters.vllm_cpu.scheduler.MtpScheduler"
        super().check_and_update_config(vllm_config)
        if compilation.mode == CompilationMode.NONE and compilation.cudagraph_mode != CUDAGraphMode.NONE:
            compilation.cudagraph_capture_sizes = sizes
        else:
            compilation.cudagraph_mode = CUDAGraphMode.NONE
