"""`mtpctl diff`: what a change of a cluster's files means, before it is applied."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from mtp_runtime.cli.app import AsJson, Inventories, Name, fail, out, warn
from mtp_runtime.config import api
from mtp_runtime.config.effects import ARTICLE_RATE, effects, rate_of
from mtp_runtime.config.files import on_disk
from mtp_runtime.config.impact import Impact, compare, said
from mtp_runtime.config.problems import ConfigError, Problem
from mtp_runtime.config.render import render
from mtp_runtime.config.revision import at_revision
from mtp_runtime.config.written import KeyChange, changed_keys

Revision = Annotated[
    str | None, typer.Argument(metavar="[REV]", help="a git revision to compare with; HEAD when none is given")
]
AgainstDeployed = Annotated[bool, typer.Option("--deployed", help="compare with what is deployed on this machine")]
Acceptance = Annotated[
    float | None,
    typer.Option("--acceptance", min=0, max=1, metavar="RATE", help="share of first drafts that are accepted, 0 to 1"),
]
HERE = "command line"


def diff(
    cluster: Name,
    revision: Revision = None,
    deployed: AgainstDeployed = False,
    acceptance: Acceptance = None,
    as_json: AsJson = False,
    inventories: Inventories = None,
) -> None:
    """What would the inventory as it is now change? Restarts, graphs, memory, K, what to expect. Touches nothing."""
    try:
        if deployed and revision is not None:
            message = "REV and --deployed name two things to compare with."
            raise ConfigError([Problem("C02", HERE, "REV", message, "give one of the two")])
        found = api.check(cluster, inventories)
        now = render(found.cluster)
        keys: list[KeyChange] = []
        if deployed:
            before, against = _deployed_plan(cluster), "what is deployed"
        else:
            before, keys, against = _earlier(cluster, revision or "HEAD", inventories)
    except ConfigError as error:
        raise fail(error.problems, as_json) from None
    warn(found.warnings)
    impact = compare(before, now)
    rate, rate_from = (acceptance, "--acceptance") if acceptance is not None else _rate(cluster)
    expected = effects(impact, before, now, rate, rate_from)
    if as_json:
        _print_json(cluster, against, keys, impact, expected)
    else:
        _print(cluster, against, keys, impact, expected)


def _earlier(cluster: str, revision: str, root: Path | None) -> tuple[dict[str, Any], list[KeyChange], str]:
    """The plan at a revision, the keys that differ from it, and its name."""
    files, commit = at_revision(cluster, revision, root)
    try:
        plan = render(api.check_files(files).cluster)
    except ConfigError as error:
        message = f"the inventory of {revision} does not pass the check of this version:"
        remedy = "compare with a later revision, or with what is deployed (--deployed)"
        raise ConfigError([Problem("C08", HERE, "REV", message, remedy), *error.problems]) from None
    keys = changed_keys(files, on_disk(api.folder(cluster, root)))
    return plan, keys, revision if commit.startswith(revision) else f"{revision} ({commit})"


def _state(cluster: str) -> Path:
    return api.repository() / ".local" / "clusters" / cluster


def _deployed_plan(cluster: str) -> dict[str, Any]:
    file = _state(cluster) / "plan.json"
    try:
        plan = json.loads(file.read_text(encoding="utf-8"))
        compare(plan, plan)
    except FileNotFoundError:
        message = f"{cluster} is not deployed on this machine."
        remedy = f"compare with a git revision: mtpctl diff {cluster} HEAD"
        raise ConfigError([Problem("C08", HERE, "--deployed", message, remedy)]) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        message = f"the deployed plan cannot be read ({type(error).__name__})."
        problem = Problem("C08", str(file), "(file)", message, f"deploy again: make deploy CLUSTER={cluster}")
        raise ConfigError([problem]) from None
    return dict(plan)


def _rate(cluster: str) -> tuple[float, str]:
    """How many drafts are accepted: as the last canary of the deployed cluster saw it, else as the article has it."""
    try:
        k = int(json.loads((_state(cluster) / "plan.json").read_text(encoding="utf-8"))["mtp"]["k"])
        report = json.loads((_state(cluster) / "reports" / "canary.json").read_text(encoding="utf-8"))
        if k >= 1 and report["mtp"] == f"on, K = {k}" and report["acceptance_length"] >= 1:
            return rate_of(float(report["acceptance_length"]), k), "as the last canary here"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return ARTICLE_RATE, "the figure of the MTP article; --acceptance sets another"


def _print_json(cluster: str, against: str, keys: list[KeyChange], impact: Impact, expected: list[str]) -> None:
    found = {
        "ok": True,
        "cluster": cluster,
        "against": against,
        "changed": impact.changed,
        "keys": [asdict(one) for one in keys],
        "ranks": [asdict(one) for one in impact.ranks],
        "services": impact.services,
        "settings": [asdict(one) for one in impact.settings],
        "effects": expected,
    }
    print(json.dumps(found, indent=2))


def _print(cluster: str, against: str, keys: list[KeyChange], impact: Impact, expected: list[str]) -> None:
    def line(text: str) -> None:
        out.print(Text(text), soft_wrap=True)

    if not keys and not impact.changed:
        line(f"{cluster}: nothing differs from {against}")
        return
    line(f"{cluster}, against {against}:")
    for key in keys:
        line(f"  {key.file}:{key.line}: {key.key}: {_shown(key.old)} -> {_shown(key.new)}")
    if not impact.changed:
        line("No program restarts and no setting changes.")
        return
    line("Programs")
    for action in ("restart", "restart with its group", "start", "stop", "unchanged"):
        for reasons in dict.fromkeys(one.reasons for one in impact.ranks if one.action == action):
            names = [one.name for one in impact.ranks if (one.action, one.reasons) == (action, reasons)]
            line(f"  {action}: {_names(names)}" + f" ({'; '.join(reasons)})" * bool(reasons))
    for service, why in impact.services.items():
        line(f"  restart: {service} ({'; '.join(why)})")
    if impact.settings:
        line("Settings")
    for one in impact.settings:
        line(f"  {one.name}: {said(one.old)} -> {said(one.new)}")
    line("What to expect")
    for sentence in expected:
        line(f"  - {sentence}")


def _names(names: list[str]) -> str:
    """decode-0, decode-1, decode-2, prefill-0 -> decode-0..2, prefill-0."""
    runs: list[tuple[str, int, int]] = []
    for name in names:
        role, _, number = name.rpartition("-")
        if runs and runs[-1][0] == role and runs[-1][2] + 1 == int(number):
            runs[-1] = (role, runs[-1][1], int(number))
        else:
            runs.append((role, int(number), int(number)))
    return ", ".join(f"{role}-{first}" + f"..{last}" * (last > first) for role, first, last in runs)


def _shown(text: str | None) -> str:
    return "(not written)" if text is None else text
