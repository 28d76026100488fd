"""`mtpctl render --explain`: every derived value, as text and as JSON, cut nowhere."""

import json
from collections.abc import Callable

import pytest
from inventory_copy import Copy
from typer.testing import CliRunner

from mtp_runtime.cli.main import app
from mtp_runtime.config import api
from mtp_runtime.config.explain import explain

SHIPPED = sorted(p.name for p in api.inventories().iterdir() if (p / "hosts.yml").is_file())


def render(*words: str) -> str:
    result = CliRunner().invoke(app, ["render", *words, "--explain"])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("name", SHIPPED)
def test_text_and_json_say_all_of_it(name: str) -> None:
    rows = explain(api.load_checked(name))
    assert [tuple(one.values()) for one in json.loads(render(name, "--json"))] == [tuple(row) for row in rows]
    shown = render(name).splitlines()
    assert [line.split(" = ")[0] for line in shown if not line.startswith(" ")] == [row.key for row in rows]
    for row in rows:
        at = next(n for n, line in enumerate(shown) if line.startswith(f"{row.key} = "))
        below = (
            [f"    {row.how}"]
            if row.overridden is None
            else [f"    written in {row.overridden}", f"    else {row.how}"]
        )
        assert shown[at + 1 : at + 1 + len(below)] == below


def test_another_k_can_be_explained(copy: Callable[[str], Copy]) -> None:
    found = copy("local")
    where = ("--inventories", str(found.root), "--json")
    values = {one["key"]: one["value"] for one in json.loads(render("local", "--k", "3", *where))}
    assert values["mtp.num_speculative_tokens"] == 3
    assert values["serving.decode.compilation_config.cudagraph_capture_sizes"][-1] == 16
    refused = CliRunner().invoke(app, ["render", "local", "--explain", "--k", "16", *where])
    assert (refused.exit_code, "R03" in refused.stderr) == (2, True)
