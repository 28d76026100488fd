"""`mtpctl offline`: a rank's configuration as the `LLM(...)` of a Python program, without a server."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from mtp_runtime.cli.app import AsJson, Inventories, Name, WithK, fail
from mtp_runtime.config import api, edit
from mtp_runtime.config import offline as programs
from mtp_runtime.config.problems import ConfigError, Problem
from mtp_runtime.config.render import render

RankName = Annotated[
    str | None, typer.Option("--rank", metavar="NAME", help="as `mtpctl render` names it; else the first that decodes")
]


def offline(
    cluster: Name, rank: RankName = None, as_json: AsJson = False, inventories: Inventories = None, k: WithK = None
) -> None:
    """Prints the Python program that runs a rank's configuration offline. Touches nothing."""
    try:
        plan = render(edit.check_with_k(cluster, k, inventories).cluster)
        names = [one["name"] for one in plan["ranks"]]
        if rank is not None and rank not in names:
            message = f"{cluster} has no rank {rank[:100]!r}; it has {names[0]} to {names[-1]}."
            raise ConfigError(
                [Problem("C03", "command line", "--rank", message, "name one that `mtpctl render` lists")]
            )
    except ConfigError as error:
        raise fail(error.problems, as_json) from None
    root = str(api.repository())
    found = programs.offline(plan, rank or programs.decoding_rank(plan), root)
    text = programs.program(found, cluster, root)
    print(json.dumps({"ok": True, **asdict(found), "program": text}, indent=2) if as_json else text, end="")
    if as_json:
        print()
