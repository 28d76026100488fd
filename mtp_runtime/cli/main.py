"""`mtpctl`: the commands of the modules beside this one, and those for a deployed cluster (canary, status, logs)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtp_runtime.cli import active_k as drafts
from mtp_runtime.cli import canary as canaries
from mtp_runtime.cli import change, graph_dump, graphs, new, offline
from mtp_runtime.cli import diff as difference
from mtp_runtime.cli.app import app, err
from mtp_runtime.cli.app import main as run_app
from mtp_runtime.cli.deployed import Deployed, NotDeployed
from mtp_runtime.metrics.plan import PlanError

# Ansible shows this output too: no colours and a fixed width where it is no terminal.
out = Console(width=None if Console().is_terminal else 110)
BAD_INPUT, RED = 2, 1
# As long as `status` waits for one answer.
HEALTH_S = 5.0
app.command()(new.init)
app.command("set")(change.set_values)
app.command()(difference.diff)
app.command()(offline.offline)
app.command()(graphs.slots)
app.command()(graphs.plan)
app.add_typer(graph_dump.app, name="graph")
Name = Annotated[str, typer.Argument(metavar="CLUSTER", help="name of a deployed cluster")]


def _find(cluster: str) -> Deployed:
    try:
        return Deployed.find(cluster)
    except (NotDeployed, PlanError) as error:
        err.print(Text(str(error), style="red"), soft_wrap=True)
        raise typer.Exit(BAD_INPUT) from None


@app.command()
def canary(
    cluster: Name, as_json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False
) -> None:
    """Sends one completion through the front and proves that every part took part. Exit code 1 when it is red."""
    deployed = _find(cluster)
    report = canaries.run(deployed)
    canaries.write_report(report, deployed.folder / "reports")
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        _print_report(report, deployed)
    if not report.green:
        raise typer.Exit(RED)


def _print_report(report: canaries.Report, deployed: Deployed) -> None:
    if not report.green:
        out.print(Text(f"{report.cluster}: the canary is red"))
        for check in report.checks:
            if not check.ok:
                out.print(Text(f"  {check.name}: {check.detail}"), soft_wrap=True)
                out.print(Text(f"  read {check.log}"), soft_wrap=True)
        return
    out.print(Text(f"{report.cluster}: the canary is green"))
    # Plain lines: Ansible shows them too, one by one.
    for name, value in canaries.summary(report, deployed):
        out.print(Text(f"  {name:<18} {value}"), soft_wrap=True)


@app.command()
def status(clusters: Annotated[list[str] | None, typer.Argument(metavar="[CLUSTER]...")] = None) -> None:
    """Shows the programs of each cluster (all deployed ones), their health and the MTP state.

    Exit code 1 when one is not healthy.
    """
    clusters = clusters or Deployed.names()
    if not clusters:
        out.print("no cluster is deployed here; start with make deploy CLUSTER=local")
        return
    sick = False
    for name in clusters:
        deployed = _find(name)
        programs = deployed.programs()
        if programs is None:
            out.print(Text(f"{name}: its supervisor does not run; make deploy CLUSTER={name} starts it again"))
            sick = True
            continue
        sick |= _print_status(deployed, programs)
    if sick:
        raise typer.Exit(RED)


def _print_status(deployed: Deployed, programs: list[dict[str, object]]) -> bool:
    """One table; True when something is not healthy."""
    plan, sick = deployed.plan, False
    urls = {engine.instance: f"{engine.url}/health" for engine in plan.engines}
    urls |= {"prometheus": f"http://{plan.prometheus}/-/ready", "exporter": f"http://{plan.exporter}/metrics"}
    table = Table("program", "state", "health", "since", title=f"{plan.cluster}   API http://{plan.front}/v1")
    for program in programs:
        name = str(program["name"])
        if name == "front":
            answer = canaries.call(f"http://{plan.front}/readiness", deployed.key(), timeout_s=HEALTH_S)
        elif name in urls:
            answer = canaries.call(urls[name], None, timeout_s=HEALTH_S)
        else:
            answer = None
        well = program["statename"] == "RUNNING" and (answer is None or answer.status == 200)
        health = "-" if answer is None else "healthy" if answer.status == 200 else f"HTTP {answer.status}"
        table.add_row(name, str(program["statename"]), health, str(program["description"]))
        sick |= not well
    out.print(table)
    state = f"on, K = {plan.k}, active K = {_active_k(deployed)}" if plan.mtp_enabled else "off"
    out.print(Text(f"MTP {state}; last canary: {_last_canary(deployed.folder)}"), soft_wrap=True)
    return sick


def _active_k(deployed: Deployed) -> str:
    """How many of the loaded drafts the running servers make; by rank where they differ."""
    ranks = drafts.read(deployed, HEALTH_S).ranks
    found = [(rank.instance, "?" if rank.trouble else str(rank.active_k)) for rank in ranks]
    if len({active for _, active in found}) == 1:
        return found[0][1]
    return ", ".join(f"{active} on {instance}" for instance, active in found)


def _last_canary(folder: Path) -> str:
    try:
        found = json.loads((folder / "reports" / "canary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "none"
    rate, tpot = found.get("acceptance_rate"), found.get("tpot_seconds")
    parts = ["green" if found.get("green") else "red"]
    parts += [f"acceptance {rate:.1%}"] if rate is not None else []
    parts += [f"TPOT {tpot * 1000:.1f} ms"] if tpot is not None else []
    return ", ".join(parts)


@app.command("active-k")
def active_k(
    cluster: Name,
    wanted: Annotated[
        int | None, typer.Argument(metavar="[N]", help="drafts a request gets each step, 0 to the loaded K")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False,
) -> None:
    """Shows how many drafts the running servers make, or sets it, without a restart. A restart undoes it."""
    deployed = _find(cluster)
    found = drafts.read(deployed) if wanted is None else drafts.change(deployed, wanted)
    if as_json:
        print(json.dumps(found.as_dict(cluster), indent=2))
    else:
        _print_ranks(found)
    if found.refused or found.failed:
        err.print(Text(f"{cluster}: {found.refused or found.failed}", style="red"), soft_wrap=True)
        raise typer.Exit(BAD_INPUT if found.refused else RED)


def _print_ranks(found: drafts.Outcome) -> None:
    table = Table("rank", "active K", "loaded K")
    for rank in found.ranks:
        known = "?" if rank.trouble else None
        table.add_row(rank.instance, known or str(rank.active_k), known or str(rank.loaded_k or "MTP is off"))
    out.print(table)


@app.command()
def logs(
    cluster: Name, lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="lines of each log")] = 20
) -> None:
    """Prints the end of every log."""
    deployed = _find(cluster)
    for path in sorted((deployed.folder / "logs").glob("*.log")):
        out.rule(Text(str(path)))
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]:
            out.print(Text(line), soft_wrap=True)


def main() -> None:
    """Entry point of the console script."""
    run_app()
