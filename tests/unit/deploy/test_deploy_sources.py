"""A program restarts for the files it reads, and for no others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from mtp_runtime import sources

ROLES = sources.ROOT / "ansible" / "roles"
EXPORTER, PLUGIN = "mtp_runtime.metrics.exporter", "mtp_runtime.adapters.vllm_cpu"
# A small project: what each file imports.
TREE = {
    "p/__init__.py": "",
    "p/main.py": "import os\nfrom p import names\nfrom p.deep.value import VALUE\n",
    "p/names.py": "",
    "p/unused.py": "",
    "p/deep/__init__.py": "from . import sibling\n",
    "p/deep/value.py": "def f():\n    from ..late import X\nVALUE = 1\n",
    "p/deep/sibling.py": "",
    "p/deep/unused.py": "",
    "p/late.py": "import p.main\nX = 1\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def names(found: set[Path], root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in found}


def test_imports_are_followed(tree: Path) -> None:
    assert names(sources.files(["p.main"], tree), tree) == set(TREE) - {"p/unused.py", "p/deep/unused.py"}


def test_a_package_stands_for_all_its_modules(tree: Path) -> None:
    assert names(sources.files(["p.deep"], tree), tree) == set(TREE) - {"p/unused.py"}
    with pytest.raises(ValueError, match=r"no module p\.gone"):
        sources.files(["p.gone"], tree)


@pytest.mark.parametrize("name", TREE)
def test_the_checksum_changes_with_exactly_these_files(name: str, tree: Path) -> None:
    before = sources.checksum(["p.main"], tree)
    (tree / name).write_text(TREE[name] + "# changed\n")
    assert (sources.checksum(["p.main"], tree) != before) == ("unused" not in name)


def test_the_exporter_runs_from_what_python_really_imports() -> None:
    code = (
        f"import json, sys, {EXPORTER};"
        "print(json.dumps([m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'mtp_runtime']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=sources.ROOT, check=True)
    assert {str(path) for path in sources.files([EXPORTER])} == set(json.loads(done.stdout))


def test_the_plugin_runs_from_verification_attention_and_adapter() -> None:
    found = names(sources.files([PLUGIN]), sources.ROOT / "mtp_runtime")
    for name in ("verify/block.py", "verify/strategy.py", "attention/batch_expansion.py", "metrics/names.py"):
        assert name in found
    adapter = (sources.ROOT / "mtp_runtime" / "adapters" / "vllm_cpu").glob("*.py")
    assert {f"adapters/vllm_cpu/{path.name}" for path in adapter} <= found
    assert not {name for name in found if name.startswith(("metrics/exporter", "cli/", "config/"))}


def task(role: str, file: str, program: str) -> dict[str, Any]:
    """The mtp_program arguments of a role's task."""
    tasks = YAML(typ="safe").load((ROLES / role / "tasks" / file).read_text())
    return next(t["mtp_program"] for t in tasks if t.get("mtp_program", {}).get("name") == program)


@pytest.mark.parametrize(
    ("role", "file", "program", "module"),
    [
        ("monitoring", "main.yml", "exporter", EXPORTER),
        ("engine", "vllm-cpu.yml", "{{ item.name }}", PLUGIN),
    ],
)
def test_the_roles_restart_for_it(role: str, file: str, program: str, module: str) -> None:
    assert "stdout" in task(role, file, program)["depends"]["code"]
    assert f"mtp_runtime.sources, {module}]" in (ROLES / role / "tasks" / file).read_text()


def test_as_a_command() -> None:
    command = [sys.executable, "-m", "mtp_runtime.sources"]
    good = subprocess.run([*command, EXPORTER], capture_output=True, text=True, cwd=sources.ROOT, check=True)
    assert good.stdout.strip() == sources.checksum([EXPORTER])
    bad = subprocess.run([*command, "mtp_runtime.gone"], capture_output=True, text=True, cwd=sources.ROOT, check=False)
    assert (bad.returncode, "no module mtp_runtime.gone" in bad.stderr) == (2, True)
