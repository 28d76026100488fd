"""What the command line and the tests call: find, check, render."""

from pathlib import Path
from typing import Any

from .load import load
from .problems import ConfigError, Problem
from .render import render
from .rules import check_cluster
from .schema import Cluster


def repository() -> Path:
    """The checkout this package runs from."""
    return Path(__file__).resolve().parents[2]


def inventories() -> Path:
    """ansible/inventories of the checkout."""
    return repository() / "ansible" / "inventories"


def load_checked(name: str, root: Path | None = None, overrides: dict[str, str] | None = None) -> Cluster:
    """A cluster that broke no rule. Errors: ConfigError with every problem."""
    cluster, places = load((root or inventories()) / name, overrides)
    problems: list[Problem] = check_cluster(cluster, places)
    if problems:
        raise ConfigError(problems)
    return cluster


def plan(name: str, root: Path | None = None) -> dict[str, Any]:
    """The plan of a cluster. Errors: ConfigError."""
    return render(load_checked(name, root))
