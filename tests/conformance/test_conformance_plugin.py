"""The Ascend entry point in the real packages: when it acts, what it says, what it refuses.

A process of vLLM registers plugins once; so each case is a process of its own.
"""

import importlib.metadata
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forked import Forks
from inventories import edited

from mtp_runtime.adapters.vllm_ascend import install, patches
from mtp_runtime.adapters.vllm_ascend.registry import PATCHES
from mtp_runtime.config import api
from mtp_runtime.metrics import names
from mtp_runtime.patch_names import PATCH_NAMES

ROOT = Path(__file__).resolve().parents[2]
UNPACKED = ROOT / ".local/conformance/vllm-ascend-0.23.0.post1"
ENGINE = ROOT / ".local/engine/bin/python"
Start = Callable[..., subprocess.CompletedProcess[str]]
NAMES = [patch.name for patch in PATCHES]
POINTS = "; ".join(f"{patch.name}: {', '.join(map(str, patch.targets))}" for patch in PATCHES)
# What a case prints when its configuration is made.
SERVE = """
import json, sys
from pathlib import Path
sys.path.insert(0, {here!r})
import real_config
{before}
folder = real_config.write_model(Path({folder!r}))
words = ["--max-model-len", "4096", "--quantization", "ascend", "--max-num-seqs", "14"]
words += ["--compilation-config", '{{"cudagraph_mode": "FULL_DECODE_ONLY"}}', *{words!r}]
config = real_config.make_config(folder, words)
real_config.make_config(folder, words)
from prometheus_client import REGISTRY
found = {{sample.labels["patch"]: sample.value for metric in REGISTRY.collect() if metric.name == {gauge!r}
         for sample in metric.samples}}
print(json.dumps({{"worker": config.parallel_config.worker_cls, "gauge": found,
                   "sizes": config.compilation_config.cudagraph_capture_sizes}}))
"""
UNKNOWN = """
import importlib.metadata
known = importlib.metadata.version
importlib.metadata.version = lambda name: "9.9" if name == "vllm-ascend" else known(name)
"""
MTP = ["--speculative-config", '{"num_speculative_tokens": 2, "method": "mtp"}']


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as found:
        yield found


@pytest.fixture
def start(forks: Forks, tmp_path: Path) -> Start:
    def one(words: list[str], before: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        here = str(Path(__file__).parent)
        code = SERVE.format(here=here, folder=str(tmp_path), words=words, before=before, gauge=names.PATCH_ACTIVE)
        return forks.run(code, **env)

    return one


def told(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What the plugin logged about itself."""
    return [line.split("] ", 1)[-1] for line in (done.stdout + done.stderr).splitlines() if "vllm-ascend 0" in line]


def test_with_mtp_it_is_active(start: Start) -> None:
    done = start(MTP)
    found = told(done)
    assert found["worker"] == install.WORKER
    # Two configurations, one line.
    assert lines(done) == [f"mtp_runtime in vllm-ascend 0.23.0, patches: {POINTS}"]
    assert found["gauge"] == dict.fromkeys(NAMES, 1.0)


def test_without_mtp_it_does_nothing(start: Start) -> None:
    """Not even a release that it does not know is a reason to refuse."""
    done = start([], before=UNKNOWN)
    found = told(done)
    assert found["worker"] == install.ENGINE_WORKER and found["gauge"] == {} and lines(done) == []


def test_other_drafters_are_not_ours(start: Start) -> None:
    ngram = '{"num_speculative_tokens": 2, "method": "ngram", "prompt_lookup_max": 3}'
    found = told(start(["--speculative-config", ngram]))
    assert found["worker"] == install.ENGINE_WORKER and found["gauge"] == {}


def test_all_patches_off(start: Start) -> None:
    done = start(MTP, **{install.VARIABLE: "none"})
    found = told(done)
    assert lines(done) == ["mtp_runtime in vllm-ascend 0.23.0, patches: none"]
    assert found["gauge"] == dict.fromkeys(NAMES, 0.0) and found["worker"] == install.WORKER
    # The engine's own sizes, which it rounds up to multiples of 3 later: 24 is the largest left then, of 42.
    assert found["sizes"] == [1, 2, 4, 8, 16, 24, 32, 40]


def test_one_patch_on(start: Start) -> None:
    done = start(MTP, **{install.VARIABLE: NAMES[0]})
    assert told(done)["gauge"] == {name: float(name == NAMES[0]) for name in NAMES}
    assert len(lines(done)) == 1 and "; " not in lines(done)[0]


CHANGED = """
from mtp_runtime.adapters.vllm_ascend import patches
patches.installed_text = lambda module, of=patches.installed_text: of(module).replace("def ", "def  ")
"""
REFUSED = {
    "an unknown release": (UNKNOWN, {}, "vllm-ascend 9.9 is not known; this plugin knows 0.23.0 and 0.23.0.post1"),
    "an unknown patch": ("", {install.VARIABLE: "smpler"}, f"no patch smpler; there are {', '.join(NAMES)} (or none)"),
    "a changed source": (CHANGED, {}, "has another source (digest "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_refuses(case: str, start: Start) -> None:
    before, env, message = REFUSED[case]
    done = start(MTP, before=before, **env)
    assert done.returncode and message in done.stderr, done.stderr[-3000:]
    if case == "a changed source":
        assert f"mtp.patches.{NAMES[0]}: false" in done.stderr


def test_a_worker_that_is_not_known(start: Start) -> None:
    done = start([*MTP, "--worker-cls", "vllm_ascend.xlite.xlite_worker.XliteWorker"])
    assert done.returncode and "XliteWorker is not known" in done.stderr, done.stderr[-3000:]


@pytest.mark.skipif(not ENGINE.is_file(), reason="needs the engine environment")
def test_without_an_npu_platform_it_does_nothing() -> None:
    """In the CPU engine's environment, where vllm-ascend is not installed."""
    code = """
import logging, sys
from mtp_runtime.adapters.vllm_ascend import register
from vllm.platforms import current_platform
of = type(current_platform).check_and_update_config
register()
assert type(current_platform).check_and_update_config == of and current_platform.device_name != "npu"
assert not any(name.startswith("vllm_ascend") for name in sys.modules)
print("nothing")
"""
    done = subprocess.run([str(ENGINE), "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1:] == ["nothing"], done.stderr[-3000:]
    assert "vllm_ascend" not in done.stdout + done.stderr


def test_our_cpu_platform_yields() -> None:
    from vllm.platforms import current_platform

    from mtp_runtime.adapters.vllm_cpu import platform

    found = {point.name for point in importlib.metadata.entry_points(group="vllm.platform_plugins")}
    assert {"ascend", "mtp_runtime"} <= found and platform() is None
    assert type(current_platform).__name__ == "NPUPlatform"


def unpacked(module: str) -> str | None:
    """The other release's text; None for a module of vLLM, which is one version for both."""
    file = UNPACKED / (module.replace(".", "/") + ".py")
    return file.read_text() if module.startswith("vllm_ascend.") else None


TARGETS = [pytest.param(patch, target, id=str(target)) for patch in PATCHES for target in patch.targets]


@pytest.mark.parametrize("patch, target", TARGETS)
def test_both_releases_have_the_patched_source(patch: patches.Patch, target: patches.Target) -> None:
    texts = [patches.installed_text(target.module), unpacked(target.module)]
    digests = {patches.digest(text, target.name) for text in texts if text is not None}
    # None that neither release has: it would let a third one through.
    assert digests == set(target.digests)


@pytest.mark.parametrize("patch, target", TARGETS)
def test_a_changed_line_is_noticed(patch: patches.Patch, target: patches.Target) -> None:
    text = patches.installed_text(target.module)
    head = f"def {target.name.rsplit('.', 1)[-1]}("
    places = [found.start() for found in re.finditer(re.escape(head), text)]
    # Of several functions of that name in the module: a change of this one is noticed, and of no other.
    changed = [text[:place] + head + "  " + text[place + len(head) :] for place in places]
    (other,) = [one for one in changed if patches.digest(one, target.name) != patches.digest(text, target.name)]
    with pytest.raises(patches.PatchRefused, match="another source"):
        target.check(other)
    with pytest.raises(patches.PatchRefused, match="is not there"):
        target.check(text.replace(head, f"def other_{head.removeprefix('def ')}"))


def test_the_cluster_files_names_are_the_registrys() -> None:
    assert sorted(PATCH_NAMES) == sorted(NAMES)


def test_a_switch_in_the_cluster_file_reaches_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = edited("a3", {"mtp.patches": {"sampler": False}}, tmp_path)
    for rank in api.plan("a3", root)["ranks"]:
        monkeypatch.setenv(install.VARIABLE, rank["env"][install.VARIABLE])
        assert [patch.name for patch in install.chosen()] == [name for name in NAMES if name != "sampler"]


def test_the_releases_are_those_that_were_read() -> None:
    assert importlib.metadata.version("vllm-ascend") in install.VERSIONS
    assert UNPACKED.name.removeprefix("vllm-ascend-") in install.VERSIONS


WORKING = """
import os, pickle, sys
from types import ModuleType
sys.path.insert(0, {here!r})
import cpu_runner
acl, rt = ModuleType("acl"), ModuleType("acl.rt")
acl.rt, rt.memcpy = rt, None
sys.modules.update({{"acl": acl, "acl.rt": rt}})
from vllm.utils.import_utils import resolve_obj_by_qualname
config = pickle.loads(pickle.dumps(cpu_runner.configuration(1, 4)))
Worker = resolve_obj_by_qualname(config.parallel_config.worker_cls)
{before}
try:
    Worker(vllm_config=config, local_rank=0, rank=0, distributed_init_method="file:///nowhere", is_driver_worker=True)
except RuntimeError as error:
    print("ended:", str(error).splitlines()[0])
from mtp_runtime.adapters.vllm_ascend import install, patches
pairs = [(patch, getattr(*patches._owner(target))) for patch in install.chosen() for target in patch.targets]
print("applied:", sum(patch.name in getattr(function, "mtp_runtime", ()) for patch, function in pairs))
"""


def work(forks: Forks, before: str = "") -> dict[str, str]:
    """What comes of the worker that the configuration names, made as the executor makes it from a pickled one.

    CANN's Python module `acl` is a name here. The real constructor ends where it asks the device for its type.
    """
    done = forks.run(WORKING.format(here=str(Path(__file__).parent), before=before))
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(line.split(": ", 1) for line in done.stdout.splitlines() if line.startswith(("ended", "applied")))


def test_the_worker_applies_every_patch(forks: Forks) -> None:
    """All of them, and what vllm-ascend's constructor replaces itself does not take them back."""
    found = work(forks)
    assert "aclInit, error code is 500000" in found["ended"]
    assert found["applied"] == str(len(TARGETS))


def test_a_worker_that_cannot_be_patched_is_not_made(forks: Forks) -> None:
    found = work(forks, "from mtp_runtime.adapters.vllm_ascend import install; install.version = lambda name: '9.9'")
    assert "vllm-ascend 9.9 is not known" in found["ended"]
    # Those of the configuration, which was made before.
    assert found["applied"] == str(sum(len(patch.targets) for patch in PATCHES if patch.stage == "config"))


def test_twice_is_once(forks: Forks) -> None:
    """A process that makes the configuration and works too, as without multiprocessing."""
    code = """
from mtp_runtime.adapters.vllm_ascend import install, patches
install.enter("config"); install.enter("worker")
before = [getattr(*patches._owner(target)) for patch in install.chosen() for target in patch.targets]
install.enter("worker"); install.enter("config")
after = [getattr(*patches._owner(target)) for patch in install.chosen() for target in patch.targets]
print("same", all(old is new for old, new in zip(before, after, strict=True)))
"""
    done = forks.run(code)
    assert done.stdout.splitlines()[-1:] == ["same True"], (done.returncode, done.stderr[-3000:])


def test_ray_carries_our_variables_over(forks: Forks) -> None:
    """Its workers inherit nothing: without MTP_PADDING they would capture no graph with slack slots."""
    code = """
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.ray.ray_env import get_env_vars_to_copy
from mtp_runtime.adapters.vllm_ascend import install
load_general_plugins()
install.install()
carried = current_platform.additional_env_vars
assert set(install.CARRIED) <= get_env_vars_to_copy(additional_vars=set(carried))
print("carried", len(carried) == len(set(carried)))
"""
    done = forks.run(code)
    assert done.stdout.splitlines()[-1:] == ["carried True"], (done.returncode, done.stderr[-3000:])
