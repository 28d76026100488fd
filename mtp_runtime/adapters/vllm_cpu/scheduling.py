"""Placeholder drafts do not count: vLLM's own statistics, and with them every dashboard, see real drafts only.

The scheduler pads a request that enters with one token to compute (D's first step after the KV transfer, a request
resumed from a full cache) with K drafts of -1, so that every request of the step has K + 1 tokens. vLLM counts them as
proposed drafts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def leave_out_placeholders(scheduler_class: type) -> None:
    """Wrap the scheduler's statistics, once a class."""
    update: Callable[..., Any] = scheduler_class.update_from_output  # type: ignore[attr-defined]
    if getattr(update, "mtp_runtime", False):
        return
    stats: Callable[..., Any] = scheduler_class.make_spec_decoding_stats  # type: ignore[attr-defined]

    @functools.wraps(update)
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        padded = padding(scheduler_output)
        self.mtp_padded = padded
        if padded:
            known = scheduler_output.num_invalid_spec_tokens or {}
            scheduler_output.num_invalid_spec_tokens = {**known, **padded}
        return update(self, scheduler_output, model_runner_output)

    @functools.wraps(stats)
    def make_spec_decoding_stats(
        self: Any, spec_decoding_stats: Any, num_draft_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        if kwargs.get("request_id") in self.mtp_padded:
            return spec_decoding_stats  # not a draft step at all
        return stats(self, spec_decoding_stats, num_draft_tokens, *args, **kwargs)

    update_from_output.mtp_runtime = True  # type: ignore[attr-defined]
    scheduler_class.update_from_output = update_from_output  # type: ignore[attr-defined]
    scheduler_class.make_spec_decoding_stats = make_spec_decoding_stats  # type: ignore[attr-defined]


def padding(scheduler_output: Any) -> dict[str, int]:
    """Request -> its placeholder drafts. Only a request that enters can have them: it has no drafts of its own yet.

    With asynchronous scheduling the scheduler knows no draft's value and writes -1 for all: the value decides nothing.
    """
    entering = {request.req_id for request in scheduler_output.scheduled_new_reqs}
    entering |= set(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
    drafts = scheduler_output.scheduled_spec_decode_tokens
    return {request: len(drafts[request]) for request in entering if drafts.get(request)}
