"""The verification functions as Triton kernels, for devices that Triton compiles for. The torch forms in
`mtp_runtime.verify` are the specification: same arguments, same results, in float32.

This file imports no Triton; `forms.py` holds the functions.

What the kernels use, all of it in triton-ascend 3.2.0 (`docs/sources/python-api/outline.md` of its tag v3.2.0 lists
operations by type): program_id, arange, full, load, store, cast (`.to`), where, minimum, maximum, + - * /,
comparisons, `&`, sum, min, max, cumsum, `range` with a bound known at run time, `if` on a scalar. Types: float32,
int32 and bool; int64 for addresses and to load and store alone, since its table has no `where` for int64. It has no
float64 at all. Grids follow from the batch's shapes, nothing waits for the device, and an address behind a mask is
still a valid one: Ascend's compiler turns a scattered load into plain reads and applies the mask afterwards.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

BACKENDS = {"npu": {"ascend"}, "cuda": {"nvidia", "amd"}, "xpu": {"intel"}}
"""Device type -> Triton backends that compile for it."""


def available(device: torch.device) -> bool:
    """Whether the kernels run on a device; on the CPU only where TRITON_INTERPRET=1 asks for Triton's interpreter."""
    if device.type == "cpu":
        return os.environ.get("TRITON_INTERPRET") == "1" and bool(installed())
    return not BACKENDS.get(device.type, set()).isdisjoint(installed())


@cache
def installed() -> frozenset[str]:
    """The backends of the Triton that is installed, found without importing it."""
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        return frozenset()
    return frozenset(path.parent.name for path in Path(spec.origin).parent.glob("backends/*/driver.py"))
