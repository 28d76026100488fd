"""make explains itself, and the lock files are complete."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
WANTED = (
    "deploy status check validate mtp logs destroy render test lint test-unit test-engine test-live bench model "
    "dashboards"
)


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=300, check=False
    )


def test_make_alone_prints_grouped_help() -> None:
    done = make()
    assert done.returncode == 0
    targets = re.findall(r"^  ([a-z-]+) +\S", done.stdout, re.MULTILINE)
    assert set(WANTED.split()) <= set(targets)
    assert re.findall(r"^[A-Z].*", done.stdout, re.MULTILINE)[1:]


@pytest.mark.parametrize("target", ["deploy", "check", "render", "plan", "mtp", "destroy"])
def test_a_cluster_must_be_named_and_known(target: str) -> None:
    for arguments in ([], ["CLUSTER=nowhere"]):
        done = make(target, "K=1", *arguments)
        assert done.returncode == 2
        assert re.search(r"^error: .*there are: .*local", done.stderr, re.MULTILINE), done.stderr


@pytest.mark.parametrize("k", ["", "x", "-1", "1.5"])
def test_k_must_be_a_number(k: str) -> None:
    done = make("mtp", "CLUSTER=local", f"K={k}")
    assert done.returncode == 2
    assert "error: which K?" in done.stderr


@pytest.mark.parametrize("name", ["control", "engine-cpu"])
def test_every_locked_package_has_its_version_and_hash(name: str) -> None:
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    packages = re.findall(r"^([a-z0-9-]+)==(\S+) \\\n    --hash=sha256:[0-9a-f]{64}$", text, re.MULTILINE)
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(lines) == 2 * len(packages)
    assert "://" not in text
    asked = (ROOT / "requirements" / f"{name}.in").read_text().splitlines()
    names = {re.split(r"[<>=#]", line)[0].strip().lower() for line in asked} - {""}
    assert names <= {package for package, _ in packages} | {"ruamel.yaml"}


def test_packages_that_break_or_bloat_the_engine_are_left_out() -> None:
    text = (ROOT / "requirements" / "engine-cpu.txt").read_text()
    assert not re.findall(r"^(torchvision|torchaudio|torchcodec|triton)==", text, re.MULTILINE)
    # the published CPU wheel
    assert "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b" in text
