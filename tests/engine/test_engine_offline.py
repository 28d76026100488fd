"""The configuration without a server: vLLM reads the same from both forms, and the decoding rank of `local` runs."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mtp_runtime.config import api
from mtp_runtime.config.offline import offline

ROOT = Path(__file__).resolve().parents[2]
CPU = ("local", "local-single", "lab")
MAX_TOKENS = 12


def engine_args(words: list[str]) -> Any:
    """EngineArgs as the server makes them from a command line."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return AsyncEngineArgs.from_cli_args(make_arg_parser(FlexibleArgumentParser()).parse_args(words))


def plain(value: Any) -> Any:
    """Configuration objects as what was given for them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


@pytest.mark.parametrize("name", CPU)
def test_vllm_reads_the_same_from_the_command_line_and_from_the_arguments(name: str) -> None:
    from vllm.engine.arg_utils import EngineArgs

    plan = api.plan(name)
    for rank in plan["ranks"]:
        found = offline(plan, rank["name"], str(ROOT))
        words = [word.replace("{root}", str(ROOT)) for word in rank["argv"][3:]]
        ours, theirs = EngineArgs(**found.arguments), engine_args(words)
        # Where nothing is given the two forms have defaults of their own.
        bare = EngineArgs(model=found.arguments["model"]), engine_args(["--model", found.arguments["model"]])
        names = {field.name for field in dataclasses.fields(EngineArgs)} - {"kv_transfer_config"}
        given = {
            key
            for key in names
            for one, default in zip((ours, theirs), bare, strict=True)
            if plain(getattr(one, key)) != plain(getattr(default, key))
        }
        assert {"max_model_len", "max_num_seqs", "speculative_config"} <= given
        for key in given:
            one, other = plain(getattr(ours, key)), plain(getattr(theirs, key))
            # A server is told a list of names, LLM one of them.
            other = other[0] if key == "served_model_name" and isinstance(other, list) else other
            assert one == other or str(one) == str(other), (rank["name"], key)
        assert ours.kv_transfer_config is None
        assert (theirs.kv_transfer_config is None) == (rank["role"] == "single")


def test_the_decoding_rank_runs_without_a_server() -> None:
    """One engine of `local`, started as an operator does it."""
    command = [sys.executable, "-m", "mtp_runtime.adapters.vllm_cpu.offline", "local", "--json"]
    prompts = ["The book of Oakford for 14 days.\nDay 1.", "The book of Stonegate for 3 days.\nDay 1. Snow"]
    command += [word for prompt in prompts for word in ("--prompt", prompt)]
    command += ["--max-tokens", str(MAX_TOKENS)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert (report["cluster"], report["rank"], report["k"]) == ("local", "decode-0", api.plan("local")["mtp"]["k"])
    assert [answer["prompt"] for answer in report["answers"]] == prompts
    assert [answer["tokens"] for answer in report["answers"]] == [MAX_TOKENS] * 2 == [report["tokens"] // 2] * 2
    assert all(answer["finish_reason"] == "length" and answer["text"].strip() for answer in report["answers"])
    # Our own parts took part, in every step with drafts.
    plugin = report["plugin"]
    names = ("engine_draft_steps", "verify_calls", "attention_draft_steps")
    steps = {value for key, value in plugin.items() for name in names if name in key}
    assert len(steps) == 1 and steps.pop() > 0, plugin
    assert 0 < report["accepted_tokens"] <= report["draft_tokens"] and report["drafts"] > 0
    assert report["acceptance_rate"] == report["accepted_tokens"] / report["draft_tokens"]
    assert 1 < report["acceptance_length"] <= report["k"] + 1
