"""Muon (K. Jordan, 2024) for the hidden matrices in float32, AdamW for everything else.

torch.optim.Muon orthogonalises in bfloat16, one matrix at a time: on a CPU without bfloat16 units that costs more than
the training step itself. Here matrices of one shape are orthogonalised together, in float32.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration towards the nearest semi-orthogonal matrices; g [N, rows, columns]."""
    a, b, c = 3.4445, -4.7750, 2.0315
    transposed = g.shape[1] > g.shape[2]
    x = g.transpose(1, 2) if transposed else g
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(1, 2) if transposed else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised; the update has the size of an orthogonal matrix whatever the gradient's size."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    shapes[p.shape].append(p)
            for shape, params in shapes.items():
                updates = []
                for p in params:
                    buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    buffer.lerp_(p.grad, 1 - group["momentum"])
                    updates.append(p.grad.lerp(buffer, group["momentum"]))
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for p, update in zip(params, orthogonalise(torch.stack(updates)), strict=True):
                    p.mul_(1 - group["lr"] * group["decay"])
                    p.add_(update, alpha=-group["lr"] * scale)


def build(model: nn.Module, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for matrices inside layers, AdamW for embedding, head, norms and routing gates."""
    matrices, others = [], []
    for name, p in model.named_parameters():
        inside = p.dim() == 2 and "layers." in name and not name.endswith("gate.weight")
        (matrices if inside else others).append(p)
    return [Muon(matrices, muon_lr), torch.optim.AdamW(others, adam_lr, betas=(0.9, 0.95), weight_decay=0.0)]
