"""Exports the real MLA layer's decode through torchair: python export_layer.py FOLDER

FOLDER/decode: a step of CASE with its two slack slots. FOLDER/draft: the drafter's K = 3 passes over the same slots, in
vllm-ascend's drafter context, all of one layer and one cache. FOLDER/dynamic: the first, one input marked dynamic.
FOLDER/dense and FOLDER/sparse: the drafter's passes of OPTIONS_STEP under the torchair line's options. Each in a forked
process, which dies in CANN's graph engine after its graph is written.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from ascend_layer import BLOCK_SIZE, configuration, layer, metadata, step
from decode_cases import CASES, HEADS, NOPE, ROPE, Case, numbers
from vllm.forward_context import get_forward_context, set_forward_context

from mtp_runtime.adapters.vllm_ascend import attention
from mtp_runtime.adapters.vllm_ascend.graph_export import example, export, module
from mtp_runtime.adapters.vllm_ascend.torchair_options import TorchairOptions, set_compile_mode
from mtp_runtime.graphs.exported_step import DRAFT, Step

CASE = "K=1, sixteen fresh requests, two slack slots"
K = 3
OPTIONS_STEP = Step(heads=8, slots=18, requests=16, k=3, block_size=128, kind=DRAFT)


class Layer(torch.nn.Module):
    """Passes of one real layer: absorption, attention, value projection."""

    def __init__(self, case: Case, metas: list[Any]) -> None:
        super().__init__()
        self.made, self.metas = layer(numbers(case).weight), metas

    def forward(self, query: Any, latent: Any, rope: Any, block_table: Any, attn_mask: Any) -> tuple[Any, ...]:
        outputs, first = [], 0
        for meta in self.metas:
            meta.decode.block_table, meta.decode.attn_mask = block_table, attn_mask
            count = meta.num_decode_tokens
            part = query[first : first + count]
            absorbed, position = self.made._q_proj_and_k_up_proj(part.flatten(1))
            outputs.append(self.made._forward_decode(absorbed, position, latent, rope, BLOCK_SIZE, meta))
            first += count
        return tuple(outputs)


def deeper(case: Case, table: torch.Tensor) -> list[Any]:
    """Metadata of the drafter's later passes: a token a slot, an entry more each time where there is a request."""
    free = case.slots - len(case.kv)
    ends = list(range(1, case.slots + 1))
    return [metadata(ends, [*(kv + depth for kv in case.kv), *[0] * free], table) for depth in range(1, K)]


def write(name: str, folder: Path) -> None:
    """One graph."""
    case = CASES[CASE]
    query, latent, rope, meta = step(case, numbers(case), 3)
    table, metas = meta.decode.block_table, [meta]
    if name == "draft":
        metas += deeper(case, table)
        query = torch.zeros(sum(one.num_decode_tokens for one in metas), HEADS, NOPE + ROPE, dtype=query.dtype)
    tensors = {"query": query, "latent": latent, "rope": rope, "block_table": table}
    with set_forward_context(meta, configuration()):
        context = get_forward_context()
        context.capturing, context.is_draft_model = False, name == "draft"
        dynamic = ("query",) if name == "dynamic" else ()
        export(Layer(case, metas), {**tensors, "attn_mask": meta.decode.attn_mask}, folder / name, dynamic)


def write_with_options(name: str, folder: Path) -> None:
    """One graph under the options, dense or sparse."""
    options = TorchairOptions(sparse=name == "sparse")
    set_compile_mode(options)
    export(module(OPTIONS_STEP), example(OPTIONS_STEP), folder / name, options=options)


GRAPHS = dict.fromkeys(("decode", "draft", "dynamic"), write) | dict.fromkeys(("dense", "sparse"), write_with_options)

if __name__ == "__main__":
    attention.PATCH.check()
    for wanted, make in GRAPHS.items():
        child = os.fork()
        if not child:
            make(wanted, Path(sys.argv[1]))
            os._exit(0)
        os.waitpid(child, 0)
