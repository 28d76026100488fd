"""What the graph tests ask of an engine. Functions of the LLM, run in the engine's process; results can be pickled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import graph_prompts as given
from engine_arms import Run, _sampling, config
from graph_watch import Seen, kv_caches, replaced, watching

GREEDY = {"temperature": 0.0, "max_tokens": given.TOKENS}
LIMITED = {**GREEDY, "max_tokens": 40}
ENDING = {**GREEDY, "ignore_eos": False, "logit_bias": {config()["eos_token_id"]: 14.0}}
"""The end of the text, within a few tokens, by a bias."""
SEEDED = [{"temperature": 1.0, "seed": 40 + number, "max_tokens": given.TOKENS} for number in range(given.SEATS)]


@dataclass
class Answer:
    """What came of requests given together.

    tokens, reasons: each request's answer and why it ended. gaps: how far the two best log-probabilities lie apart at
    each token, where asked for. ours: the plugin's counters. accepted: drafts accepted at each depth; drafts: draft
    steps; preemptions: all three vLLM's own counts.
    """

    tokens: list[list[int]]
    reasons: list[str]
    gaps: list[list[float]]
    seen: Seen
    ours: dict[str, int] = field(default_factory=dict)
    accepted: list[int] = field(default_factory=list)
    drafts: int = 0
    preemptions: int = 0


def ask(llm: Any, prompts: list[list[int]], sampling: Any) -> Answer:
    """Give the engine these requests at once, and watch."""
    run = Run(prompts, sampling)
    with watching(llm) as seen, counting(llm) as counted:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], _sampling(run), use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    return Answer(
        [list(answer.token_ids) for answer in answers],
        [answer.finish_reason for answer in answers],
        [_gaps(answer) for answer in answers],
        seen,
        **counted,
    )


@contextmanager
def counting(llm: Any) -> Iterator[dict[str, Any]]:
    """The counts of `Answer`, filled in at the end."""
    from mtp_runtime.adapters.counters import totals

    counted: dict[str, Any] = {}
    ours, theirs = totals(), _metrics(llm)
    yield counted
    now = _metrics(llm)
    counted["ours"] = {_short(name): value - ours.get(name, 0) for name, value in totals().items()}
    accepted = "vllm:spec_decode_num_accepted_tokens_per_pos"
    counted["accepted"] = [new - old for new, old in zip(now.get(accepted, []), theirs.get(accepted, []), strict=True)]
    for key, name in (("drafts", "vllm:spec_decode_num_drafts"), ("preemptions", "vllm:num_preemptions")):
        counted[key] = now.get(name, 0) - theirs.get(name, 0)


def _short(name: str) -> str:
    return name.removeprefix("mtp_runtime_").removesuffix("_total")


def _metrics(llm: Any) -> dict[str, Any]:
    return {m.name: m.values if hasattr(m, "values") else getattr(m, "value", None) for m in llm.get_metrics()}


def _gaps(answer: Any) -> list[float]:
    best = [sorted((found.logprob for found in step.values()), reverse=True) for step in answer.logprobs or []]
    return [step[0] - step[1] for step in best]


# --- the reference: K = 0, eager ------------------------------------------------------------------------------------


def reference(llm: Any) -> dict[str, Answer]:
    """Every greedy request of the tests; those of the burst one at a time."""
    two = {"logprobs": 2}
    return {
        "mixed": ask(llm, given.mixed(), {**GREEDY, **two}),
        "burst": _one_by_one(llm, given.single_tokens(), {**GREEDY, **two, "max_tokens": given.BURST_TOKENS}),
        "handed over": ask(llm, given.handed_over(), {**GREEDY, **two}),
        "handed over late": ask(llm, given.handed_over_late(), {**GREEDY, **two}),
        "limited": ask(llm, given.limited(), {**LIMITED, **two}),
        "end": ask(llm, given.mixed()[: given.SEATS], {**ENDING, **two}),
    }


def _one_by_one(llm: Any, prompts: list[list[int]], sampling: dict[str, Any]) -> Answer:
    found = [ask(llm, [prompt], sampling) for prompt in prompts]
    tokens, reasons, gaps = ([getattr(one, name)[0] for one in found] for name in ("tokens", "reasons", "gaps"))
    return Answer(tokens, reasons, gaps, Seen())


# --- the matrix -----------------------------------------------------------------------------------------------------


def matrix(llm: Any) -> dict[str, Answer]:
    """One request, a full batch, requests that join and leave, a burst of single tokens, and seeded ones."""
    prompts = given.mixed()
    leaving = [{**GREEDY, "max_tokens": tokens} for tokens in given.answers_of()]
    return {
        "alone": ask(llm, prompts[1:2], GREEDY),
        "batch": ask(llm, prompts[: given.SEATS], GREEDY),
        "joining": ask(llm, prompts, leaving),
        "burst": ask(llm, given.single_tokens(), {**GREEDY, "max_tokens": given.BURST_TOKENS}),
        "seeded": ask(llm, prompts[: given.SEATS], SEEDED),
    }


def mixed_batch(llm: Any) -> Answer:
    """A full batch."""
    return ask(llm, given.mixed()[: given.SEATS], GREEDY)


# --- P/D in one process ---------------------------------------------------------------------------------------------


def hand_over(llm: Any) -> Answer:
    """P: one prompt after the other, each KV saved."""
    from handoff_connector import OneTokenLeft

    with replaced(OneTokenLeft, "saving", lambda _: True):
        return _one_by_one(llm, [*given.handed_over(), *given.handed_over_late()], {**GREEDY, "max_tokens": 1})


def handed_over(llm: Any) -> dict[str, Answer]:
    """D: the prompts computed here, then with their KV from P. In between the whole cache is spoiled."""
    from handoff_connector import OneTokenLeft

    found = {"here": ask(llm, given.handed_over(), GREEDY)}
    for cache in kv_caches(llm).values():
        cache.fill_(7.0)
    with replaced(OneTokenLeft, "loading", lambda _: True):
        found["from P"] = ask(llm, given.handed_over(), GREEDY)
        found["late from P"] = ask(llm, given.handed_over_late(), GREEDY)
    return found
