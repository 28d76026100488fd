"""The endpoint in vLLM's own application: behind the server's key, and strict about what it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the engine environment")

from fastapi.testclient import TestClient
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.plugins.endpoint_plugins.interface import init_endpoint_plugins_state
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.core import EngineCore

from mtp_runtime.adapters.counters import Level, levels
from mtp_runtime.adapters.vllm_cpu import register
from mtp_runtime.adapters.vllm_cpu.scheduler import MtpScheduler
from mtp_runtime.metrics import names

pytestmark = pytest.mark.engine

PATH = "/v1/mtp/active_k"
KEY = "the-key"
SIGNED = {"Authorization": f"Bearer {KEY}"}
Serve = Callable[..., tuple[TestClient, list[Any]]]


def core(loaded: int) -> Any:
    """An engine core with nothing but the scheduler's K. 0: MTP is off."""
    scheduler = object.__new__(MtpScheduler)
    scheduler.loaded_k, scheduler._active_level = loaded, Level(names.PLUGIN_ACTIVE_K)
    scheduler.active_k = loaded
    return SimpleNamespace(scheduler=scheduler)


class Client:
    """vLLM's client of the engine cores: calls their methods by name."""

    def __init__(self, cores: list[Any]) -> None:
        self.cores = cores

    async def call_utility_all_async(self, method: str, *arguments: Any) -> list[Any]:
        """One result a core."""
        return [getattr(EngineCore, method)(core, *arguments) for core in self.cores]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[Serve]:
    """(client, cores) of vLLM's application as a server builds it, with the plugins that are installed."""
    monkeypatch.setenv("VLLM_PLUGINS", "mtp_runtime")
    monkeypatch.setenv("MTP_RUNTIME_COUNTERS_DIR", str(tmp_path))
    register()

    def start(loaded: int = 3, key: str | None = KEY, cores: int = 1) -> tuple[TestClient, list[Any]]:
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--api-key", key] if key else [])
        app = build_app(args, ("generate",))
        made = [core(loaded) for _ in range(cores)]
        asyncio.run(init_endpoint_plugins_state(SimpleNamespace(engine_core=Client(made)), app.state, args))
        return TestClient(app), made

    yield start


def message(answer: Any) -> str:
    """As vLLM words an error."""
    return answer.json()["error"]["message"]


def test_it_tells_active_and_loaded_k(serve: Serve) -> None:
    client, _ = serve(loaded=2)
    answer = client.get(PATH, headers=SIGNED)
    assert (answer.status_code, answer.json()) == (200, {"active_k": 2, "loaded_k": 2})


@pytest.mark.parametrize("cores", [1, 2])
def test_it_sets_every_number_that_is_loaded(serve: Serve, cores: int) -> None:
    client, made = serve(cores=cores)
    for k in (0, 3, 1, 2):
        answer = client.post(PATH, json={"active_k": k}, headers=SIGNED)
        assert (answer.status_code, answer.json()) == (200, {"active_k": k, "loaded_k": 3})
        assert client.get(PATH, headers=SIGNED).json()["active_k"] == k
        assert [core.scheduler.active_k for core in made] == [k] * cores
        assert levels()[names.PLUGIN_ACTIVE_K] == k


def test_the_active_k_is_a_metric(serve: Serve) -> None:
    client, _ = serve()
    client.post(PATH, json={"active_k": 2}, headers=SIGNED)
    lines = client.get("/metrics").text.splitlines()
    assert f"{names.PLUGIN_ACTIVE_K} 2.0" in lines
    assert f"# TYPE {names.PLUGIN_ACTIVE_K} gauge" in lines
    assert f"# TYPE {names.PLUGIN_LOADED_K} gauge" in lines
    assert f"# TYPE {names.PLUGIN_VERIFY_CALLS} counter" in lines


@pytest.mark.parametrize(
    "body",
    [
        {"active_k": -1},
        {"active_k": 4},
        {"active_k": 10**30},
        {"active_k": 1.0},
        {"active_k": "1"},
        {"active_k": True},
        {"active_k": None},
        {"active_k": [1]},
        {"active_k": 1, "loaded_k": 3},
        {"k": 1},
        {},
        [1],
        1,
        None,
    ],
)
def test_it_refuses_anything_else_and_changes_nothing(serve: Serve, body: Any) -> None:
    client, made = serve()
    answer = client.post(PATH, json=body, headers=SIGNED)
    assert answer.status_code == 400, answer.text
    assert message(answer)
    assert made[0].scheduler.active_k == 3


def test_it_says_what_would_do(serve: Serve) -> None:
    client, _ = serve()
    assert "use 0 to 3" in message(client.post(PATH, json={"active_k": 4}, headers=SIGNED))
    assert "extra_key" in message(client.post(PATH, json={"active_k": 1, "extra_key": 1}, headers=SIGNED))


def test_a_body_that_is_no_json_is_refused(serve: Serve) -> None:
    client, _ = serve()
    for content in (b"", b"{", b"active_k=1"):
        assert client.post(PATH, content=content, headers=SIGNED).status_code == 400


@pytest.mark.parametrize("method", ["get", "post"])
def test_without_mtp_there_is_nothing_to_change(serve: Serve, method: str) -> None:
    client, _ = serve(loaded=0)
    answer = client.request(method, PATH, headers=SIGNED, json={"active_k": 0} if method == "post" else None)
    assert answer.status_code == 409
    assert "MTP is off" in message(answer)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": KEY},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": f"Bearer {KEY.upper()}"},
        {"X-API-Key": KEY},
    ],
)
def test_without_the_key_it_is_closed(serve: Serve, headers: dict[str, str]) -> None:
    """Whatever else is wrong with the request; nothing but the key is looked at."""
    client, made = serve()
    assert client.get(PATH, headers=headers).status_code == 401
    for content in (b'{"active_k": 1}', b'{"active_k": 9}', b"{", b""):
        assert client.post(PATH, content=content, headers=headers).status_code == 401
    assert made[0].scheduler.active_k == 3


@pytest.mark.parametrize("path", [f"/{PATH}", f"{PATH}/", "/mtp/active_k", PATH.upper(), "/x/.." + PATH])
def test_no_other_way_leads_there(serve: Serve, path: str) -> None:
    client, made = serve()
    answer = client.post(path, json={"active_k": 1}, follow_redirects=True)
    assert answer.status_code in (401, 404), answer.text
    assert made[0].scheduler.active_k == 3


def test_a_server_without_a_key_asks_for_none(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its other routes."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    client, _ = serve(key=None)
    assert client.post(PATH, json={"active_k": 1}).status_code == 200


def test_the_key_of_the_environment_counts_too(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way a deployed rank gets its key."""
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    client, _ = serve(key=None)
    assert client.get(PATH).status_code == 401
    assert client.get(PATH, headers=SIGNED).status_code == 200


@pytest.mark.parametrize("k", [-1, 4])
def test_the_scheduler_itself_takes_no_other_number(serve: Serve, k: int) -> None:
    _, made = serve()
    with pytest.raises(ValueError, match="use 0 to 3"):
        EngineCore.mtp_set_active_k(made[0], k)
    assert made[0].scheduler.active_k == 3
