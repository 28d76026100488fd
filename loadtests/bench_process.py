"""The engine process of a benchmark, seen from outside. One process an engine, for as long as it is needed.

Engines with our plugin are forks of one process that has paid vLLM's imports; stock vLLM imports for itself, as what a
fork has imported would already know the plugin. What is measured begins after either.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from loadtests.bench_arms import Arm, Engine
from loadtests.bench_figures import Answer
from mtp_runtime.config.engines import cpu_env

PATIENCE_S = 30
ROOT = Path(__file__).resolve().parent.parent
PRELOAD = [
    "loadtests.bench_engine_worker",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.deepseek_v2",
    "vllm.model_executor.models.deepseek_mtp",
]


class EngineProcess:
    """An engine that answers one batch at a time; RuntimeError when it dies.

    start: what it told when it was up; its imports do not count.
    """

    def __init__(self, engine: Engine, model: str, length: int) -> None:
        self.engine = engine
        self._counters = tempfile.TemporaryDirectory()  # of the plugin; an engine may be killed in the end
        base = {**cpu_env(str(ROOT)), "VLLM_LOGGING_LEVEL": "ERROR"}
        context = multiprocessing.get_context("forkserver" if engine.plugin else "spawn")
        if engine.plugin:
            os.environ.update(base)  # before the first fork: imports read thread counts and plugins
            context.set_forkserver_preload(PRELOAD)
        env = {**base, **engine.environment(), "MTP_RUNTIME_COUNTERS_DIR": self._counters.name}
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_child, args=(engine, model, length, env, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.start = self._read()

    def ask(self, arm: Arm, prompts: list[list[int]], tokens: int, temperature: float) -> Answer:
        """Give it these prompts at once, for so many tokens each."""
        request = {"prompts": prompts, "tokens": tokens, "temperature": temperature}
        if self.engine.plugin and self.engine.k:
            request["active_k"] = arm.drafts
        return Answer(**self._read(request))

    def close(self) -> None:
        """Let this process end, or end it, and wait for it."""
        self._connection.close()
        self._process.join(PATIENCE_S)
        self._process.kill()
        self._process.join()
        self._counters.cleanup()

    def _read(self, request: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            if request:
                self._connection.send(request)
            found: dict[str, Any] = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            code = self._process.exitcode
            raise RuntimeError(f"the engine {self.engine.name} died, exit code {code}") from None
        return found


def _child(engine: Engine, model: str, length: int, env: dict[str, str], connection: Connection) -> None:
    os.environ.update(env)
    os.dup2(2, 1)  # standard output is the report's
    warnings.simplefilter("ignore", FutureWarning)  # vLLM's, once an engine
    from loadtests import bench_engine_worker  # imports vLLM

    bench_engine_worker.main(engine, model, length, connection)
