"""Run decode steps in fixed shapes: eagerly, or as a static graph that was recorded once.

`StaticStep` behaves as a graph captured on a device: a replay enters none of the model's Python, reads the persistent
buffers and nothing else, and takes one shape and one length of every host list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from mtp_runtime.graphs.capture import CaptureError, record
from mtp_runtime.graphs.padding import InputError, StepBuffers, StepInputs, pad
from mtp_runtime.graphs.planner import Graph, Plan, fits
from mtp_runtime.graphs.simplify import simplify

Step = Callable[[StepBuffers], Any]
"""A step of the model that reads its inputs, and its host lists, from the buffers it is given."""


class StepGraph(Protocol):
    """What runs a step of one shape."""

    graph: Graph
    hits: int

    def capture(self) -> None:
        """Prepare; called once, before the first replay."""

    def can_use(self, requests: int, tokens: int) -> bool:
        """Whether a step of so many requests and tokens fits."""

    def replay(self, plan: Plan, inputs: StepInputs) -> Any:
        """Pad the step, run it, return what the step returns, padding included."""


class EagerStep:
    """The padded step, run by the model itself each time: what a static graph must be equal to."""

    def __init__(self, step: Step, buffers: StepBuffers) -> None:
        self.graph, self.buffers, self.hits = buffers.graph, buffers, 0
        self._step = step

    def capture(self) -> None:
        """Nothing to do."""

    def can_use(self, requests: int, tokens: int) -> bool:
        """See StepGraph."""
        return fits(requests, tokens, self.graph)

    def replay(self, plan: Plan, inputs: StepInputs) -> Any:
        """See StepGraph."""
        pad(self.buffers, plan, inputs)
        self.hits += 1
        with torch.no_grad():
            return self._step(self.buffers)


class StaticStep:
    """A step recorded as a whole graph.

    uses_lists: whether the step hands the buffers' host lists to an operator (attention in TND layout does).
    """

    def __init__(self, step: Step, buffers: StepBuffers, uses_lists: bool = True) -> None:
        self.graph, self.buffers, self.hits = buffers.graph, buffers, 0
        self._step = step
        self._uses_lists = uses_lists
        self._run: fx.GraphModule | None = None

    @property
    def operators(self) -> list[str]:
        """Names of the recorded operators, in order."""
        nodes = self._captured().graph.nodes
        return [str(node.target) for node in nodes if node.op == "call_function"]

    def capture(self) -> None:
        """Record the step on a step of padding. Raises CaptureError where it cannot be recorded."""
        if self._run is not None:
            raise CaptureError("this graph is captured already")
        self.buffers.clear()
        self._run = simplify(record(lambda: self._step(self.buffers), self._lists())).compile()

    def can_use(self, requests: int, tokens: int) -> bool:
        """See StepGraph; False before the capture."""
        return self._run is not None and fits(requests, tokens, self.graph)

    def replay(self, plan: Plan, inputs: StepInputs) -> Any:
        """See StepGraph. Raises InputError for an input of another form and CaptureError before the capture."""
        run = self._captured()
        pad(self.buffers, plan, inputs)
        self.hits += 1
        with torch.no_grad():
            return run(**self._lists())

    def _lists(self) -> dict[str, list[int]]:
        return self.buffers.lists() if self._uses_lists else {}

    def _captured(self) -> fx.GraphModule:
        if self._run is None:
            raise CaptureError("this graph is not captured yet")
        return self._run


class PiecewiseStep:
    """A step recorded in pieces around the operators that the engine keeps opaque, attention among them.

    Those run live and read what they need elsewhere, so that requests and lengths do not bind the graph: only the
    number of tokens does, and padding is rows that nobody reads.
    """

    def __init__(self, step: Callable[..., Any], tensors: dict[str, Tensor]) -> None:
        self.hits = 0
        self.tensors = tensors
        self._step = step
        self._run: fx.GraphModule | None = None

    @property
    def operators(self) -> list[str]:
        """Names of the recorded operators, the opaque ones too, in order."""
        if self._run is None:
            raise CaptureError("this graph is not captured yet")
        return [str(node.target) for node in self._run.graph.nodes if node.op == "call_function"]

    def capture(self) -> None:
        """Record. Raises CaptureError."""
        if self._run is not None:
            raise CaptureError("this graph is captured already")
        self._run = simplify(record(lambda: self._step(**self.tensors), {})).compile()

    def replay(self, **inputs: Tensor) -> Any:
        """Copy the inputs, clear the rows behind them, run. Raises InputError for an input of another form."""
        if self._run is None:
            raise CaptureError("this graph is not captured yet")
        if inputs.keys() != self.tensors.keys():
            raise InputError(f"{', '.join(inputs)}: the graph takes {', '.join(self.tensors)}")
        for name, given in inputs.items():
            buffer = self.tensors[name]
            alike = given.dtype == buffer.dtype and given.dim() == buffer.dim() and given.shape[1:] == buffer.shape[1:]
            if not alike or len(given) > len(buffer):
                raise InputError(
                    f"{name}: {given.dtype} {tuple(given.shape)}, recorded {buffer.dtype} {tuple(buffer.shape)}"
                )
        if len({len(given) for given in inputs.values()}) > 1:
            raise InputError(f"{', '.join(inputs)}: {', '.join(str(len(given)) for given in inputs.values())} rows")
        for name, given in inputs.items():
            self.tensors[name][: len(given)].copy_(given)
            self.tensors[name][len(given) :].zero_()
        self.hits += 1
        with torch.no_grad():
            return self._run()
