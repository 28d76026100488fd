"""The commands over inventories. Exit codes: 0 fine, 2 bad input (nothing changed). No traceback gets out."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from mtp_runtime.config import api, edit, editor_schema, host_checks, reference, rules, weights
from mtp_runtime.config import explain as explanations
from mtp_runtime.config.engines import ENGINE_PYTHON, ROOT
from mtp_runtime.config.problems import ConfigError, Problem, printable
from mtp_runtime.config.render import render as render_plan
from mtp_runtime.config.render import url
from mtp_runtime.config.rule import WHERE_TEXT
from mtp_runtime.config.schema import THIS_MACHINE, Cluster
from mtp_runtime.config.text_edit import for_people

app = typer.Typer(help="Checks, renders and reads clusters.", no_args_is_help=True, pretty_exceptions_enable=False)
out, err = Console(), Console(stderr=True)
Name = Annotated[str, typer.Argument(metavar="CLUSTER", help="name of a folder in ansible/inventories")]
AsJson = Annotated[bool, typer.Option("--json", help="machine-readable output")]
Inventories = Annotated[
    Path | None, typer.Option("--inventories", help="folder of inventories, instead of the repository's")
]
WithK = Annotated[
    int | None, typer.Option("--k", metavar="K", help="as if mtp.yml had this K (0: MTP off); written nowhere")
]
BAD_INPUT = 2


def fail(problems: list[Problem], as_json: bool = False) -> typer.Exit:
    """Prints every problem, text to stderr and JSON to stdout; the exit to raise."""
    problems = rules.with_sources(problems)
    if as_json:
        print(json.dumps({"ok": False, "problems": [p.as_dict() for p in problems]}, indent=2))
    for problem in problems:
        _print_problem(problem, "red")
    count = len(problems)
    err.print(Text(f"{count} problem{'s' if count != 1 else ''}; nothing was changed."))
    return typer.Exit(BAD_INPUT)


def warn(warnings: list[Problem]) -> None:
    """Prints warnings to stderr; they stop nothing."""
    for warning in warnings:
        _print_problem(warning, "yellow", "warning: ")


def _print_problem(problem: Problem, style: str, kind: str = "") -> None:
    place = f"{problem.file}:{problem.line}" if problem.line else problem.file
    first = f"{problem.rule}  {kind}{place}: {problem.key}: {problem.message}"
    err.print(Text(printable(first), style=style), soft_wrap=True)
    for name, text in (("value", problem.value), ("remedy", f"{problem.remedy}."), ("source", problem.source)):
        if text:
            err.print(Text(printable(f"     {name}: {text}")), soft_wrap=True)


def _print_line(text: str) -> None:
    """One line whatever the terminal's width, so that what is on it can be searched and copied."""
    out.print(Text(text), soft_wrap=True)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


@app.command()
def check(cluster: Name, as_json: AsJson = False, inventories: Inventories = None, k: WithK = None) -> None:
    """Is the inventory right? Touches nothing."""
    try:
        found = edit.check_with_k(cluster, k, inventories)
    except ConfigError as error:
        raise fail(error.problems, as_json) from None
    warn(found.warnings)
    if as_json:
        warnings = [w.as_dict() for w in found.warnings]
        _print_json(
            {
                "ok": True,
                "problems": [],
                "warnings": warnings,
                "unchecked": found.unchecked,
                "examples": host_checks.example_addresses(found.cluster),
            }
        )
        return
    plan = render_plan(found.cluster)
    mtp = plan["mtp"]
    state = f"on, K = {mtp['k']}, {mtp['method']}" if mtp["enabled"] else "off"
    count = len(plan["ranks"])
    ranks = f"{count} rank{'s' if count != 1 else ''}"
    _print_line(f"{cluster}: {found.held} rules hold, {ranks}, MTP {state}")
    for why in dict.fromkeys(found.unchecked.values()):
        ids = ", ".join(rule for rule, reason in found.unchecked.items() if reason == why)
        _print_line(f"not checked here: {ids}: {why}")
    examples = host_checks.example_addresses(found.cluster)
    if examples:
        _print_line(
            f"still to edit: {', '.join(examples)} in hosts.yml: an address of the documentation range is nobody's"
        )


@app.command()
def render(
    cluster: Name,
    as_json: AsJson = False,
    inventories: Inventories = None,
    k: WithK = None,
    explain: Annotated[bool, typer.Option("--explain", help="instead: where every derived value comes from")] = False,
) -> None:
    """Shows what would be started: environment and command line of every rank, and the router. Touches nothing."""
    try:
        found = edit.check_with_k(cluster, k, inventories).cluster
    except ConfigError as error:
        raise fail(error.problems, as_json) from None
    if explain:
        _explain(found, as_json)
        return
    plan = render_plan(found)
    if as_json:
        _print_json(plan)
        return
    commands = []
    for rank in plan["ranks"]:
        _print_line(f"{rank['name']} on {rank['host']}, {rank['url']}, K = {rank['k']}")
        commands.append(_command(found, rank))
        _print_line(f"  {commands[-1]}")
    router = plan["router"]
    front = router["front"]
    _print_line(f"router on {router['host']}, clients: {url(front['host'], front['port'])}")
    commands.append(_command(found, router))
    _print_line(f"  {commands[-1]}")
    if any(mark in text for text in commands for mark in (ROOT, ENGINE_PYTHON)):
        _print_line(f"{ROOT}: this project's folder on the host; {ENGINE_PYTHON}: the Python of its engine environment")
    chosen, padding, graphs = plan["verification"], plan["padding"], plan["graphs"]
    _print_line(f"verification: {chosen['method'] or 'none'} ({chosen['why']})")
    _print_line(f"padding: {padding['method'] or 'none'} ({padding['why']})")
    sizes = ", ".join(map(str, graphs["capture_sizes"]))
    _print_line(f"graphs: {graphs['mode'] or 'left to the engine'}{f', sizes {sizes} tokens' if sizes else ''}")


def _command(cluster: Cluster, program: dict[str, Any]) -> str:
    """Environment and command line of a program as one command of a shell, its paths filled in on this machine."""

    def here(word: str) -> str:
        if cluster.machine(program["host"]) != THIS_MACHINE:
            return word
        root = str(api.repository())
        return word.replace(ENGINE_PYTHON, f"{root}/.local/engine/bin/python").replace(ROOT, root)

    env = [here(f"{name}={value}") for name, value in program["env"].items()]
    command = shlex.join(map(here, program["argv"]))
    return f"{shlex.join(['env', *env])} \\\n  {command}" if env else command


def _explain(cluster: Cluster, as_json: bool) -> None:
    """Every derived value: what it is, where somebody wrote it, how it follows from others."""
    rows = explanations.explain(cluster)
    if as_json:
        _print_json([row._asdict() for row in rows])
        return
    for row in rows:
        _print_line(f"{row.key} = {explanations.ENGINES if row.value is None else for_people(row.value)}")
        if row.overridden is None:
            _print_line(f"    {row.how}")
        else:
            _print_line(f"    written in {row.overridden}")
            _print_line(f"    else {row.how}")


@app.command("set-k")
def set_k(
    cluster: Name,
    k: Annotated[int, typer.Argument(metavar="K", help="draft tokens a step; 0 switches MTP off")],
    inventories: Inventories = None,
) -> None:
    """Writes K into mtp.yml when the result breaks no rule; keeps comments."""
    try:
        found, changed = edit.set_k(cluster, k, inventories)
    except ConfigError as error:
        raise fail(error.problems) from None
    state = f"on, K = {found.mtp.k}" if found.mtp.enabled else "off"
    out.print(f"{cluster}: MTP {state} ({'mtp.yml changed' if changed else 'unchanged'})", highlight=False)


@app.command("weights")
def weights_command(
    cluster: Name,
    as_json: AsJson = False,
    root: Annotated[Path | None, typer.Option("--root", help="folder that relative paths start at")] = None,
    inventories: Inventories = None,
    k: WithK = None,
) -> None:
    """Compares the weights with their manifest and with model.yml. Touches nothing."""
    try:
        found = edit.check_with_k(cluster, k, inventories).cluster
    except ConfigError as error:
        raise fail(error.problems, as_json) from None
    problems = weights.check_weights(found, root or api.repository())
    if problems:
        raise fail(problems, as_json)
    if as_json:
        _print_json({"ok": True, "problems": []})
        return
    _print_line(f"{cluster}: weights in {found.model.path} are complete and intact")


@app.command("rules")
def rules_command(
    as_markdown: Annotated[bool, typer.Option("--markdown", help="the text of docs/rules.md")] = False,
    as_json: AsJson = False,
) -> None:
    """Lists the rules."""
    if as_markdown:
        print(rules.markdown(), end="")
        return
    if as_json:
        _print_json(rules.as_dicts())
        return
    table = Table("id", "name", "must hold", "checked")
    for rule in rules.RULES:
        table.add_row(rule.id, rule.name, Text(rule.message), Text(WHERE_TEXT[rule.where]))
    out.print(table)


@app.command("keys")
def keys_command(
    as_markdown: Annotated[bool, typer.Option("--markdown", help="the text of docs/configuration.md")] = False,
) -> None:
    """Lists every key of the cluster files."""
    text = reference.markdown()
    if as_markdown:
        print(text, end="")
    else:
        out.print(Markdown(text))


@app.command("schema")
def schema_command(
    section: Annotated[
        str | None, typer.Argument(metavar="[SECTION]", help="hosts, model, topology, mtp, serving or monitoring")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help=f"write all of them to {editor_schema.FOLDER}")] = False,
) -> None:
    """Prints the JSON schema of an inventory's file, for editors; without a section, those of all by section."""
    documents = editor_schema.documents()
    if section is not None and section not in documents:
        remedy = f"name one of {', '.join(documents)}"
        raise fail([Problem("C03", "command line", "SECTION", f"there is no file of {section[:100]!r}.", remedy)])
    if write:
        folder = api.repository() / editor_schema.FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in documents.items():
            (folder / f"{name}.json").write_text(text, encoding="utf-8")
        out.print(Text(f"{editor_schema.FOLDER}: {', '.join(documents)}"))
    elif section is not None:
        print(documents[section], end="")
    else:
        _print_json({name: json.loads(text) for name, text in documents.items()})


def main() -> None:
    """Runs the commands: a file system error is a message, not a traceback."""
    try:
        app()
    except OSError as error:
        err.print(Text(f"{error.filename or ''}: {error.strerror or error}; nothing was changed.", style="red"))
        sys.exit(BAD_INPUT)
