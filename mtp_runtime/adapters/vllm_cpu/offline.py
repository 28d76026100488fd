"""A cluster's decoding rank without a server: generates, prints the text and what MTP did (engine environment).

    python -m mtp_runtime.adapters.vllm_cpu.offline CLUSTER [--prompt TEXT]... [--max-tokens N] [--json]

The arguments and the environment are the rank's own (mtp_runtime/config/offline.py; `mtpctl offline CLUSTER` prints the
same as a program). Only statistics are switched on beside them.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
BAD_INPUT = 2
# Of vLLM's metrics: the engine's own count of what was drafted and accepted.
DRAFTS, TOKENS, ACCEPTED = (f"vllm:spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens"))


def main(words: list[str] | None = None) -> int:
    """Exit code 0; 2 for a cluster or a rank that cannot be run here, before anything is loaded."""
    asked = _arguments().parse_args(words)
    # By name: a server runs from the modules that the files of this folder import, the configuration is none of them.
    api, problems, render, offline = (
        importlib.import_module(f"mtp_runtime.config.{name}") for name in ("api", "problems", "render", "offline")
    )
    try:
        plan = render.render(api.load_checked(asked.cluster, asked.inventories))
        found = offline.offline(plan, asked.rank or offline.decoding_rank(plan), str(ROOT))
    except problems.ConfigError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    except KeyError:
        names = ", ".join(rank["name"] for rank in plan["ranks"])
        print(f"{asked.cluster} has no rank {asked.rank!r}; it has {names}", file=sys.stderr)
        return BAD_INPUT
    if found.engine != "vllm-cpu":
        where = f"this runs vllm-cpu; print the program for its hosts: mtpctl offline {asked.cluster}"
        print(f"topology.engine of {asked.cluster} is {found.engine}: {where}", file=sys.stderr)
        return BAD_INPUT
    prompts = asked.prompt or offline.PROMPTS[found.engine]
    with _stdout_for_the_result() as result:
        try:
            report = run(found.environment, found.arguments, prompts, asked.max_tokens, asked.temperature)
        except ValueError as error:  # vLLM's word for a prompt or an argument that it does not take
            print(error, file=sys.stderr)
            return BAD_INPUT
        report = {"cluster": asked.cluster, "rank": found.rank, **report}
        print(json.dumps(report, indent=2) if asked.json else text(report), file=result)
    return 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mtp_runtime.adapters.vllm_cpu.offline", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("cluster", metavar="CLUSTER", help="name of a folder in ansible/inventories")
    parser.add_argument("--rank", metavar="NAME", help="the first that decodes unless named")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="several: they are decoded together")
    parser.add_argument("--max-tokens", type=_positive, default=64, metavar="N", help="of each answer")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: the best token each time")
    parser.add_argument("--inventories", type=Path, metavar="FOLDER", help="instead of the repository's")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    return parser


def _positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is no number of tokens")
    return number


@contextmanager
def _stdout_for_the_result() -> Iterator[Any]:
    """A stream to stdout; what the engine writes there meanwhile goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(kept), "w", encoding="utf-8") as result:
            yield result
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def run(
    environment: dict[str, str], arguments: dict[str, Any], prompts: list[str], max_tokens: int, temperature: float
) -> dict[str, Any]:
    """Answers to the prompts, and the counters of vLLM and of our plugin, from zero to the end."""
    os.environ.update(environment)
    Path(environment.get("TMPDIR", "/tmp")).mkdir(parents=True, exist_ok=True)
    libnuma = ROOT / ".local/deb/usr/lib/x86_64-linux-gnu/libnuma.so.1"
    if libnuma.exists():
        # vLLM's extension looks for it by this name; once loaded, it is found.
        ctypes.CDLL(str(libnuma), mode=ctypes.RTLD_GLOBAL)
    from vllm import LLM, SamplingParams

    llm = LLM(**arguments, disable_log_stats=False)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    from mtp_runtime.adapters.counters import totals

    engine = {one.name: one.value for one in llm.get_metrics() if one.name in (DRAFTS, TOKENS, ACCEPTED)}
    drafts, drafted, accepted = (int(engine.get(name, 0)) for name in (DRAFTS, TOKENS, ACCEPTED))
    answers = [
        {
            "prompt": output.prompt,
            "text": output.outputs[0].text,
            "tokens": len(output.outputs[0].token_ids),
            "finish_reason": output.outputs[0].finish_reason,
        }
        for output in outputs
    ]
    return {
        "k": (arguments.get("speculative_config") or {}).get("num_speculative_tokens", 0),
        "answers": answers,
        "tokens": sum(answer["tokens"] for answer in answers),
        "seconds": round(seconds, 3),
        "drafts": drafts,
        "draft_tokens": drafted,
        "accepted_tokens": accepted,
        "acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_length": 1 + accepted / drafts if drafts else None,
        "plugin": totals(),
    }


def text(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = []
    for answer in report["answers"]:
        lines += [f"Prompt: {answer['prompt']!r}", f"Answer: {answer['text']!r}"]
        lines += [f"        {answer['tokens']} tokens, {answer['finish_reason']}"]
    lines += [f"{report['tokens']} tokens in {report['seconds']} s, K = {report['k']}"]
    if report["drafts"]:
        rate, length = report["acceptance_rate"], report["acceptance_length"]
        accepted = f"{report['accepted_tokens']} of {report['draft_tokens']} drafts accepted"
        lines += [f"{accepted}: acceptance rate {rate:.1%}, {length:.2f} tokens a step"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
