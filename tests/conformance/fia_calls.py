"""A described call as a call: meta tensors and keyword arguments for the real operator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch_npu  # noqa: F401  declares the operators
from torch import Tensor

from mtp_runtime.attention.call import OPERATORS, FiaCall, Foreign, Shaped

SCALE = 192**-0.5
FOREIGN = {"torch.Tensor": lambda: torch.arange(1, 19), "numpy.ndarray": lambda: np.arange(1, 19)}


def tensor(part: Shaped, device: str = "meta") -> Tensor:
    """A tensor of its shape and type without numbers worth a look."""
    return torch.empty(part.shape, dtype=getattr(torch, part.dtype), device=device)


def keywords(call: FiaCall, device: str = "meta") -> dict[str, Any]:
    """What the operator gets beside query, key and value, by the names of the call's version."""
    found: dict[str, Any] = {"scale": SCALE}
    for name in ("query_rope", "key_rope", "atten_mask", "block_table"):
        part = getattr(call, name)
        found[name] = None if part is None else tensor(part, device)
    for name in ("actual_seq_lengths", "actual_seq_lengths_kv"):
        given = getattr(call, name)
        found[name] = FOREIGN[given.kind]() if isinstance(given, Foreign) else given
    for name in (
        "num_heads",
        "num_key_value_heads",
        "input_layout",
        "sparse_mode",
        "block_size",
        "softmax_lse_flag",
    ):
        found[name] = getattr(call, name)
    named = {call.name(name): given for name, given in found.items()}
    # A call that was written with other names than its version's: those in place of ours.
    wrong = {name: 1 for name in call.names if name not in named}
    return {**named, **wrong}


def ask(call: FiaCall, device: str = "meta") -> tuple[Tensor, Tensor]:
    """The real operator's answer, on meta tensors unless another mode is on. Raises what it raises."""
    operator = getattr(torch.ops.npu, OPERATORS[call.version])
    parts = [tensor(part, device) for part in (call.query, call.key, call.value)]
    return operator(*parts, **keywords(call, device))


def in_version(call: FiaCall, version: Any, **fields: Any) -> FiaCall:
    return replace(call, version=version, **fields)
