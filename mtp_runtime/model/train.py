"""Trains the tiny model: main loss plus the MTP loss, resumable at any step, the same numbers after a resume.

The MTP loss is the seed's: the cross entropy of each depth, averaged over the depths, weighted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from mtp_runtime.model import data, optim
from mtp_runtime.model.arch import Config, Gate, rope_table
from mtp_runtime.model.mtp_layer import DeepseekV3, grow, initialise
from mtp_runtime.model.recipe import Recipe


@dataclass(frozen=True)
class Losses:
    """Mean cross entropies in nats a token: of the next token, and of each MTP depth."""

    main: Tensor
    depths: list[Tensor]

    def total(self, weight: float) -> Tensor:
        return self.main + weight * torch.stack(self.depths).mean()


def losses(model: DeepseekV3, tokens: Tensor, real: Tensor, depths: int) -> Losses:
    """tokens and real [B, T + depths]: place j of depth k predicts token j + k' where the main model's k' is 1."""
    t = tokens.shape[1] - max(depths, 2)
    rope = rope_table(model.c, t)
    hidden = model.hidden(tokens[:, :t], rope)
    targets = tokens.masked_fill(~real, data.IGNORE)

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=data.IGNORE)

    main = loss(model.lm_head(hidden)[:, : t - 1], targets[:, 1:t])
    embedded = model.model.embed_tokens(tokens[:, 1 : t + 1])
    outputs = model.mtp.unroll(hidden, embedded, rope, depths)
    return Losses(main, [loss(model.mtp_logits(x)[:, k:], targets[:, 2 + k : t + 2]) for k, x in enumerate(outputs)])


class Trainer:
    """One training run with its state in `folder/checkpoint.pt`."""

    def __init__(self, folder: Path, recipe: Recipe, config: Config | None = None) -> None:
        self.folder, self.recipe = folder, recipe
        self.tokenizer: Tokenizer = data.train_tokenizer()
        self.config = config or Config(vocab_size=self.tokenizer.get_vocab_size())
        self.model = DeepseekV3(replace(self.config, num_hidden_layers=recipe.stages[0].layers))
        initialise(self.model, recipe.seed)
        self.optimisers = optim.build(self.model, recipe.muon_lr, recipe.adam_lr)
        self.step = 0
        self.log: list[dict[str, float]] = []

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    def save(self) -> None:
        """Write the whole state; the old file stays until the new one is complete."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "step": self.step,
            "layers": self.model.c.num_hidden_layers,
            "recipe": repr(self.recipe),
            "model": self.model.state_dict(),
            "optimisers": [o.state_dict() for o in self.optimisers],
            "log": self.log,
        }
        part = self.checkpoint.with_suffix(".part")
        torch.save(state, part)
        part.replace(self.checkpoint)

    def resume(self) -> bool:
        """Load the last checkpoint; False when there is none. ValueError when it belongs to another recipe."""
        if not self.checkpoint.exists():
            return False
        state = torch.load(self.checkpoint)
        if state["recipe"] != repr(self.recipe):
            raise ValueError(f"{self.checkpoint}: made by another recipe ({state['recipe']}); remove it to start anew")
        self._grow(state["layers"])
        self.model.load_state_dict(state["model"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.step, self.log = state["step"], state["log"]
        return True

    def _grow(self, layers: int) -> None:
        """Go on with a model of `layers` layers, with fresh optimiser state; nothing where it has them already."""
        if layers == self.model.c.num_hidden_layers:
            return
        self.model = grow(self.model, replace(self.config, num_hidden_layers=layers), self.recipe.seed)
        self.optimisers = optim.build(self.model, self.recipe.muon_lr, self.recipe.adam_lr)

    def train_step(self) -> dict[str, float]:
        """One step; returns its losses (nats a token) and its speed (tokens a second)."""
        began, recipe = time.perf_counter(), self.recipe
        stage, _, book = recipe.at(self.step)
        self._grow(stage.layers)
        for optimiser, peak in zip(self.optimisers, (recipe.muon_lr, recipe.adam_lr), strict=True):
            for group in optimiser.param_groups:
                group["lr"] = peak * recipe.rate(self.step)
        tokens, real = data.batch(self.tokenizer, book, stage.batch, stage.length, stage.depths)
        found = losses(self.model, tokens, real, stage.depths)
        found.total(recipe.mtp_weight).backward()
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad()
        self._balance_experts()
        self.step += 1
        row = {"step": float(self.step), "main": found.main.item()}
        row |= {f"mtp{k + 1}": x.item() for k, x in enumerate(found.depths)}
        row["tokens_per_s"] = real.sum().item() / (time.perf_counter() - began)
        self.log.append(row)
        return row

    def _balance_experts(self) -> None:
        """Auxiliary-loss-free balancing: overloaded experts are steered away from, underloaded ones towards."""
        for module in self.model.modules():
            if isinstance(module, Gate):
                module.e_score_correction_bias += self.recipe.balance * torch.sign(module.load.mean() - module.load)
