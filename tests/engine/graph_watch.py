"""What an engine does while it is watched: counted at the scheduler and at vLLM's model classes, apart from the plugin.

Runs in the engine's process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Replay:
    """One replay of a static graph. part: target | first | later | write | piece (of either model)."""

    part: str
    slots: int = 0
    width: int = 0
    ends: list[int] = field(default_factory=list)
    kv: list[int] = field(default_factory=list)


@dataclass
class Seen:
    """steps: the tokens of each request, each scheduled step. forwards: entries into the Python of each model."""

    steps: list[list[int]] = field(default_factory=list)
    replays: list[Replay] = field(default_factory=list)
    forwards: dict[str, int] = field(default_factory=lambda: {"target": 0, "drafter": 0})

    def of(self, part: str) -> list[Replay]:
        """The replays of a part."""
        return [replay for replay in self.replays if replay.part == part]


def core(llm: Any) -> Any:
    """The engine core, in this process."""
    return llm.llm_engine.engine_core.engine_core


def worker(llm: Any) -> Any:
    """The worker."""
    return core(llm).model_executor.driver_worker.worker


def runner(llm: Any) -> Any:
    """The model runner."""
    return worker(llm).model_runner


def kv_caches(llm: Any) -> dict[str, Any]:
    """Layer -> its KV cache [blocks, 16, 576]; the drafter's layer is the last."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    layers = runner(llm).compilation_config.static_forward_context
    return {name: layer.kv_cache for name, layer in layers.items() if isinstance(layer, MLAAttention)}


def static_steps(llm: Any) -> dict[int, str]:
    """id of each whole-step graph -> its part."""
    model, drafter = runner(llm).model, getattr(runner(llm), "drafter", None)
    parts = {"target": getattr(model, "_full", {})}
    for part, name in (("first", "_first"), ("later", "_later"), ("write", "_writes")):
        parts[part] = getattr(drafter, name, {})
    return {id(step): part for part, steps in parts.items() for step in steps.values()}


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, owner.name is make(what it was)."""
    own = name in vars(owner)
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original) if own else delattr(owner, name)


@contextmanager
def watching(llm: Any) -> Iterator[Seen]:
    """What happens inside."""
    from vllm.model_executor.models.deepseek_mtp import DeepSeekMTP
    from vllm.model_executor.models.deepseek_v2 import DeepseekV2ForCausalLM

    from mtp_runtime.graphs.static import PiecewiseStep, StaticStep

    seen, parts = Seen(), static_steps(llm)

    def schedule(original: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            if output.total_num_scheduled_tokens:
                seen.steps.append(list(output.num_scheduled_tokens.values()))
            return output

        return wrapped

    def whole(original: Any) -> Any:
        def wrapped(step: Any, *args: Any) -> Any:
            result, lists = original(step, *args), step.buffers
            part, graph = parts[id(step)], step.graph
            ends, kv = list(lists.actual_seq_lengths), list(lists.actual_seq_lengths_kv)
            seen.replays.append(Replay(part, graph.slots, graph.width, ends, kv))
            return result

        return wrapped

    def pieces(original: Any) -> Any:
        def wrapped(step: Any, **inputs: Any) -> Any:
            seen.replays.append(Replay("piece"))
            return original(step, **inputs)

        return wrapped

    def forward(name: str) -> Any:
        def make(original: Any) -> Any:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                seen.forwards[name] += 1
                return original(*args, **kwargs)

            return wrapped

        return make

    with ExitStack() as stack:
        stack.enter_context(replaced(core(llm).scheduler, "schedule", schedule))
        stack.enter_context(replaced(StaticStep, "replay", whole))
        stack.enter_context(replaced(PiecewiseStep, "replay", pieces))
        stack.enter_context(replaced(DeepseekV2ForCausalLM, "forward", forward("target")))
        stack.enter_context(replaced(DeepSeekMTP, "forward", forward("drafter")))
        yield seen
