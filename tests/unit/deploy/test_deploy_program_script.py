"""The shell script and the supervisor section that a program gets: every value arrives as it was."""

from __future__ import annotations

import configparser
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ansible_modules import ROOT, load

PRINT = (
    "import json, os, sys; "
    "print(json.dumps([sys.argv[1:], {k: os.environ.get(k) for k in ('A', 'SECRET')}, os.getcwd()]))"
)
HOSTILE = [
    "plain",
    "two words",
    "",
    "it's",
    '{"a":"$HOME"}',
    "100%",
    "%(here)s",
    "back\\slash",
    "`id`",
    "line\nbreak",
    "é",
]


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return load("mtp_program")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state folder whose own name needs quoting."""
    folder = tmp_path / "it's 50% here"
    for name in ("run", "bin", "programs", "logs"):
        (folder / name).mkdir(parents=True)
    source = ROOT / "ansible" / "module_utils" / "mtp_processes.py"
    (folder / "bin" / "end_former.py").write_text(source.read_text())
    return folder


def params(state: Path, **values: Any) -> dict[str, Any]:
    base = {"name": "decode-0", "state_dir": str(state), "env": {}, "secrets": {}, "depends": {}, "stop_s": 5}
    return {**base, "argv": [sys.executable, "-c", PRINT, *HOSTILE], **values}


@pytest.mark.parametrize("value", HOSTILE)
def test_values_arrive_as_they_were(module: ModuleType, state: Path, value: str) -> None:
    secret = state / "the key"
    secret.write_text("s3cret\n")
    text = module.script(params(state, env={"A": value}, secrets={"SECRET": str(secret)}), state)
    path = state / "programs" / "decode-0.sh"
    path.write_text(text)
    done = subprocess.run(["/bin/sh", str(path)], capture_output=True, text=True, timeout=60, check=True)
    argv, environment, folder = json.loads(done.stdout)
    assert argv == HOSTILE
    assert environment == {"A": value, "SECRET": "s3cret"}
    assert folder == str(state / "run")
    assert "s3cret" not in text


def test_only_what_the_program_depends_on_changes_the_script(module: ModuleType, state: Path) -> None:
    first = module.script(params(state, depends={"plugin": "1"}), state)
    assert module.script(params(state, depends={"plugin": "1"}), state) == first
    assert module.script(params(state, depends={"plugin": "2"}), state) != first
    assert module.script(params(state, depends={"plugin": "1"}, env={"A": "b"}), state) != first


def test_the_supervisor_stops_whole_process_groups(module: ModuleType, state: Path) -> None:
    parser = configparser.RawConfigParser()
    parser.read_string(module.configuration(params(state), state))
    section = dict(parser["program:decode-0"])
    assert section["stopasgroup"] == section["killasgroup"] == "true"
    assert section["stopwaitsecs"] == "5"
    assert "50%% here" in section["command"], "supervisor expands single percent signs"
