"""Whether graphs behave as captured ones do: what they read, write and enter. Runs in the engine's process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import graph_prompts as given
import torch
from engine_arms import BLOCK, Run, _sampling, config
from graph_asks import GREEDY, Answer, ask, counting
from graph_watch import Seen, core, kv_caches, replaced, runner, watching

FEW = [{**GREEDY, "max_tokens": tokens} for tokens in (16, 9, 14, 6, 12)]
"""Five requests that leave one by one: graphs of 8, 4, 2 and 1 slots, most with padding."""
EIGHT = [0, 1, 9, 10, 11, 12, 13, 15]
"""Mixed prompts of 17 to 100 tokens."""


def few(llm: Any) -> Answer:
    """Five mixed prompts."""
    return ask(llm, given.mixed()[9:14], FEW)


# --- poison ---------------------------------------------------------------------------------------------------------


def poisoned(llm: Any) -> dict[str, Answer]:
    """Answers with every buffer of a graph spoiled before each replay, with K drafts and while drafting rests; and, to
    see that the poison is one, with the slots of padding left as they were."""
    with poison(llm):
        found = {"padded": few(llm), "batch": ask(llm, given.mixed(), GREEDY)}
        core(llm).mtp_set_active_k(0)
        found["resting"] = few(llm)
        core(llm).mtp_set_active_k(runner(llm).num_spec_tokens)
        with replaced(_static(), "pad", _forgetful):
            found["slots left"] = few(llm)
    return found


def _static() -> Any:
    from mtp_runtime.graphs import static

    return static


def _forgetful(pad: Any) -> Any:
    def wrapped(buffers: Any, plan: Any, inputs: Any) -> None:
        kept = buffers.slot_mapping.clone()
        pad(buffers, plan, inputs)
        buffers.slot_mapping[plan.tokens :] = kept[plan.tokens :]

    return wrapped


@contextmanager
def poison(llm: Any) -> Iterator[None]:
    """Garbage in all that persists between steps. Slots and blocks are those of the requests that run."""
    static, generator = _static(), torch.Generator().manual_seed(3)

    def among(values: Any, like: Any) -> Any:
        chosen = torch.randint(0, len(values), like.shape, generator=generator)
        return torch.as_tensor(values)[chosen].to(like.dtype)

    def spoil(tensors: dict[str, Any]) -> None:
        table = runner(llm).input_batch.block_table[0]
        blocks = [int(block) for block in table.block_table.np[: runner(llm).input_batch.num_reqs].ravel() if block]
        slots = [block * BLOCK + place for block in blocks for place in range(BLOCK)]
        choices = {
            "input_ids": range(config()["vocab_size"]),
            "positions": range(given.CONTEXT),
            "slot_mapping": slots,
            "block_table": blocks,
            "hidden_states": [-100.0, 100.0],
            "row_owner": [0],
            "row_lengths": range(1, given.CONTEXT),
        }
        for name, tensor in tensors.items():
            tensor.copy_(among(list(choices[name]), tensor))

    def whole(original: Any) -> Any:
        def wrapped(step: Any, *args: Any) -> Any:
            buffers = step.buffers
            spoil({**buffers.tensors(), "row_owner": buffers.row_owner, "row_lengths": buffers.row_lengths})
            for values in buffers.lists().values():
                values[:] = [given.CONTEXT] * len(values)
            return original(step, *args)

        return wrapped

    def pieces(original: Any) -> Any:
        def wrapped(step: Any, **inputs: Any) -> Any:
            spoil(step.tensors)
            return original(step, **inputs)

        return wrapped

    with ExitStack() as stack:
        stack.enter_context(replaced(static.StaticStep, "replay", whole))
        stack.enter_context(replaced(static.PiecewiseStep, "replay", pieces))
        yield


# --- who writes whose KV --------------------------------------------------------------------------------------------


def written(llm: Any) -> list[tuple[str, list[str]]]:
    """(target or drafter, layers whose KV it changed), in the order of their calls."""
    found: list[tuple[str, list[str]]] = []

    def noting(part: str) -> Any:
        def make(original: Any) -> Any:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                before = {name: cache.clone() for name, cache in kv_caches(llm).items()}
                result = original(*args, **kwargs)
                changed = [name for name, cache in kv_caches(llm).items() if not torch.equal(before[name], cache)]
                found.append((part, changed))
                return result

            return wrapped

        return make

    with ExitStack() as stack:
        stack.enter_context(replaced(runner(llm), "_model_forward", noting("target")))
        stack.enter_context(replaced(runner(llm).drafter, "propose", noting("drafter")))
        ask(llm, given.mixed()[9:12], {**GREEDY, "max_tokens": 8})
    return found


# --- dummy steps ----------------------------------------------------------------------------------------------------


@dataclass
class Dummy:
    """Dummy steps between those of requests.

    real: what a step of one request replays; seen: what a dummy step did; ours: the plugin's counters, of one after a
    step of one request and of one among three requests; changed: layers whose KV it changed; tokens: the answers.
    """

    real: Seen
    seen: Seen
    ours: list[dict[str, int]]
    changed: list[str]
    tokens: list[list[int]] = field(default_factory=list)


def dummy_step(llm: Any) -> Dummy:
    """As an idle rank of a group runs it."""
    engine = llm.llm_engine
    prompts = given.mixed()[9:12]

    def add(name: str, prompt: list[int]) -> None:
        engine.add_request(name, {"prompt_token_ids": prompt}, _sampling(Run([], GREEDY)))

    add("alone", prompts[0])
    engine.step()
    with watching(llm) as real:
        engine.step()
    with counting(llm) as first:
        llm.collective_rpc("execute_dummy_batch")
    engine.abort_request(["alone"])
    for number, prompt in enumerate(prompts):
        add(str(number), prompt)
    for _ in range(3):
        engine.step()
    before = {name: cache.clone() for name, cache in kv_caches(llm).items()}
    with counting(llm) as counted, watching(llm) as seen:
        llm.collective_rpc("execute_dummy_batch")
    changed = [name for name, cache in kv_caches(llm).items() if not torch.equal(before[name], cache)]
    found = Dummy(real, seen, [first["ours"], counted["ours"]], changed)
    answers: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        answers |= {out.request_id: list(out.outputs[0].token_ids) for out in engine.step() if out.finished}
    found.tokens = [answers[str(number)] for number in range(len(prompts))]
    return found


# --- acceptance, attention calls ------------------------------------------------------------------------------------


def acceptance(llm: Any) -> dict[str, list[Answer]]:
    """The same eight requests alone and in a batch."""
    prompts = [given.mixed()[number] for number in EIGHT]
    return {"alone": [ask(llm, [prompt], GREEDY) for prompt in prompts], "batch": [ask(llm, prompts, GREEDY)]}


def attention_calls(llm: Any) -> tuple[int, Answer]:
    """How often the attention operator was called for single tokens that join and leave, all of it decode."""
    calls = 0
    operator = torch.ops.mtp_runtime.fused_infer_attention_score

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return operator(*arguments, **named)

    prompts = given.single_tokens()
    leaving = [{**GREEDY, "max_tokens": 2 + number % 7} for number in range(len(prompts) + 4)]
    torch.ops.mtp_runtime.fused_infer_attention_score = counted
    try:
        answer = ask(llm, [*prompts, *prompts[:4]], leaving)
    finally:
        torch.ops.mtp_runtime.fused_infer_attention_score = operator
    return calls, answer


def static(llm: Any) -> dict[str, Any]:
    """All of it, the spoiled cache last."""
    return {
        "acceptance": acceptance(llm),
        "written": written(llm),
        "poisoned": poisoned(llm),
    }
