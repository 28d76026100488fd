"""The real NPUModelRunner on CPU: its constructor, its buffers, its drafter's, vLLM's groups of one rank.

Replaced at the edge, while `edge()` holds: streams, events and the current device, which need one, and pinned memory.
No weights are loaded, no KV cache is made, nothing runs forward.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
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
        from vllm_ascend.ops import rotary_embedding
        from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

        _groups(vllm_config)
        rotary_embedding._cos_mla = rotary_embedding._sin_mla = None
        return NPUModelRunner(vllm_config, DEVICE)


def _groups(vllm_config: Any) -> None:
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.distributed.parallel_state import model_parallel_is_initialized
    from vllm_ascend.distributed.parallel_state import init_ascend_model_parallel

    if model_parallel_is_initialized():
        return
    # Of a group of one the store's file is read by nobody else.
    store = Path(tempfile.mkdtemp()) / "store"
    init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
    ensure_model_parallel_initialized(1, 1)
    init_ascend_model_parallel(vllm_config.parallel_config)


LAYERS = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]
DRAFTER_LAYER = "model.layers.2.self_attn.attn"
STALE = 7
"""What the last step left in tables and slot mappings."""


def attention_group(vllm_config: Any, layers: Sequence[str] = LAYERS) -> Any:
    """vLLM's group of MLA layers with vllm-ascend's backend and metadata builder."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.worker.utils import AttentionGroup
    from vllm_ascend.attention.mla_v1 import AscendMLABackend

    # Of the layer, which is not made here, the builder asks for the kernel that prefills.
    known = vllm_config.compilation_config.static_forward_context
    known |= {layer: SimpleNamespace(prefill_backend=None) for layer in layers}
    with set_current_vllm_config(vllm_config), edge():
        group = AttentionGroup(AscendMLABackend, list(layers), cache_spec(vllm_config), 0)
        group.create_metadata_builders(vllm_config, DEVICE)
    return group


def cache_spec(vllm_config: Any) -> Any:
    """The KV cache of an MLA layer: one latent and its rope part a token."""
    from vllm_ascend.core.kv_cache_interface import AscendMLAAttentionSpec

    return AscendMLAAttentionSpec(
        block_size=vllm_config.cache_config.block_size, num_kv_heads=1, head_size=576, dtype=torch.bfloat16
    )


def give_attention(runner: Any) -> None:
    """What `initialize_kv_cache` gives a runner before graphs are captured: groups, builders, the dispatcher's keys.

    Without a cache. The rotary tables, which the model's layers record, are ones and zeros.
    """
    from vllm.config import set_current_vllm_config
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm_ascend.compilation import acl_graph
    from vllm_ascend.ops import rotary_embedding

    # One runner a process is what the package expects.
    acl_graph._graph_params = acl_graph._draft_graph_params = acl_graph._draft_graph_prefill_params = None
    layers = [*LAYERS, DRAFTER_LAYER]
    table = torch.ones(runner.max_model_len, 64)
    rotary_embedding._record_cos_and_sin_cache(table, 0 * table)
    group = KVCacheGroupSpec(layers, cache_spec(runner.vllm_config))
    runner.kv_cache_config = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[group])
    runner.attn_groups = [[attention_group(runner.vllm_config, layers)]]
    runner.drafter.attn_layer_names = [DRAFTER_LAYER]
    with set_current_vllm_config(runner.vllm_config), edge():
        runner._check_and_update_cudagraph_mode([{runner.attn_groups[0][0].backend}], [group])


class Step:
    """A decode step of a runner as far as its attention metadata: the calls of `execute_model`, in its order."""

    def __init__(self, runner: Any, counts: Sequence[int], kv: Sequence[int]) -> None:
        """counts: query tokens of each request; kv: its KV length, these tokens included."""
        self.runner, self.counts, self.kv = runner, np.array(counts, dtype=np.int32), np.array(kv, dtype=np.int32)
        _prepare(runner, self.counts, self.kv)
        with edge():
            self.mode, self.descriptor, *_ = runner._determine_batch_execution_and_padding(
                num_tokens=int(self.counts.sum()),
                num_reqs=len(counts),
                num_scheduled_tokens_np=self.counts,
                max_num_scheduled_tokens=int(self.counts.max()),
                use_cascade_attn=False,
                force_eager=False,
                num_encoder_reqs=0,
            )

    def metadata(self) -> Any:
        """What a layer of the target gets."""
        from vllm.config import CUDAGraphMode

        runner, tokens, requests = self.runner, self.descriptor.num_tokens, len(self.counts)
        slots = requests
        with edge():
            if self.mode == CUDAGraphMode.FULL:
                slots = runner._pad_query_start_loc_for_fia(
                    runner.query_start_loc,
                    tokens,
                    self.descriptor.num_reqs,
                    requests,
                    self.mode,
                    self.descriptor.num_reqs,
                )
            found, _ = runner._build_attention_metadata(
                num_tokens=int(self.counts.sum()),
                num_tokens_padded=tokens,
                num_reqs=requests,
                num_reqs_padded=slots,
                max_query_len=int(self.counts.max()),
                num_scheduled_tokens_np=self.counts,
            )
        return found[LAYERS[0]]


def _prepare(runner: Any, counts: np.ndarray, kv: np.ndarray) -> None:
    """The buffers as `_prepare_inputs` leaves them, and all else as another step left it."""
    from vllm_ascend.attention.attention_v1 import AscendAttentionState

    requests, ends = len(counts), np.cumsum(counts)
    runner.attn_state = AscendAttentionState.SpecDecoding
    runner.query_lens = torch.from_numpy(counts)
    runner.input_batch.num_computed_tokens_cpu[:requests] = kv - counts
    runner.input_batch.num_prompt_tokens[:requests] = 1
    runner.query_start_loc.np[:] = np.concatenate(
        [[0], ends, np.full(len(runner.query_start_loc.np) - 1 - requests, ends[-1])]
    )
    runner.optimistic_seq_lens_cpu[:requests] = torch.from_numpy(kv)
    runner.optimistic_seq_lens_cpu[requests:].fill_(0)
    runner.seq_lens.copy_(runner.optimistic_seq_lens_cpu)
    table = runner.input_batch.block_table[0]
    table.get_device_tensor().fill_(STALE)
    table.slot_mapping.gpu.fill_(STALE)
