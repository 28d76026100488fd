"""What the other tests stand on: the real packages load, and nothing of them computes here."""

import ctypes
import re
import subprocess
import sys
from pathlib import Path

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
    "a stream": "torch.npu.Stream(device=0)",
    "memory": "torch.npu.mem_get_info()",
    "a graph": "torch_npu._C._NPUGraph()",
}


@pytest.mark.parametrize("what", COMPUTES)
def test_nothing_computes_by_accident(what: str) -> None:
    done = run(f"import torch, torch_npu\nprint('before')\nprint('got', {COMPUTES[what]})")
    assert "before" in done.stdout and "got" not in done.stdout and done.returncode
    # What the stand-ins answer, and no slip of Python's that would end it too.
    assert "error code is 500000" in done.stderr, done.stderr


def test_every_stand_in_fails() -> None:
    """Each function of CANN whose headers say that it returns a status, called as it stands."""
    sys.path.insert(0, str(Path(__file__).parent / "environment"))
    import cann_stubs

    folder = Path(torch_npu.__file__).parents[1] / "torch_npu.libs"
    library = ctypes.CDLL(str(folder / "libcann_stubs.so"))
    made = re.findall(r"^long (\w+)\(\)", (folder / "cann_stubs.c").read_text(), re.MULTILINE)
    kinds = cann_stubs.returned(folder.parent)
    told = {name: getattr(library, name)() for name in made if kinds.get(name) in cann_stubs._STATUS}
    assert len(told) > 150 and {"aclInit", "aclrtMalloc", "aclopCompileAndExecute"} <= set(told), len(told)
    assert set(told.values()) == {cann_stubs.FAILED}, {name for name, status in told.items() if not status}
