"""A copied inventory that a test may break."""

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

Edits = dict[str, Any]
DELETE = object()


class Copy:
    """One copied inventory. root: the folder that holds it, for --inventories."""

    def __init__(self, root: Path, name: str):
        self.root, self.name = root, name
        self.folder = root / name

    def file(self, section: str) -> Path:
        """Path of hosts.yml or of a variables file."""
        return self.folder / ("hosts.yml" if section == "hosts" else f"group_vars/all/{section}.yml")

    def edit(self, edits: Edits) -> "Copy":
        """Sets dotted keys, e.g. {'mtp.num_speculative_tokens': 16}; `hosts.` addresses hosts.yml."""
        yaml = YAML(typ="rt")
        for dotted, value in edits.items():
            section, *rest = dotted.split(".")
            file = self.file(section)
            data = yaml.load(file.read_text())
            node = data if section == "hosts" else data[section]
            for part in rest[:-1]:
                if node.get(part) is None:
                    node[part] = {}
                node = node[part]
            if value is DELETE:
                del node[rest[-1]]
            else:
                node[rest[-1]] = value
            with file.open("w") as stream:
                yaml.dump(data, stream)
        return self

    def content(self) -> dict[str, bytes]:
        """Every file below the folder, to show that nothing was changed."""
        return {str(p.relative_to(self.folder)): p.read_bytes() for p in self.folder.rglob("*") if p.is_file()}
