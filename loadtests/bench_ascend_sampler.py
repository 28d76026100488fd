"""Verification on Ascend's side: ours against vllm-ascend's pure torch functions, on this machine's CPU.

Both are the real package's `rejection_sample`, without and with the patch `sampler`, called in turn with the same
tensors: logits [B K, 129280] after every constraint, drafts of which about half are accepted, one-hot as the package's
runner has them. Then the real class's whole `forward`, where bonus tokens, copies and constraints, which the patch
leaves to the package, count for both. They run in turn; times are the fastest of all rounds, which other work on the
machine disturbs least, and a ratio is theirs / ours. `same` is that ratio for the package's code against itself: what a
ratio may be off by. Aims: drawn at least 2, greedy at least 1, of which `--noise` may be missing, since nearly all of
both is the same argmax.

Needs the conformance environment; no figure of an NPU follows from it. The kernels of Triton are not measured: neither
side has Triton here.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "conformance"))

import sampler_edge as edge
import vllm_ascend.sample.rejection_sampler as package

VOCAB = 129_280
"""DeepSeek-V3's."""
BATCHES = (1, 16, 64, 256)
KS = (1, 3)
AIMS = {"greedy": 1.0, "drawn": 2.0}
SECONDS = 3.0
ROUNDS = {"function": 9, "forward": 3}
"""At least so many."""

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Row:
    """Fastest times in ms of one kind at one shape; ratio: theirs / ours; same: theirs / theirs again."""

    kind: str
    part: str
    batch: int
    k: int
    theirs_ms: float
    ours_ms: float
    ratio: float
    same: float

    def verdict(self, noise: float) -> str:
        """Against the aim; the whole forward has none."""
        if self.part == "forward":
            return ""
        aim = AIMS[self.kind]
        return "met" if self.ratio >= aim * (1 - noise * (self.kind == "greedy")) else f"MISSED: below {aim}"


def measure(batch: int, k: int, kind: str, seconds: float) -> list[Row]:
    """The function, then the whole forward."""
    generator = torch.Generator().manual_seed(batch * 10 + k)
    logits = torch.randn(batch * (k + 1), VOCAB, generator=generator) * 3
    step = edge.step(torch.zeros(batch * k), [k] * batch)
    target = logits[step.target_logits_indices]
    best = target.argmax(-1)
    wrong = torch.rand(best.shape, generator=generator) < 0.5
    drafts = torch.where(wrong, torch.randint(VOCAB, best.shape, generator=generator), best)
    step = edge.step(drafts, [k] * batch)
    bonus = torch.randint(VOCAB, (batch, 1), generator=generator).int()
    parameters = edge.sampling(torch.full((batch,), 0.8 if kind == "drawn" else 0.0))
    given = (step.draft_token_ids, step.num_draft_tokens, k, step.cu_num_draft_tokens, None, target, bonus, parameters)
    old, sampler = package.rejection_sample, edge.make_sampler()
    with edge.patched():
        new = package.rejection_sample

    def forward(verify: Any) -> Call:
        def call() -> None:
            package.rejection_sample = verify
            sampler(step, None, logits, parameters)

        return call

    parts: dict[str, list[Call]] = {
        "function": [lambda: old(*given), lambda: new(*given), lambda: old(*given)],
        "forward": [forward(old), forward(new), forward(old)],
    }
    try:
        return [_row(kind, part, batch, k, calls, seconds) for part, calls in parts.items()]
    finally:
        package.rejection_sample = old


def _row(kind: str, part: str, batch: int, k: int, calls: list[Call], seconds: float) -> Row:
    for call in calls:
        call()
    rounds: list[list[float]] = []
    end = time.perf_counter() + seconds
    while len(rounds) < ROUNDS[part] or time.perf_counter() < end:
        # Turned round by round: who runs after whom must not matter.
        order = [(len(rounds) + i) % len(calls) for i in range(len(calls))]
        times = {i: _time(calls[i]) for i in order}
        rounds.append([times[i] for i in range(len(calls))])
    theirs, ours, again = (min(column) * 1e3 for column in zip(*rounds, strict=True))
    return Row(kind, part, batch, k, theirs, ours, theirs / ours, theirs / again)


def _time(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main(arguments: list[str] | None = None) -> int:
    """Entry point; 1 where an aim was missed."""
    parser = argparse.ArgumentParser(prog="bench_ascend_sampler", description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="at least so long a cell (and ROUNDS)")
    parser.add_argument("--largest", type=int, default=max(BATCHES), help="largest batch")
    parser.add_argument("--noise", type=float, default=0.03, help="by how much a ratio may miss 1 (default: 0.03)")
    parser.add_argument("--json", action="store_true", help="one JSON line a row")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    edge.configure()
    missed = 0
    if not options.json:
        print(
            f"{'kind':>7} {'part':>9} {'batch':>5} {'K':>2} {'theirs, ms':>11} {'ours, ms':>9} {'ratio':>6} {'same':>5}"
        )
    for kind in AIMS:
        for batch in (b for b in BATCHES if b <= options.largest):
            for k in KS:
                for row in measure(batch, k, kind, options.seconds):
                    verdict = row.verdict(options.noise)
                    missed += verdict.startswith("MISSED")
                    show(row, verdict, options.json)
    return int(missed > 0)


def show(row: Row, verdict: str, as_json: bool) -> None:
    """A line for a row."""
    if as_json:
        print(json.dumps({**asdict(row), "verdict": verdict}), flush=True)
        return
    figures = f"{row.theirs_ms:>11.3f} {row.ours_ms:>9.3f} {row.ratio:>6.2f} {row.same:>5.2f}"
    print(f"{row.kind:>7} {row.part:>9} {row.batch:>5} {row.k:>2} {figures}  {verdict}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
