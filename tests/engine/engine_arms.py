"""Real vLLM engines for the tests: one forked process an arm, the imports paid once.

An engine takes a process for itself. The fork server imports vLLM, each arm is a fork of it, so an arm costs the
model's start and not the imports.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtp_runtime.config.engines import CPU_ATTENTION, cpu_env
from mtp_runtime.config.graph_plan import CUDAGRAPH_MODE
from mtp_runtime.graphs.slots import graph_slots

ROOT = Path(__file__).resolve().parents[2]
MODEL = os.environ.get("MTP_TEST_MODEL", "mtp_runtime/model/weights")
PRELOAD = ["vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.deepseek_mtp"]
LIMIT_S = 600
MAX_MODEL_LEN = 512
BLOCK = 16
KV_ROW_BYTES = 576 * 4
"""One token in one layer: a latent of 512 and a rotary part of 64, float32."""

_BASE_ENV = {**cpu_env(str(ROOT)), "VLLM_LOGGING_LEVEL": "ERROR"}


@dataclass
class Run:
    """Requests given to the engine together.

    sampling: keyword arguments of SamplingParams, for all or one a prompt; `bad_words_token_ids` too, which the API
    makes from words. rescore: read the answers again as prompts and report the log-probabilities found there.
    """

    prompts: list[list[int]]
    sampling: dict[str, Any] | list[dict[str, Any]]
    rescore: bool = False


@dataclass
class Arm:
    """One engine: its K, its drafter, its environment, further engine arguments, what it is asked.

    graph_mode: eager | piecewise | full; attention and padding as in the cluster file. capture_slots: of the graphs,
    None for those that a plan renders. asks: name -> a function of a module, called with the LLM after the runs; its
    result is found[name].
    """

    k: int
    runs: list[Run] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    draft_sampling: str = "greedy"
    engine: dict[str, Any] = field(default_factory=dict)
    graph_mode: str = "eager"
    attention: str = "tnd"
    padding: str = "placeholder"
    max_num_seqs: int = 8
    capture_slots: list[int] | None = None
    asks: dict[str, Callable[[Any], Any]] = field(default_factory=dict)

    def slots(self) -> list[int]:
        """Slots of the graphs, ascending; none when eager."""
        if self.graph_mode == "eager":
            return []
        return self.capture_slots or graph_slots(self.max_num_seqs, self.k, self.padding)

    def modes(self) -> dict[str, Any]:
        """Engine arguments of the graph mode, as `mtp_runtime.config` renders them."""
        if self.graph_mode == "eager":
            return {"enforce_eager": True}
        sizes = [slots * (self.k + 1) for slots in self.slots()]
        mode = CUDAGRAPH_MODE[self.graph_mode]
        return {"compilation_config": {"mode": 0, "cudagraph_mode": mode, "cudagraph_capture_sizes": sizes}}

    def environment(self) -> dict[str, str]:
        """What the modes need in the environment, and what the arm adds."""
        breakable = {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"} if self.graph_mode == "piecewise" else {}
        return {"MTP_ATTENTION": self.attention, "MTP_PADDING": self.padding, **breakable, **self.env}

    def kv_bytes(self) -> int:
        """KV memory in which every request reaches the longest context, with its drafts, and the null block."""
        context = self.engine.get("max_model_len", MAX_MODEL_LEN) + self.k
        layers = config()["num_hidden_layers"] + bool(self.k)
        return (self.max_num_seqs * -(-context // BLOCK) + 1) * BLOCK * layers * KV_ROW_BYTES


def config() -> dict[str, Any]:
    """The tested model's config.json."""
    return json.loads((Path(MODEL) / "config.json").read_text())


def start(arms: list[Arm]) -> list[dict[str, Any]]:
    """Run the arms, one after the other; each result is what `_serve` returns, or {"error": traceback}."""
    context = multiprocessing.get_context("forkserver")
    os.environ.update(_BASE_ENV)  # before the fork server starts: thread counts are read at import
    context.set_forkserver_preload(PRELOAD)
    results = []
    for arm in arms:
        receiver, sender = context.Pipe(duplex=False)
        with tempfile.TemporaryDirectory() as counters:  # the arm ends without a chance to tidy up
            env = {**arm.environment(), "MTP_RUNTIME_COUNTERS_DIR": counters}
            process = context.Process(target=_child, args=(arm, env, sender))
            process.start()
            sender.close()
            try:
                results.append(receiver.recv() if receiver.poll(LIMIT_S) else {"error": f"no answer in {LIMIT_S} s"})
            except EOFError:
                process.join(10)
                results.append({"error": f"the engine process died, exit code {process.exitcode}"})
            process.terminate()  # only this arm's own process
            process.join()
    return results


def _child(arm: Arm, env: dict[str, str], sender: Any) -> None:
    os.environ.update(env)
    try:
        sender.send(_serve(arm))
    except BaseException:
        sender.send({"error": traceback.format_exc()})
    finally:
        sender.close()
        os._exit(0)  # no interpreter shutdown: it would wait for the engine's helpers


def _serve(arm: Arm) -> dict[str, Any]:
    llm = _engine(arm)
    scheduled = _watch_scheduler(llm)
    from mtp_runtime.adapters.counters import totals

    answers = []
    for run in arm.runs:
        before = totals(), _spec_metrics(llm), dict(scheduled)
        outputs = llm.generate([{"prompt_token_ids": p} for p in run.prompts], _sampling(run), use_tqdm=False)
        after = totals(), _spec_metrics(llm), dict(scheduled)
        ours, engine, steps = ({key: b[key] - a.get(key, 0) for key in b} for a, b in zip(before, after, strict=True))
        tokens = [list(o.outputs[0].token_ids) for o in outputs]
        answers.append(
            {
                "tokens": tokens,
                "text": [o.outputs[0].text for o in outputs],
                "logprobs": [_chosen_logprobs(o.outputs[0]) for o in outputs],
                "all_logprobs": [_all_logprobs(o.outputs[0]) for o in outputs],
                "rescored": _rescore(llm, run.prompts, tokens) if run.rescore else None,
                "ours": ours,
                "engine": engine,
                "scheduled": steps,
            }
        )
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    sampler = getattr(runner, "rejection_sampler", None)
    return {
        "answers": answers,
        "sampler": f"{type(sampler).__module__}.{type(sampler).__name__}",
        "found": {name: ask(llm) for name, ask in arm.asks.items()},
    }


def _engine(arm: Arm) -> Any:
    from vllm import LLM

    speculative = {
        "method": "mtp",
        "num_speculative_tokens": arm.k,
        "attention_backend": CPU_ATTENTION,
        "draft_sample_method": arm.draft_sampling,
    }
    fixed = {
        "model": MODEL,
        "dtype": "float32",
        "attention_backend": CPU_ATTENTION,
        "skip_tokenizer_init": True,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": arm.max_num_seqs,
        "kv_cache_memory_bytes": arm.kv_bytes(),
        "disable_log_stats": False,
        "seed": 0,
    }
    return LLM(**{**fixed, **arm.modes(), **({"speculative_config": speculative} if arm.k else {}), **arm.engine})


def _sampling(run: Run) -> Any:
    """SamplingParams, one or one a prompt."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    def one(given: dict[str, Any]) -> SamplingParams:
        given = {"ignore_eos": True, "detokenize": False, **given}
        bad_words = given.pop("bad_words_token_ids", None)
        if "regex" in given:
            given["structured_outputs"] = StructuredOutputsParams(regex=given.pop("regex"))
        params = SamplingParams(**given)
        params._bad_words_token_ids = bad_words
        return params

    return one(run.sampling) if isinstance(run.sampling, dict) else [one(given) for given in run.sampling]


def _rescore(llm: Any, prompts: list[list[int]], tokens: list[list[int]]) -> list[list[float]]:
    """Log-probabilities of the answers' tokens when the whole sequences are read as prompts: one forward pass each."""
    from vllm import SamplingParams

    whole = [{"prompt_token_ids": p + t} for p, t in zip(prompts, tokens, strict=True)]
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    found = []
    for prompt, answer, output in zip(prompts, tokens, llm.generate(whole, params, use_tqdm=False), strict=True):
        steps = output.prompt_logprobs[len(prompt) :]
        found.append([step[token].logprob for token, step in zip(answer, steps, strict=True)])
    return found


def _watch_scheduler(llm: Any) -> dict[str, int]:
    """Count scheduled steps with drafts at the scheduler itself, apart from the plugin's own counting."""
    seen = {"steps": 0, "draft_steps": 0, "requests_with_drafts": 0}
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    original = scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        seen["steps"] += output.total_num_scheduled_tokens > 0
        drafts = [tokens for tokens in output.scheduled_spec_decode_tokens.values() if tokens]
        seen["draft_steps"] += bool(drafts)
        seen["requests_with_drafts"] += len(drafts)
        return output

    scheduler.schedule = schedule
    return seen


def _spec_metrics(llm: Any) -> dict[str, int]:
    """vLLM's own counters of drafts and preemptions, scalar ones."""
    wanted = ("spec_decode", "num_preemptions")
    return {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value") and any(w in m.name for w in wanted)}


def _all_logprobs(output: Any) -> list[dict[int, float]] | None:
    if output.logprobs is None:
        return None
    return [{token: value.logprob for token, value in step.items()} for step in output.logprobs]


def _chosen_logprobs(output: Any) -> list[float] | None:
    if output.logprobs is None:
        return None
    return [step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)]
