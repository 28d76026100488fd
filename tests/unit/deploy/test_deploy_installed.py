"""What is installed is installed again when what is wanted changes, and only then."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from ansible_modules import ROOT
from ansible_tasks import run_tasks, tasks_that_ran

ROLES = ROOT / "ansible" / "roles"
PACKAGES = sorted(yaml.safe_load((ROLES / "runtime" / "defaults" / "main.yml").read_text())["runtime_deb"])


@pytest.mark.parametrize(
    ("stamp", "again"),
    [
        (" ".join(PACKAGES) + "\nsome versions\n", False),
        (" ".join(PACKAGES[:-1]) + "\n", True),
        (None, True),
    ],
    ids=["same", "a package is new", "nothing there"],
)
def test_debian_programs(stamp: str | None, again: bool, tmp_path: Path) -> None:
    (tmp_path / "deb").mkdir()
    if stamp:
        (tmp_path / "deb" / ".stamp").write_text(stamp)
    done = run_tasks(tmp_path, "runtime", "debian", "--check", mtp_deb=str(tmp_path / "deb"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("Remember the packages, and their versions for people" in tasks_that_ran(done.stdout)) == again


def test_the_readme_asks_for_the_disk_that_is_checked() -> None:
    asked = re.findall(r"(\d+) GB of disk", (ROOT / "README.md").read_text())
    checked = yaml.safe_load((ROLES / "preflight" / "defaults" / "main.yml").read_text())["preflight_install_mb"]
    assert [int(gigabytes) * 1000 for gigabytes in asked] == [checked]
