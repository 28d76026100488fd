"""vllm-ascend's worker, which patches its process before it makes anything."""

from __future__ import annotations

from typing import Any

from vllm_ascend.worker.worker import NPUWorker

from mtp_runtime.adapters.vllm_ascend.install import enter


class MtpNPUWorker(NPUWorker):  # type: ignore[misc]
    """Named by the configuration where MTP is on."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        """Raises PatchRefused before the worker is made."""
        enter("worker")
        super().__init__(vllm_config, *args, **kwargs)
