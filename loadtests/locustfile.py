"""Locust users that stream completions and chats through a cluster's router.

Started by `loadtests.validate`, or by hand from the repository root:

    locust -f loadtests/locustfile.py --headless --users 4 --run-time 2m \
        --plan .local/clusters/local/plan.json --api-key-file .local/clusters/local/secrets/api_key \
        --max-requests 24 --result result.json

Traffic goes to the plan's router address and nowhere else; a run is bounded by --max-requests and --run-time.
Every request is judged by `loadtests.stream`; its record goes to --result when the run ends. Locust's own statistics
get two more rows for each kind: TTFT and TPOT (milliseconds).
"""

from __future__ import annotations

import itertools
import json
import time
from argparse import ArgumentParser
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import requests
from locust import HttpUser, constant, events, task
from locust.env import Environment
from locust.exception import StopUser

from loadtests.stream import StreamOutcome
from mtp_runtime.metrics.plan import read_plan
from mtp_runtime.model import prompts

CONNECT_READ_TIMEOUT_S = (10.0, 120.0)  # the second is the longest silence inside a stream
MAX_REQUESTS_LIMIT = 10_000
KINDS = ("completion", "chat")


@dataclass(frozen=True, slots=True)
class Record:
    """One request of the run; times in seconds."""

    kind: str
    status: int | None
    problem: str | None
    tokens: int
    usage_tokens: int | None
    chunks: int
    ttft_s: float | None
    tpot_s: float | None
    total_s: float


class Run:
    """What all users of one run share: settings, the next request's number, the records."""

    def __init__(self, options: Any) -> None:
        plan = read_plan(Path(options.plan))
        self.base_url = f"http://{plan.front}"
        self.api_key = Path(options.api_key_file).read_text(encoding="utf-8").strip()
        self.max_requests = min(options.max_requests, MAX_REQUESTS_LIMIT)
        self.max_tokens: int = options.max_tokens
        self.temperature: float = options.temperature
        self.result = Path(options.result)
        self.numbers = itertools.count()
        self.records: list[Record] = []
        self.model = self._served_model()

    def _served_model(self) -> str:
        with requests.Session() as session:
            session.trust_env = False
            answer = session.get(f"{self.base_url}/v1/models", headers=self.headers, timeout=10)
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"}

    def request(self, number: int) -> tuple[str, str, dict[str, Any]]:
        """Kind, path and body of request `number`: kinds alternate, every request has a prompt of its own."""
        kind = KINDS[number % len(KINDS)]
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if kind == "chat":
            return (
                kind,
                "/v1/chat/completions",
                body | {"messages": [{"role": "user", "content": prompts.chat(number)}]},
            )
        return kind, "/v1/completions", body | {"prompt": prompts.completion(number)}


def add_options(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("MTP load test")
    group.add_argument("--plan", default=".local/clusters/local/plan.json", help="plan.json of the cluster")
    group.add_argument("--api-key-file", default=".local/clusters/local/secrets/api_key", help="file with the key")
    group.add_argument("--max-requests", type=int, default=24, help="requests of the whole run")
    group.add_argument("--max-tokens", type=int, default=64, help="max_tokens of each request")
    group.add_argument("--temperature", type=float, default=0.0, help="sampling temperature")
    group.add_argument("--result", default="load-result.json", help="where the records go")


def on_init(environment: Environment, **_: Any) -> None:
    options = environment.parsed_options
    if options is None:
        return
    try:
        run = Run(options)
    except (OSError, ValueError, LookupError) as error:  # OSError: of files and of requests alike
        # Locust only logs an exception of a listener and would go on without a run.
        raise SystemExit(f"error: cannot start the load test: {error}") from error
    environment.host = run.base_url
    environment.mtp_run = run  # type: ignore[attr-defined]


def on_quitting(environment: Environment, **_: Any) -> None:
    run: Run | None = getattr(environment, "mtp_run", None)
    if run is not None:
        run.result.write_text(json.dumps([asdict(record) for record in run.records], indent=1), encoding="utf-8")


events.init_command_line_parser.add_listener(add_options)  # type: ignore[no-untyped-call]
events.init.add_listener(on_init)  # type: ignore[no-untyped-call]
events.quitting.add_listener(on_quitting)  # type: ignore[no-untyped-call]


class StreamingUser(HttpUser):
    """Sends one request after the other until the run has sent all it may."""

    wait_time = constant(0)

    def on_start(self) -> None:
        self.load_run: Run = self.environment.mtp_run
        # An environment's HTTP proxy must not come between the test and the router.
        self.client.trust_env = False
        # The plan says where traffic goes, whatever --host says.
        self.client.base_url = self.load_run.base_url

    @task
    def stream(self) -> None:
        run = self.load_run
        number = next(run.numbers)
        if number >= run.max_requests:
            self._finish()
        kind, path, body = run.request(number)
        outcome = StreamOutcome(started_s=time.perf_counter(), max_tokens=run.max_tokens)
        with self.client.post(
            path,
            json=body,
            headers=run.headers,
            stream=True,
            name=path,
            catch_response=True,
            timeout=CONNECT_READ_TIMEOUT_S,
        ) as response:
            problem = self._read(response, outcome)
            if problem is None:
                response.success()
            else:
                response.failure(problem)
        run.records.append(
            Record(
                kind=kind,
                status=response.status_code or None,
                problem=problem,
                tokens=outcome.tokens,
                usage_tokens=outcome.usage_tokens,
                chunks=outcome.chunks,
                ttft_s=outcome.ttft_s,
                tpot_s=outcome.tpot_s,
                total_s=time.perf_counter() - outcome.started_s,
            )
        )
        if problem is None:
            self._report_times(path, outcome)

    @staticmethod
    def _read(response: Any, outcome: StreamOutcome) -> str | None:
        if response.status_code != requests.codes.ok:
            return f"HTTP {response.status_code}: {response.error or response.text[:200]}"
        try:
            # chunk_size=None hands chunks on as they arrive; a number would hold tokens back and spoil the times.
            for line in response.iter_lines(chunk_size=None, decode_unicode=True):
                outcome.feed(line, time.perf_counter())
        except requests.RequestException as error:
            return f"connection broke after {outcome.tokens} tokens: {error}"
        return outcome.problem()

    def _report_times(self, path: str, outcome: StreamOutcome) -> None:
        for kind, seconds in (("TTFT", outcome.ttft_s), ("TPOT", outcome.tpot_s)):
            if seconds is not None:
                self.environment.events.request.fire(
                    request_type=kind,
                    name=path,
                    response_time=seconds * 1000,
                    response_length=outcome.tokens,
                    exception=None,
                    context={},
                )

    def _finish(self) -> None:
        """Stop this user; the last one to stop ends the run."""
        runner = self.environment.runner
        if runner is not None and len(self.load_run.records) >= self.load_run.max_requests:
            runner.quit()
        raise StopUser
