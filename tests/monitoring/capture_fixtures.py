"""Captures `fixtures/` from a running stack: `.venv/bin/python tests/monitoring/capture_fixtures.py [--cluster local]`.

The cluster must be deployed with prefill and decode and K = 1 (`make deploy CLUSTER=local`), and nothing else may use
it. Sends a fixed set of greedy requests with the shipped model's own kind of text, a one-token and a two-token request
among them: TPOT leaves out the former and must keep the latter. Nothing is written when the captures would not show
that, or an acceptance of 0 or 1, with which a wrong formula looks right.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from mtp_runtime.cli.canary import call
from mtp_runtime.cli.deployed import Deployed, NotDeployed
from mtp_runtime.metrics import engine_stats, names
from mtp_runtime.metrics.plan import Engine
from mtp_runtime.metrics.scrape import Samples, parse
from mtp_runtime.model import prompts

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = Path(__file__).parent / "fixtures"
LENGTHS = (1, 2, *(24,) * 8)
"""max_tokens of the plain requests."""
STREAM_TOKENS = 12
SETTLE_S = 15.0


class CaptureError(RuntimeError):
    """The captures would not serve their tests; the message says why."""


def ask(deployed: Deployed, path: str, body: dict[str, Any]) -> str:
    """The text of an answer through the front."""
    whole = {"model": deployed.model, "temperature": 0, **body}
    answer = call(f"http://{deployed.plan.front}{path}", deployed.key(), whole)
    if answer.status != 200:
        raise CaptureError(f"{path}: HTTP {answer.status}: {answer.body[:300]}")
    return answer.body


def streams(deployed: Deployed) -> dict[str, str]:
    """File name -> a whole stream, as a client of the load test gets it."""
    options = {
        "max_tokens": STREAM_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    messages = [{"role": "user", "content": prompts.chat(0)}]
    return {
        "completion.sse": ask(deployed, "/v1/completions", {**options, "prompt": prompts.completion(0)}),
        "chat.sse": ask(deployed, "/v1/chat/completions", {**options, "messages": messages}),
    }


def page(url: str) -> str:
    """A page of metrics."""
    answer = call(url, None)
    if answer.status != 200:
        raise CaptureError(f"{url}: HTTP {answer.status}: {answer.body[:300]}")
    return answer.body


def finished(text: str) -> float:
    """How many requests an engine has counted."""
    return parse(text).total(names.REQUEST_SUCCESS) or 0.0


def settled(engine: Engine, wanted: float) -> str:
    """The engine's metrics once it has counted that many requests: it does so shortly after its answer."""
    end = time.monotonic() + SETTLE_S
    while finished(text := page(engine.metrics_url)) != wanted:
        if time.monotonic() > end:
            raise CaptureError(
                f"{engine.instance} counts {finished(text):.0f} requests, not {wanted:.0f}: other traffic?"
            )
        time.sleep(0.3)
    return text


def captured(deployed: Deployed) -> dict[str, str]:
    """File name -> text of everything."""
    plan = deployed.plan
    engines = {engine.role: engine for engine in plan.engines}
    if set(engines) != {"prefill", "decode"} or len(plan.engines) != 2 or not plan.mtp_enabled or plan.k != 1:
        raise CaptureError(f"{plan.cluster}: one prefill and one decode server with K = 1 are needed")
    before = {role: finished(page(engine.metrics_url)) for role, engine in engines.items()}
    for number, length in enumerate(LENGTHS):
        ask(deployed, "/v1/completions", {"prompt": prompts.completion(number), "max_tokens": length})
    found = streams(deployed)
    sent = len(LENGTHS) + len(found)
    for role, engine in engines.items():
        found[f"{role}_k1.prom"] = settled(engine, before[role] + sent)
    # The plan names it, not the front: there the router's metrics need the key.
    found["router_pd.prom"] = page(f"http://{plan.router_metrics}/metrics")
    return found


def check(found: dict[str, str]) -> None:
    """The tests' demands on the captures."""
    decode = parse(found["decode_k1.prom"])
    counts = engine_stats.draft_counts(decode)
    if counts is None or not 0 < counts.accepted < counts.draft_tokens:
        raise CaptureError(f"acceptance must lie between 0 and 1: {counts}")
    one, two = (_requests_of(decode, tokens) for tokens in (1, 2))
    if one < 1 or two < 1:
        raise CaptureError(f"requests of one token: {one:.0f}, of two: {two:.0f}; both are needed")
    for name, text in found.items():
        for private in (str(ROOT), str(Path.home())):
            if private in text:
                raise CaptureError(f"{name} has a path of this machine: {private}")


def _requests_of(samples: Samples, tokens: int) -> float:
    """How many requests had exactly that many tokens (1 and 2 have buckets of their own)."""
    bucket = f"{names.REQUEST_GENERATION_TOKENS}_bucket"
    upto, below = (samples.total(bucket, le=f"{bound}.0") or 0.0 for bound in (tokens, tokens - 1))
    return upto - below


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cluster", default="local", help="name of a deployed cluster")
    try:
        found = captured(Deployed.find(parser.parse_args().cluster))
        check(found)
    except (CaptureError, NotDeployed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name, text in found.items():
        (FIXTURES / name).write_text(text, encoding="utf-8")
        print(f"{FIXTURES / name}: {len(text.splitlines())} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
