"""The operators `mtp_runtime::fused_infer_attention_score` and `mtp_runtime::write_latent_kv`.

    python -m mtp_runtime.attention.native      # build the C++ kernels ahead of time

Importing this module declares both (schema and shapes). `load` gives them a kernel for the CPU: the C++ one, built once
and kept in MTP_KERNEL_CACHE (default: mtp_runtime in XDG_CACHE_HOME), or, where that cannot be, the form in torch.
Arguments and errors: `tnd.attend` and `tnd.write_latent_kv`. The operators take float32, bfloat16 and float16 with head
sizes 512 and 64, their last dimensions contiguous.

The C++ kernel works out every row from its query and the entries it sees alone, in a fixed order: a token's result is
bit for bit the same in any batch, at any place of a segment of any length, with any number of threads. Attention is
thus no reason for greedy tokens to depend on K. The form in torch does not promise that.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtp_runtime.attention import tnd

SOURCE = Path(__file__).with_name("csrc") / "tnd.cpp"
SCHEMAS = {
    "fused_infer_attention_score": "(Tensor query, Tensor key, Tensor value, *, Tensor query_rope, Tensor key_rope, "
    "Tensor? atten_mask=None, int[] actual_seq_lengths, int[] actual_seq_lengths_kv, Tensor block_table, "
    'int num_heads, float scale, int num_key_value_heads=1, str input_layout="TND", int sparse_mode=3, '
    "int block_size=16) -> Tensor",
    "write_latent_kv": "(Tensor kv_c, Tensor k_pe, Tensor(a!) cache, Tensor slot_mapping) -> ()",
}
# No contraction: a product and a sum are fused where the source says so, the same in every loop.
FLAGS = ("-std=c++20", "-O3", "-ffp-contract=off", "-fopenmp", "-fPIC", "-shared", "-Wno-psabi")
BUILD_SECONDS = 600

logger = logging.getLogger("mtp_runtime.attention")


class BuildError(Exception):
    """Why there are no C++ kernels."""


def _shape(query: Tensor, *_: object, **__: object) -> Tensor:
    return query.new_empty(query.shape)


def _nothing(*_: object) -> None:
    return None


LIBRARY = torch.library.Library("mtp_runtime", "FRAGMENT")
for _name, _fake in (("fused_infer_attention_score", _shape), ("write_latent_kv", _nothing)):
    LIBRARY.define(_name + SCHEMAS[_name])
    torch.library.register_fake(f"mtp_runtime::{_name}", _fake, lib=LIBRARY)


def load() -> bool:
    """Give the operators their kernel, once a process; builds it if need be. Whether it is the C++ one."""
    return _load()[0]


def available() -> bool:
    """Whether the operators run the C++ kernels (after `load`)."""
    return load()


def why() -> str:
    """Which kernels run (after `load`), and if not the C++ ones, why."""
    return _load()[1]


@functools.cache
def _load() -> tuple[bool, str]:
    try:
        library = build()
        torch.ops.load_library(str(library))
    except (BuildError, OSError) as error:
        LIBRARY.impl("fused_infer_attention_score", _attend, "CPU")
        LIBRARY.impl("write_latent_kv", tnd.write_latent_kv, "CPU")
        logger.warning("TND attention runs in torch, several times slower than its C++ kernel: %s", error)
        return False, f"torch: {error}"
    logger.info("TND attention: %s", library)
    return True, f"C++: {library}"


def _attend(query: Tensor, key: Tensor, value: Tensor, **named: Any) -> Tensor:
    """`tnd.attend` for what the C++ kernel takes: a call does not begin to fail where a compiler is installed."""
    tnd.want(query.dtype in tnd.DTYPES, "query", f"must be float32, bfloat16 or float16, not {query.dtype}")
    parts = {
        "query": query,
        "query_rope": named["query_rope"],
        "key": key,
        "key_rope": named["key_rope"],
        "value": value,
    }
    for name, part in parts.items():
        size = tnd.ROPE if name.endswith("rope") else tnd.LATENT
        tnd.want(part.dim() == 3 and part.shape[2] == size, name, f"must be [., ., {size}], not {list(part.shape)}")
        tnd.want(part.stride(2) == 1, name, f"the last dimension must be contiguous, its stride is {part.stride(2)}")
    return tnd.attend(query, key, value, **named)


def build() -> Path:
    """The shared library, built unless it is there. Raises BuildError.

    Its name holds the source, torch, the processor's instructions and the compiler, so a change of any makes another.
    """
    flags = (*FLAGS, *_instructions())
    base = _hash(SOURCE.read_bytes(), torch.__version__, *flags)
    folder = _folder()
    compiler = os.environ.get("CXX") or "g++"
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        # Built where there was a compiler, as in an image.
        built = sorted(folder.glob(f"tnd-{base}-*.so"))
        if built:
            return built[0]
        raise BuildError(f"no C++ compiler: {error} (install g++, or name one with CXX)") from error
    library = folder / f"tnd-{base}-{_hash(version)}.so"
    if not library.exists():
        try:
            _compile([compiler, *flags], library)
        except OSError as error:
            raise BuildError(f"cannot write {folder}: {error} (MTP_KERNEL_CACHE names another folder)") from error
    return library


def _compile(command: list[str], library: Path) -> None:
    """One process compiles, others that started at the same time wait for it. Raises BuildError, OSError."""
    library.parent.mkdir(parents=True, exist_ok=True)
    torch_root = Path(torch.__file__).parent
    include = torch_root / "include"
    with (library.parent / "tnd.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return
        with tempfile.TemporaryDirectory(dir=library.parent, prefix=".build-") as folder:
            made = Path(folder) / library.name
            arguments = [
                *command,
                f"-I{include}",
                f"-I{include / 'torch/csrc/api/include'}",
                "-o",
                str(made),
                str(SOURCE),
            ]
            arguments += [f"-L{torch_root / 'lib'}", "-ltorch_cpu", "-lc10"]
            try:
                done = subprocess.run(arguments, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
            except subprocess.TimeoutExpired as error:
                raise BuildError(f"{command[0]} took longer than {BUILD_SECONDS} s") from error
            if done.returncode or not made.exists():
                errors = [line for line in done.stderr.splitlines() if "error" in line]
                raise BuildError(f"{command[0]} failed: {(errors or [done.stderr.strip()])[0]}")
            made.replace(library)


def _instructions() -> tuple[str, ...]:
    """Compiler flags for what this processor can do."""
    if platform.machine() != "x86_64":
        return ()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    known = next((line.split() for line in lines if line.startswith("flags")), [])
    return ("-mavx2", "-mfma") if {"avx2", "fma"} <= set(known) else ()


def _folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("MTP_KERNEL_CACHE") or cache / "mtp_runtime")


def _hash(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(b"%d:" % len(data) + data)
    return digest.hexdigest()[:16]


def main() -> int:
    """Builds the kernels and prints where they are. Exit code 1, and a logged line, if they cannot be built."""
    begin = time.perf_counter()
    before = {path.name for path in _folder().glob("*.so")}
    if not load():
        return 1
    built = {path.name for path in _folder().glob("*.so")} - before
    print(f"TND attention: {why()}" + (f" (built in {time.perf_counter() - begin:.1f} s)" if built else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
