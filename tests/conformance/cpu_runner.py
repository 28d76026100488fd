"""The real NPUModelRunner on CPU: its constructor, its buffers, its drafter's, vLLM's groups of one rank.

Replaced at the edge, while `edge()` holds: streams, events and the current device, which need one, and pinned memory.
No weights are loaded, no KV cache is made, nothing runs forward.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import real_config
import torch
import torch_npu  # noqa: F401  registers torch.npu
from vllm.platforms import current_platform

DEVICE = torch.device("cpu")


class Idle:
    """A stream or an event: everything that is asked of it is done at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None

    def __enter__(self) -> Idle:
        return self

    def __exit__(self, *error: Any) -> None:
        return None


@contextmanager
def edge() -> Iterator[None]:
    """What needs a device, without one."""
    platform = type(current_platform)
    with (
        patch.object(torch.npu, "current_device", lambda: DEVICE),
        patch.object(torch.npu, "Stream", Idle),
        patch.object(torch.npu, "Event", Idle),
        patch.object(torch.npu, "current_stream", Idle),
        patch.object(torch.Tensor, "pin_memory", lambda tensor, *_: tensor),
        patch.object(platform, "is_pin_memory_available", classmethod(lambda cls: False)),
    ):
        from vllm.utils.platform_utils import is_pin_memory_available

        is_pin_memory_available.cache_clear()
        try:
            yield
        finally:
            is_pin_memory_available.cache_clear()


def configuration(k: int, requests: int, *words: str, sizes: Sequence[int] = (), mode: str = "FULL_DECODE_ONLY") -> Any:
    """A VllmConfig of the small model with its MTP layer, and whole-step graphs of these sizes (none: the engine's)."""
    import json

    compilation: dict[str, Any] = {"cudagraph_mode": mode}
    if sizes:
        compilation["cudagraph_capture_sizes"] = list(sizes)
    with tempfile.TemporaryDirectory() as folder:
        real_config.write_model(Path(folder), "small", quantized=False)
        drafts = json.dumps({"method": "mtp", "num_speculative_tokens": k})
        given = ["--skip-tokenizer-init", "--max-model-len", "1024", "--max-num-seqs", str(requests)]
        given += ["--speculative-config", drafts, "--compilation-config", json.dumps(compilation)]
        if "--max-num-batched-tokens" not in words:
            given += ["--max-num-batched-tokens", "512"]
        return real_config.make_config(Path(folder), [*given, *words])


def make_runner(vllm_config: Any) -> Any:
    """The runner that a worker with this configuration makes."""
    import vllm_ascend.ops  # noqa: F401  before attention.mla_v1, which alone is a circular import
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(vllm_config), edge():
        from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

        _groups(vllm_config)
        return NPUModelRunner(vllm_config, DEVICE)


def _groups(vllm_config: Any) -> None:
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.distributed.parallel_state import model_parallel_is_initialized
    from vllm_ascend.distributed.parallel_state import init_ascend_model_parallel

    if model_parallel_is_initialized():
        return
    # The store's file has to live as long as the process.
    file = tempfile.NamedTemporaryFile(delete=False)
    init_distributed_environment(1, 0, f"file://{file.name}-store", 0, "gloo")
    ensure_model_parallel_initialized(1, 1)
    init_ascend_model_parallel(vllm_config.parallel_config)
