"""Makes .local/conformance: the real packages of an Ascend machine, as far as they load on a machine without an NPU.

Usage: PYTHON tests/conformance/environment/make_env.py (`make conformance` runs it). Plain Python, nothing need be
installed; needs gcc and binutils. The vLLM wheel that is built stays in $MTP_CACHE, when that names a folder. A stamp
holds what the environment was made from: when nothing changed, nothing is done. Exit code 2, with a message, when
something is missing. Of two at once the second waits, and finds nothing to do.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
WHERE = ROOT / ".local" / "conformance"
LOCK = ROOT / "requirements" / "conformance.txt"
SOURCES = ROOT / "requirements" / "conformance-source.txt"
MADE_FROM = (LOCK, SOURCES, ROOT / "pyproject.toml", *sorted(HERE.glob("*.py")))
PYTHON = WHERE / "bin" / "python"
# As docs say it: an empty target has no kernels, and takes what torch is there.
BUILD = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": "0.23.0"}
# vllm-ascend's build wants a chip to be named before it says its version.
ASKED = {"SOC_VERSION": "ascend910_9391", "COMPILE_CUSTOM_KERNELS": "0"}
OTHER_RELEASE = WHERE / "vllm-ascend-0.23.0.post1"
# What tests compare of the torch_npu that is deployed, which cannot be installed beside the other one.
DEPLOYED_NPU = WHERE / "torch_npu-2.10.0.post4"
NPU_DOCS, NPU_LIBRARY = "torch_npu/_op_plugin_docs.py", "torch_npu/lib/libtorch_npu.so"
# The library registers operators under their schemas, which stand in it as text.
NPU_SCHEMA = re.compile(rb"\0(_?npu_fused_infer_attention_score[\w.]*\([^\0]*\) -> [^\0]+)\0")


class Refused(Exception):
    """The environment cannot be made; the message says what to do."""


def run(*command: object, env: dict[str, str] | None = None) -> None:
    """Raises Refused with the end of what the command printed."""
    done = subprocess.run(
        [str(word) for word in command], env={**os.environ, **(env or {})}, capture_output=True, text=True, cwd=ROOT
    )
    if done.returncode:
        told = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise Refused(f"{' '.join(str(word) for word in command[:6])} ... failed:\n{told}")


def pip(*words: object, env: dict[str, str] | None = None) -> None:
    """pip of the environment. Raises Refused."""
    index = ["--extra-index-url", os.environ["TORCH_INDEX"]] if os.environ.get("TORCH_INDEX") else []
    verb, *rest = words
    run(PYTHON, "-m", "pip", verb, "-qq", "--no-deps", *(index if verb != "wheel" else []), *rest, env=env)


def pinned(name: str, folder: Path) -> Path:
    """A requirements file with one package of SOURCES, its hash included."""
    text = SOURCES.read_text()
    start = text.index(f"\n{name}==") + 1
    path = folder / f"{name}.txt"
    path.write_text("\n".join(text[start:].splitlines()[:2]) + "\n")
    return path


def vllm_wheel(tmp: Path) -> Path:
    """vLLM built without kernels; from $MTP_CACHE when it was built there before. Raises Refused."""
    key = hashlib.sha256(pinned("vllm", tmp).read_bytes() + LOCK.read_bytes()).hexdigest()[:16]
    cache = Path(os.environ["MTP_CACHE"]) if os.environ.get("MTP_CACHE") else tmp
    folder = cache / f"vllm-empty-{key}"
    if not list(folder.glob("*.whl")):
        made = tmp / "wheel"
        words = ("--no-build-isolation", "--no-binary", "vllm", "--require-hashes", "-w", made)
        pip("wheel", *words, "-r", pinned("vllm", tmp), env=BUILD)
        for wheel in made.glob("*.whl"):
            keep(wheel, folder)
    return next(folder.glob("*.whl"))


def keep(file: Path, folder: Path) -> None:
    """Copies a file into a folder, whole or not at all, whoever else does it at the same time."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as part:
        shutil.copy(file, part)
        (Path(part) / file.name).rename(folder / file.name)


def tools() -> None:
    """Raises Refused when a program is missing, or the cache cannot be written."""
    absent = [name for name in ("gcc", "nm") if not shutil.which(name)]
    if absent:
        raise Refused(f"{', '.join(absent)} not found: install it (Debian: apt-get install gcc binutils)")
    if cache := os.environ.get("MTP_CACHE"):
        try:
            Path(cache).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=cache).close()
        except OSError as error:
            raise Refused(f"MTP_CACHE={cache} cannot be written ({error.strerror}): name another folder") from None


def packages() -> Path:
    """site-packages of the environment."""
    return next(WHERE.glob("lib/python3*/site-packages"))


def make() -> None:
    """Makes the environment. Raises Refused."""
    tools()
    shutil.rmtree(WHERE, ignore_errors=True)
    tmp = WHERE / "tmp"
    say("an empty environment")
    run(sys.executable, "-m", "venv", WHERE)
    tmp.mkdir()
    say(f"the packages of requirements/{LOCK.name} (3 GB, 1 to 5 minutes)")
    pip("install", "--no-compile", "--require-hashes", "-r", LOCK)
    say("vLLM without kernels, from its source")
    pip("install", vllm_wheel(tmp))
    say("stand-ins for CANN's libraries")
    # torch_npu's objects look for what the wheel brings along in this folder, all of them.
    run(PYTHON, HERE / "cann_stubs.py", packages(), packages() / "torch_npu.libs")
    names = packages() / "torchvision"
    names.mkdir(exist_ok=True)
    shutil.copy(HERE / "torchvision_names.py", names / "__init__.py")
    say("the sources of vllm-ascend 0.23.0.post1, to read")
    fetch_other_release(tmp)
    say("operator schemas and documentation of torch_npu 2.10.0.post4, to read")
    fetch_deployed_npu(tmp, DEPLOYED_NPU)
    pip("install", "--no-build-isolation", "-e", ROOT)
    shutil.rmtree(tmp)


def fetch_other_release(tmp: Path) -> None:
    """The sources of the other release that the adapter knows, into OTHER_RELEASE. Raises Refused."""
    words = ("--no-build-isolation", "--no-binary", "vllm-ascend", "--require-hashes", "-d", tmp)
    pip("download", *words, "-r", pinned("vllm-ascend", tmp), env=ASKED)
    with tarfile.open(next(tmp.glob("vllm_ascend-*.tar.gz"))) as archive:
        archive.extractall(tmp / "unpacked", filter="data")
    shutil.move(next((tmp / "unpacked").iterdir()), OTHER_RELEASE)


def fetch_deployed_npu(tmp: Path, target: Path) -> None:
    """From the wheel of the deployed torch_npu into target: schemas.txt, a schema of the attention operator a line, and
    its operator documentation. Raises Refused."""
    words = ("--only-binary", "torch-npu", "--require-hashes", "-d", tmp)
    pip("download", *words, "-r", pinned("torch-npu", tmp))
    with zipfile.ZipFile(next(tmp.glob("torch_npu-*.whl"))) as wheel:
        # Overlapping ends: two schemas may share the zero byte between them.
        library = wheel.read(NPU_LIBRARY).replace(b"\0", b"\0\0")
        schemas = sorted({found.decode() for found in NPU_SCHEMA.findall(library)})
        if not schemas:
            raise Refused(f"no schemas in {NPU_LIBRARY}")
        target.mkdir(parents=True, exist_ok=True)
        (target / "schemas.txt").write_text("\n".join(schemas) + "\n")
        (target / Path(NPU_DOCS).name).write_bytes(wheel.read(NPU_DOCS))


def say(text: str) -> None:
    print(f"    {text}", flush=True)


def wanted() -> str:
    """What the environment should be made from."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in MADE_FROM)).hexdigest()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """No other run of this file, in this clone, is between the same lines."""
    WHERE.parent.mkdir(parents=True, exist_ok=True)
    with (WHERE.parent / f"{WHERE.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    with alone():
        return made()


def made() -> int:
    """Exit code, once the environment is as wanted or cannot be."""
    # As it was at the start: what changes meanwhile is not in it.
    stamp, asked = WHERE / ".stamp", wanted()
    if stamp.exists() and stamp.read_text() == asked:
        return 0
    print("==> conformance environment: .local/conformance", flush=True)
    try:
        make()
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    stamp.write_text(asked)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
