"""Take out of a recorded graph what a replay need not do. The results stay the same to the last bit.

What each operator returned while it was recorded is still there, so whether two values share memory is known and not
guessed from schemas.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from mtp_runtime.graphs.capture import Recording, storage


def simplify(recording: Recording) -> Recording:
    """Drop views that change nothing, work on weights alone, repeated work and unused results. Changes its argument."""
    for node in list(recording.graph.nodes):
        if node.op == "call_function" and not _writes(node):
            _drop_same_view(recording, node) or _fold_weights(recording, node)
    _merge_repeats(recording)
    recording.graph.eliminate_dead_code(_writes)
    return recording


def _writes(node: fx.Node) -> bool:
    """Whether a node does more than return a value. An engine's own operators may, whatever their schemas say."""
    if node.op in ("placeholder", "output"):
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and (bool(schema.is_mutable) or not schema.name.startswith("aten::"))


def _drop_same_view(recording: Recording, node: fx.Node) -> bool:
    """`alias`, `detach`, a slice of everything: an operator that returns the very memory it was given.

    So does the copy of a constant that nobody writes.
    """
    value = recording.values.get(node)
    if not isinstance(value, Tensor):
        return False
    constant = node.target is torch.ops.aten.lift_fresh_copy.default and _unwritten(recording, node)
    for source in node.all_input_nodes:
        if source.op != "placeholder" and (constant or _same(recording.values.get(source), value)):
            node.replace_all_uses_with(source)
            return True
    return False


def _same(first: Any, second: Tensor) -> bool:
    return (
        isinstance(first, Tensor)
        and first.dtype == second.dtype
        and first.shape == second.shape
        and first.stride() == second.stride()
        and first.storage_offset() == second.storage_offset()
        and storage(first) == storage(second)
        and first.is_conj() == second.is_conj()
        and first.is_neg() == second.is_neg()
    )


def _fold_weights(recording: Recording, node: fx.Node) -> None:
    """A value that depends on weights alone is a weight. Whoever loads other weights records again."""
    value, sources = recording.values.get(node), node.all_input_nodes
    if not isinstance(value, Tensor) or not sources or not _unwritten(recording, node):
        return
    if any(source not in recording.parameters for source in sources):
        return
    name = f"folded_{node.name}"
    recording.module.register_buffer(name, value.detach(), persistent=False)
    with recording.graph.inserting_before(node):
        held = recording.graph.get_attr(name)
    recording.values[held] = value
    recording.parameters.add(held)
    node.replace_all_uses_with(held)


def _merge_repeats(recording: Recording) -> None:
    """The same operator on the same unwritten values yields the same: every layer looks up the same rotary angles."""
    seen: dict[Any, fx.Node] = {}
    for node in list(recording.graph.nodes):
        if node.op == "get_attr":
            value = recording.values[node]
            key: Any = (id(value),)
        elif node.op == "call_function" and not _writes(node) and _unwritten(recording, node):
            key = (node.target, _key(node.args), _key(node.kwargs))
        else:
            continue
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)


def _unwritten(recording: Recording, node: fx.Node) -> bool:
    """Whether neither what a node reads nor what it makes is ever written. A list of results counts by its parts."""
    tensors: list[Tensor] = []
    for value in (recording.values.get(found) for found in (node, *node.all_input_nodes)):
        parts = value if isinstance(value, (tuple, list)) else (value,)
        if not all(isinstance(part, Tensor) for part in parts):
            return False
        tensors += parts
    return all(storage(tensor) not in recording.written for tensor in tensors)


def _key(value: Any) -> Any:
    """A hashable form of arguments; nodes by identity."""
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *map(_key, value))
    if isinstance(value, dict):
        return tuple((name, _key(part)) for name, part in value.items())
    # 1, 1.0 and True are equal in Python, not as arguments.
    return value if isinstance(value, fx.Node) else (type(value).__name__, str(value))
