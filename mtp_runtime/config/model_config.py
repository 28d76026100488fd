"""What the weights' own config.json says. Reads files, changes nothing."""

import json
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.json"


def read_json(file: Path) -> Any:
    """The content of a JSON file; None when it cannot be read."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def mtp_layers(folder: Path) -> int | None:
    """num_nextn_predict_layers of the weights in a folder; None when unknown, or no number of layers."""
    config = read_json(folder / CONFIG_FILE)
    found = config.get("num_nextn_predict_layers") if isinstance(config, dict) else None
    return found if type(found) is int and found >= 1 else None
