"""docs/schema/*.json: what editors check and complete while an inventory is written, from the schema itself.

Each file of an inventory names its own in the first line, `# yaml-language-server: $schema=...`. They know keys, types
and limits; the rules are `mtpctl check`'s.
"""

from __future__ import annotations

import json
from typing import Any

from .files import NAMES
from .schema import Cluster

FOLDER = "docs/schema"
DIALECT = "http://json-schema.org/draft-07/schema#"


def header(section: str) -> str:
    """The first line of an inventory's file, which names its schema for editors."""
    up = "../" * (3 + NAMES[section].count("/"))
    return f"# yaml-language-server: $schema={up}{FOLDER}/{section}.json\n"


def documents() -> dict[str, str]:
    """Section -> text of its schema file."""
    whole = Cluster.model_json_schema()
    return {section: json.dumps(_document(section, whole), indent=2) + "\n" for section in NAMES}


def _document(section: str, whole: dict[str, Any]) -> dict[str, Any]:
    """The schema of one file: hosts.yml is its own top, the others have one key, their name."""
    inner = whole["properties"][section]
    if section == "hosts":
        body = dict(_target(inner, whole))
    else:
        body = {"type": "object", "properties": {section: inner}, "required": [section], "additionalProperties": False}
    used = {name: whole["$defs"][name] for name in sorted(_reached(body, whole))}
    head = {"$schema": DIALECT, "title": f"{NAMES[section]} of an inventory"}
    return {**head, **_closed({**body, "$defs": used})}


def _target(field: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = whole["$defs"][field["$ref"].rsplit("/", 1)[1]]
    return found


def _reached(node: Any, whole: dict[str, Any], seen: frozenset[str] = frozenset()) -> set[str]:
    """Names of the definitions that a part refers to, over others too."""
    if isinstance(node, dict):
        found: set[str] = set()
        if "$ref" in node:
            name = node["$ref"].rsplit("/", 1)[1]
            if name not in seen:
                found = {name} | _reached(whole["$defs"][name], whole, seen | {name})
        return found.union(*(_reached(one, whole, seen) for key, one in node.items() if key != "$ref"))
    return set().union(*(_reached(one, whole, seen) for one in node)) if isinstance(node, list) else set()


def _closed(node: Any) -> Any:
    """Names of hosts are limited, so a mapping of hosts refuses the others; titles say nothing that keys do not."""
    if isinstance(node, list):
        return [_closed(one) for one in node]
    if not isinstance(node, dict):
        return node
    closed = {"additionalProperties": False} if "patternProperties" in node else {}
    return {key: _closed(one) for key, one in node.items() if key != "title" or not isinstance(one, str)} | closed
