"""The causal mask of sparse mode 3: one compressed matrix for every batch.

FIA slides it over each segment itself, so its content never depends on a step: one tensor a dtype and device serves
all calls, and a captured graph keeps the address it saw.
"""

from __future__ import annotations

import torch  # type: ignore[import-not-found, unused-ignore]  # the type checker's environment has no torch
from torch import Tensor  # type: ignore[import-not-found, unused-ignore]

from mtp_runtime.attention.findings import MASK_DTYPES, is_mask_shape
from mtp_runtime.attention.findings import MASK_SIZE as SIZE

_SHARED: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def causal_mask(dtype: torch.dtype = torch.int8, device: torch.device | str = "cpu") -> Tensor:
    """[2048, 2048], 1 = masked: ones strictly above the diagonal. Shared by all callers: read it, do not write it.

    dtype: int8 or bool, else ValueError. Source: fia_tnd_constraints, D and T.
    """
    _check_dtype(dtype)
    # "npu" and "npu:0" may be one device: what a tensor there says is the key.
    place = torch.empty(0, device=device).device
    mask = _SHARED.get((dtype, place))
    if mask is None:
        # A tensor born in inference mode has no version, by which `is_shared` sees writes.
        with torch.inference_mode(False):
            mask = torch.ones(SIZE, SIZE, dtype=dtype, device=place).triu(1)
        _SHARED[dtype, place] = mask
    return mask


def is_shared(mask: Tensor) -> bool:
    """Whether it is the very tensor of `causal_mask`, never written since: known without looking at its content."""
    shared = _SHARED.get((mask.dtype, mask.device))
    return shared is not None and mask is shared and shared._version == 0


def is_causal(mask: Tensor) -> bool:
    """Whether it is the mask of sparse mode 3: int8 or bool, [2048, 2048] or with one or two 1s before it, and right.

    Looks at every element (waits for the mask's device) unless it is the shared one.
    """
    if is_shared(mask):
        return True
    if str(mask.dtype).removeprefix("torch.") not in MASK_DTYPES or not is_mask_shape(tuple(mask.shape)):
        return False
    place = torch.arange(SIZE, device=mask.device)
    return bool((mask.reshape(SIZE, SIZE) == (place > place[:, None])).all())


def _check_dtype(dtype: torch.dtype) -> None:
    if str(dtype).removeprefix("torch.") not in MASK_DTYPES:
        raise ValueError(f"a mask is {' or '.join(MASK_DTYPES)}, not {dtype}")
