"""Exports the attention of a decode step, or of a drafter's K passes, as a torchair graph.

    python -m mtp_runtime.adapters.vllm_ascend.graph_export STEP FOLDER     # STEP: JSON of `Step`

FOLDER gets dynamo.pbtxt, which `mtp_runtime.graphs.dump` reads. Needs torch_npu, no device: torchair writes that file
before it turns to CANN's graph engine, and on a machine without one the process dies there, so run it as a process of
its own and look for the file. Exit code 3, with the name on stdout, where a package is missing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mtp_runtime.adapters.vllm_ascend.torchair_options import TorchairOptions, compiler_config
from mtp_runtime.graphs.exported_step import MISSING, Step, input_names

LATENT, ROPE = 512, 64
SCALE = 192**-0.5
"""Softmax scale of DeepSeek's heads of 128 and 64."""


def example(step: Step) -> dict[str, Any]:
    """The step's tensors by `input_names`, zeros in bf16."""
    import torch

    from mtp_runtime.attention.mask import causal_mask

    tokens = step.slots * (step.k + 1)
    columns = -(-(step.kv + step.k) // step.block_size)
    cache = (step.requests * columns, 1, step.block_size)
    shapes = {
        "query": (tokens, step.heads, LATENT),
        "query_rope": (tokens, step.heads, ROPE),
        "deeper_query": (step.k - 1, step.slots, step.heads, LATENT),
        "deeper_rope": (step.k - 1, step.slots, step.heads, ROPE),
        "latent": (*cache, LATENT),
        "rope": (*cache, ROPE),
    }
    made = {"block_table": torch.zeros(step.slots, columns, dtype=torch.int32), "attn_mask": causal_mask()}
    names = input_names(step)
    halves = {name: torch.zeros(shapes[name], dtype=torch.bfloat16) for name in names if name in shapes}
    return {name: {**made, **halves}[name] for name in names}


def module(step: Step) -> Any:
    """The passes of a step, in order, as a torch module over `example`'s tensors."""
    import torch
    import torch_npu

    # Not inside: dynamo would trace the planner, and take its numbers for inputs of a dynamic graph.
    passes = step.lengths()

    class Passes(torch.nn.Module):
        def forward(
            self,
            query: Any,
            query_rope: Any,
            latent: Any,
            rope: Any,
            block_table: Any,
            attn_mask: Any,
            deeper_query: Any = None,
            deeper_rope: Any = None,
        ) -> tuple[Any, ...]:
            outputs = []
            for depth, (ends, kv) in enumerate(passes):
                nope, position = (query, query_rope) if not depth else (deeper_query[depth - 1], deeper_rope[depth - 1])
                attended, _ = torch_npu.npu_fused_infer_attention_score_v2(
                    nope,
                    latent,
                    latent,
                    query_rope=position,
                    key_rope=rope,
                    atten_mask=attn_mask,
                    block_table=block_table,
                    actual_seq_qlen=ends,
                    actual_seq_kvlen=kv,
                    num_query_heads=step.heads,
                    num_key_value_heads=1,
                    softmax_scale=SCALE,
                    input_layout="TND_NTD",
                    sparse_mode=3,
                    block_size=step.block_size,
                )
                outputs.append(attended)
            return tuple(outputs)

    return Passes()


def export(
    made: Any,
    tensors: dict[str, Any],
    folder: Path,
    dynamic: tuple[str, ...] = (),
    options: TorchairOptions | None = None,
) -> None:
    """Writes FOLDER/dynamo.pbtxt of a module over tensors; every dimension is static but the first of those in
    `dynamic`. options: of the compiler; None for torchair's own and lengths as constants of the graph.

    Without a device CANN's graph engine is not started, and the process does not come back from here.
    """
    import torch
    import torch_npu
    import torchair
    from torchair._ge_concrete_graph import compat_ir, fx2ge_converter

    if not torch_npu.npu.is_available():
        # The engine, and what its operators can do: a matter of the machine, not of the graph.
        fx2ge_converter.initialize_graph_engine = lambda *_, **__: None
        compat_ir.is_cann_compat = lambda *_, **__: ""
    for name, tensor in tensors.items():
        if name in dynamic:
            torch._dynamo.mark_dynamic(tensor, 0)
        else:
            torch._dynamo.mark_static(tensor)
    torchair.dynamo_export(
        model=made,
        export_path=str(folder),
        export_name="step",
        dynamic=bool(dynamic) or (options is not None and options.dynamic),
        # torchair's own default is one object for all calls.
        config=torchair.CompilerConfig() if options is None else compiler_config(options),
        **tensors,
    )


def main() -> int:
    """See the module."""
    written = json.loads(sys.argv[1])
    step = Step(**{**written, "dynamic": tuple(written["dynamic"])})
    try:
        import torch  # noqa: F401
        import torch_npu  # noqa: F401
        import torchair  # noqa: F401
    except ModuleNotFoundError as error:
        print(error.name)
        return MISSING
    export(module(step), example(step), Path(sys.argv[2]), step.dynamic)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
