"""vllm-ascend's sampler on the CPU: what stands at the edge of the device, real configurations, steps for it.

Replaced, and what that leaves unproven: `EDGE`.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import real_config
import torch
import vllm_ascend.ops  # noqa: F401  before the sampler: a circular import
import vllm_ascend.sample.rejection_sampler as verifier
import vllm_ascend.sample.sampler as plain
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm_ascend.ascend_config import clear_ascend_config, init_ascend_config

from mtp_runtime.adapters.vllm_ascend import patches
from mtp_runtime.adapters.vllm_ascend.sampler import PATCH

EDGE = {
    "pin_memory in rejection_sampler": "pinning asks the device: the factories make plain host memory",
    "streams in sampler": "random numbers are drawn on a second stream: here there is one order anyway",
    "npu::npu_top_k_top_p": "the operator: vLLM's torch form of the same limits",
}
LIBRARY = torch.library.Library("npu", "IMPL")


def put() -> None:
    """Put the edge in place; more than once does nothing more."""
    if getattr(verifier.torch, "unpinned", False):
        return
    verifier.torch = _copy(**{name: _unpinned(getattr(torch, name)) for name in ("tensor", "arange", "ones", "full")})
    stream = SimpleNamespace(wait_stream=lambda other: None)
    plain.torch = _copy(npu=SimpleNamespace(current_stream=lambda: stream, Event=torch.npu.Event))
    plain.global_stream = lambda: stream
    plain.npu_stream_switch = lambda target: nullcontext()
    LIBRARY.impl("npu_top_k_top_p", lambda x, p=None, k=None: apply_top_k_top_p_pytorch(x.clone(), k, p), "CPU")


def _copy(**changed: Any) -> ModuleType:
    """The module torch with other attributes: one module sees it, and an attribute costs what it did."""
    copied = ModuleType("torch")
    vars(copied).update(vars(torch), **changed, unpinned=True)
    return copied


def _unpinned(factory: Any) -> Any:
    return lambda *args, pin_memory=False, **kwargs: factory(*args, **kwargs)


@functools.cache
def _config(additional: str) -> Any:
    folder = real_config.write_model(Path(tempfile.mkdtemp()) / "model", "small", quantized=False)
    speculative = json.dumps({"method": "mtp", "num_speculative_tokens": 3})
    return real_config.make_config(
        folder, ["--max-model-len", "2048", "--speculative-config", speculative, "--additional-config", additional]
    )


def configure(**additional: Any) -> Any:
    """A real VllmConfig with this additional_config, and vllm-ascend's own made from it."""
    put()
    config = _config(json.dumps(additional))
    clear_ascend_config()
    init_ascend_config(config)
    return config


@contextmanager
def patched() -> Iterator[None]:
    """Inside it the patch is applied, as the worker does it."""
    owners = [patches._owner(target) for target in PATCH.targets]
    old = [vars(owner)[name] for owner, name in owners]
    try:
        PATCH.apply()
        yield
    finally:
        for (owner, name), one in zip(owners, old, strict=True):
            setattr(owner, name, one)


def make_sampler() -> Any:
    """The two real classes, as the runner makes them."""
    return verifier.AscendRejectionSampler(plain.AscendSampler())


def step(drafts: Tensor, counts: Sequence[int]) -> SpecDecodeMetadata:
    """As the runner makes it: drafts [T], counts of each request, logits in request order with the bonus row last."""
    drafted, sampled = (torch.tensor(c, dtype=torch.int32) for c in (counts, [n + 1 for n in counts]))
    ends = sampled.cumsum(0, dtype=torch.int32)
    rows = torch.arange(int(ends[-1]), dtype=torch.int32)
    is_bonus = torch.zeros(len(rows), dtype=torch.bool).index_fill(0, ends.long() - 1, True)
    return SpecDecodeMetadata(
        draft_token_ids=drafts.int(),
        num_draft_tokens=list(counts),
        cu_num_draft_tokens=drafted.cumsum(0, dtype=torch.int32),
        cu_num_sampled_tokens=ends,
        target_logits_indices=rows[~is_bonus],
        bonus_logits_indices=ends - 1,
        logits_indices=rows,
    )


def sampling(temperature: Tensor, **changes: Any) -> SamplingMetadata:
    """As the runner makes it for requests without constraints. temperature: [B], 0 greedy."""
    nothing = torch.empty(0)
    fields: dict[str, Any] = {
        "temperature": None if not temperature.any() else temperature,
        "all_greedy": not temperature.any(),
        "all_random": bool((temperature > 0).all()),
        "top_p": None,
        "top_k": None,
        "generators": {},
        "max_num_logprobs": None,
        "no_penalties": True,
        "prompt_token_ids": None,
        "frequency_penalties": nothing,
        "presence_penalties": nothing,
        "repetition_penalties": nothing,
        "output_token_ids": [],
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors(),
    }
    return SamplingMetadata(**(fields | changes))
