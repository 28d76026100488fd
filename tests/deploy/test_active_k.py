"""`mtpctl active-k` on the running stack: nothing restarts, no answer changes, the metric follows, and clients have no
way to it.
"""

from __future__ import annotations

import http.client
import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
from live_stack import CLUSTER, ROOT, Stack, make

from mtp_runtime.cli.active_k import PATH
from mtp_runtime.metrics import names

pytestmark = pytest.mark.live

TOKENS = 96


def active_k(*words: str) -> subprocess.CompletedProcess[str]:
    """The command as an operator gives it."""
    command = [str(ROOT / ".venv" / "bin" / "mtpctl"), "active-k", CLUSTER, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def levels(stack: Stack) -> tuple[float | None, float | None]:
    """Decode's active and loaded K."""
    found = stack.metrics("decode")
    return found.total(names.PLUGIN_ACTIVE_K), found.total(names.PLUGIN_LOADED_K)


def drafts(stack: Stack) -> float:
    return stack.metrics("decode").total(names.PLUGIN_VERIFY_CALLS) or 0


def tokens(stack: Stack) -> list[int]:
    status, body = stack.completion(TOKENS, return_token_ids=True)
    assert status == 200, body
    found: list[int] = json.loads(body)["choices"][0]["token_ids"]
    return found


@pytest.fixture
def loaded(stack: Stack) -> Iterator[int]:
    """The loaded K, which is active again afterwards."""
    k = stack.deployed.plan.k
    yield k
    assert active_k(str(k)).returncode == 0


def test_it_stops_and_resumes_drafting_without_a_restart(stack: Stack, loaded: int) -> None:
    pids, expected = stack.pids(), tokens(stack)
    for k in (0, loaded, 0, loaded):
        done = active_k(str(k))
        assert done.returncode == 0, done.stderr
        assert levels(stack) == (k, loaded)
        before = drafts(stack)
        assert tokens(stack) == expected
        assert (drafts(stack) > before) == (k > 0)
    assert stack.pids() == pids


def test_the_canary_is_green_while_nothing_is_drafted(stack: Stack, loaded: int) -> None:
    assert active_k("0").returncode == 0
    assert "paused" in make("canary", CLUSTER=CLUSTER).stdout


def test_requests_under_way_go_on(stack: Stack, loaded: int) -> None:
    expected = tokens(stack)
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(tokens, stack) for _ in range(3)]
        changes = 0
        while not all(answer.done() for answer in answers):
            assert active_k(str(changes % 2 * loaded)).returncode == 0
            changes += 1
    assert changes > 1
    assert [answer.result() for answer in answers] == [expected] * 3


def test_it_shows_what_is_set(stack: Stack, loaded: int) -> None:
    assert active_k("0").returncode == 0
    found = json.loads(active_k("--json").stdout)
    ranks = [(rank["active_k"], rank["loaded_k"]) for rank in found["ranks"]]
    assert found["ok"] and ranks == [(0, loaded)] * len(stack.deployed.plan.decoding)


def test_what_is_not_loaded_is_refused(stack: Stack, loaded: int) -> None:
    done = active_k(str(loaded + 1))
    assert done.returncode == 2
    assert f"use 0 to {loaded}" in done.stderr
    assert levels(stack) == (loaded, loaded)


@pytest.mark.parametrize("key", [None, "wrong"])
def test_an_engine_wants_the_key_for_it(stack: Stack, key: str | None) -> None:
    for method, body in (("GET", None), ("POST", b'{"active_k": 0}')):
        connection = http.client.HTTPConnection(urlsplit(stack.engine("decode")).netloc, timeout=30)
        connection.request(method, PATH, body, stack.headers(key))
        assert connection.getresponse().status == 401


WRITTEN = (
    *(PATH, f"/{PATH}", f"{PATH}/", f"{PATH}?x=1", "/v1/./mtp/active_k", "/v1/models/../mtp/active_k"),
    *("/v1/%6dtp/active%5fk", "/v1%2Fmtp%2Factive_k", "/v1\\mtp/active_k", "/v1\\mtp\\active_k"),
)
"""Ways to write the route, the last ones for a reader who takes a backslash for a slash, as the router does."""


@pytest.mark.parametrize("path", WRITTEN)
def test_no_way_leads_there_through_the_front(stack: Stack, path: str) -> None:
    """With the key that every client has. The router hands unknown routes on to the engines, and signs them."""
    k = stack.deployed.plan.k
    assert stack.call(path, {"active_k": 0})[0] == 404
    assert stack.call(path, key=None)[0] == 401
    assert levels(stack) == (k, k)
