"""What the other tests stand on: the real packages load, and nothing of them computes here."""

import subprocess
import sys

import pytest
import torch
import torch_npu

OPERATORS = ("npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2")


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_the_platform_is_the_npu_one() -> None:
    done = run("from vllm.platforms import current_platform as p; print(type(p).__module__, type(p).__name__)")
    assert done.stdout.splitlines()[-1] == "vllm_ascend.platform NPUPlatform", done.stderr


def test_schemas_of_the_real_package() -> None:
    assert torch_npu.__version__ == "2.13.0"
    names = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("npu::")}
    assert {f"npu::{name}" for name in OPERATORS} <= names and len(names) > 400


def test_there_is_no_device() -> None:
    assert not torch.npu.is_available() and torch.npu.device_count() == 0


COMPUTES = {
    "arithmetic": "torch.arange(4).npu() + 1",
    "a new tensor": "torch.zeros(4, device='npu')",
    "a stream": "torch.npu.Stream()",
    "memory": "torch.npu.mem_get_info()",
    "a graph": "torch.npu.NPUGraph().capture_begin()",
}


@pytest.mark.parametrize("what", COMPUTES)
def test_nothing_computes_by_accident(what: str) -> None:
    done = run(f"import torch, torch_npu\nprint('before')\nprint('got', {COMPUTES[what]})")
    assert "before" in done.stdout and "got" not in done.stdout and done.returncode
    assert "error code is 500000" in done.stderr or "Error" in done.stderr, done.stderr
