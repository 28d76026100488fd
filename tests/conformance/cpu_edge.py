"""What stands at the edge of the device: CPU kernels for operators of torch_npu, nothing of the packages themselves.

FIA, both versions, eager and into given tensors: our reference form; its workspace: an empty tensor.
npu_transpose_batchmatmul: a batched product with the output's first two dimensions swapped. npu_format_cast: the tensor
itself, as the format is the device's matter. Unproven by this: the device's kernels, their tiling checks and their
numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from mtp_runtime.attention import tnd
from mtp_runtime.attention.call import V1_NAMES
from mtp_runtime.attention.mask import is_causal

LIBRARY = torch.library.Library("npu", "IMPL")
IDLE = ("pre_tokens", "next_tokens", "inner_precise")
"""Arguments of the operator that its TND layout does not use."""


class Fia:
    """Calls that reached the operator. calls: their keyword arguments by version 1's names, lists copied.

    change: may change a call before it is computed, for tests that want a wrong one.
    """

    calls: ClassVar[list[dict[str, Any]]] = []
    change: ClassVar[Callable[[dict[str, Any]], dict[str, Any]] | None] = None


def fused_infer_attention_score(query: Tensor, key: Tensor, value: Tensor, **written: Any) -> tuple[Tensor, Tensor]:
    """The operator in layouts TND and TND_NTD, paged, sparse mode 3. Raises ValueError for what it cannot be."""
    arguments = {V1_NAMES.get(name, name): given for name, given in written.items()}
    Fia.calls.append(dict(arguments, query=query, key=key, value=value))
    if Fia.change is not None:
        arguments = Fia.change(arguments)
    layout = arguments.pop("input_layout")
    tnd.want(layout in ("TND", "TND_NTD"), "input_layout", f"only TND and TND_NTD, not {layout}")
    mask = arguments.pop("atten_mask", None)
    tnd.want(mask is not None and is_causal(mask), "atten_mask", "must be that of sparse mode 3")
    for name in IDLE:
        arguments.pop(name, None)
    tnd.want(not arguments.pop("softmax_lse_flag", False), "softmax_lse_flag", "not in this layout")
    key_rope = arguments.pop("key_rope")
    for name in ("actual_seq_lengths", "actual_seq_lengths_kv"):
        arguments[name] = [int(length) for length in arguments[name]]
    out = tnd.attend(query, *map(_without_heads, (key, value)), key_rope=_without_heads(key_rope), **arguments)
    return out.transpose(0, 1).contiguous() if layout == "TND_NTD" else out, query.new_empty(0, dtype=torch.float32)


def _into(query: Tensor, key: Tensor, value: Tensor, *, out: list[Tensor], **written: Any) -> tuple[Tensor, Tensor]:
    """The form that fills given tensors; the log-sum-exp is not computed."""
    written.pop("workspace", None)
    out[0].copy_(fused_infer_attention_score(query, key, value, **written)[0])
    return out[0], out[1]


def _workspace(query: Tensor, *_: Tensor, **written: Any) -> Tensor:
    return query.new_empty(1)


def _without_heads(part: Tensor) -> Tensor:
    """[blocks, 1, block size, D], or NZ [blocks, 1, D / 16, block size, 16], as [blocks, block size, D]."""
    if part.dim() == 5:
        return part.squeeze(1).transpose(1, 2).flatten(2)
    return part.squeeze(1) if part.dim() == 4 else part


def _transpose_batchmatmul(left: Tensor, right: Tensor, *, perm_y: Any = (0, 1, 2), **_: Any) -> Tensor:
    return torch.bmm(left, right).permute(*perm_y).contiguous()


@functools.cache
def put() -> None:
    """Registers the kernels, once a process."""
    for version in ("", "_v2"):
        LIBRARY.impl(f"npu_fused_infer_attention_score{version}", fused_infer_attention_score, "CPU")
        LIBRARY.impl(f"npu_fused_infer_attention_score{version}.out", _into, "CPU")
    LIBRARY.impl("_npu_fused_infer_attention_score_v2_get_max_workspace", _workspace, "CPU")
    LIBRARY.impl("npu_transpose_batchmatmul", _transpose_batchmatmul, "CPU")
    LIBRARY.impl("npu_format_cast", lambda tensor, *_, **__: tensor, "CPU")
