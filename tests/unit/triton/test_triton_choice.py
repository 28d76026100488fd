"""Which forms run: the kernels where Triton has the device, the torch forms elsewhere, without a trace of Triton."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import mtp_runtime.verify.triton as package
from mtp_runtime.verify import STRATEGIES, DraftBatch, Noise, verify_exact, verify_mixed, verify_tokenwise
from mtp_runtime.verify.triton import forms

BATCH = DraftBatch(torch.tensor([1, 1, 0]), torch.tensor([1, 3], dtype=torch.int32), 2)
PROBS = torch.tensor([[0.6, 0.4]] * 5)
NOISE = Noise(torch.full((3,), 0.3).double(), torch.tensor([0.1, 0.2]).double())


def test_the_real_triton_ascend_is_installed() -> None:
    torch.utils.rename_privateuse1_backend("npu")  # as torch_npu does
    assert package.installed() == {"ascend"}
    assert package.available(torch.device("npu", 0))
    assert not package.available(torch.device("cuda", 0))
    assert not package.available(torch.device("meta"))


def test_strategies_take_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    for name, kernel in forms.METHODS.items():
        monkeypatch.setitem(forms.METHODS, name, lambda *args, kernel=kernel: (taken.append(kernel), kernel(*args))[1])
    for verify in STRATEGIES.values():
        verify(BATCH, PROBS.clone(), None, NOISE)
    assert taken == [forms.verify_tokenwise, forms.verify_block]


def test_a_mixed_batch_is_the_same() -> None:
    """One request of the batch exact, the other by chance."""
    chosen, exact = PROBS.argmax(1), torch.tensor([True, False])
    kernels = verify_mixed(BATCH, chosen, exact, PROBS, None, NOISE, STRATEGIES["tokenwise"])
    known, drawn = verify_exact(BATCH, chosen), verify_tokenwise(BATCH, PROBS.clone(), None, NOISE)
    assert kernels.tokens.tolist() == [known.tokens[0].tolist(), drawn.tokens[1].tolist()]
    assert kernels.accepted.tolist() == [known.accepted[0].item(), drawn.accepted[1].item()]


def test_the_cpu_never_sees_triton() -> None:
    """Triton is on the path here, and nobody asks for its interpreter."""
    program = """
import sys, torch
from mtp_runtime.verify import STRATEGIES, DraftBatch, Noise, verify_mixed
batch = DraftBatch(torch.tensor([1]), torch.tensor([1]), 1)
noise = Noise(torch.zeros(1).double(), torch.zeros(1).double())
p = torch.tensor([[0.5, 0.5]] * 2)
for verify in STRATEGIES.values():
    verify_mixed(batch, p.argmax(1), torch.tensor([False]), p.clone(), None, noise, verify)
print([name for name in sys.modules if name.split(".")[0] == "triton"])
"""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    found = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
    assert found.strip() == "[]"
