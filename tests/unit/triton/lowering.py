"""Lowers every kernel with triton-ascend's own compiler as far as it goes without CANN: Triton IR, then linalg.

Usage: python lowering.py > FILE. Prints {variant: [Triton IR, linalg]} as JSON. Needs Triton without its interpreter.
"""

from __future__ import annotations

import itertools
import json
import sys

from triton._C.libtriton import ir
from triton.backends.ascend import compiler
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mtp_runtime.verify.triton import block, exact, recover, tokenwise

TYPES = {
    **dict.fromkeys(("tokens", "out"), "*i32"),
    **dict.fromkeys(("cumulative", "chosen", "accepted"), "*i64"),
    **dict.fromkeys(("probs", "draft_probs", "left", "accept", "high", "low"), "*fp32"),
    **dict.fromkeys(("total", "width"), "i32"),
}
"""Argument -> type, as the engine has them."""


def lower(kernel, constants: dict) -> list[str]:
    """Triton IR and linalg of one variant. Raises an exception where the compiler refuses it."""
    target = GPUTarget("npu", "Ascend910B1", 0)
    backend = compiler.AscendBackend(target)
    options = backend.parse_options({})
    signature = {name: TYPES[name] for name in kernel.arg_names if name in TYPES and name not in constants}
    context = ir.context()
    ir.load_dialects(context)
    source = ASTSource(kernel, signature, constants)
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    metadata = {**vars(options), "target": target}
    module = compiler.make_ttir(module, metadata, options)
    return [str(module), compiler.ttir_to_linalg(module, metadata, options)]


def variants() -> dict[str, tuple]:
    """Every kernel for one-hot drafts and real probabilities, K = 3, DeepSeek's vocabulary, the shipped tile."""
    sizes = recover.tiling(129_280, recover.TILE)
    found = {
        "exact": (exact.exact_kernel, {"PLACES": 4}),
        "residual": (block.residual_kernel, {"PLACES": 4, "VOCAB": sizes["VOCAB"], "TILE": sizes["TILE"]}),
    }
    kernels = {"tokenwise": (tokenwise.tokenwise_kernel, ["draft_probs"])}
    kernels["block"] = (block.block_kernel, ["draft_probs", "left"])
    for (name, (kernel, absent)), has_q in itertools.product(kernels.items(), (False, True)):
        constants = {"PLACES": 4, "HAS_Q": has_q, **sizes, **({} if has_q else dict.fromkeys(absent))}
        found[f"{name}, {'probabilities' if has_q else 'one-hot'}"] = (kernel, constants)
    return found


if __name__ == "__main__":
    json.dump({name: lower(*variant) for name, variant in variants().items()}, sys.stdout)
