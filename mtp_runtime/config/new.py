"""A new inventory as a copy of one that passes its check, and what is left to edit in it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from .addresses import is_documentation
from .api import check, inventories
from .files import NAMES, on_disk, shown
from .load import NAME, load
from .problems import ConfigError, KeyPath, Problem, dotted
from .render import render
from .schema import THIS_MACHINE, Cluster
from .schema_problems import Places

# Names that Ansible has its own meaning for.
RESERVED = ("all", "ungrouped", "localhost")
HERE = "command line"


@dataclass(frozen=True)
class ToEdit:
    """A value that is still the original's. why: half a sentence for people."""

    file: str
    line: int
    key: str
    value: str
    why: str


def init(name: str, source: str, root: Path | None = None) -> tuple[Path, list[ToEdit]]:
    """Makes inventory `name` from `source`; returns its folder and what to edit next.

    Errors: ConfigError, with nothing made, for a name that cannot be used or is taken and for a source that is not
    there or breaks a rule; OSError.
    """
    root = root or inventories()
    folder = root / name
    _usable("NAME", name)
    _usable("--from", source)
    if name in RESERVED:
        message = f"{name} has a meaning of its own for Ansible, as have {', '.join(n for n in RESERVED if n != name)}."
        raise ConfigError([Problem("C03", HERE, "NAME", message, "choose another name")])
    if folder.exists() or folder.is_symlink():
        message = f"{shown(root)}/{name} exists already."
        raise ConfigError([Problem("C03", HERE, "NAME", message, "choose another name, or edit that inventory")])
    original = check(source, root).cluster
    files = on_disk(root / source)
    # In a folder that no command takes for an inventory, until it is whole and passes its check.
    stage = Path(tempfile.mkdtemp(dir=root, prefix=".init-"))
    try:
        for section, below in NAMES.items():
            file = stage / name / below
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(mode=0o600)
            file.write_bytes(files.read(section))
            # hosts.yml may hold passwords that only its owner may read.
            file.chmod((root / source / below).stat().st_mode & 0o777)
        check(name, stage)
        (stage / name).rename(folder)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    cluster, places = load(folder)
    return folder, [
        *_addresses(cluster, original, places),
        *_weights(cluster, places),
        *_ports(cluster, original, places, root),
    ]


def _usable(key: str, name: str) -> None:
    if not NAME.fullmatch(name):
        message = f"{name[:70]!r} is not a usable cluster name; inventories lie in one folder and have no path."
        remedy = "use up to 64 letters, digits, '-' and '_', a letter or digit first"
        raise ConfigError([Problem("C03", HERE, key, message, remedy)])


def _addresses(cluster: Cluster, original: Cluster, places: Places) -> Iterator[ToEdit]:
    """Addresses that are no loopback ones: they are still the original's hosts."""
    keys: list[tuple[KeyPath, Any]] = [
        ((*path, name), getattr(entry, name))
        for path, _, entry in cluster.host_entries()
        if entry
        for name in ("ansible_host", "address", "nic")
    ]
    router, monitoring = cluster.serving.router, cluster.monitoring
    keys += [(("serving", "router", name), getattr(router, name)) for name in ("host", "backend_host", "metrics_host")]
    keys += [(("monitoring", "host"), monitoring.host)]
    for path, value in keys:
        if value is None:
            continue
        why = f"the network interface of {original.name}'s host" if path[-1] == "nic" else _why(value, original.name)
        if why:
            yield _to_edit(path, value, why, places)


def _why(address: str, original: str) -> str | None:
    try:
        number = ip_address(address)
    except ValueError:
        return None if address == "localhost" else f"a host of {original}"
    if is_documentation(address):
        return "an address from the documentation range; put the host's own here"
    return None if number.is_loopback else f"a host of {original}"


def _weights(cluster: Cluster, places: Places) -> Iterator[ToEdit]:
    """Absolute paths: they are true on the original's hosts."""
    for name in ("path", "manifest"):
        value = getattr(cluster.model, name)
        if value and Path(value).is_absolute():
            yield _to_edit(("model", name), value, "where the weights lie on the hosts", places)


def _ports(cluster: Cluster, original: Cluster, places: Places, root: Path) -> Iterator[ToEdit]:
    """Ports on this machine that another inventory has too, the original named before others."""
    taken: dict[tuple[str, int], str] = {}
    others = {p.name for p in root.iterdir() if (p / "hosts.yml").is_file()} - {cluster.name, original.name}
    for other in (*sorted(others), original.name):
        try:
            taken |= {(one["address"], one["port"]): other for one in _here(check(other, root).cluster)}
        except ConfigError:
            continue
    seen = set()
    for one in _here(check(cluster.name, root).cluster):
        other = taken.get((one["address"], one["port"]), "")
        if not other or one["key"] in seen:
            continue
        seen.add(one["key"])
        path = tuple(one["key"].split("."))
        why = f"a port of {other}, on the same machine: only one of the two can be deployed at a time"
        yield _to_edit(("hosts", *path) if path[0] == "all" else path, str(one["port"]), why, places)


def _here(cluster: Cluster) -> list[dict[str, Any]]:
    """What the cluster listens on on this machine."""
    return [one for one in render(cluster)["listeners"] if cluster.machine(one["host"]) == THIS_MACHINE]


def _to_edit(path: KeyPath, value: str, why: str, places: Places) -> ToEdit:
    file, line = places.find(path)
    return ToEdit(file, line, dotted(path[1:] if path[0] == "hosts" else path), value, why)
