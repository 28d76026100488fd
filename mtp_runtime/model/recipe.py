"""How the tiny model is trained: stages, rates, and which books each step reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """A part of the training: how many layers, how much of each book (tokens), how many books a step, MTP depths."""

    steps: int
    layers: int
    length: int
    batch: int
    depths: int


@dataclass(frozen=True)
class Recipe:
    """How to train; rates are peak rates.

    Short beginnings of the books and few layers first: there the model finds out quickly what to look back for. Then
    whole books, and last all layers. `decay_from` is the share of all steps from which the rates fall.
    """

    stages: tuple[Stage, ...] = (
        Stage(steps=700, layers=4, length=160, batch=4, depths=1),
        Stage(steps=150, layers=4, length=1024, batch=2, depths=3),
        Stage(steps=200, layers=20, length=1024, batch=2, depths=3),
    )
    mtp_weight: float = 0.3
    muon_lr: float = 0.005
    adam_lr: float = 3e-3
    warmup: int = 20
    decay_from: float = 0.83
    balance: float = 1e-3
    seed: int = 20
    save_every: int = 50

    @property
    def steps(self) -> int:
        return sum(s.steps for s in self.stages)

    @property
    def books(self) -> int:
        """Training books in all: 0..books - 1."""
        return sum(s.steps * s.batch for s in self.stages)

    def at(self, step: int) -> tuple[Stage, int, int]:
        """Stage of a step, the step's number within it, and the first training book of the step."""
        book = 0
        for stage in self.stages:
            if step < stage.steps:
                return stage, step, book + step * stage.batch
            step -= stage.steps
            book += stage.steps * stage.batch
        return self.stages[-1], self.stages[-1].steps + step, book

    def rate(self, step: int) -> float:
        """Share of the peak rate: a warm-up in each stage that has new layers, flat, linear decay to 2 %."""
        start = self.decay_from * self.steps
        decay = 1.0 if step < start else max(0.02, 1 - (step - start) / (self.steps - start))
        return min(1.0, (self.at(step)[1] + 1) / self.warmup) * decay
