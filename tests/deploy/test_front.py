"""The way in: the key is enforced everywhere, and what passes is served by prefill and decode together."""

from __future__ import annotations

import http.client
import json
import re
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
from live_stack import Stack, wait_until

from mtp_runtime.metrics import names

pytestmark = pytest.mark.live

ROUTES = [
    ("GET", "/"),
    ("GET", "/v1/models"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/metrics"),
    ("GET", "/health"),
    ("GET", "/readiness"),
    ("GET", "/workers"),
    ("POST", "/workers"),
    ("POST", "/add_worker"),
    ("POST", "/remove_worker?url=http://127.0.0.1:8300"),
    ("DELETE", "/workers/http%3A%2F%2F127.0.0.1%3A8300"),
    ("OPTIONS", "/v1/models"),
    ("GET", "//v1/models"),
    ("GET", "/no/such/route"),
]


@pytest.mark.parametrize("key", [None, "wrong", "another case"], ids=["no key", "wrong key", "another case"])
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_route_without_the_key(stack: Stack, method: str, path: str, key: str | None) -> None:
    body = stack.request(4) if method == "POST" else None
    key = stack.deployed.key().swapcase() if key == "another case" else key
    assert stack.call(path, body, key, method)[0] == 401


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/health", "/readiness", "/workers"])
def test_the_key_opens_the_routes(stack: Stack, path: str) -> None:
    status, body = stack.call(path)
    assert status == 200
    assert body.strip()


def test_models_and_metrics_say_what_they_should(stack: Stack) -> None:
    assert [model["id"] for model in json.loads(stack.call("/v1/models")[1])["data"]] == [stack.deployed.model]
    assert stack.completion()[0] == 200
    assert names.ROUTER_PD_REQUESTS in stack.call("/metrics")[1]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_engines_want_the_key_too(stack: Stack, role: str) -> None:
    """A way round the front ends at the engine."""
    connection = http.client.HTTPConnection(urlsplit(stack.engine(role)).netloc, timeout=30)
    connection.request("POST", "/v1/completions", json.dumps(stack.request(4)), {"Content-Type": "application/json"})
    assert connection.getresponse().status == 401


def test_the_key_is_on_no_command_line(stack: Stack) -> None:
    from live_stack import processes

    lines = processes(stack.state).values()
    assert len(lines) >= 7  # two engines with a child each, router, nginx, Prometheus, exporter
    assert [line for line in lines if stack.deployed.key() in line] == []


def test_each_request_is_handed_over_once(stack: Stack) -> None:
    """Decode pulls KV once a request, and prefill serves each: nobody computes the prompt twice in silence."""
    transfers, served = f"{names.NIXL_XFER_TIME}_count", names.REQUEST_SUCCESS

    def counts() -> tuple[float, float]:
        return stack.metrics("decode").total(transfers) or 0.0, stack.metrics("prefill").total(served) or 0.0

    before = counts()
    for _ in range(3):
        status, body = stack.completion(8)
        assert status == 200, body
        assert json.loads(body)["usage"]["completion_tokens"] == 8
    wait_until(lambda: counts() == (before[0] + 3, before[1] + 3), 20, "3 transfers and 3 prefills")


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_streams_arrive_in_pieces_and_end_properly(stack: Stack, kind: str) -> None:
    path, body = "/v1/completions", stack.request(24, stream_options={"include_usage": True})
    if kind == "chat":
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    events = list(stack.stream(path, body))
    assert events[-1] == "[DONE]"
    pieces = [json.loads(event) for event in events[:-1]]
    assert pieces[-1]["usage"]["completion_tokens"] == 24
    assert sum(1 for piece in pieces if piece["choices"]) >= 24 / (1 + 15)


def test_a_grammar_holds_through_prefill_and_decode(stack: Stack) -> None:
    """Decode's first step has placeholder drafts, which must not reach the grammar; later drafts break it often."""
    pattern = r"[A-Z][a-z]{3,8}( [a-z]{2,7}){3}[.]"
    before = stack.metrics("decode")
    for temperature in (0, 0.9):
        status, body = stack.completion(
            60, ignore_eos=False, temperature=temperature, structured_outputs={"regex": pattern}
        )
        assert status == 200, body
        text = json.loads(body)["choices"][0]["text"]
        assert re.fullmatch(pattern, text), text
    assert (stack.metrics("decode").total(names.SPEC_DRAFTS) or 0) > (before.total(names.SPEC_DRAFTS) or 0)


def test_a_seed_gives_the_same_tokens_alone_and_in_company(stack: Stack) -> None:
    """Through prefill and decode, beside other requests that are at other places of theirs."""

    def tokens(seed: int) -> list[int]:
        status, body = stack.completion(16 + seed, temperature=1.0, seed=seed, return_token_ids=True)
        assert status == 200, body
        found: list[int] = json.loads(body)["choices"][0]["token_ids"]
        return found

    alone = [tokens(seed) for seed in range(6)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tokens, range(6))) == alone
    assert len({tuple(row[:16]) for row in alone}) == 6


def test_min_p_and_logit_bias_work_with_drafts(stack: Stack) -> None:
    """vLLM refuses both where there are drafts."""

    def tokens(**options: object) -> list[int]:
        status, body = stack.completion(12, return_token_ids=True, **options)
        assert status == 200, body
        found: list[int] = json.loads(body)["choices"][0]["token_ids"]
        return found

    assert tokens(logit_bias={"40": 100}) == [40] * 12
    assert tokens(temperature=1.5, min_p=1.0) == tokens()


@pytest.mark.parametrize("fault", [{"model": "no-such-model"}, {"max_tokens": -1}, {"temperature": -5}])
def test_bad_requests_are_the_clients_fault(stack: Stack, fault: dict[str, object]) -> None:
    status, body = stack.call("/v1/completions", {**stack.request(4), **fault})
    assert 400 <= status < 500, f"{status}: {body}"
