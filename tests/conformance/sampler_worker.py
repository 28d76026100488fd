"""One of two tensor-parallel workers with half of the vocabulary each: RANK STORE. Prints its tokens as JSON.

The real groups of vLLM and vllm-ascend, over gloo; the real forward with `enable_reduce_sample`, patched: twenty greedy
steps, then twenty drawn with top-k, all alike.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import cpu_runner
import sampler_edge as edge
import torch
from sampler_edge import make_sampler, patched, sampling, step
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel, parallel_state

B, K, V, TOP, STEPS = 8, 2, 64, 6, 20
LIBRARY = torch.library.Library("vllm", "IMPL")
LOGITS = torch.randn(B * (K + 1), V, generator=torch.Generator().manual_seed(1)) * 2


def case(temperature: float) -> tuple[Any, None, torch.Tensor, Any]:
    """What forward is given, with the whole vocabulary: most drafts the best token, some placeholders."""
    drafts = LOGITS.argmax(1)[step(torch.zeros(B * K), [K] * B).target_logits_indices]
    drafts[::5] = -1
    limits = {"top_k": torch.full((B,), TOP)} if temperature else {}
    return step(drafts, [K] * B), None, LOGITS.clone(), sampling(torch.full((B,), temperature), **limits)


def main(rank: int, store: str) -> None:
    # vLLM registers its operator for the platform's device: the same function, for tensors of the CPU.
    LIBRARY.impl("all_gather", parallel_state.all_gather, "CPU")
    config = edge.configure(enable_reduce_sample=True)
    with set_current_vllm_config(config), cpu_runner.edge():
        init_distributed_environment(2, rank, f"file://{store}", rank, "gloo")
        initialize_model_parallel(2, 1)
    found = {}
    with patched():
        for name, temperature in (("greedy", 0.0), ("drawn", 1.0)):
            torch.manual_seed(4)
            sampler = make_sampler()
            sampler.prepare_sampling(TOP)
            sampler.sampler.prepare_sampling(TOP)
            tokens = []
            for _ in range(STEPS):
                metadata, probs, logits, parameters = case(temperature)
                own = logits[:, rank * V // 2 : (rank + 1) * V // 2].contiguous()
                tokens.append(sampler(metadata, probs, own, parameters).sampled_token_ids.tolist())
            found[name] = tokens
    print("TOKENS", json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
