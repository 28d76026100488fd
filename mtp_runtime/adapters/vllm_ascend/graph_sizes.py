"""Patch `graph_sizes`: the configuration ends with graph sizes that all get captured, and all get used.

vLLM leaves out sizes above max_num_batched_tokens when it makes the configuration. Later, in each worker, it rounds
sizes up to multiples of K + 1, leaves out those that then exceed the largest one, and keeps no graph above
max_num_seqs x (K + 1) tokens. Whatever went missing, its steps run eagerly (vllm-ascend#3909, vLLM#37865).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from mtp_runtime.adapters.counters import export
from mtp_runtime.adapters.settings import settings
from mtp_runtime.adapters.vllm_ascend import slack
from mtp_runtime.adapters.vllm_ascend.install import chosen, has_mtp
from mtp_runtime.adapters.vllm_ascend.patches import Patch, Target
from mtp_runtime.graphs.slots import SLACK, GraphError, whole_sizes

log = logging.getLogger("vllm.mtp_runtime_ascend")


class SizesRefused(ValueError):
    """No graph sizes do what the configuration asks for."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"patch graph_sizes: {what}; {remedy}")


def _checked(original: Callable[..., None]) -> Callable[..., None]:
    def _set_cudagraph_sizes(self: Any) -> None:
        """As vLLM's; with MTP and whole-step graphs for decode alone, then ours. Raises SizesRefused."""
        from vllm.config import CUDAGraphMode

        original(self)
        compilation = self.compilation_config
        mode = compilation.cudagraph_mode
        if not has_mtp(self) or not compilation.cudagraph_capture_sizes or not mode.has_full_cudagraphs():
            return
        if mode != CUDAGraphMode.FULL_DECODE_ONLY:
            _without_slack(mode.name)
            return
        export()
        _put(self, sizes(self))

    return _set_cudagraph_sizes


def _without_slack(mode: str) -> None:
    if settings().padding == SLACK:
        raise SizesRefused(
            f"MTP_PADDING=slack with cudagraph_mode {mode}, whose graphs take other steps too (R05)",
            "use graph_mode: full (FULL_DECODE_ONLY), or mtp.padding: placeholder",
        )


def sizes(vllm_config: Any) -> list[int]:
    """The sizes to capture, tokens, ascending. Raises SizesRefused."""
    given = vllm_config.compilation_config.cudagraph_capture_sizes
    requests, k = vllm_config.scheduler_config.max_num_seqs, vllm_config.speculative_config.num_speculative_tokens
    try:
        wanted = slack.wanted(vllm_config)
    except GraphError as error:
        raise SizesRefused(f"MTP_PADDING=slack: {error.what} (R21)", error.remedy) from None
    # No step is larger: a graph above it would never be used.
    batched = vllm_config.scheduler_config.max_num_batched_tokens
    needed = wanted.tokens if wanted else k + 1
    if batched < needed:
        raise SizesRefused(
            f"max_num_batched_tokens {batched}: less than the {needed} tokens of a graph, which is left out (R06)",
            f"use {needed} or more",
        )
    if wanted is None:
        return whole_sizes(given, min(requests, batched // (k + 1)), k)
    if "padding" not in {patch.name for patch in chosen()}:
        raise SizesRefused("MTP_PADDING=slack without the patch `padding`", "switch it on: mtp.patches.padding: true")
    _replayable(vllm_config)
    return [wanted.tokens]


def _replayable(vllm_config: Any) -> None:
    """Raises SizesRefused where other classes than AscendMLAImpl run attention: they have lengths of their own."""
    parallel = vllm_config.parallel_config
    contexts = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    model = vllm_config.model_config
    asked = {
        "context parallelism": contexts > 1,
        "a model without MLA": not model.use_mla,
        "sparse attention (DeepSeek-V3.2)": hasattr(model.hf_text_config, "index_topk"),
    }
    for what, there in asked.items():
        if there:
            raise SizesRefused(f"MTP_PADDING=slack with {what}", "use mtp.padding: placeholder")


def _put(vllm_config: Any, found: list[int]) -> None:
    compilation = vllm_config.compilation_config
    given = list(compilation.cudagraph_capture_sizes)
    if found == given:
        return
    log.info("mtp_runtime: cudagraph_capture_sizes %s instead of %s, which would lose some", found, given)
    compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = found, found[-1]
    compilation.post_init_cudagraph_sizes()


PATCH = Patch(
    "graph_sizes",
    "config",
    "graph sizes that are multiples of K + 1, none left out, with slack slots where mtp.padding: slack",
    (Target("vllm.config.vllm", "VllmConfig._set_cudagraph_sizes", ("7a139cda349d60b6",), _checked),),
)
