"""Decides whether vllm-ascend is patched, and where: in the process that makes a configuration, and in workers."""

from __future__ import annotations

import functools
import logging
import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from mtp_runtime.adapters.vllm_ascend.patches import Patch, PatchRefused
from mtp_runtime.releases import MTP_METHODS

VERSIONS = ("0.23.0", "0.23.0.post1")
"""Releases of vllm-ascend whose patched functions were read and proven."""
VARIABLE = "MTP_PATCHES"
"""Which patches are on: names with commas between, `none`, or unset for all (as rendered from `mtp.patches`)."""
ENGINE_WORKER = "vllm_ascend.worker.worker.NPUWorker"
WORKER = "mtp_runtime.adapters.vllm_ascend.worker.MtpNPUWorker"
CARRIED = (VARIABLE, "MTP_VERIFICATION", "MTP_ATTENTION", "MTP_PADDING", "MTP_RUNTIME_FAULT", "MTP_DEBUG")
"""What workers must know of the environment. A child inherits it; Ray carries over only what the platform lists."""
log = logging.getLogger("vllm.mtp_runtime_ascend")


def install() -> None:
    """Put a gate before the configuration; nothing without an NPU platform.

    Whether MTP is on, only a configuration says. Raises PatchRefused for an unknown release or an
    unknown patch name.
    """
    from vllm.platforms import current_platform

    if getattr(current_platform, "device_name", None) != "npu":
        return
    chosen()
    _gate(type(current_platform))


def chosen() -> tuple[Patch, ...]:
    """The patches that are on. Raises PatchRefused for a name that no patch has."""
    from mtp_runtime.adapters.vllm_ascend.registry import PATCHES

    asked = os.environ.get(VARIABLE)
    if asked is None:
        return PATCHES
    names = [name.strip() for name in asked.split(",") if name.strip() and name.strip() != "none"]
    unknown = set(names) - {patch.name for patch in PATCHES}
    if unknown:
        known = ", ".join(patch.name for patch in PATCHES)
        raise PatchRefused(f"{VARIABLE}: no patch {', '.join(sorted(unknown))}; there are {known} (or none)")
    return tuple(patch for patch in PATCHES if patch.name in names)


def check_release() -> str:
    """The release of vllm-ascend. Raises PatchRefused for one that is not known."""
    try:
        found = version("vllm-ascend")
    except PackageNotFoundError:
        raise PatchRefused("vllm-ascend is not installed as a package: its release is not known") from None
    if found not in VERSIONS:
        raise PatchRefused(f"vllm-ascend {found} is not known; this plugin knows {' and '.join(VERSIONS)}")
    return found


def has_mtp(vllm_config: Any) -> bool:
    """Whether an engine with this configuration drafts with the model's own MTP layer."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.method in MTP_METHODS and bool(speculative.num_speculative_tokens)


def enter(stage: str) -> None:
    """Applies the chosen patches of a stage, after all of them, of both stages, were checked. Raises PatchRefused."""
    found, patches = check_release(), chosen()
    for patch in patches:
        patch.check()
    for patch in patches:
        if patch.stage == stage:
            patch.apply()
    _tell(found, patches)


@functools.cache
def _tell(found: str, patches: tuple[Patch, ...]) -> None:
    """Once a process: a line in the log, and a gauge for each patch, 1 or 0."""
    from prometheus_client import Gauge

    from mtp_runtime.adapters.vllm_ascend.registry import PATCHES
    from mtp_runtime.metrics import names

    points = "; ".join(f"{patch.name}: {', '.join(map(str, patch.targets))}" for patch in patches) or "none"
    log.info("mtp_runtime in vllm-ascend %s, patches: %s", found, points)
    gauge = Gauge(names.PATCH_ACTIVE, "Whether a patch of vllm-ascend is on.", ["patch"], multiprocess_mode="max")
    for patch in PATCHES:
        gauge.labels(patch.name).set(int(patch in patches))


def _gate(platform: Any) -> None:
    """Enters the stage before vllm-ascend looks at a configuration with MTP, and gives it our worker."""
    old = platform.check_and_update_config
    if getattr(old, "mtp_runtime", False):
        return

    @functools.wraps(old)
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        with_mtp = has_mtp(vllm_config)
        if with_mtp:
            enter("config")
        old.__func__(cls, vllm_config)
        if with_mtp:
            _name_worker(vllm_config.parallel_config)

    check_and_update_config.mtp_runtime = True  # type: ignore[attr-defined]
    platform.check_and_update_config = classmethod(check_and_update_config)
    platform.additional_env_vars = [*platform.additional_env_vars, *CARRIED]


def _name_worker(parallel: Any) -> None:
    """Raises PatchRefused for a worker that the patches were not made for."""
    if parallel.worker_cls not in (ENGINE_WORKER, WORKER):
        raise PatchRefused(f"worker {parallel.worker_cls} is not known; MTP's patches are for {ENGINE_WORKER}")
    parallel.worker_cls = WORKER
