"""`make mtp`: a new K is checked on the hosts before it is written, and written before a host changes."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
import yaml
from ansible_modules import ROOT
from ansible_tasks import run_tasks

NAME = "unit-test-of-make-mtp"


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    """A copy of an inventory; nothing of this name is deployed."""
    shutil.copytree(ROOT / "ansible" / "inventories" / "local-single", tmp_path / NAME)
    return tmp_path / NAME


def mtp(inventory: Path, k: int) -> subprocess.CompletedProcess[str]:
    variables = (f"CLUSTER={NAME}", f"INVENTORIES={inventory.parent}", f"K={k}")
    return subprocess.run(
        ["make", "-C", str(ROOT), "mtp", *variables], capture_output=True, text=True, timeout=300, check=False
    )


def test_a_host_that_refuses_leaves_the_file_as_it_was(inventory: Path) -> None:
    file, serving = inventory / "group_vars/all/mtp.yml", inventory / "group_vars/all/serving.yml"
    before = file.read_text()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        serving.write_text(re.sub(r"^    port: \d+$", f"    port: {port}", serving.read_text(), flags=re.MULTILINE))
        done = mtp(inventory, 3)
    assert done.returncode == 2
    assert "MTP on, K = 3" in done.stdout, "checked with the new K"
    assert "H10" in done.stdout and "Nothing was changed" in " ".join(done.stdout.split())
    assert file.read_text() == before
    assert not (ROOT / ".local" / "clusters" / NAME).exists()


def test_a_k_that_breaks_a_rule_leaves_the_file_as_it_was(inventory: Path) -> None:
    before = (inventory / "group_vars/all/mtp.yml").read_text()
    done = mtp(inventory, 16)
    assert (done.returncode, "R03" in done.stderr, "PLAY" in done.stdout) == (2, True, False)
    assert (inventory / "group_vars/all/mtp.yml").read_text() == before


def test_written_after_every_check_and_before_every_change() -> None:
    plays = yaml.safe_load((ROOT / "ansible" / "site.yml").read_text())
    names = [[role["role"] for role in play.get("roles", [])] or play["tasks"] for play in plays]
    at = next(i for i, play in enumerate(plays) if "tasks" in play)
    include = plays[at]["tasks"][0]
    assert include["ansible.builtin.include_role"] == {"name": "inventory_check", "tasks_from": "write_k"}
    assert names[:at] == [["inventory_check"], ["preflight", "weights", "runtime"]]
    assert names[at + 1] == ["supervisor"]
    assert plays[at - 1]["any_errors_fatal"], "one unfit host must stop the others too"


def test_writing_it(inventory: Path, tmp_path: Path) -> None:
    known = {"mtp_control_bin": str(ROOT / ".venv" / "bin"), "mtp_cluster": NAME, "mtp_inventory": str(inventory)}
    for k, changed in ((3, 1), (3, 0)):
        done = run_tasks(tmp_path, "inventory_check", "write_k", mtp_k=str(k), **known)
        assert done.returncode == 0, done.stdout
        assert f"changed={changed}" in done.stdout
    mtp = yaml.safe_load((inventory / "group_vars/all/mtp.yml").read_text())["mtp"]
    assert (mtp["enabled"], mtp["num_speculative_tokens"]) == (True, 3)
