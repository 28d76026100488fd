"""Which drafts of a step are placeholders, as both engines' schedulers say it."""

from __future__ import annotations

from typing import Any


def padding(scheduler_output: Any) -> dict[str, int]:
    """Request -> its placeholder drafts. Only a request that enters can have them: it has no drafts of its own yet.

    With asynchronous scheduling the scheduler knows no draft's value and writes -1 for all: the value decides nothing.
    """
    entering = {request.req_id for request in scheduler_output.scheduled_new_reqs}
    entering |= set(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
    drafts = scheduler_output.scheduled_spec_decode_tokens
    return {request: len(drafts[request]) for request in entering if drafts.get(request)}
