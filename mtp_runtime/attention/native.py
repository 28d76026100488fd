"""The operators `mtp_runtime::fused_infer_attention_score` and `mtp_runtime::write_latent_kv`.

Importing this module declares them (schema and shapes); `load` gives them a kernel for the CPU.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from mtp_runtime.attention import tnd

LIBRARY = torch.library.Library("mtp_runtime", "FRAGMENT")
LIBRARY.define(
    "fused_infer_attention_score(Tensor query, Tensor key, Tensor value, *, Tensor query_rope, Tensor key_rope, "
    "Tensor? atten_mask=None, int[] actual_seq_lengths, int[] actual_seq_lengths_kv, Tensor block_table, "
    'int num_heads, float scale, int num_key_value_heads=1, str input_layout="TND", int sparse_mode=3, '
    "int block_size=16) -> Tensor"
)
LIBRARY.define("write_latent_kv(Tensor kv_c, Tensor k_pe, Tensor(a!) cache, Tensor slot_mapping) -> ()")


@torch.library.register_fake("mtp_runtime::fused_infer_attention_score", lib=LIBRARY)
def _shape(query: Tensor, *_: object, **__: object) -> Tensor:
    return query.new_empty(query.shape)


@torch.library.register_fake("mtp_runtime::write_latent_kv", lib=LIBRARY)
def _nothing(*_: object) -> None:
    return None


@functools.cache
def load() -> bool:
    """Give the operators their kernel, once a process. Whether it is the native one."""
    LIBRARY.impl("fused_infer_attention_score", tnd.attend, "CPU")
    LIBRARY.impl("write_latent_kv", tnd.write_latent_kv, "CPU")
    return False


def available() -> bool:
    """Whether the operators run the C++ kernels."""
    return load()


def why() -> str:
    """Why the C++ kernels run, or do not."""
    return "not built"
