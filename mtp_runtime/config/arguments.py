"""A rank's command line as the engine's arguments: `--max-num-seqs 4` -> max_num_seqs=4. Pure.

vLLM names a flag after the field of its EngineArgs, so the same names are the keyword arguments of `LLM(...)`.
"""

import json
from collections.abc import Callable
from typing import Any

# `--no-X` of a switch is X=False.
SWITCHES = ("enforce_eager", "trust_remote_code", "enable_expert_parallel", "enable_prefix_caching")
_NUMBERS = (
    *("port", "seed", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "kv_cache_memory_bytes"),
    *("data_parallel_size", "data_parallel_rank", "data_parallel_rpc_port", "tensor_parallel_size"),
)
_TEXTS = (
    *("model", "host", "served_model_name", "dtype", "attention_backend", "quantization", "data_parallel_address"),
)
_OBJECTS = ("speculative_config", "additional_config", "compilation_config", "kv_transfer_config")
TYPES: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(_NUMBERS, int),
    **dict.fromkeys(_TEXTS, str),
    **dict.fromkeys(_OBJECTS, json.loads),
    "gpu_memory_utilization": float,
}


def engine_arguments(argv: list[str]) -> dict[str, Any]:
    """The arguments of a rendered command line, in its order. Errors: ValueError for a flag that is not known here."""
    words = argv[3:]
    if argv[:2] == ["vllm", "serve"]:
        words = ["--model", *argv[2:]]
    found: dict[str, Any] = {}
    while words:
        word = words.pop(0)
        name = word.removeprefix("--").replace("-", "_")
        switch = name.removeprefix("no_")
        if not word.startswith("--") or (name not in TYPES and switch not in SWITCHES):
            raise ValueError(f"{word}: not an argument of a rendered command line")
        if switch in SWITCHES:
            found[switch] = switch == name
        elif not words:
            raise ValueError(f"{word}: its value is missing")
        else:
            found[name] = TYPES[name](words.pop(0))
    return found
