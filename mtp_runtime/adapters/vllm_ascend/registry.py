"""Every patch of vllm-ascend. One list: the entry point, the tests and the docs read it."""

from __future__ import annotations

from mtp_runtime.adapters.vllm_ascend import attention, graph_sizes, padding, placeholders, sampler
from mtp_runtime.adapters.vllm_ascend.patches import Patch

PATCHES: tuple[Patch, ...] = (graph_sizes.PATCH, padding.PATCH, attention.PATCH, sampler.PATCH, placeholders.PATCH)
