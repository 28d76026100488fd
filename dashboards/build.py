"""Builds the Grafana dashboard `grafana/mtp.json`.

python -m dashboards.build           write it
python -m dashboards.build --check   exit 1 when the file differs from what would be written
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import BigValueGraphMode, LegendDisplayMode, LegendPlacement, VisibilityMode
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from dashboards import queries as q
from mtp_runtime.metrics import names

TARGET = Path(__file__).parent / "grafana" / "mtp.json"
DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
INSTANCE = f"{{{{{names.LABEL_INSTANCE}}}}}"


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression and the legend of its series."""

    expr: str
    legend: str = INSTANCE


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel; `now` shows the last value (stat), otherwise a graph over time. Width in 24ths of the page."""

    title: str
    description: str
    queries: Sequence[Query]
    unit: str = "short"
    width: int = 8
    now: bool = False
    low: float | None = None
    high: float | None = None


ROWS: dict[str, list[Panel]] = {
    "Since server start": [
        Panel(
            "Acceptance rate",
            "Accepted draft tokens / draft tokens of each engine since its server started. No value: MTP is off.",
            [Query(names.ACCEPTANCE_RATE + q.OURS)],
            unit="percentunit",
            width=6,
            now=True,
        ),
        Panel(
            "Acceptance length",
            "Tokens that one draft step yields: 1 + accepted draft tokens / draft steps.",
            [Query(names.ACCEPTANCE_LENGTH + q.OURS)],
            width=6,
            now=True,
        ),
        Panel(
            "TPOT",
            "Mean time per output token over finished requests of two tokens and more.",
            [Query(names.TPOT + q.OURS)],
            unit="s",
            width=6,
            now=True,
        ),
        Panel(
            "Engines readable",
            "1 when the exporter could read the engine's metrics.",
            [Query(names.ENGINE_UP + q.OURS)],
            width=6,
            now=True,
        ),
    ],
    "Multi-token prediction": [
        Panel(
            "Acceptance rate (window)",
            "Accepted draft tokens / draft tokens. Placeholder drafts of a request's first step do not count.",
            [Query(q.acceptance_rate())],
            unit="percentunit",
            low=0,
            high=1,
        ),
        Panel(
            "Acceptance length (window)",
            "Tokens per draft step; 1 means that MTP gains nothing, 1 + K is the most.",
            [Query(q.acceptance_length())],
            low=1,
        ),
        Panel(
            "Acceptance by position (window)",
            "Share of draft steps in which the draft at this position was accepted; it falls with the position.",
            [Query(q.acceptance_by_position(), f"{INSTANCE} position {{{{{names.LABEL_POSITION}}}}}")],
            unit="percentunit",
            low=0,
            high=1,
        ),
        Panel(
            "Draft and accepted tokens",
            "Draft tokens proposed and accepted a second.",
            [
                Query(q.draft_tokens(), f"{INSTANCE} drafted"),
                Query(q.rate(names.SPEC_ACCEPTED_TOKENS, q.DECODING), f"{INSTANCE} accepted"),
            ],
            low=0,
        ),
        Panel(
            "TPOT and step time",
            "TPOT is the time per output token; ITL is the time per step, which yields several tokens with MTP.",
            [
                Query(q.tpot(), f"{INSTANCE} TPOT"),
                Query(q.mean(names.INTER_TOKEN_LATENCY, q.DECODING), f"{INSTANCE} ITL per step"),
            ],
            unit="s",
            low=0,
        ),
        Panel(
            "ITL per step, 95th percentile",
            "Per step of a request, not per token.",
            [Query(q.quantile(0.95, names.INTER_TOKEN_LATENCY, q.DECODING))],
            unit="s",
            low=0,
        ),
        Panel(
            "Steps with drafts: engine, verification, attention",
            "Engine steps that had drafts, and how many of them our verification and our attention took: equal lines.",
            [
                Query(q.rate(names.PLUGIN_ENGINE_DRAFT_STEPS, q.DECODING), f"{INSTANCE} engine"),
                Query(q.rate(names.PLUGIN_VERIFY_CALLS, q.DECODING), f"{INSTANCE} verification"),
                Query(q.rate(names.PLUGIN_ATTENTION_DRAFT_STEPS, q.DECODING), f"{INSTANCE} attention"),
            ],
            unit="ops",
            low=0,
        ),
    ],
    "Load": [
        Panel(
            "Time to first token",
            "Median and 95th percentile per engine. On decode it includes the wait for the KV cache.",
            [
                Query(q.quantile(0.5, names.TIME_TO_FIRST_TOKEN, q.EVERY), f"{INSTANCE} p50"),
                Query(q.quantile(0.95, names.TIME_TO_FIRST_TOKEN, q.EVERY), f"{INSTANCE} p95"),
            ],
            unit="s",
            low=0,
        ),
        Panel(
            "Requests running and waiting",
            "Requests in the engine's batch, and those queued before it.",
            [
                Query(q.total(names.REQUESTS_RUNNING + q.EVERY), f"{INSTANCE} running"),
                Query(q.total(names.REQUESTS_WAITING + q.EVERY), f"{INSTANCE} waiting"),
            ],
            low=0,
        ),
        Panel(
            "Tokens per second",
            "Generated tokens (decoding engines) and prompt tokens (all engines).",
            [
                Query(q.rate(names.GENERATION_TOKENS, q.DECODING), f"{INSTANCE} generated"),
                Query(q.rate(names.PROMPT_TOKENS, q.EVERY), f"{INSTANCE} prompt"),
            ],
            low=0,
        ),
        Panel(
            "KV cache usage",
            "Share of the engine's KV blocks in use.",
            [Query(q.total(names.KV_CACHE_USAGE + q.EVERY))],
            unit="percentunit",
            low=0,
            high=1,
        ),
        Panel(
            "Finished requests",
            "A second, by reason. `error` and `abort` should stay at 0.",
            [Query(q.rate(names.REQUEST_SUCCESS, q.DECODING, "finished_reason"), INSTANCE + " {{finished_reason}}")],
            unit="reqps",
            low=0,
        ),
        Panel(
            "Preemptions",
            "Requests thrown out of the batch for lack of KV blocks, a second.",
            [Query(q.rate(names.PREEMPTIONS, q.EVERY))],
            low=0,
        ),
    ],
    "KV transfer (NIXL)": [
        Panel(
            "Transfers and failures",
            "KV transfers that decode pulled from prefill, and failed ones, a second.",
            [
                Query(q.rate(f"{names.NIXL_XFER_TIME}_count", q.DECODING), f"{INSTANCE} transfers"),
                Query(q.rate(names.NIXL_FAILED_TRANSFERS, q.DECODING), f"{INSTANCE} failed"),
            ],
            unit="ops",
            low=0,
        ),
        Panel(
            "Transfer time",
            "Mean time of a KV transfer.",
            [Query(q.mean(names.NIXL_XFER_TIME, q.DECODING))],
            unit="s",
            low=0,
        ),
        Panel(
            "Bytes transferred",
            "KV cache bytes pulled a second.",
            [Query(q.rate(f"{names.NIXL_BYTES}_sum", q.DECODING))],
            unit="Bps",
            low=0,
        ),
    ],
    "Router": [
        Panel(
            "Requests by route",
            "Requests that entered the router, a second.",
            [Query(q.router_rate(names.ROUTER_PD_REQUESTS, names.ROUTER_REQUESTS), "{{route}}")],
            unit="reqps",
            low=0,
        ),
        Panel(
            "Request duration",
            "Mean time until the router had an answer to pass on.",
            [Query(q.router_mean(names.ROUTER_PD_DURATION, names.ROUTER_DURATION), "{{route}}")],
            unit="s",
            low=0,
        ),
        Panel(
            "Healthy workers",
            "1 when the router sends requests to this engine.",
            [Query(names.ROUTER_WORKER_HEALTH, "{{worker}}")],
            low=0,
            high=1,
        ),
    ],
}


def _query(query: Query, index: int) -> prometheus.Dataquery:
    return prometheus.Dataquery().ref_id(chr(ord("A") + index)).expr(query.expr).legend_format(query.legend)


def _stat() -> stat.Panel:
    last = common.ReduceDataOptions().calcs(["lastNotNull"])
    return stat.Panel().height(5).graph_mode(BigValueGraphMode.AREA).reduce_options(last)


def _graph() -> timeseries.Panel:
    legend = (
        common.VizLegendOptions()
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    return timeseries.Panel().height(8).legend(legend).fill_opacity(8).show_points(VisibilityMode.NEVER)


def _panel(panel: Panel, number: int) -> stat.Panel | timeseries.Panel:
    builder = _stat() if panel.now else _graph()
    builder = (
        builder.id(number)
        .title(panel.title)
        .description(panel.description)
        .datasource(DATASOURCE)
        .unit(panel.unit)
        .span(panel.width)
        .targets([_query(query, index) for index, query in enumerate(panel.queries)])
    )
    if panel.low is not None:
        builder = builder.min(panel.low)
    if panel.high is not None:
        builder = builder.max(panel.high)
    return builder


def _variables() -> tuple[dashboard.DatasourceVariable, dashboard.QueryVariable]:
    source = dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    instance = (
        dashboard.QueryVariable("engine_instance")
        .label("Engine")
        .datasource(DATASOURCE)
        .query(f'label_values(up{{job="{names.JOB_VLLM}"}}, {names.LABEL_INSTANCE})')
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(VariableOption(selected=True, text="All", value="$__all"))
    )
    return source, instance


def build() -> str:
    """The dashboard as JSON text."""
    source, instance = _variables()
    board = (
        dashboard.Dashboard("MTP serving")
        .uid("mtp-serving")
        .description("Multi-token prediction: acceptance, latency per token, load, KV transfers, router.")
        .tags(["mtp", "vllm"])
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .time("now-30m", "now")
        .refresh("10s")
        .with_variable(source)
        .with_variable(instance)
    )
    number = 0
    for title, panels in ROWS.items():
        number += 1
        board = board.with_row(dashboard.Row(title).id(number))
        for panel in panels:
            number += 1
            board = board.with_panel(_panel(panel, number))
    return JSONEncoder(sort_keys=True, indent=2).encode(board.build()) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the Grafana dashboard.")
    parser.add_argument("--check", action="store_true", help="only compare; exit 1 when the file is out of date")
    args = parser.parse_args(argv)
    text = build()
    if args.check:
        if not TARGET.is_file() or TARGET.read_text(encoding="utf-8") != text:
            print(f"error: {TARGET} is out of date; run `make dashboards`", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
