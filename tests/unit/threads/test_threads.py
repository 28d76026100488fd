"""What went wrong elsewhere has a test here: each thread is named by a test, by a rule with cases, or by a reason."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from mtp_runtime.config import rules

TESTS = Path(__file__).resolve().parents[2]
# vllm-ascend (va), vLLM, SGLang and TensorRT-LLM threads whose fault could be repeated here.
THREADS = re.findall(
    r"\S+",
    """
    va#6524 va#7144 va#7460 va#3909 vLLM#37865 va#16637 va#8392 va#3597 va#11338 va#10878 va#14236 TRT-LLM#17240 va#9367
    va#5472 va#16109 va#10973 va#9688 va#7364 va#13523 SGLang#7927 SGLang#7242 vLLM#40589 vLLM#44185 va#10117 vLLM#43547
    va#7807 va#7603 vLLM#17509 vLLM#27969 vLLM#44297 vLLM#49620 vLLM#39012 vLLM#47382
    """,
)
ELSEWHERE = {
    "va#12154": "the expert balancer does not exist on CPU; nothing here feeds it",
    "va#16638": "a time: `make bench-engine ARGS='--part active-k'` shows what a step without drafts costs",
    "vLLM#47602": "a figure: docs/model.md gives acceptance by position and temperature, the dashboard by instance",
}


@cache
def named() -> str:
    """Every test file, and the sources of the rules, each of which has a passing and a failing case."""
    files = [path.read_text() for path in TESTS.rglob("*.py") if path.parent != Path(__file__).parent]
    return "\n".join([*files, *(rule.source for rule in rules.RULES if rule.check or rule.check_plan)])


@pytest.mark.parametrize("thread", THREADS)
def test_a_thread_has_a_test(thread: str) -> None:
    number = thread.split("#")[1]
    assert re.search(rf"#{number}\b", named()), f"no test names {thread}"


def test_none_is_listed_twice() -> None:
    assert len(THREADS) == len(set(THREADS))
    assert not set(THREADS) & set(ELSEWHERE)
