"""make's short ways to the commands, and what a refusal says on a terminal."""

import subprocess
from collections.abc import Callable

import pytest
from inventory_copy import Copy
from typer.testing import CliRunner

from mtp_runtime.cli.main import app
from mtp_runtime.config import api, rules

WAYS = {
    "diff CLUSTER=a3": "/mtpctl diff a3 --inventories ",
    "diff CLUSTER=a3 REV=HEAD~1 ARGS=--json": "/mtpctl diff a3 HEAD~1 --inventories ",
    "diff CLUSTER=a3 ARGS=--deployed": " --deployed",
    "init NEW=mine FROM=a3": "/mtpctl init 'mine' --from 'a3' --inventories ",
    "set CLUSTER=a3 SET=mtp.padding=slack": " -- mtp.padding=slack",
    "offline CLUSTER=a3 ARGS=--rank=decode-1": "/mtpctl offline a3 --inventories ",
    "check CLUSTER=local K=3": "/mtpctl check local --inventories ",
    "render CLUSTER=local K=3": " --k 3",
    "offline CLUSTER=local K=3": " --k 3",
    "docs": "/mtpctl schema --write",
}


@pytest.mark.parametrize("words", WAYS)
def test_make_calls_mtpctl(words: str) -> None:
    command = ["make", "-n", "-C", str(api.repository()), *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert WAYS[words] in done.stdout.replace("  ", " ")


def test_check_looks_at_the_k_it_is_given() -> None:
    command = ["make", "-n", "-C", str(api.repository()), "check", "CLUSTER=local", "K=3"]
    assert "--k 3" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("target", ["deploy", "diff", "plan", "set"])
def test_a_k_that_would_change_nothing_is_refused(target: str) -> None:
    command = ["make", "-C", str(api.repository()), target, "CLUSTER=local", "K=3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "error: K=3 changes nothing here: make mtp CLUSTER=local K=3 sets it" in done.stderr


def test_a_refusal_names_everything(copy: Callable[[str], Copy]) -> None:
    found = copy("local").edit({"mtp.num_speculative_tokens": 16})
    shown = CliRunner().invoke(app, ["check", "local", "--inventories", str(found.root)]).stderr
    rule = rules.get("R03")
    assert f"R03  {found.file('mtp')}:" in shown and "mtp.num_speculative_tokens: K = 16 gives 17" in shown
    assert f"     value: 16\n     remedy: {rule.remedy}.\n     source: {rule.source}\n" in shown


def test_what_nobody_sees_is_named(copy: Callable[[str], Copy]) -> None:
    found = copy("local").edit({"topology.release": "0\u202e1"})
    shown = CliRunner().invoke(app, ["check", "local", "--inventories", str(found.root)]).stderr
    assert "topology.release: should hold visible characters only, not U+202E, found" in shown
    assert "\\u202e" in shown and "\u202e" not in shown
