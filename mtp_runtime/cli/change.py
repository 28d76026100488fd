"""`mtpctl set`: values of a cluster's files, changed when the result breaks no rule."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from mtp_runtime.cli.app import AsJson, Inventories, Name, fail, out, warn
from mtp_runtime.config import edit
from mtp_runtime.config.problems import ConfigError

Words = Annotated[
    list[str],
    typer.Argument(
        metavar="KEY=VALUE...",
        help="as mtp.num_speculative_tokens=2 or all.hosts.p0.kv_port=36000; "
        "KEY=null writes null, KEY= takes the key out",
    ),
]


def set_values(cluster: Name, assignments: Words, as_json: AsJson = False, inventories: Inventories = None) -> None:
    """Changes keys of the cluster's files, all or none, when the result breaks no rule; keeps everything else."""
    try:
        found, changes = edit.set_values(cluster, assignments, inventories)
    except ConfigError as error:
        raise fail(error.problems, as_json) from None
    warn(found.warnings)
    if as_json:
        warnings = [one.as_dict() for one in found.warnings]
        print(json.dumps({"ok": True, "changes": [asdict(one) for one in changes], "warnings": warnings}, indent=2))
        return
    for one in changes:
        out.print(Text(f"{one.file}: {one.key}: {_value(one.old)} -> {_value(one.new)}"), soft_wrap=True)
    if changes:
        next_step = f"next: mtpctl diff {cluster} says what it means, make deploy CLUSTER={cluster} applies it"
        out.print(Text(next_step), soft_wrap=True)
    else:
        out.print(Text(f"{cluster}: unchanged"))


def _value(text: str | None) -> str:
    return "(not written)" if text is None else text
