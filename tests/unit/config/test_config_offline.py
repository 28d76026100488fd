"""`mtpctl offline`: the program is complete, and has every argument of the rank's command line, none added."""

import ast
import copy as copying
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inventory_copy import DELETE, Copy
from typer.testing import CliRunner

from mtp_runtime import releases
from mtp_runtime.adapters.vllm_cpu import offline as runner
from mtp_runtime.cli.main import app
from mtp_runtime.config import api
from mtp_runtime.config.arguments import SWITCHES, TYPES, engine_arguments
from mtp_runtime.config.offline import DATA_PARALLEL, HAND_OVER_ENV, MEETING_POINT, decoding_rank, offline, program

SHIPPED = sorted(p.name for p in api.inventories().iterdir() if (p / "hosts.yml").is_file())
PLANS = {name: api.plan(name) for name in SHIPPED}
RANKS = [(name, rank["name"]) for name in SHIPPED for rank in PLANS[name]["ranks"] if rank["rank"] in (0, 31)]
ROOT = "/opt/mtp"


def argv_of(name: str, rank: str) -> list[str]:
    """A rank's command line, the repository's folder put in."""
    argv = next(one["argv"] for one in PLANS[name]["ranks"] if one["name"] == rank)
    return [word.replace("{root}", ROOT) for word in argv]


def flags(argv: list[str]) -> dict[str, str | None]:
    """--flag -> its value as text, None for a switch; read here without the code under test."""
    words = ["--model", *argv[2:]] if argv[0] == "vllm" else argv[3:]
    found: dict[str, str | None] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word] = None if following.startswith("--") else following
    return found


def call_of(text: str) -> dict[str, Any]:
    """Keyword arguments of the program's one LLM(...) call."""
    (call,) = (
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "LLM"
    )
    assert not call.args
    return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}


def as_flags(name: str, value: Any) -> dict[str, str | None]:
    """An argument of LLM(...) as the flag that vLLM names after it."""
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        return {flag: None}
    if value is False:
        return {f"--no-{flag[2:]}": None}
    return {flag: json.dumps(value, separators=(",", ":")) if isinstance(value, dict) else str(value)}


@pytest.mark.parametrize(("name", "rank"), RANKS)
def test_every_argument_of_the_command_line_is_there_and_no_other(name: str, rank: str) -> None:
    found = offline(PLANS[name], rank, ROOT)
    arguments = call_of(program(found, name, ROOT))
    assert arguments == found.arguments
    written = flags(argv_of(name, rank))
    ours: dict[str, str | None] = {}
    for key, value in arguments.items():
        ours |= as_flags(key, value)
    left_out = {flag: written.pop(flag) for flag in ("--host", "--port", "--kv-transfer-config") if flag in written}
    assert {"--host", "--port"} <= set(left_out)
    place = {
        env: written.pop(f"--{key.replace('_', '-')}")
        for key, env in DATA_PARALLEL.items()
        if f"--{key.replace('_', '-')}" in written
    }
    assert ours == written
    assert list(ours) == list(written), "in the order of the command line"
    environment = found.environment
    assert {env: environment[env] for env in place} == place
    rank_env = next(one["env"] for one in PLANS[name]["ranks"] if one["name"] == rank)
    kept = {key: value.replace("{root}", ROOT) for key, value in rank_env.items() if key not in HAND_OVER_ENV}
    more = MEETING_POINT if found.processes > 1 else {}
    assert environment == {**kept, **place, **more}
    names = {flag[2:].replace("-", "_") for flag in left_out} | {key for key in rank_env if key in HAND_OVER_ENV}
    assert set(found.left_out) == names


@pytest.mark.parametrize(("name", "rank"), RANKS)
def test_the_program_is_complete(name: str, rank: str, tmp_path: Path) -> None:
    """Run with a stand-in for vLLM, which keeps what it sees of the environment when it is imported."""
    found = offline(PLANS[name], rank, ROOT)
    (tmp_path / "vllm.py").write_text(
        "import json, os\n"
        "ENV = dict(os.environ)\n"
        "class SamplingParams:\n    def __init__(self, **given): self.given = given\n"
        "class Answer: text = 'answer'\n"
        "class Output:\n    def __init__(self, prompt): self.prompt, self.outputs = prompt, [Answer]\n"
        "class LLM:\n"
        "    def __init__(self, **given): self.given = given\n"
        "    def generate(self, prompts, params):\n"
        "        seen = {'env': ENV, 'arguments': self.given, 'prompts': prompts, 'sampling': params.given}\n"
        "        print(json.dumps(seen))\n"
        "        return [Output(prompt) for prompt in prompts]\n"
    )
    file = tmp_path / "program.py"
    file.write_text(program(found, name, ROOT))
    numbers = ["2"] * (found.processes > 1)
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, str(file), *numbers], capture_output=True, text=True, env=env, check=True)
    seen, *answers = done.stdout.splitlines()
    told = json.loads(seen)
    assert told["arguments"] == found.arguments
    expected = {**found.environment}
    if found.processes > 1:
        tp = found.arguments["tensor_parallel_size"]
        expected |= {"VLLM_DP_RANK": "2", "ASCEND_RT_VISIBLE_DEVICES": ",".join(map(str, range(2 * tp, 3 * tp)))}
    assert {key: told["env"].get(key) for key in expected} == expected
    assert told["sampling"] == {"max_tokens": 16, "temperature": 0}
    assert len(answers) == len(told["prompts"]) and all("generated text: 'answer'" in line for line in answers)


# The second example of the MTP article, section 6, as it stands there.
ARTICLE = """
llm = LLM(
    model="/home/data/DeepSeek-R1_w8a8/",
    tensor_parallel_size=16,
    max_num_seqs=16,
    gpu_memory_utilization=0.9,
    distributed_executor_backend="mp",
    enable_expert_parallel=True,
    speculative_config={
        "method": "deepseek_mtp",
        "num_speculative_tokens": 1,
    },
    trust_remote_code=True,
    enforce_eager=False,
    max_model_len=2000,
    additional_config = {
       'torchair_graph_config': {
            'enabled': True,
            "graph_batch_sizes": [16],
            'enable_multistream_shared_expert': False,
        },
    }
)
"""
# What it writes although the engine does the same without it: all ranks on one host, graphs unless switched off.
WRITTEN_DEFAULTS = {"distributed_executor_backend": "mp", "enforce_eager": False}
# What its first example gives the server, and the second leaves out.
OF_THE_FIRST = {"served_model_name": "deepseekr1", "quantization": "ascend", "enable_prefix_caching": False}


def test_the_example_of_the_article(copy: Callable[[str], Copy]) -> None:
    """seed-online with the second example's sizes gives the second example."""
    found = copy("seed-online").edit(
        {
            "model.path": "/home/data/DeepSeek-R1_w8a8/",
            "model.max_model_len": 2000,
            "topology.single": {"dp": 1, "tp": 16, "port": 1234},
            "serving.additional_config.torchair_graph_config.enable_multistream_shared_expert": False,
            "serving.additional_config.enable_weight_nz_layout": DELETE,
        }
    )
    text = program(offline(api.plan("seed-online", found.root), "single-0", ROOT), "seed-online", ROOT)
    assert call_of(text) | WRITTEN_DEFAULTS == call_of(ARTICLE) | OF_THE_FIRST
    for prompt in ("Hello, my name is", "The president of the United States is", "The capital of France is"):
        assert f'"{prompt}"' in text
    assert "from vllm import LLM, SamplingParams" in text and "max_tokens=16, temperature=0" in text


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["offline", *words])
    return result.exit_code, result.stdout, result.stderr


def test_as_a_command(copy: Callable[[str], Copy]) -> None:
    found = copy("local")
    where = ("--inventories", str(found.root))
    code, shown, _ = run("local", *where)
    assert (code, decoding_rank(PLANS["local"])) == (0, "decode-0")
    assert shown == program(offline(PLANS["local"], "decode-0", str(api.repository())), "local", str(api.repository()))
    assert "# Rank decode-0 of local" in shown and f"{api.repository()}/.local/engine/bin/python FILE" in shown
    assert call_of(run("local", "--k", "3", *where)[1])["speculative_config"]["num_speculative_tokens"] == 3
    assert "speculative_config" not in call_of(run("local", "--k", "0", *where)[1])
    prefill = call_of(run("local", "--rank", "prefill-0", *where)[1])
    assert prefill["enforce_eager"] is True
    told = json.loads(run("a3", "--rank", "decode-31", "--json")[1])
    assert told["environment"]["VLLM_DP_RANK"] == "31" and told["arguments"] == call_of(told["program"])
    assert told["left_out"]["kv_transfer_config"]["kv_port"] == "36200"
    code, _, said = run("local", "--rank", "decode-9", *where)
    assert (code, "has no rank 'decode-9'; it has prefill-0 to decode-0" in said) == (2, True)
    code, shown, said = run("local", "--k", "16", "--json", *where)
    assert (code, json.loads(shown)["ok"], "R03" in said) == (2, False, True)


def test_what_cannot_run_here_is_refused_before_an_engine_is_loaded(
    copy: Callable[[str], Copy], capsys: pytest.CaptureFixture[str]
) -> None:
    found = copy("local").edit({"mtp.num_speculative_tokens": 16})
    for words, said in (
        (["a3"], "mtpctl offline a3"),
        (["nobody"], "there is no inventory"),
        (["local", "--rank", "x"], "it has prefill-0, decode-0"),
        (["local", "--inventories", str(found.root)], "[R03]"),
    ):
        assert runner.main(words) == 2
        assert said in capsys.readouterr().err
    for words in (["local", "--max-tokens", "0"], ["local", "--max-tokens", "x"], []):
        with pytest.raises(SystemExit) as stopped:
            runner.main(words)
        assert stopped.value.code == 2
    assert "vllm" not in sys.modules


def test_what_people_read() -> None:
    report = {"answers": [{"prompt": "a\n", "text": " b", "tokens": 2, "finish_reason": "length"}], "tokens": 2}
    report |= {"seconds": 0.5, "k": 1, "drafts": 0}
    assert runner.text(report).splitlines() == [
        "Prompt: 'a\\n'",
        "Answer: ' b'",
        "        2 tokens, length",
        "2 tokens in 0.5 s, K = 1",
    ]
    report |= {"drafts": 4, "draft_tokens": 4, "accepted_tokens": 3, "acceptance_rate": 0.75, "acceptance_length": 1.75}
    assert runner.text(report).endswith("3 of 4 drafts accepted: acceptance rate 75.0%, 1.75 tokens a step")


def test_a_flag_that_is_not_known_is_an_error() -> None:
    argv = ["vllm", "serve", "/weights", "--max-num-seqs", "4"]
    assert engine_arguments(argv) == {"model": "/weights", "max_num_seqs": 4}
    for more in (["--new-flag", "1"], ["stray"], ["--seed"], ["--no-max-num-seqs"], ["--port", "x"]):
        with pytest.raises(ValueError, match=r"."):
            engine_arguments([*argv, *more])


def test_every_flag_that_is_rendered_is_known(copy: Callable[[str], Copy]) -> None:
    rendered = {flag for name, rank in RANKS for flag in flags(argv_of(name, rank))}
    assert {flag[2:].removeprefix("no-").replace("-", "_") for flag in rendered} <= {*TYPES, *SWITCHES}
    more = copy("local").edit({"serving.prefix_caching": True, "serving.kv_cache_bytes": 10**9})
    assert engine_arguments(api.plan("local", more.root)["ranks"][1]["argv"])["enable_prefix_caching"] is True
    assert len({release.engine for release in releases.RELEASES}) == 2, "another engine needs its own PROMPTS"


@settings(deadline=None)
@given(st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=20))
def test_texts_survive_as_python(text: str) -> None:
    plan = copying.deepcopy(PLANS["local-single"])
    plan["ranks"][0]["argv"][4] = f"/weights/{text}"
    found = offline(plan, "single-0", ROOT)
    assert call_of(program(found, "local-single", ROOT))["model"] == f"/weights/{text}"
