"""The engine process of one benchmark arm: reads a JSON request a line, answers with `BENCH {...}` lines."""

from __future__ import annotations

import gc
import json
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams

from mtp_runtime.config.engines import CPU_ATTENTION


def build(model: str, k: int, length: int) -> LLM:
    """An engine for one request at a time, in this process. Every arm, stock too, has a deployed rank's backend."""
    speculative = {"method": "mtp", "num_speculative_tokens": k, "attention_backend": CPU_ATTENTION}
    drafts: dict[str, Any] = {"speculative_config": speculative} if k else {}
    return LLM(
        model=model,
        dtype="float32",
        attention_backend=CPU_ATTENTION,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=length,
        max_num_seqs=4,
        kv_cache_memory_bytes=160 << 20,
        seed=0,
        **drafts,
    )


def serve(engine: Any, name: str, request: dict[str, Any]) -> dict[str, Any]:
    """Run one request step by step. Returns step_s [steps], tokens_per_step [steps] and token_ids."""
    sampling = SamplingParams(
        temperature=request["temperature"], seed=1, max_tokens=request["tokens"], ignore_eos=True, detokenize=False
    )
    engine.add_request(name, {"prompt_token_ids": request["prompt"]}, sampling)
    step_s, counts, ids = [], [], []
    while engine.has_unfinished_requests():
        begin = time.perf_counter()
        outputs = engine.step()
        step_s.append(time.perf_counter() - begin)
        now = list(outputs[0].outputs[0].token_ids) if outputs else ids
        counts.append(len(now) - len(ids))
        ids = now
    return {"step_s": step_s, "tokens_per_step": counts, "token_ids": ids}


def main() -> None:
    """Serve until standard input ends."""
    model, k, length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    engine = build(model, k, length).llm_engine
    gc.collect()
    gc.freeze()  # the model's objects; what a step leaves behind is still collected
    print("BENCH {}", flush=True)
    for number, line in enumerate(sys.stdin):
        print("BENCH " + json.dumps(serve(engine, str(number), json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
