"""mtpctl slots and mtpctl plan as an operator meets them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mtp_runtime.cli.main import app

ROOT = Path(__file__).parents[3]
ONES = ",".join(["1"] * 16)


def mtpctl(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def test_slots_as_json() -> None:
    result = mtpctl("slots", "--requests", "16", "--k", "1", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout) == {
        "requests": 16,
        "k": 1,
        "slack_slots": 2,
        "slots": 18,
        "tokens": 36,
        "overhead": 0.125,
    }


def test_slots_for_people() -> None:
    result = mtpctl("slots", "--requests", "16", "--k", "1")
    assert result.exit_code == 0
    assert "slack slots" in result.stdout and "12.5%" in result.stdout


def test_plan_as_json() -> None:
    result = mtpctl("plan", "--requests", "16", "--k", "1", "--tokens", ONES, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout) == {
        "graph": {"slots": 18, "width": 2, "tokens": 36},
        "requests": 16,
        "tokens": 16,
        "actual_seq_lengths": [*range(1, 17), 26, 36],
        "actual_seq_lengths_kv": [1] * 16 + [0, 0],
    }


def test_plan_with_kv_lengths_and_fewer_requests() -> None:
    answer = json.loads(
        mtpctl("plan", "--requests", "4", "--k", "2", "--tokens", "1, 3", "--kv", "70,80", "--json").stdout
    )
    assert answer["actual_seq_lengths"] == [1, 4, 8, 12, 15]
    assert answer["actual_seq_lengths_kv"] == [70, 80, 0, 0, 0]


def test_plan_of_a_dummy_step() -> None:
    answer = json.loads(mtpctl("plan", "--requests", "2", "--k", "1", "--tokens", "", "--json").stdout)
    assert (answer["actual_seq_lengths"], answer["actual_seq_lengths_kv"]) == ([2, 4, 6], [0, 0, 0])


def test_plan_for_people() -> None:
    result = mtpctl("plan", "--requests", "4", "--k", "2", "--tokens", "1,3")
    assert result.exit_code == 0
    assert "5 slots x 3 = 15 tokens" in result.stdout
    assert result.stdout.count("request") == 2 and result.stdout.count("padding") == 3


# What is wrong -> (words, option, what the message says)
BAD = {
    "no slack at K = 15": (["slots", "--requests", "16", "--k", "15"], "--k", ["K <= 14", "placeholder", "eager"]),
    "K above the limit": (["slots", "--requests", "16", "--k", "16"], "--k", ["1 to 16 tokens", "placeholder"]),
    "K below 0": (["slots", "--requests", "16", "--k", "-1"], "--k", ["K = -1"]),
    "no requests": (["slots", "--requests", "0", "--k", "1"], "--requests", ["1 request or more"]),
    "too many": (["slots", "--requests", "65537", "--k", "1"], "--requests", ["65536"]),
    "plan, no slack": (["plan", "--requests", "4", "--k", "15", "--tokens", "1"], "--k", ["K <= 14"]),
    "plan, words": (["plan", "--requests", "4", "--k", "1", "--tokens", "1,x"], "--tokens", ["'1,x'", "1,2,2"]),
    "plan, gap": (["plan", "--requests", "4", "--k", "1", "--tokens", "1,,2"], "--tokens", ["'1,,2'"]),
    "plan, zero": (["plan", "--requests", "4", "--k", "1", "--tokens", "1,0"], "--tokens", ["request 1 has 0"]),
    "plan, wide": (["plan", "--requests", "4", "--k", "1", "--tokens", "1,3"], "--tokens", ["request 1 has 3"]),
    "plan, crowd": (
        ["plan", "--requests", "2", "--k", "1", "--tokens", "1,1,1"],
        "--tokens",
        ["3 requests", "2 at once"],
    ),
    "plan, kv count": (
        ["plan", "--requests", "2", "--k", "1", "--tokens", "1", "--kv", "1,2"],
        "--kv",
        ["2 KV lengths"],
    ),
    "plan, kv short": (["plan", "--requests", "2", "--k", "1", "--tokens", "2", "--kv", "1"], "--kv", ["KV length 1"]),
    "plan, kv words": (["plan", "--requests", "2", "--k", "1", "--tokens", "2", "--kv", "many"], "--kv", ["'many'"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_says_what_would_work(name: str) -> None:
    words, option, says = BAD[name]
    result = mtpctl(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert option in result.stderr and "remedy:" in result.stderr and "Traceback" not in result.stderr
    assert all(text in result.stderr for text in says), result.stderr
    answer = json.loads(mtpctl(*words, "--json").stdout)
    assert answer["ok"] is False
    (problem,) = answer["problems"]
    assert option in problem["key"] and problem["remedy"]
    assert all(text in f"{problem['message']} {problem['remedy']}" for text in says)


@pytest.mark.parametrize("words", [["slots", "--requests", "x", "--k", "1"], ["slots"], ["plan", "--k", "1"]])
def test_a_command_line_that_cannot_be_read(words: list[str]) -> None:
    result = mtpctl(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["slots", "plan"])
def test_help(command: str) -> None:
    result = mtpctl(command, "--help")
    assert result.exit_code == 0 and "--requests" in result.stdout


def test_the_core_is_the_standard_library_alone() -> None:
    code = (
        "import sys, mtp_runtime.graphs.planner, mtp_runtime.graphs.strategy;"
        "known = sys.stdlib_module_names | {'mtp_runtime', '__main__'};"
        "print([name for name in sys.modules if name.split('.')[0] not in known])"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
