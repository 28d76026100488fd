"""What the documents tell operators to type does what they say."""

import re
import shlex
from collections.abc import Callable
from typing import Any

import pytest
from inventory_copy import Copy
from typer.testing import CliRunner

from mtp_runtime.cli.main import app
from mtp_runtime.config import api, reference

MakeCopy = Callable[[str], Copy]
DOCUMENTS = api.repository() / "docs"


def test_the_commands_of_graphs_can_be_copied() -> None:
    text = (DOCUMENTS / "graphs.md").read_text()
    commands = re.findall(r"^    mtpctl (slots .*|plan .*)$", text, re.MULTILINE)
    assert {command.split()[0] for command in commands} == {"slots", "plan"}
    for command in commands:
        result = CliRunner().invoke(app, shlex.split(command))
        assert result.exit_code == 0, result.stderr
        assert "36" in result.stdout


def node(number: int) -> dict[str, str]:
    return {"ansible_host": f"192.0.2.{number}", "address": f"192.0.2.{number}", "nic": "eth0"}


NODES: tuple[tuple[str, list[str], list[str], dict[str, Any], dict[int, int]], ...] = (
    ("prefill", ["p0", "p1"], ["p2"], {}, {0: 2, 1: 2, 2: 2}),
    ("decode", ["d0", "d1"], ["d2", "d3"], {"topology.decode.dp": 64}, {0: 64}),
    ("decode", ["d0", "d1"], ["d2", "d3"], {}, {0: 32, 1: 32}),
)


@pytest.mark.parametrize(("group", "there", "new", "edits", "ranks"), NODES)
def test_adding_a_node_as_documented(
    group: str, there: list[str], new: list[str], edits: dict[str, Any], ranks: dict[int, int], copy: MakeCopy
) -> None:
    assert "## Adding a node" in reference.markdown()
    hosts = {f"hosts.all.hosts.{name}": node(30 + number) for number, name in enumerate(new)}
    names = {f"hosts.all.children.{group}.hosts": dict.fromkeys([*there, *new])}
    plan = api.plan("a3", copy("a3").edit({**hosts, **names, **edits}).root)
    counts: dict[int, int] = {}
    for rank in plan["ranks"]:
        if rank["role"] == group:
            counts[rank["group"]] = counts.get(rank["group"], 0) + 1
    assert counts == ranks


def test_links_from_readme_lead_to_a_heading() -> None:
    readme = (DOCUMENTS.parent / "README.md").read_text()
    links = re.findall(r"\]\((docs/[a-z]+\.md)#([a-z-]+)\)", readme)
    assert {anchor for _, anchor in links} >= {"vaulted-values", "adding-a-node", "release-lines"}
    for file, anchor in links:
        heads = re.findall(r"^#+ (.*)$", (DOCUMENTS.parent / file).read_text(), re.MULTILINE)
        assert anchor in {head.lower().replace(" ", "-") for head in heads}
