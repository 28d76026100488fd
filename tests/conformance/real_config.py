"""A real VllmConfig from a command line, through the real NPUPlatform, without weights and without an NPU.

`write_model` makes a folder with config.json and ModelSlim's description file; `make_config` parses words as
`vllm serve` does and makes the configuration. Replaced at the edge, here and nowhere else: `EDGE`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# Source: config.json of deepseek-ai/DeepSeek-R1. Without auto_map, which names Python files beside the weights, and
# without quantization_config: its FP8 is what ModelSlim's W8A8 export took the place of.
R1: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": _YARN,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
# Source: config.json of deepseek-ai/DeepSeek-V3.2: R1's sizes and the lightning indexer.
V32 = R1 | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
}
# R1's layer kinds and the head sizes that the attention operator takes, in sizes for tests that hold tensors.
SMALL = R1 | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 4096,
    "rope_scaling": None,
    "vocab_size": 256,
}
# config.json of deepseek-ai/DeepSeek-V3.1 has the sizes of R1; it differs in the FP8 scales only, left out above.
MODELS = {"r1": R1, "v3.1": R1, "v3.2": V32, "small": SMALL}

EDGE = {
    "vllm_ascend._build_info.__device_type__": "the wheel is built for A2, an A3 build says A3: set before it is read",
    "mooncake.engine.TransferEngine": "built for the host it transfers on, and not installed: cannot be made here",
}


def write_model(folder: Path, model: str = "r1", quantized: bool = True, **changes: Any) -> Path:
    """A folder as the weights of MODELS[model] have it, without the weights.

    quantized: with ModelSlim's description file, which `--quantization ascend` reads and without which none is found.
    changes: other values for config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[model] | changes, indent=1))
    description = folder / "quant_model_description.json"
    description.unlink(missing_ok=True)
    if quantized:
        description.write_text(json.dumps({"model_quant_type": "W8A8_DYNAMIC"}))
    return folder


def make_config(folder: Path, words: Sequence[str] = ()) -> Any:
    """The VllmConfig of `vllm serve FOLDER WORDS`. Raises what vLLM raises; SystemExit for words it cannot parse."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    fresh()
    _without_mooncake()
    args = parser().parse_args([str(folder), *words])
    args.model = args.model_tag
    return AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)


def parser() -> Any:
    """What `vllm serve` parses its words with; the platform adds its own (`--quantization ascend`)."""
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


def fresh() -> None:
    """Puts back what vllm-ascend keeps for a process: it expects one configuration in each."""
    from vllm_ascend import _build_info, utils
    from vllm_ascend.ascend_config import clear_ascend_config

    clear_ascend_config()
    # The device type is a constant of the build, and the wheel's is another one.
    _build_info.__device_type__ = "A3"
    for name in ("_ascend_device_type", "_IS_MOE_MODEL", "_IS_DRAFTER_MOE_MODEL", "_IS_VL_MODEL"):
        assert hasattr(utils, name), name
        setattr(utils, name, None)


def _without_mooncake() -> None:
    """vLLM imports a connector's module to ask its class a question; that module imports the transfer engine."""

    class TransferEngine:
        def __init__(self) -> None:
            raise RuntimeError("there is no transfer engine here")

    engine = ModuleType("mooncake.engine")
    engine.TransferEngine = TransferEngine  # type: ignore[attr-defined]
    sys.modules.setdefault("mooncake", ModuleType("mooncake"))
    sys.modules.setdefault("mooncake.engine", engine)
