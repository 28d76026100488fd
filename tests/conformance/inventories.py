"""A copy of a shipped inventory with other values, for tests that compare with the engine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import yaml

from mtp_runtime.config import api


def edited(base: str, edits: dict[str, Any], root: Path) -> Path:
    """The folder that holds the copy; edits: dotted keys -> values, as `serving.decode.max_num_seqs`."""
    shutil.copytree(api.inventories() / base, root / base)
    for dotted, value in edits.items():
        section, *path, last = dotted.split(".")
        file = root / base / "group_vars/all" / f"{section}.yml"
        data = yaml.safe_load(file.read_text())
        node = data[section]
        for part in path:
            node[part] = node.get(part) or {}
            node = node[part]
        node[last] = value
        file.write_text(yaml.safe_dump(data))
    return root
