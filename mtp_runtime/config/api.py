"""What the command line and the tests call: find, check, render."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import Files, on_disk
from .load import load_files
from .model_config import mtp_layers
from .problems import ConfigError, Problem
from .render import render
from .rules import check_cluster, check_warnings, with_sources
from .schema import Cluster


@dataclass(frozen=True)
class Checked:
    """A cluster that broke no rule, its K looked up; warnings: what is allowed but deserves a look."""

    cluster: Cluster
    warnings: list[Problem]


def repository() -> Path:
    """The checkout this package runs from."""
    return Path(__file__).resolve().parents[2]


def inventories() -> Path:
    """ansible/inventories of the checkout."""
    return repository() / "ansible" / "inventories"


def folder(name: str, root: Path | None = None) -> Path:
    """The folder of an inventory, which may not be there. Errors: ConfigError for what names no folder in root."""
    single = name.rstrip("/")
    if not single or single in (".", "..") or Path(single).name != single:
        message = f"{name[:100]!r} names no inventory: they lie in one folder and have no path."
        remedy = "name one of them, as in mtpctl check local; another folder of inventories: --inventories"
        raise ConfigError([Problem("C03", "command line", "CLUSTER", message, remedy)])
    return (root or inventories()) / single


def check(name: str, root: Path | None = None, overrides: dict[str, str] | None = None) -> Checked:
    """A cluster's files, read and checked. Errors: ConfigError with every problem.

    root: the folder of inventories; overrides: section -> text to take instead of its file. The weights' config.json is
    looked at where it can be read.
    """
    return check_files(on_disk(folder(name, root), overrides))


def check_files(files: Files) -> Checked:
    """The same for files that lie somewhere else, as in a git revision."""
    try:
        written, places = load_files(files)
    except ConfigError as error:
        raise ConfigError(with_sources(error.problems)) from None
    layers = mtp_layers(repository() / written.model.path)
    cluster = written.with_k_of(layers)
    problems: list[Problem] = check_cluster(cluster, places)
    if problems:
        raise ConfigError(problems)
    return Checked(cluster, check_warnings(cluster, layers, places))


def load_checked(name: str, root: Path | None = None, overrides: dict[str, str] | None = None) -> Cluster:
    """A cluster that broke no rule. Errors: ConfigError with every problem."""
    return check(name, root, overrides).cluster


def plan(name: str, root: Path | None = None) -> dict[str, Any]:
    """The plan of a cluster. Errors: ConfigError."""
    return render(load_checked(name, root))
