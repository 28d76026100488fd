"""Drive an engine step by step while its active K changes. Runs in the engine's process; results can be pickled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from engine_arms import MODEL, Run, _sampling
from tokenizers import Tokenizer

from mtp_runtime.model import prompts


@dataclass(frozen=True)
class Request:
    """enters: the step before which the engine gets it."""

    prompt: list[int]
    sampling: dict[str, Any]
    enters: int = 0


@dataclass(frozen=True)
class DraftStep:
    """Drafts of one request that one step verified. position: the request's output tokens before it."""

    step: int
    position: int
    drafted: int
    accepted: int


@dataclass
class Driven:
    """What came of the requests.

    tokens: each request's answer. drafts: each request's draft steps. scheduled: drafts that each step carried, one
    entry a request that had any; placeholders not counted. calls: what the drafter's attention layer was asked for.
    ours: the plugin's counters.
    """

    tokens: list[list[int]]
    drafts: list[list[DraftStep]]
    scheduled: list[list[int]]
    calls: Counter[str] = field(default_factory=Counter)
    ours: dict[str, int] = field(default_factory=dict)


def books(count: int, length: int) -> list[list[int]]:
    """The first tokens of held-out books."""
    tokenizer = Tokenizer.from_file(str(Path(MODEL) / "tokenizer.json"))
    return [tokenizer.encode(prompts.completion(number)).ids[:length] for number in range(count)]


def drive_all(llm: Any, runs: dict[str, tuple[list[Request], list[int]]]) -> dict[str, Driven]:
    """Each run's requests and the active K of its steps."""
    return {name: drive(llm, requests, ks) for name, (requests, ks) in runs.items()}


def drive(llm: Any, requests: list[Request], ks: list[int]) -> Driven:
    """Run to the end. Step n has active K ks[n], further ones the last."""
    from mtp_runtime.adapters.counters import totals

    engine, core = llm.llm_engine, llm.llm_engine.engine_core.engine_core
    found = Driven([[] for _ in requests], [[] for _ in requests], [])
    before, waiting, step = totals(), dict(enumerate(requests)), 0
    with watching(core, found), drafter_calls(core, found.calls):
        while waiting or engine.has_unfinished_requests():
            for number in [number for number, request in waiting.items() if request.enters <= step]:
                request = waiting.pop(number)
                params = _sampling(Run([], request.sampling))
                engine.add_request(str(number), {"prompt_token_ids": request.prompt}, params)
            core.mtp_set_active_k(ks[min(step, len(ks) - 1)])
            for output in engine.step():
                found.tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
            step += 1
    core.mtp_set_active_k(core.mtp_active_k()[1])
    found.ours = {name: value - before[name] for name, value in totals().items()}
    return found


@contextmanager
def watching(core: Any, found: Driven) -> Iterator[None]:
    """Note what is scheduled and what is accepted."""
    scheduler = core.scheduler
    schedule, stats = scheduler.schedule, scheduler.make_spec_decoding_stats

    def watched_schedule(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        drafts = output.scheduled_spec_decode_tokens.values()
        found.scheduled.append([len(tokens) for tokens in drafts if tokens and set(tokens) != {-1}])
        return output

    def watched_stats(*args: Any, **kwargs: Any) -> Any:
        name, counts = kwargs["request_id"], (kwargs["num_draft_tokens"], kwargs["num_accepted_tokens"])
        if name not in scheduler._padded:
            made = DraftStep(len(found.scheduled) - 1, scheduler.requests[name].num_output_tokens, *counts)
            found.drafts[int(name.partition("-")[0])].append(made)
        return stats(*args, **kwargs)

    with (
        mock.patch.object(scheduler, "schedule", watched_schedule),
        mock.patch.object(scheduler, "make_spec_decoding_stats", watched_stats),
    ):
        yield


@contextmanager
def drafter_calls(core: Any, calls: Counter[str]) -> Iterator[None]:
    """Count what the drafter's attention layer is asked for, and the heads it runs."""
    runner = core.model_executor.driver_worker.worker.model_runner
    drafter = runner.drafter
    [name] = drafter._draft_attn_layer_names
    layer = runner.compilation_config.static_forward_context[name].impl

    def counting(original: Any, name: str) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        return wrapped

    with ExitStack() as stack:
        for owner, names in ((layer, ("do_kv_cache_update", "forward_mqa", "forward_mha")), (drafter, ("pick",))):
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, counting(getattr(owner, name), name)))
        yield


def write_graphs(llm: Any) -> list[list[str]]:
    """The operators of each graph that the drafter replays where it only keeps its KV."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    return [static.operators for static in runner.drafter._writes.values()]
