"""The judge of a streamed answer, on streams captured from the real stack and on the same streams cut short."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtests.stream import StreamOutcome

FIXTURES = Path(__file__).parents[2] / "monitoring" / "fixtures"
MAX_TOKENS = 12
STREAMS = ("completion.sse", "chat.sse")


def lines_of(name: str) -> list[str]:
    return (FIXTURES / name).read_text(encoding="utf-8").splitlines()


def events_of(name: str) -> list[str]:
    return [line for line in lines_of(name) if line.startswith("data:")]


def judge(lines: list[str], max_tokens: int = MAX_TOKENS) -> StreamOutcome:
    """Feed lines one second apart, the first at second 1."""
    outcome = StreamOutcome(started_s=0.0, max_tokens=max_tokens)
    for second, line in enumerate(lines, start=1):
        outcome.feed(line, float(second))
    return outcome


def has_tokens(line: str) -> bool:
    if not line.startswith("data: {"):
        return False
    return any(choice.get("token_ids") for choice in json.loads(line.removeprefix("data:"))["choices"])


@pytest.mark.parametrize("name", STREAMS)
def test_whole_stream_is_counted_and_timed(name: str) -> None:
    outcome = judge(lines_of(name))
    assert outcome.problem() is None
    assert outcome.tokens == outcome.usage_tokens == MAX_TOKENS
    assert outcome.finish_reason == "length"
    token_lines = [number for number, line in enumerate(lines_of(name), start=1) if has_tokens(line)]
    assert outcome.ttft_s == token_lines[0]
    assert outcome.tpot_s == pytest.approx((token_lines[-1] - token_lines[0]) / (MAX_TOKENS - 1))


@pytest.mark.parametrize("name", STREAMS)
def test_stream_cut_anywhere_is_failed(name: str) -> None:
    lines = lines_of(name)
    last = max(number for number, line in enumerate(lines) if line.startswith("data:"))
    for length in range(last):
        assert judge(lines[:length]).problem() is not None, f"cut after {length} lines"


@pytest.mark.parametrize("name", STREAMS)
def test_each_missing_event_is_named(name: str) -> None:
    *tokens, finish, usage, done = events_of(name)
    assert judge([*tokens, finish, usage]).problem() == f"stream ended without [DONE] after {MAX_TOKENS} tokens"
    assert judge([*tokens, finish, done]).problem() == "no usage in the stream"
    assert "without finish_reason" in str(judge([*tokens, usage, done]).problem())
    fewer = judge([*tokens[:-1], finish, usage, done])
    assert fewer.problem() == f"usage says {MAX_TOKENS} completion tokens, {fewer.tokens} were received"
    assert judge([done]).problem() == "no token seen"
    assert judge([]).problem() == "no token seen"


def test_error_inside_a_stream_is_failed() -> None:
    *start, _finish, _usage, done = events_of("completion.sse")
    broken = judge([*start, 'data: {"error": {"message": "engine died", "code": 500}}', done])
    assert "engine died" in str(broken.problem())


def test_garbage_and_late_events_are_failed() -> None:
    events = events_of("completion.sse")
    assert "not JSON" in str(judge([*events[:3], "data: {", *events[3:]]).problem())
    assert "unexpected line" in str(judge(["<html>502</html>"]).problem())
    usage = events[-2]
    assert judge([*events, usage]).problem() == "event after [DONE]"


def test_length_must_mean_max_tokens() -> None:
    events = events_of("completion.sse")
    assert judge(events, max_tokens=MAX_TOKENS + 1).problem() == "finish_reason is length after 12 of 13 tokens"
    assert judge(events, max_tokens=MAX_TOKENS - 1).problem() == "12 tokens received, max_tokens was 11"


def test_one_token_has_no_time_per_token() -> None:
    outcome = judge(events_of("completion.sse")[:1])
    assert outcome.tokens == 1
    assert outcome.ttft_s == 1.0
    assert outcome.tpot_s is None
