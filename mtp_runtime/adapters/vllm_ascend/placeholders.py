"""Patch `placeholders`: drafts that never were do not count.

The recompute scheduler of D gives a new request K placeholder drafts, so that its first step has the shape of all
others. The mechanism stays vllm-ascend's; what changes is the scheduler's class, for one with honest statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mtp_runtime.adapters.vllm_ascend.install import has_mtp
from mtp_runtime.adapters.vllm_ascend.patches import Patch, Target

MODULE = "vllm_ascend.core.recompute_scheduler"
OURS = "mtp_runtime.adapters.vllm_ascend.scheduler"


def _named(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def initialize_from_config(vllm_config: Any) -> Any:
        """As vllm-ascend's; with MTP it names our scheduler, synchronous or asynchronous as it was."""
        made = original(vllm_config)
        if has_mtp(vllm_config):
            name = made.scheduler_cls.removeprefix(f"{MODULE}.")
            made.scheduler_cls = f"{OURS}.Mtp{name}"
        return made

    return initialize_from_config


PATCH = Patch(
    "placeholders",
    "config",
    "placeholder drafts of new requests on D do not count as drafts",
    (
        Target(MODULE, "RecomputeSchedulerConfig.initialize_from_config", ("580a1035ff5940cc",), _named),
        # Unchanged: the statistics of our class hang on how it asks for them.
        Target(MODULE, "RecomputeScheduler.update_from_output", ("ff19bb5c6e681c44",), lambda original: original),
    ),
)
