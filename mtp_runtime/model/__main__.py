"""`python -m mtp_runtime.model train|quality`: what `make model` runs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, track

from mtp_runtime.model import export, heldout, quality
from mtp_runtime.model.recipe import Recipe
from mtp_runtime.model.report import page
from mtp_runtime.model.train import Trainer

app = typer.Typer(add_completion=False, help="Train the tiny DeepSeek-V3 model and measure what it can do.")
console = Console(stderr=True)
ROOT = Path(__file__).parents[2]
RUN = ROOT / ".local" / "model"


def _watch(rows: list[Any]) -> Iterator[Any]:
    yield from track(rows, "completions", console=console)


@app.command()
def train(
    folder: Annotated[Path, typer.Option(help="Where checkpoints are kept; training resumes from there.")] = RUN,
    out: Annotated[Path, typer.Option(help="Where the finished model is written.")] = export.WEIGHTS,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = os.cpu_count() or 1,
) -> None:
    """Train (or go on training) and write the model."""
    torch.set_num_threads(threads)
    trainer = Trainer(folder, Recipe())
    steps = trainer.recipe.steps
    try:
        resumed = trainer.resume()
    except ValueError as error:
        console.print(f"[red]{error}")
        raise typer.Exit(2) from None
    console.print(f"{'resumed at' if resumed else 'starting at'} step {trainer.step}; checkpoints in {folder}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=steps, completed=trainer.step)
        while trainer.step < steps:
            row = trainer.train_step()
            named = " ".join(f"{k} {row[k]:.3f}" for k in row if k not in ("step", "tokens_per_s"))
            progress.update(task, advance=1, description=f"{named} {row['tokens_per_s']:.0f} tok/s")
            if trainer.step % trainer.recipe.save_every == 0 or trainer.step == steps:
                trainer.save()
                progress.console.print(f"step {trainer.step} of {steps}: {named}")  # also where there is no terminal
    export.save(trainer.model, trainer.tokenizer, out)
    console.print(f"wrote {out}: {export.parameters(trainer.model):,} parameters")


@app.command("quality")
def measure(
    folder: Annotated[Path, typer.Option(help="Folder of the model to measure.")] = export.WEIGHTS,
    prompts: Annotated[int, typer.Option(help="How many held-out prompts.")] = quality.PROMPTS,
    report: Annotated[Path | None, typer.Option(help="Write docs/model.md here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the values as JSON.")] = False,
) -> None:
    """Measure perplexity, grammar, variety and acceptance; exit 1 when a limit is missed."""
    model, tokenizer = export.load(folder)
    console.print("collecting the training text's 20-grams")
    seen = heldout.training_ngrams(tokenizer, Recipe())
    chosen = heldout.prompts(tokenizer, prompts, seen)
    found, completions = quality.measure(model, tokenizer, chosen, progress=_watch)
    if report:
        report.write_text(page(model, tokenizer, found, chosen, completions))
    failures = found.failures()
    if as_json:
        print(json.dumps({**asdict(found), "failures": failures}))
    else:
        for name, value in asdict(found).items():
            console.print(f"{name:24} {value:.4f}")
    for failure in failures:
        console.print(f"[red]missed: {failure}")
    raise typer.Exit(1 if failures else 0)


if __name__ == "__main__":
    app()
