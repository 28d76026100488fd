"""Verification without a model: `make bench-core`.

Every cell is a ratio of times measured side by side in this run: the calls of a row take turns, round after round,
and the ratios are taken within a round; median over the rounds. The memory limit is one pass over the same logits
[R, V], R = B (K + 1) rows: an argmax (the faster of torch's and vLLM's kernel) for greedy, a softmax for the rest.
`ours` is the whole way from logits to emitted tokens, random numbers and copies included, as the engine calls it;
`vLLM` is its own sampler's whole way on the same input. One thread, float32 logits.

Aims: greedy at most 1.2 of an argmax pass, one-hot at most 2.5 and with draft probabilities at most 4 of a softmax
pass, never slower than vLLM, and at most one copy of the logits in extra memory (the peak of one call, in copies of the
logits; 8 MiB beyond are forgiven). Top-k and top-p filtering, which both sides leave to vLLM's function, is timed
apart.

Last, planning and padding (`bench_plan`), which go before every step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from loadtests import bench_plan

VOCAB = 129_280
"""DeepSeek-V3's."""
SHAPES = [(batch, k) for batch in (1, 16, 64, 256) for k in (1, 3)]
AIMS = {"greedy": 1.2, "one-hot": 2.5, "tokenwise, q": 4.0, "block, q": 4.0}
PARTS = ("verification", "planning")
SMALL = 8 << 20
"""Bytes that do not count as a copy: sums of tiles, a chunk that fits a cache."""

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of verification at one shape: ratios to the pass, and memory in copies of the logits."""

    kind: str
    batch: int
    k: int
    pass_ms: float
    ours: float
    vllm: float
    memory: float
    vllm_memory: float

    @property
    def verdict(self) -> str:
        """What was missed, if anything."""
        missed = [f"over {AIMS[self.kind]}"] if self.ours > AIMS[self.kind] else []
        missed += ["slower than vLLM"] if self.ours > self.vllm else []
        copy = self.batch * (self.k + 1) * VOCAB * 4
        missed += ["more than one copy"] if (self.memory - 1) * copy > SMALL else []
        return f"MISSED: {', '.join(missed)}" if missed else "met"


def metadata(drafts: Tensor, batch: int, k: int) -> SpecDecodeMetadata:
    """As the runner makes it for requests of k drafts each."""
    made = SpecDecodeMetadata.make_dummy(drafts.view(batch, k).tolist(), drafts.device)
    rows = torch.arange(batch * (k + 1)).view(batch, k + 1)
    return replace(
        made,
        target_logits_indices=rows[:, :-1].flatten(),
        bonus_logits_indices=rows[:, -1].contiguous(),
        logits_indices=rows.flatten(),
    )


def sampling(batch: int, temperature: float) -> SamplingMetadata:
    """Requests without any constraint."""
    nothing = torch.empty(0)
    return SamplingMetadata(
        temperature=torch.full((batch,), temperature),
        all_greedy=temperature == 0,
        all_random=temperature > 0,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=nothing,
        presence_penalties=nothing,
        repetition_penalties=nothing,
        output_token_ids=[],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def ratios(baseline: list[Call], calls: list[Call], seconds: float) -> tuple[float, list[float]]:
    """Median ms of the fastest baseline, and for each call the median ratio to it within a round."""
    everything = [*baseline, *calls]
    for call in everything:
        call()
    times: list[list[float]] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        times.append([_time(call) for call in everything])
    passes = [min(row[: len(baseline)]) for row in times]
    found = [
        statistics.median(row[len(baseline) + i] / one for row, one in zip(times, passes, strict=True))
        for i in range(len(calls))
    ]
    return statistics.median(passes) * 1e3, found


def peak(call: Call) -> int:
    """Bytes a call holds at most, beyond what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        call()
    events = watched.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(itertools.accumulate(size for _, size in changes))


def _time(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measure(batch: int, k: int, seconds: float) -> list[Row]:
    """All kinds at one shape. Drafts are drawn so that about half are accepted."""
    from mtp_runtime.adapters.vllm_cpu.sampler import MtpRejectionSampler

    generator = torch.Generator().manual_seed(batch * 10 + k)
    logits = torch.randn(batch * (k + 1), VOCAB, generator=generator) * 3
    out = torch.empty_like(logits)
    best = logits.view(batch, k + 1, VOCAB)[:, :-1].argmax(-1)
    wrong = torch.rand(best.shape, generator=generator) < 0.5
    drafts = torch.where(wrong, torch.randint(VOCAB, best.shape, generator=generator), best).flatten().int()
    draft_probs = (torch.randn(batch * k, VOCAB, generator=generator) * 3).softmax(-1)
    step, greedy, drawn = metadata(drafts, batch, k), sampling(batch, 0.0), sampling(batch, 0.8)
    stock, own = RejectionSampler(Sampler()), MtpRejectionSampler(Sampler())

    def both(probs: Tensor | None, parameters: SamplingMetadata) -> list[Call]:
        # vLLM may change logits in place, so it is given the original and its results are not looked at.
        return [lambda s=s: s(step, probs, logits, parameters) for s in (own, stock)]  # type: ignore[misc]

    argmax: list[Call] = [lambda: logits.argmax(-1), lambda: torch.ops._C.greedy_argmax(logits)]
    softmax: list[Call] = [lambda: torch.softmax(logits, -1, out=out)]
    plan = [("greedy", argmax, None, greedy, "auto"), ("one-hot", softmax, None, drawn, "tokenwise")]
    plan += [(f"{method}, q", softmax, draft_probs, drawn, method) for method in ("tokenwise", "block")]
    rows = []
    for kind, baseline, probs, parameters, method in plan:
        own.method = method
        pass_ms, (ours, theirs) = ratios(baseline, both(probs, parameters), seconds)
        own.forget()
        memory = [peak(call) / (logits.numel() * logits.element_size()) for call in both(probs, parameters)]
        rows.append(Row(kind, batch, k, pass_ms, ours, theirs, *memory))
    return rows


def filters(batch: int, k: int, seconds: float) -> dict[str, float]:
    """Top-k and top-p over all rows, against the softmax pass."""
    logits = torch.randn(batch * (k + 1), VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    rows = len(logits)
    limits = {"top-k 50": (torch.full((rows,), 50), None), "top-p 0.9": (None, torch.full((rows,), 0.9))}
    calls = [lambda pair=pair: apply_top_k_top_p(logits.clone(), *pair) for pair in limits.values()]
    return dict(zip(limits, ratios([lambda: logits.softmax(-1)], calls, seconds)[1], strict=True))  # type: ignore[arg-type]


def show(options: argparse.Namespace) -> None:
    """Measure verification and print it, row by row."""
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()  # as vLLM's worker does
    if not options.json:
        print(f"{'batch':>5} {'K':>2} {'kind':>13} {'pass, ms':>9}", end=" ")
        print(f"{'ours':>7} {'vLLM':>7} {'memory':>7} {'vLLM':>7}  aim")
    for batch, k in SHAPES:
        if batch > options.largest:
            continue
        for row in measure(batch, k, options.seconds):
            if options.json:
                fields: dict[str, Any] = {name: getattr(row, name) for name in Row.__slots__}
                print(json.dumps({**fields, "verdict": row.verdict}), flush=True)
                continue
            figures = " ".join(f"{x:>7.2f}" for x in (row.ours, row.vllm, row.memory, row.vllm_memory))
            print(f"{batch:>5} {k:>2} {row.kind:>13} {row.pass_ms:>9.3f} {figures}  {row.verdict}", flush=True)
    for name, ratio in filters(16, 3, options.seconds).items():
        print(
            json.dumps({"filter": name, "ratio": ratio})
            if options.json
            else f"{name} alone, batch 16, K 3: {ratio:.2f}"
        )


def main(arguments: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="bench_core", description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="at least so long a cell (and at least 5 rounds)")
    parser.add_argument("--largest", type=int, default=256, help="largest batch")
    parser.add_argument("--json", action="store_true", help="one JSON line a row")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if "verification" in options.part:
        show(options)
    if "planning" in options.part:
        bench_plan.show(options.seconds / 4, options.largest, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
