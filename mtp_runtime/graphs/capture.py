"""Record one step of a model as a whole graph.

Like aclgraph and CUDA graphs, recording runs the step once and notes every operator that reaches the dispatcher, with
the tensors it took. Tensors that no recorded operator made (weights, the KV cache, the step's persistent buffers) are
part of the graph: a replay reads and writes them where they lie. Shapes and Python branches are those of the recorded
step. Host lists are the exception: operators may take new values at each replay, never another length.

The result is a torch.fx graph of operator calls; running it enters none of the model's Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

REFUSED_READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__)
REFUSED_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded)


class CaptureError(RuntimeError):
    """The step cannot be recorded: it depends on values, draws random numbers, or uses no host list it should."""


@dataclass
class Recording:
    """A recorded step.

    graph: one placeholder a host list, then operator calls. values: what each node held while it was recorded; kept
    until the graph is simplified, so that storages stay distinct. parameters: nodes that hold weights. written:
    storages (data pointers) that some operator wrote.
    """

    module: torch.nn.Module
    graph: fx.Graph
    values: dict[fx.Node, Any] = field(default_factory=dict)
    parameters: set[fx.Node] = field(default_factory=set)
    written: set[int] = field(default_factory=set)

    def compile(self) -> fx.GraphModule:
        """The callable form: takes the host lists by name, returns what the step returned."""
        self.graph.lint()
        return fx.GraphModule(self.module, self.graph)


def record(step: Callable[[], Any], host_lists: Mapping[str, list[int]]) -> Recording:
    """Run `step()` once and record it.

    host_lists: name -> the list that the step gives to operators under that keyword. Errors: CaptureError.
    """
    recorder = _Recorder(host_lists)
    with torch.no_grad(), _NoReads(), recorder:
        result = step()
    return recorder.finish(result)


def storage(tensor: Tensor) -> int:
    """What two views of the same memory share."""
    return tensor.untyped_storage().data_ptr()


class _NoReads(TorchFunctionMode):
    """Refuses what hands out a tensor's values past the dispatcher: they would become constants unseen.

    Operators may do so inside.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in REFUSED_READS:
            raise CaptureError(f"Tensor.{func.__name__} cannot be part of a static graph (it reads values)")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Turns each dispatched operator into a node."""

    def __init__(self, host_lists: Mapping[str, list[int]]) -> None:
        super().__init__()
        self.recording = Recording(torch.nn.Module(), fx.Graph())
        self.nodes: dict[int, fx.Node] = {}
        # A tensor that dies gives its id, and its memory, to the next one.
        self.alive: list[Tensor] = []
        self.host_lists = {name: list(values) for name, values in host_lists.items()}
        self.lists = {name: self.recording.graph.placeholder(name) for name in host_lists}
        self.used: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            # Of inference tensors, composed operators come whole: `is_nonzero` would hide its look at a value.
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        _refuse_dynamic(func, args)
        if func is torch.ops.aten.lift_fresh.default:
            # What torch.tensor(...) makes is new in each run of the step, whatever was written to the one before.
            func = torch.ops.aten.lift_fresh_copy.default
        node_args = tree_map_only(Tensor, self._node, args)
        node_kwargs = {name: self._keyword(name, value) for name, value in kwargs.items()}
        written = [(tensor, _form(tensor)) for tensor in _written(func, args, kwargs)]
        result = func(*args, **kwargs)
        node = self.recording.graph.call_function(func, tuple(node_args), node_kwargs)
        for tensor, form in written:
            if form is not None and form != _form(tensor):
                raise CaptureError(f"{func} cannot be part of a static graph (it changes a tensor's shape in place)")
            self.recording.written.add(storage(tensor))
        self._keep(node, result)
        return result

    def finish(self, result: Any) -> Recording:
        """The recording with its output. A host list that no operator took is an error: it would never be updated."""
        unused = self.host_lists.keys() - self.used
        if unused:
            raise CaptureError(f"no operator took the host list {', '.join(sorted(unused))}")
        self.recording.graph.output(tree_map_only(Tensor, self._node, result))
        return self.recording

    def _keyword(self, name: str, value: Any) -> Any:
        if name in self.host_lists:
            if list(value) != self.host_lists[name]:
                raise CaptureError(f"{name}: the step gave {value}, not the host list it was recorded with")
            self.used.add(name)
            return self.lists[name]
        return tree_map_only(Tensor, self._node, value)

    def _node(self, tensor: Tensor) -> fx.Node:
        """The node that made a tensor; one that holds it where no recorded operator did."""
        known = self.nodes.get(id(tensor))
        if known is not None:
            return known
        name = f"held_{len(self.alive)}"
        self.recording.module.register_buffer(name, tensor.detach(), persistent=False)
        node = self.recording.graph.get_attr(name)
        if isinstance(tensor, torch.nn.Parameter):
            self.recording.parameters.add(node)
        self._know(node, tensor)
        return node

    def _know(self, node: fx.Node, tensor: Tensor) -> None:
        self.nodes[id(tensor)] = node
        self.alive.append(tensor)
        self.recording.values[node] = tensor

    def _keep(self, node: fx.Node, result: Any) -> None:
        if isinstance(result, Tensor):
            self._know(node, result)
            return
        self.recording.values[node] = result
        for index, part in enumerate(result if isinstance(result, (tuple, list)) else ()):
            if isinstance(part, Tensor):
                self._know(self.recording.graph.call_function(_item, (node, index)), part)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operator writes."""
    values = [
        args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _form(tensor: Tensor) -> Any:
    """Where a tensor's elements lie; None without any, as an `out` that is still to get its memory."""
    return (storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()) if tensor.numel() else None


def _refuse_dynamic(func: Any, args: Any) -> None:
    """Errors: CaptureError for an operator whose result's shape, or whose very value on the host, depends on data."""
    tags = [tag for tag in REFUSED_TAGS if tag in func.tags]
    if tags and func is torch.ops.aten.index.Tensor:
        # Tagged for boolean masks alone: positions give the shape they have.
        tags = [tag for tag in tags if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])]
    if tags:
        raise CaptureError(f"{func} cannot be part of a static graph ({tags[0].name})")


def _item(parts: Any, index: int) -> Any:
    """One result of an operator that has several."""
    return parts[index]
