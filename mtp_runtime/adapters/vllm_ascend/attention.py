"""Patch `attention`: MLA decode's calls of the attention operator are checked before the operator gets them.

vllm-ascend's functions stay as they are. What they call is another thing: the name `torch_npu` of their module gets a
stand-in that checks every call of version 2 of the operator, in its three forms (eager, into given tensors while a
graph is captured or updated, and the question for the workspace), and is torch_npu in all else. In that module only
decode calls version 2.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

from mtp_runtime.adapters.settings import settings
from mtp_runtime.adapters.vllm_ascend.patches import Patch, PatchRefused, Target
from mtp_runtime.attention.call import OPERATORS, FiaCall
from mtp_runtime.attention.cann import release_of
from mtp_runtime.attention.constraints import FiaConstraintError, enforce
from mtp_runtime.attention.findings import LAYOUTS
from mtp_runtime.attention.remedies import FiaCallRefused

MODULE = "vllm_ascend.attention.mla_v1"
WORKSPACE = f"_{OPERATORS['v2']}_get_max_workspace"
log = logging.getLogger("vllm.mtp_runtime_ascend")


class Checks:
    """Which calls were checked: with MTP_DEBUG=1 all of them, else the first of each shape."""

    def __init__(self) -> None:
        self._all = settings().debug
        self._known: set[tuple[Any, ...]] = set()

    def check(self, query: Any, key: Any, value: Any, arguments: dict[str, Any]) -> None:
        """Raises FiaCallRefused where a call breaks a rule.

        Other layouts than those of K + 1 tokens a request, and quantised caches, have other rules: passed by.
        """
        if arguments.get("input_layout") not in LAYOUTS or arguments.get("dequant_scale_query") is not None:
            return
        shape = _shape(query, key, value, arguments)
        if not self._all and shape in self._known:
            return
        written = {name: given for name, given in arguments.items() if name not in ("workspace", "out")}
        try:
            enforce(FiaCall.from_tensors(query, key, value, version="v2", **written), cann_version=cann_version())
        except FiaConstraintError as error:
            raise FiaCallRefused(error) from None
        self._known.add(shape)


def _shape(query: Any, key: Any, value: Any, arguments: dict[str, Any]) -> tuple[Any, ...]:
    """What decides most rules: shapes, types, and how many lengths there are."""
    tensors = (query, key, value, *(arguments.get(name) for name in ("query_rope", "key_rope", "block_table")))
    lists = (arguments.get("actual_seq_qlen"), arguments.get("actual_seq_kvlen"))
    return (
        *((None, None) if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors),
        *(None if values is None else len(values) for values in lists),
        arguments["input_layout"],
        arguments.get("num_query_heads"),
        arguments.get("block_size"),
    )


@functools.cache
def cann_version() -> str | None:
    """That of the machine as torch_npu finds it; None, for the strictest rules, where it finds none we know."""
    from torch_npu.npu.utils import get_cann_version

    found = get_cann_version()
    try:
        release_of(found)
    except ValueError as error:
        log.info("attention calls are checked by the strictest rules: %s", error)
        return None
    return str(found)


class CheckedOperator:
    """The operator, with a check before it."""

    def __init__(self, operator: Any, checks: Checks) -> None:
        self._operator, self._checks = operator, checks

    def __call__(self, query: Any, key: Any, value: Any, **arguments: Any) -> Any:
        self._checks.check(query, key, value, arguments)
        return self._operator(query, key, value, **arguments)

    def out(self, query: Any, key: Any, value: Any, **arguments: Any) -> Any:
        """Into given tensors, as while a graph is captured or updated."""
        self._checks.check(query, key, value, arguments)
        return self._operator.out(query, key, value, **arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operator, name)


class CheckedPackage:
    """torch_npu with the operator checked."""

    def __init__(self, package: Any) -> None:
        checks = Checks()
        self._package = package
        for name in (OPERATORS["v2"], WORKSPACE):
            setattr(self, name, CheckedOperator(getattr(package, name), checks))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._package, name)


def _over_checked_package(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function; the package it calls is the checked one from here on. Raises PatchRefused, ValueError.

    By its module: the function may be another patch's, which calls the package by that module's name for it.
    """
    names = vars(importlib.import_module(MODULE))
    package = names.get("torch_npu")
    if package is None:
        raise PatchRefused(f"{MODULE} has no torch_npu to call")
    if not isinstance(package, CheckedPackage):
        names["torch_npu"] = CheckedPackage(package)
    return function


PATCH = Patch(
    name="attention",
    stage="worker",
    summary="checks every call of the attention operator in MLA decode by its published rules",
    targets=(
        Target(MODULE, "AscendMLAImpl._forward_decode", ("b9b9e0281809f265",), _over_checked_package),
        Target(MODULE, "AscendMLAImpl.update_graph_params", ("92d4725718649d52",), _over_checked_package),
    ),
)
