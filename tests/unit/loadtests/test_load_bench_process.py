"""The engine process of a benchmark from outside; what runs inside only pretends."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from loadtests import bench_process
from loadtests.bench_arms import Arm, Engine
from loadtests.bench_process import EngineProcess


def pretend(engine: Engine, model: str, length: int, env: dict[str, str], connection: Connection) -> None:
    """Yields as many tokens as it is asked for; what it was asked is in the last row."""
    connection.send({"env": env, "length": length})
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        if request["tokens"] == 13:
            os._exit(7)
        if request["tokens"] == 99:
            connection.send({"step_s": [], "tokens": [], "token_ids": []})
            time.sleep(600)
        connection.send({"step_s": [], "tokens": [], "token_ids": [request.get("active_k")]})


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    spawn = multiprocessing.get_context("spawn")
    monkeypatch.setattr(bench_process, "_child", pretend)
    monkeypatch.setattr(bench_process, "cpu_env", lambda root: {"OMP_NUM_THREADS": "1"})
    monkeypatch.setattr(bench_process.multiprocessing, "get_context", lambda method: spawn)
    for name in ("OMP_NUM_THREADS", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "")
    started: list[EngineProcess] = []

    def one(engine: Engine) -> EngineProcess:
        started.append(EngineProcess(engine, "model", 64))
        return started[-1]

    yield one
    for process in started:
        if process._process.is_alive():
            process.close()


def test_an_engine_learns_how_many_drafts_are_active(start: Any) -> None:
    engine = start(Engine(3))
    assert engine.start["length"] == 64
    assert engine.start["env"].items() >= {"MTP_ATTENTION": "tnd", "OMP_NUM_THREADS": "1"}.items()
    for active, expected in ((None, 3), (0, 0), (2, 2), (None, 3)):
        assert engine.ask(Arm(Engine(3), active_k=active), [[1]], 8, 0.0).token_ids == [expected]
    counters = engine.start["env"]["MTP_RUNTIME_COUNTERS_DIR"]
    engine.close()
    assert engine._process.exitcode == 0
    assert not Path(counters).exists()


def test_stock_vllm_has_no_drafts_to_switch(start: Any) -> None:
    arm = Arm(Engine(1, plugin=False))
    engine = start(arm.engine)
    assert engine.start["env"]["VLLM_PLUGINS"] == ""
    assert engine.ask(arm, [[1]], 8, 0.0).token_ids == [None]


def test_an_engine_that_dies_is_named(start: Any) -> None:
    engine = start(Engine(1, "full"))
    with pytest.raises(RuntimeError, match="K=1 full placeholder died, exit code 7"):
        engine.ask(Arm(engine.engine), [[1]], 13, 0.0)
    engine.close()


def test_an_engine_that_does_not_end_is_ended(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_process, "PATIENCE_S", 0.1)
    engine = start(Engine(0))
    engine.ask(Arm(engine.engine), [[1]], 99, 0.0)
    engine.close()
    assert engine._process.exitcode == -9
