"""How many drafts each verification accepts on the shipped model: `make bench-acceptance`.

One engine an arm, each in a process of its own, the same held-out prompts, sampled without seeds. An arm is K, how
drafts are taken (greedy: the drafter's best token; probabilistic: sampled from its probabilities, which verification
then sees) and the method. Reported: acceptance length (1 + accepted / draft steps) with its standard error over parts
of the prompts, and the acceptance rate. Time plays no part, so the machine need not be quiet.

The two methods differ by less than such samples tell apart. So for the drafts that are verified both methods' expected
number of accepted drafts is worked out as well, exactly, and the mean of block minus token by token reported.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mtp_runtime.config.engines import CPU_ATTENTION, cpu_env

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_MODEL = "mtp_runtime/model/weights"
PARTS = 10
"""The prompts are asked in this many parts; the spread between parts gives the standard error."""


@dataclass(frozen=True, slots=True)
class Arm:
    """k: drafts a step; drafts: greedy | probabilistic; method: tokenwise | block."""

    k: int
    drafts: str
    method: str


ARMS = [
    Arm(k, drafts, method)
    for k in (1, 2, 3)
    for drafts, method in (("greedy", "tokenwise"), ("probabilistic", "tokenwise"), ("probabilistic", "block"))
    if (k, method) != (1, "block")
]


def expected_accepted(batch: Any, probs: Any, draft_probs: Any) -> tuple[Any, Any]:
    """Expected accepted drafts [B] of these drafts, token by token and by block: over the uniform numbers, exactly."""
    import torch

    from mtp_runtime.verify.block import block_chances
    from mtp_runtime.verify.tokenwise import draft_chances

    p, q = draft_chances(batch, probs, draft_probs)
    passes = torch.where(q > 0, p.double() / q, 0.0).clamp(max=1)
    tokenwise = batch.rectangle(passes, 0.0).cumprod(1).sum(1)
    missed = 1 - block_chances(batch, probs, draft_probs)[0]
    # A prefix of i and more is accepted unless every longer prefix, and i itself, misses.
    block = (1 - missed.flip(1).cumprod(1)).sum(1)
    return tokenwise, block


def compare_methods(method: str) -> list[float]:
    """Note block minus token by token at every verification by `method` in this process, a request each."""
    from mtp_runtime.adapters.vllm_cpu import sampler

    verify, found = sampler.STRATEGIES[method], []

    def watched(batch: Any, probs: Any, draft_probs: Any, noise: Any) -> Any:
        if draft_probs is not None and batch.width > 1:
            tokenwise, block = expected_accepted(batch, probs, draft_probs)
            found.extend((block - tokenwise)[batch.counts == batch.width].tolist())
        return verify(batch, probs, draft_probs, noise)

    sampler.STRATEGIES[method] = watched
    return found


def serve(arm: Arm, options: argparse.Namespace) -> dict[str, Any]:
    """Counts of each part, and the differences of `compare_methods`, in this process."""
    from vllm import LLM, SamplingParams

    prompts = json.loads(Path(options.prompts_file).read_text())
    llm = LLM(
        model=options.model,
        dtype="float32",
        attention_backend=CPU_ATTENTION,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=16,
        kv_cache_memory_bytes=1 << 30,
        disable_log_stats=False,
        seed=0,
        speculative_config={
            "method": "mtp",
            "num_speculative_tokens": arm.k,
            "attention_backend": CPU_ATTENTION,
            "draft_sample_method": arm.drafts,
        },
    )

    def counts() -> dict[str, float]:
        found = {m.name: m.value for m in llm.get_metrics() if "spec_decode" in m.name and hasattr(m, "value")}
        return {what: found[f"vllm:spec_decode_num_{what}"] for what in ("drafts", "draft_tokens", "accepted_tokens")}

    sampling = SamplingParams(
        temperature=options.temperature, max_tokens=options.tokens, ignore_eos=True, detokenize=False
    )
    differences = compare_methods(arm.method)
    parts, before = [], counts()
    for part in range(PARTS):
        asked = [{"prompt_token_ids": p} for p in prompts[part::PARTS]]
        llm.generate(asked, sampling, use_tqdm=False)
        after = counts()
        parts.append({what: after[what] - before[what] for what in after})
        before = after
    return {"parts": parts, "differences": differences}


def run(arm: Arm, options: argparse.Namespace) -> dict[str, Any]:
    """The arm in a process of its own."""
    with tempfile.TemporaryDirectory() as counters:
        env = {
            **os.environ,
            **cpu_env(str(ROOT)),
            "MTP_RUNTIME_COUNTERS_DIR": counters,
            "MTP_VERIFICATION": arm.method,
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        command = [sys.executable, "-m", "loadtests.bench_acceptance", "--arm", json.dumps(asdict(arm))]
        for name in ("model", "tokens", "temperature", "prompts_file"):
            command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("PARTS "))
    found: dict[str, Any] = json.loads(line.removeprefix("PARTS "))
    return found


def summary(served: dict[str, Any]) -> dict[str, float]:
    """Acceptance length, its standard error over the parts, acceptance rate; gain of block over token by token."""
    parts, differences = served["parts"], served["differences"]
    lengths = [1 + part["accepted_tokens"] / part["drafts"] for part in parts]
    whole = {what: sum(part[what] for part in parts) for what in parts[0]}
    return {
        "length": 1 + whole["accepted_tokens"] / whole["drafts"],
        "error": _error(lengths),
        "rate": whole["accepted_tokens"] / whole["draft_tokens"],
        "steps": whole["drafts"],
        **({"gain": statistics.mean(differences), "gain_error": _error(differences)} if differences else {}),
    }


def _error(values: list[float]) -> float:
    """Standard error of the mean."""
    return statistics.stdev(values) / math.sqrt(len(values))


def write_prompts(options: argparse.Namespace, file: Path) -> None:
    """Held-out text of the model's own language, as token ids."""
    from tokenizers import Tokenizer

    from mtp_runtime.model import prompts

    tokenizer = Tokenizer.from_file(str(Path(options.model) / "tokenizer.json"))
    texts = [prompts.completion(number) for number in range(options.prompts)]
    file.write_text(json.dumps([tokenizer.encode(text, add_special_tokens=False).ids for text in texts]))


def main(arguments: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="bench_acceptance", description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--prompts", type=int, default=160, help="how many prompts")
    parser.add_argument("--tokens", type=int, default=96, help="tokens an answer")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--json", action="store_true", help="one JSON line an arm")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--prompts-file", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.arm:
        print("PARTS " + json.dumps(serve(Arm(**json.loads(options.arm)), options)), flush=True)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        options.prompts_file = str(Path(folder) / "prompts.json")
        write_prompts(options, Path(options.prompts_file))
        if not options.json:
            print(f"{'K':>2} {'drafts':>14} {'method':>10} {'acceptance length':>24} {'rate':>7}", end=" ")
            print(f"{'draft steps':>12} {'block gains':>18}")
        for arm in ARMS:
            found: dict[str, Any] = summary(run(arm, options))
            if options.json:
                print(json.dumps({**asdict(arm), **found}), flush=True)
                continue
            length = f"{found['length']:.4f} +- {found['error']:.4f}"
            row = f"{arm.k:>2} {arm.drafts:>14} {arm.method:>10} {length:>24} {found['rate']:>7.4f}"
            gain = f"{found['gain']:.4f} +- {found['gain_error']:.4f}" if "gain" in found else ""
            print(f"{row} {found['steps']:>12.0f} {gain:>18}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
