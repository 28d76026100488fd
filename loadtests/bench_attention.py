"""Decode attention without a model: `make bench-attention`.

Three ways to attend K + 1 tokens a request over a paged latent cache, as a layer does it: `TND` (one call over
segments, C++), `torch` (the same call, in torch) and `expansion` (one row a token for vLLM's decode kernel, as its MLA
backend calls it; the rows are made once a step for all layers, and are not in the figure).
All in this run, in turns, round after round: microseconds a call are medians over the rounds, ratios are medians of
the ratios within a round. A round calls every way once a layer, with other blocks of the cache for each layer, so KV
comes from where it would in a step (torch: for one layer, and not beyond TORCH_LIMIT). float32. One thread, whose own
processor time counts, so that other programs disturb less; with --threads the clock on the wall.

Aim: TND faster than expansion at every shape.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtp_runtime.attention import native, tnd
from mtp_runtime.attention.batch_expansion import expand_rows

BLOCK = 16
LAYERS = 20
"""At most, and as many as `POOL` blocks are enough for."""
POOL = 8192
SCALE = (tnd.LATENT + tnd.ROPE) ** -0.5
TORCH_LIMIT = 1 << 16
"""Entries of a call beyond which the form in torch, which copies them all, is left out."""
WAYS = ("TND", "torch", "expansion")

Call = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Row:
    """One shape: microseconds a call, and how many times as long as TND the others take."""

    batch: int
    k: int
    context: int
    tnd_us: float
    torch_us: float | None
    expansion_us: float
    torch_ratio: float | None
    expansion_ratio: float


def ways(
    batch: int, k: int, context: int, heads: int, cache: Tensor, tables: Sequence[Tensor]
) -> dict[str, list[Call]]:
    """For every way one call a layer. Raises AssertionError if they do not agree."""
    from vllm import _custom_ops as ops

    d = k + 1
    # As the engine has them: the latent part of the queries comes out of a batched product by heads.
    nope = torch.randn(heads, batch * d, tnd.LATENT).transpose(0, 1)
    rope = torch.randn(batch * d, heads, tnd.ROPE)
    ends, lengths = [d * (i + 1) for i in range(batch)], [context] * batch
    starts = torch.tensor([0, *ends], dtype=torch.int32)

    def segments(attend: Callable[..., Tensor], table: Tensor) -> Tensor:
        latents = cache[..., : tnd.LATENT]
        return attend(
            nope,
            latents,
            latents,
            query_rope=rope,
            key_rope=cache[..., tnd.LATENT :],
            actual_seq_lengths=ends,
            actual_seq_lengths_kv=lengths,
            block_table=table,
            num_heads=heads,
            scale=SCALE,
        )

    def rows(table: Tensor, row_lengths: Tensor) -> Tensor:
        query = torch.cat((nope, rope), dim=-1)
        out = torch.zeros(len(query), heads, tnd.LATENT)
        ops.mla_decode_kvcache_cpu(out, query, cache, SCALE, table, row_lengths)
        return out

    expanded = [expand_rows(table, torch.tensor(lengths, dtype=torch.int32), starts) for table in tables]
    operator = torch.ops.mtp_runtime.fused_infer_attention_score
    made: dict[str, list[Call]] = {
        "TND": [lambda table=table: segments(operator, table) for table in tables],  # type: ignore[misc]
        "expansion": [lambda pair=pair: rows(*pair) for pair in expanded],  # type: ignore[misc]
    }
    if batch * context <= TORCH_LIMIT:
        made["torch"] = [lambda: segments(tnd.attend, tables[0])]
    answer = made["TND"][0]()
    for calls in made.values():
        torch.testing.assert_close(calls[0](), answer, atol=1e-4, rtol=0)
    return made


def measure(batch: int, k: int, context: int, heads: int, cache: Tensor, seconds: float) -> Row:
    """All ways at one shape."""
    pages = -(-context // BLOCK)
    layers = min(LAYERS, len(cache) // (batch * pages))
    blocks = torch.randperm(len(cache))[: layers * batch * pages].int().view(layers, batch, pages)
    calls = ways(batch, k, context, heads, cache, list(blocks))
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while len(times["TND"]) < 3 or time.perf_counter() < end:
        for name, one in calls.items():
            times[name].append(_time(one))
    micro = {name: statistics.median(found) * 1e6 for name, found in times.items()}
    ratio = {
        name: statistics.median(a / b for a, b in zip(found, times["TND"], strict=True))
        for name, found in times.items()
    }
    return Row(
        batch, k, context, micro["TND"], micro.get("torch"), micro["expansion"], ratio.get("torch"), ratio["expansion"]
    )


def _time(calls: list[Call]) -> float:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    for call in calls:
        call()
    return (clock() - begin) / len(calls)


def crossover(rows: Sequence[Row]) -> str:
    """From which context on TND is faster than expansion; rows of one K and batch."""
    slower = [row.context for row in rows if row.expansion_ratio < 1]
    faster = [row.context for row in rows if row.context > max(slower, default=0)]
    if not slower:
        return "at every context"
    return f"from {min(faster)} on" if faster else "at no context"


def main(arguments: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="bench_attention", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="at least so long a shape (and at least 3 rounds)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--k", type=int, nargs="+", default=[0, 1, 3, 7])
    parser.add_argument("--context", type=int, nargs="+", default=[128, 512, 2048, 8192])
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON line a row")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    native.load()
    cache = torch.randn(max(POOL, max(options.batch) * -(-max(options.context) // BLOCK)), BLOCK, tnd.LATENT + tnd.ROPE)
    if not options.json:
        print(f"{native.why()}\nmicroseconds a call, and times as long as TND")
        print(f"{'batch':>5} {'K':>2} {'context':>7}", *(f"{way:>9}" for way in (*WAYS, *WAYS[1:])))
    rows = []
    for batch, k, context in itertools.product(options.batch, options.k, options.context):
        row = measure(batch, k, context, options.heads, cache, options.seconds)
        rows.append(row)
        if options.json:
            print(json.dumps({name: getattr(row, name) for name in Row.__slots__}), flush=True)
            continue
        torch_us, torch_ratio = (
            f"{x:{form}}" if x else "-" for x, form in ((row.torch_us, ".0f"), (row.torch_ratio, ".2f"))
        )
        print(
            f"{batch:>5} {k:>2} {context:>7} {row.tnd_us:>9.0f} {torch_us:>9} {row.expansion_us:>9.0f} "
            f"{torch_ratio:>9} {row.expansion_ratio:>9.2f}" + "  MISSED: slower" * (row.expansion_ratio < 1),
            flush=True,
        )
    if not options.json:
        for k in options.k:
            found = {b: crossover([row for row in rows if row.k == k and row.batch == b]) for b in options.batch}
            for at in dict.fromkeys(found.values()):
                batches = ", ".join(str(b) for b in found if found[b] == at)
                print(f"K {k}, batch {batches}: TND is faster than expansion {at}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
