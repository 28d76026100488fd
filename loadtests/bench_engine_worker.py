"""The engine process of a benchmark, from inside: answers one batch of requests after the other."""

from __future__ import annotations

import gc
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from loadtests.bench_arms import Engine
from mtp_runtime.choice import TND
from mtp_runtime.metrics import names

COUNTERS = {
    "replays": names.PLUGIN_GRAPH_REPLAYS,
    "draft_replays": names.PLUGIN_GRAPH_DRAFT_REPLAYS,
    "no_graph": names.PLUGIN_GRAPH_EAGER_STEPS,
}


def main(engine: Engine, model: str, length: int, connection: Connection) -> None:
    """Start the engine, tell what that took, then serve until the other side is gone."""
    recording = watch_recording() if engine.plugin else {}
    begin = time.perf_counter()
    llm = LLM(**engine.arguments(model, length))
    start_s = time.perf_counter() - begin
    gc.collect()
    gc.freeze()  # the model's objects; what a step leaves behind is still collected
    connection.send(
        {
            "start_s": start_s,
            "recording_s": recording.get("seconds"),
            "recording_mb": recording.get("mb"),
            "rss_mb": resident_mb(),
            "kernel": kernel() if engine.plugin and engine.attention == TND else None,
        }
    )
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        connection.send(serve(llm.llm_engine, plugin=engine.plugin, **request))


def serve(
    engine: Any,
    plugin: bool,
    prompts: list[list[int]],
    tokens: int,
    temperature: float,
    active_k: int | None = None,
) -> dict[str, Any]:
    """Run requests that come at once, step by step. Returns the fields of `bench_figures.Answer`.

    active_k: drafts a request gets each step, where the engine has any.
    """
    if active_k is not None:
        engine.engine_core.engine_core.scheduler.active_k = active_k
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(
            temperature=temperature,
            seed=1 + number,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
    step_s: list[float] = []
    ids: list[list[int]] = [[] for _ in prompts]
    counts: list[list[int]] = [[] for _ in prompts]
    joined = 0  # the steps up to the last prefill
    before: dict[str, int] = {}
    while engine.has_unfinished_requests():
        begin = time.perf_counter()
        outputs = engine.step()
        step_s.append(time.perf_counter() - begin)
        for row in counts:
            row.append(0)
        for output in outputs:
            number, new = int(output.request_id), output.outputs[0].token_ids
            counts[number][-1] += len(new)
            ids[number] += new
        if not joined and all(ids):
            joined, before = len(step_s), counted(plugin)
    after = counted(plugin)
    return {
        "step_s": step_s,
        "tokens": counts,
        "token_ids": ids,
        "decode_steps": len(step_s) - joined,
        **{name: after[name] - before[name] for name in after},
    }


def counted(plugin: bool) -> dict[str, int]:
    """What the plugin has counted so far; stock vLLM counts nothing."""
    if not plugin:
        return {}
    from mtp_runtime.adapters.counters import totals

    found = totals()
    return {name: found[counter] for name, counter in COUNTERS.items()}


def watch_recording() -> dict[str, float]:
    """Time the recording of the graphs, and what it adds to this process; filled in when the engine has started."""
    from mtp_runtime.adapters.vllm_cpu.runner import MtpModelRunner

    capture, found = MtpModelRunner.capture_graphs, dict[str, float]()

    def watched(runner: MtpModelRunner) -> None:
        if runner.model_config.enforce_eager:
            capture(runner)
            return
        gc.collect()
        before, begin = resident_mb(), time.perf_counter()
        capture(runner)
        found["seconds"] = time.perf_counter() - begin
        gc.collect()
        found["mb"] = resident_mb() - before

    MtpModelRunner.capture_graphs = watched
    return found


def resident_mb() -> float:
    """Resident memory of this process, MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def kernel() -> str:
    """Which kernel TND attention runs."""
    from mtp_runtime.attention import native

    return native.why()
