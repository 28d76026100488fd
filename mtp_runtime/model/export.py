"""Writes a trained model as the files that engines read, and their manifest of hashes; reads them back."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from mtp_runtime.model import tokenizer as tok
from mtp_runtime.model.arch import Config
from mtp_runtime.model.mtp_layer import DeepseekV3

WEIGHTS = Path(__file__).parent / "weights"
MANIFEST = "manifest.json"
MODEL_FILE = "model.safetensors"


def _shared(config: Config) -> dict[str, str]:
    """MTP tensors that published checkpoints repeat, and the main model's tensor each one equals."""
    prefix = f"model.layers.{config.num_hidden_layers}"
    return {
        f"{prefix}.embed_tokens.weight": "model.embed_tokens.weight",
        f"{prefix}.shared_head.head.weight": "lm_head.weight",
    }


def save(model: DeepseekV3, tokenizer: Tokenizer, folder: Path) -> None:
    """Write weights (bfloat16), configuration, tokenizer and manifest to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        # The routing bias steers by thousandths: published checkpoints keep it in float32 too.
        state[name] = tensor.float() if name.endswith("correction_bias") else tensor.bfloat16()
    state |= {copy: state[original].clone() for copy, original in _shared(model.c).items()}
    save_file(state, folder / MODEL_FILE, metadata={"format": "pt"})
    (folder / MODEL_FILE).chmod(0o644)  # safetensors writes it for its owner alone
    (folder / "config.json").write_text(json.dumps(model.c.to_hf(), indent=2) + "\n")
    generation = {"bos_token_id": tok.BOS_ID, "eos_token_id": tok.EOS_ID, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tok.save(tokenizer, folder, model.c.max_position_embeddings)
    files = sorted(p.name for p in folder.iterdir() if p.is_file() and p.name != MANIFEST)
    manifest = {"files": {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in files}}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def load(folder: Path) -> tuple[DeepseekV3, Tokenizer]:
    """The model in float32, evaluation mode, with the shipped (bfloat16-rounded) weights, and its tokenizer."""
    model = DeepseekV3(Config.from_hf(folder))
    state = {k: v.float() for k, v in load_file(folder / MODEL_FILE).items() if k not in _shared(model.c)}
    model.load_state_dict(state)
    return model.eval().requires_grad_(False), Tokenizer.from_file(str(folder / "tokenizer.json"))


def parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
