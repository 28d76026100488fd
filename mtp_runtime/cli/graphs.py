"""`mtpctl slots` and `mtpctl plan`: the arithmetic of static graphs, without a cluster. They change nothing."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from mtp_runtime.cli.app import AsJson, fail, out
from mtp_runtime.config.problems import Problem
from mtp_runtime.graphs.planner import Graph, Plan, PlanError
from mtp_runtime.graphs.planner import plan as plan_step
from mtp_runtime.graphs.slots import GraphError, Slots, slots_for

Requests = Annotated[int, typer.Option("--requests", metavar="R", help="requests the server decodes at once")]
Drafts = Annotated[int, typer.Option("--k", metavar="K", help="draft tokens a step")]
Tokens = Annotated[
    str,
    typer.Option("--tokens", metavar="N,N,...", help='query tokens of each request, 1 to K + 1; "" is a dummy step'),
]
Lengths = Annotated[
    str | None,
    typer.Option("--kv", metavar="N,N,...", help="KV length of each request, this step included; default: its tokens"),
]
# The tiling check of CANN takes no larger batch, whatever the release.
MAX_REQUESTS = 65536


def slots(requests: Requests, k: Drafts, as_json: AsJson = False) -> None:
    """How many slots must a graph have, so that every mix of 1 to K + 1 tokens a request fits into it?"""
    found = _slots(requests, k, as_json)
    if as_json:
        print(json.dumps(asdict(found)))
        return
    table = Table("requests", "K", "slack slots", "slots", "tokens", "overhead")
    counts = (found.requests, found.k, found.slack_slots, found.slots, found.tokens)
    table.add_row(*map(str, counts), f"{found.overhead:.1%}")
    out.print(table)


def plan(requests: Requests, k: Drafts, tokens: Tokens, kv: Lengths = None, as_json: AsJson = False) -> None:
    """Which length lists does one decode step hand to the attention operator, in the graph of `mtpctl slots`?"""
    graph = Graph(_slots(requests, k, as_json).slots, k + 1)
    counts = _numbers("--tokens", tokens, as_json)
    lengths = counts if kv is None else _numbers("--kv", kv, as_json)
    if len(counts) > requests:
        message = f"{len(counts)} requests, but the server decodes {requests} at once"
        raise _refuse("C03", "--tokens", message, f"give at most {requests}, or raise --requests", as_json)
    try:
        found = plan_step(counts, lengths, graph)
    except PlanError as error:
        key = "--tokens" if kv is None else "--tokens, --kv"
        raise _refuse("C03", key, error.what, error.remedy, as_json) from None
    if as_json:
        print(json.dumps({**asdict(found), "graph": {**asdict(graph), "tokens": graph.tokens}}))
        return
    _print_plan(found)


def _print_plan(found: Plan) -> None:
    graph, before = found.graph, 0
    title = f"{graph.slots} slots x {graph.width} = {graph.tokens} tokens"
    table = Table("slot", "holds", "tokens", "prefix sum", "KV length", title=title)
    for slot, (end, length) in enumerate(zip(found.actual_seq_lengths, found.actual_seq_lengths_kv, strict=True)):
        held = "padding" if slot >= found.requests else f"request {slot}"
        table.add_row(str(slot), held, str(end - before), str(end), str(length))
        before = end
    out.print(table)


def _slots(requests: int, k: int, as_json: bool) -> Slots:
    if requests > MAX_REQUESTS:
        message = f"{requests} requests: the attention operator takes a batch of {MAX_REQUESTS} at most"
        raise _refuse("C03", "--requests", message, f"use {MAX_REQUESTS} or fewer", as_json)
    try:
        return slots_for(requests, k)
    except GraphError as error:
        key = "--requests" if requests < 1 else "--k"
        raise _refuse("C03", key, error.what, error.remedy, as_json) from None


def _numbers(key: str, text: str, as_json: bool) -> list[int]:
    """'1, 2' -> [1, 2]; nothing -> []."""
    if not text.strip():
        return []
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        message = f"{text[:60]!r} is not a list of whole numbers"
        raise _refuse("C02", key, message, "write numbers with commas between them, as 1,2,2", as_json) from None


def _refuse(rule: str, key: str, message: str, remedy: str, as_json: bool) -> typer.Exit:
    return fail([Problem(rule, "command line", key, message, remedy)], as_json)
