"""Reads one streamed answer (server-sent events of vLLM's OpenAI API) and judges it. No network here.

Tokens are counted from the `token_ids` of each chunk (request field `return_token_ids`): with MTP one chunk carries
several tokens, so chunks are not tokens, and the count does not lean on the `usage` that it is compared with.
Times are seconds on one monotonic clock.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

DONE = "[DONE]"


@dataclass(slots=True)
class StreamOutcome:
    """What a stream showed. Feed it line by line, then ask `problem`."""

    started_s: float
    max_tokens: int
    tokens: int = 0
    chunks: int = 0  # events that carried tokens
    usage_tokens: int | None = None
    prompt_tokens: int | None = None
    finish_reason: str | None = None
    done: bool = False
    error: str | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    _after_done: bool = field(default=False, repr=False)

    def feed(self, line: str, now_s: float) -> None:
        """Take one line of the response body, received at `now_s`."""
        if not line.startswith("data:"):
            if line.strip() and not line.startswith(":"):
                self.error = self.error or f"unexpected line in the stream: {line[:200]!r}"
            return
        data = line.removeprefix("data:").strip()
        if data == DONE:
            self.done = True
            return
        if self.done:
            self._after_done = True
        try:
            event = json.loads(data)
        except json.JSONDecodeError:
            self.error = self.error or f"event is not JSON: {data[:200]!r}"
            return
        self._take_event(event, now_s)

    def _take_event(self, event: dict[str, Any], now_s: float) -> None:
        if event.get("error") is not None:
            self.error = self.error or f"error in the stream: {json.dumps(event['error'])[:300]}"
        usage = event.get("usage")
        if usage:
            self.usage_tokens = int(usage["completion_tokens"])
            self.prompt_tokens = int(usage["prompt_tokens"])
        for choice in event.get("choices", ()):
            count = len(choice.get("token_ids") or ())
            if count:
                self.tokens += count
                self.chunks += 1
                self.last_token_s = now_s
                if self.first_token_s is None:
                    self.first_token_s = now_s
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from sending the request."""
        return None if self.first_token_s is None else self.first_token_s - self.started_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None with fewer than two tokens."""
        if self.tokens < 2 or self.first_token_s is None or self.last_token_s is None:
            return None
        return (self.last_token_s - self.first_token_s) / (self.tokens - 1)

    def problem(self) -> str | None:
        """Why this answer counts as failed; None when it is whole."""
        if self.error:
            return self.error
        if self.tokens == 0:
            return "no token seen"
        if self.finish_reason is None:
            return f"stream ended without finish_reason after {self.tokens} tokens"
        if not self.done:
            return f"stream ended without {DONE} after {self.tokens} tokens"
        if self._after_done:
            return f"event after {DONE}"
        if self.usage_tokens is None:
            return "no usage in the stream"
        if self.usage_tokens != self.tokens:
            return f"usage says {self.usage_tokens} completion tokens, {self.tokens} were received"
        if self.tokens > self.max_tokens:
            return f"{self.tokens} tokens received, max_tokens was {self.max_tokens}"
        if self.finish_reason == "length" and self.tokens != self.max_tokens:
            return f"finish_reason is length after {self.tokens} of {self.max_tokens} tokens"
        return None
