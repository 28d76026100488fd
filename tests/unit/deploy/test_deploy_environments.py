"""Environments are made again when what they are made from changes, and never under a running stack."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from ansible_modules import ROOT
from ansible_tasks import run_tasks, tasks_that_ran

SOURCES = ("requirements/control.txt", "pyproject.toml", "ansible/module_utils/mtp_processes.py")


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """control_env.py; its commands are noted in `ran` instead of run."""
    spec = importlib.util.spec_from_file_location("control_env", ROOT / "requirements" / "control_env.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    loaded.ran = []  # type: ignore[attr-defined]
    monkeypatch.setattr(loaded, "run", lambda root, *command: loaded.ran.append(command))
    return loaded


@pytest.fixture
def checkout(tool: ModuleType, tmp_path: Path) -> Path:
    """A checkout with a complete environment."""
    for name in SOURCES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".stamp").write_text(json.dumps(tool.wanted(tmp_path)))
    return tmp_path


@pytest.fixture
def running(checkout: Path) -> Iterator[None]:
    """A program of the deployed cluster `local`."""
    environment = {"MTP_CLUSTER_ROOT": f"{checkout}/.local/clusters/local"}
    with subprocess.Popen(["/bin/sh", "-c", "echo; exec sleep 300"], env=environment, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield
        child.kill()


def change(file: Path) -> None:
    file.write_text(file.read_text() + "# changed\n")


def test_a_file_that_was_only_touched_changes_nothing(tool: ModuleType, checkout: Path) -> None:
    for name in SOURCES:
        os.utime(checkout / name)
    tool.ensure(checkout)
    assert tool.ran == []


def test_another_lock_makes_the_environment_again(tool: ModuleType, checkout: Path) -> None:
    change(checkout / "requirements" / "control.txt")
    tool.ensure(checkout)
    assert [command[2] for command in tool.ran] == ["venv", "pip", "pip"]
    assert tool.made_from(checkout) == tool.wanted(checkout)


@pytest.mark.usefixtures("running")
def test_not_under_a_running_stack(tool: ModuleType, checkout: Path) -> None:
    tool.ensure(checkout)
    change(checkout / "requirements" / "control.txt")
    with pytest.raises(tool.Refused, match=r"requirements/control\.txt changed .* make destroy CLUSTER=local"):
        tool.ensure(checkout)
    assert tool.ran == []


@pytest.mark.usefixtures("running")
def test_the_project_itself_is_installed_in_place(tool: ModuleType, checkout: Path) -> None:
    change(checkout / "pyproject.toml")
    tool.ensure(checkout)
    assert [command[-2:] for command in tool.ran] == [("-e", ".")]


@pytest.mark.usefixtures("running")
def test_a_lost_environment_is_made_whatever_runs(tool: ModuleType, checkout: Path) -> None:
    """Without it, what runs could not even be stopped."""
    (checkout / ".venv" / ".stamp").unlink()
    tool.ensure(checkout)
    assert len(tool.ran) == 3


def test_another_python_makes_the_environment_again(tool: ModuleType, checkout: Path) -> None:
    stamp = checkout / ".venv" / ".stamp"
    stamp.write_text(json.dumps({**tool.made_from(checkout), "python": "/opt/python3.11"}))
    tool.ensure(checkout)
    assert tool.made_from(checkout)["python"] == os.path.realpath(sys.executable)


def test_exit_code_and_message(tool: ModuleType, checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool.ROOT = checkout
    assert tool.main() == 0
    (checkout / "requirements" / "control.txt").write_text("other")
    tool.check_python = refuse(tool)
    assert tool.main() == 2
    assert capsys.readouterr().err == "error: no Python today\n"


def refuse(tool: ModuleType):  # type: ignore[no-untyped-def]
    def check() -> None:
        raise tool.Refused("no Python today")

    return check


@pytest.mark.usefixtures("running")
def test_the_engine_environment_is_not_removed_under_a_running_stack(checkout: Path) -> None:
    engine = checkout / ".local" / "engine"
    engine.mkdir(parents=True)
    pyproject = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    (engine / ".stamp").write_text(f"another-lock {pyproject}")
    done = run_tasks(
        checkout,
        "runtime",
        "engine-venv",
        mtp_engine=str(engine),
        mtp_engine_python="-",
        mtp_local=f"{checkout}/.local",
    )
    assert done.returncode == 2
    assert "make destroy CLUSTER=local. Nothing was changed." in " ".join(done.stdout.split())
    assert (engine / ".stamp").is_file()
    assert "Remove the environment of another lock" not in tasks_that_ran(done.stdout)
