"""How the torchair line of vllm-ascend (up to 0.11) compiles a model with MTP: the article's options, as data.

That line is checked and rendered only, not deployed from here. Source: the MTP article, section 3 (torchair).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STATIC_INPUTS = (
    "input_ids",
    "positions",
    "hidden_states",
    "block_table",
    "input_positions",
    "sin",
    "cos",
    "mc2_mask",
    "slot_mapping",
    "attn_mask",
)
"""Inputs of a step that are marked static, each before the first call: dynamo takes some for dynamic otherwise, and one
dynamic input makes the graph dynamic. hidden_states: a drafter's alone. sin, cos: where the model makes them ahead."""
OPTIONAL_INPUTS = ("hidden_states", "sin", "cos", "mc2_mask")


@dataclass(frozen=True, slots=True)
class TorchairOptions:
    """frozen_parameter: weights keep their addresses, so they are handed over once. tiling_schedule_optimize: tilings
    of a static graph are worked out when it is compiled. enable_view_optimize: views cost no copies. jit_compile: off,
    operators come compiled. fullgraph: a break in the graph is an error. sparse: sparse attention (V3.2).
    """

    frozen_parameter: bool = True
    tiling_schedule_optimize: bool = True
    enable_view_optimize: bool = True
    jit_compile: bool = False
    fullgraph: bool = True
    sparse: bool = False

    @property
    def dynamic(self) -> bool:
        """torch.compile's `dynamic`: as the article's code has it, not with sparse attention.

        Shapes stay static either way, for every input is marked. What it changes are the host's lists of lengths:
        inputs of the graph with it, constants, so a graph for every step, without.
        """
        return not self.sparse

    def compile_arguments(self) -> dict[str, Any]:
        """Arguments of torch.compile beside the model and the backend."""
        return {"dynamic": self.dynamic, "fullgraph": self.fullgraph}


def compiler_config(options: TorchairOptions) -> Any:
    """The real torchair.CompilerConfig. jit_compile is not in it: `set_compile_mode`. Raises ImportError without
    torchair."""
    import torch_npu  # noqa: F401  brings torchair along
    import torchair

    config = torchair.CompilerConfig()
    for name in ("frozen_parameter", "tiling_schedule_optimize", "enable_view_optimize"):
        setattr(config.experimental_config, name, getattr(options, name))
    return config


def set_compile_mode(options: TorchairOptions) -> None:
    """Tells torch_npu whether operators are compiled when they are called; for the whole process."""
    import torch
    import torch_npu  # noqa: F401  brings torch.npu along

    torch.npu.set_compile_mode(jit_compile=options.jit_compile)


def mark_static(inputs: Mapping[str, Any], mark: Callable[[Any], None]) -> None:
    """Marks every input of a step. inputs: name -> tensor, None where the step has none; mark: dynamo's mark_static.

    Raises ValueError, with nothing marked, for an input that is not in STATIC_INPUTS or one that is missing.
    """
    unknown = sorted(set(inputs) - set(STATIC_INPUTS))
    missing = sorted(name for name in STATIC_INPUTS if inputs.get(name) is None and name not in OPTIONAL_INPUTS)
    if unknown or missing:
        told = [f"{', '.join(names)} {what}" for names, what in ((unknown, "not known"), (missing, "missing")) if names]
        raise ValueError(f"inputs marked static: {'; '.join(told)}")
    for name in STATIC_INPUTS:
        if inputs.get(name) is not None:
            mark(inputs[name])


def drafter_caches(kv_caches: Sequence[Any]) -> Sequence[Any]:
    """The drafter's share of a model's KV caches: the last, a sequence of one. Raises ValueError without any."""
    if not kv_caches:
        raise ValueError("kv_caches: there are none, so the drafter has none")
    return kv_caches[-1:]
