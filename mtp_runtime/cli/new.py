"""`mtpctl init`: a new inventory."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from mtp_runtime.cli.app import AsJson, Inventories, fail, out
from mtp_runtime.config import new
from mtp_runtime.config.files import shown
from mtp_runtime.config.problems import ConfigError

NewName = Annotated[str, typer.Argument(metavar="NAME", help="of the new cluster: letters, digits, - and _")]
Source = Annotated[str, typer.Option("--from", metavar="CLUSTER", help="the inventory to copy")]


def init(name: NewName, source: Source, as_json: AsJson = False, inventories: Inventories = None) -> None:
    """Makes a new inventory from another one, and says what to edit in it."""
    try:
        folder, to_edit = new.init(name, source, inventories)
    except ConfigError as error:
        raise fail(error.problems, as_json) from None
    if as_json:
        edits = [asdict(one) for one in to_edit]
        print(
            json.dumps({"ok": True, "cluster": name, "from": source, "folder": shown(folder), "edit": edits}, indent=2)
        )
        return
    out.print(Text(f"{name}: {shown(folder)}, a copy of {source} that passes its check. Edit next:"), soft_wrap=True)
    for one in to_edit:
        out.print(Text(f"  {one.file}:{one.line}: {one.key}: {one.value}: {one.why}"), soft_wrap=True)
    rest = "  what it serves and how: group_vars/all/*.yml there, or mtpctl set "
    out.print(Text(f"{rest}{name} KEY=VALUE (all keys: docs/configuration.md)"), soft_wrap=True)
    then = ", ".join(f"make {target} CLUSTER={name}" for target in ("check", "render", "deploy"))
    out.print(Text(f"Then: {then}"), soft_wrap=True)
