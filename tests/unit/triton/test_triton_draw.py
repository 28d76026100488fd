"""A token of weight 0 is never drawn, also where a device's parallel sum steps by a rounding error."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from mtp_runtime.verify.triton.recover import first_place


@triton.jit
def place_kernel(weights, beyond, out):
    index = tl.arange(0, 4)
    tl.store(out, first_place(tl.load(weights + index), tl.load(beyond + index) > 0, 4))


@pytest.mark.parametrize(
    ("weights", "beyond", "place"),
    [
        ([0.0, 0.5, 0.0, 0.5], [1, 0, 1, 1], 3),  # places 0 and 2 have no weight
        ([0.0, 0.5, 0.5, 0.0], [0, 0, 0, 1], 2),  # the last with weight where none with weight is beyond
        ([0.0, 0.5, 0.5, 0.0], [0, 0, 0, 0], 2),
        ([0.5, 0.5, 0.0, 0.0], [1, 1, 1, 1], 0),
        ([0.0, 0.0, 0.0, 0.0], [0, 0, 0, 0], 0),
    ],
)
def test_first_place_has_weight(weights: list[float], beyond: list[int], place: int) -> None:
    out = torch.empty(1, dtype=torch.int32)
    place_kernel[(1,)](torch.tensor(weights), torch.tensor(beyond), out)
    assert out.item() == place
