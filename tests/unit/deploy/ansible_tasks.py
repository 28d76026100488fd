"""Single tasks files of the roles, run by Ansible on this machine against folders of a test."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from ansible_modules import ROOT


def run_tasks(
    folder: Path, role: str, tasks_from: str, *arguments: str, **variables: Any
) -> subprocess.CompletedProcess[str]:
    """One tasks file of a role. folder: for the playbook and what Ansible writes; arguments: for ansible-playbook."""
    include = {"ansible.builtin.include_role": {"name": role, "tasks_from": tasks_from}}
    play = {"hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": [include]}
    (folder / "play.yml").write_text(yaml.safe_dump([play]))
    known = {"ansible_python_interpreter": sys.executable, "mtp_root": str(ROOT), "mtp_local": str(folder)}
    (folder / "variables.json").write_text(json.dumps(known | variables))
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible" / "ansible.cfg"),
        "ANSIBLE_HOME": str(folder / "ansible"),
        "ANSIBLE_LOCAL_TEMP": str(folder / "ansible"),
        "ANSIBLE_NOCOLOR": "1",
        "LC_ALL": "C.UTF-8",
    }
    (folder / "hosts.yml").write_text("all: {hosts: {localhost: {}}}\n")
    command = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", str(folder / "hosts.yml")]
    return subprocess.run(
        [*command, str(folder / "play.yml"), "-e", f"@{folder / 'variables.json'}", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def tasks_that_ran(output: str) -> list[str]:
    """Names of the tasks that were not skipped: our configuration does not show those."""
    return re.findall(r"^TASK \[\S+ : (.*?)\] \*", output, re.MULTILINE)
