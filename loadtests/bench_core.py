"""Verification without an engine: `make bench-core`. Microseconds a call, median over repeats, one thread."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

from mtp_runtime.verify import DraftBatch, Noise, verify_greedy, verify_tokenwise
from mtp_runtime.verify.block import verify_block

SHAPES = ((1, 1, 1024), (1, 3, 1024), (16, 1, 1024), (16, 3, 1024), (16, 3, 129_280))
"""(requests, K, vocabulary); the last is DeepSeek-V3's vocabulary."""


def cases(requests: int, k: int, vocab: int, with_probs: bool) -> dict[str, Callable[[], object]]:
    """Name -> the call to time, on random drafts."""
    rows = requests * k
    target = torch.rand(rows, vocab).softmax(1)
    draft_probs = torch.rand(rows, vocab).softmax(1) if with_probs else None
    batch = DraftBatch(torch.randint(vocab, (rows,)), [k] * requests, torch.randint(vocab, (requests,)))
    noise = Noise(torch.rand(rows, dtype=torch.float64), torch.empty(requests, vocab).exponential_())
    best = target.argmax(1)
    return {
        "greedy": lambda: verify_greedy(batch, best),
        "tokenwise": lambda: verify_tokenwise(batch, target, draft_probs, noise),
        "block": lambda: verify_block(batch, target, draft_probs, noise),
    }


def microseconds(call: Callable[[], object], repeats: int) -> float:
    """Median over `repeats` calls, after a warm-up."""
    times = []
    for i in range(repeats + 5):
        begin = time.perf_counter()
        call()
        if i >= 5:
            times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def main(arguments: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="bench_core", description=__doc__)
    parser.add_argument("--repeats", type=int, default=50)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"{'requests':>8} {'K':>3} {'vocab':>8} {'drafts':>14} {'method':>10} {'us':>10}")
    for requests, k, vocab in SHAPES:
        for kind in ("one-hot", "probabilities"):
            for name, call in cases(requests, k, vocab, kind == "probabilities").items():
                took = microseconds(call, options.repeats)
                print(f"{requests:>8} {k:>3} {vocab:>8} {kind:>14} {name:>10} {took:>10.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
