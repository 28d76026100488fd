"""What the command line and the tests call: find, check, render."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtp_runtime.releases import MTP_METHODS

from .files import Files, on_disk
from .load import load_files
from .model_config import CONFIG_FILE, mtp_layers
from .problems import ConfigError, Problem
from .render import render
from .rules import RULES, check_cluster, check_warnings, with_sources
from .schema import Cluster


@dataclass(frozen=True)
class Checked:
    """A cluster that broke no rule, its K looked up; warnings: what is allowed but deserves a look.

    unchecked: id of a rule that could not be checked here -> why, a sentence.
    """

    cluster: Cluster
    warnings: list[Problem]
    unchecked: dict[str, str]

    @property
    def held(self) -> int:
        """Rules over the files and the plan that were checked, and hold."""
        return sum(rule.where in ("files", "check") and rule.id not in self.unchecked for rule in RULES)


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
        raise ConfigError([_weights_elsewhere(one, cluster) if one.rule == "R44" else one for one in problems])
    warnings = check_warnings(cluster, layers, places)
    return Checked(cluster, warnings, _unchecked(cluster, layers, warnings))


def _config_file(cluster: Cluster) -> Path:
    return repository() / cluster.model.path / CONFIG_FILE


def _weights_elsewhere(problem: Problem, cluster: Cluster) -> Problem:
    """R44 where config.json cannot be asked."""
    if _config_file(cluster).is_file():
        return problem
    message = f"num_speculative_tokens is not written, and {cluster.model.path}/{CONFIG_FILE} is not on this machine."
    remedy = "write mtp.num_speculative_tokens; the weights are asked for K only where this command runs"
    return replace(problem, message=message, remedy=remedy)


def _unchecked(cluster: Cluster, layers: int | None, warnings: list[Problem]) -> dict[str, str]:
    """What needs something that is not here. R06 has a warning of its own."""
    unknown = [one.message for one in warnings if one.rule == "W06"]
    found = {"R06": unknown[0]} if unknown else {}
    if layers is None and cluster.mtp.enabled and cluster.mtp.method in MTP_METHODS:
        here = _config_file(cluster).is_file()
        why = "names no num_nextn_predict_layers" if here else "is not on this machine"
        text = f"{cluster.model.path}/{CONFIG_FILE} {why}, so K = {cluster.mtp.k} was not compared with the MTP layers"
        rest = (
            "" if here else f"; where the weights are, mtpctl check {cluster.name} and mtpctl weights {cluster.name} do"
        )
        found |= dict.fromkeys(("W01", "W02"), f"{text}{rest}.")
    return found


def load_checked(name: str, root: Path | None = None, overrides: dict[str, str] | None = None) -> Cluster:
    """A cluster that broke no rule. Errors: ConfigError with every problem."""
    return check(name, root, overrides).cluster


def plan(name: str, root: Path | None = None) -> dict[str, Any]:
    """The plan of a cluster. Errors: ConfigError."""
    return render(load_checked(name, root))
