"""What the engine scheduled for the step that runs now, seen independently of our own parts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mtp_runtime.adapters.vllm_cpu.counters import Count
from mtp_runtime.metrics import names


class Step:
    """The step that runs in this process: one engine core is one process, and it runs one step at a time.

    draft_rows: query tokens of the requests that carry drafts (drafts + 1 each); 0 in a step without drafts and in
    dummy runs.
    """

    draft_rows = 0


def watch(runner_class: type) -> None:
    """Make every runner of this class note the drafts of each scheduled step before it runs. Wraps a class once."""
    original: Callable[..., Any] = runner_class.execute_model  # type: ignore[attr-defined]
    if getattr(original, "mtp_runtime", False):
        return
    count = Count(names.PLUGIN_ENGINE_DRAFT_STEPS)

    @functools.wraps(original)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        # A request near its token limit may be listed with no draft at all.
        drafts = [len(tokens) for tokens in scheduler_output.scheduled_spec_decode_tokens.values() if tokens]
        Step.draft_rows = sum(drafts) + len(drafts)
        if drafts:
            count.add()
        return original(self, scheduler_output, *args, **kwargs)

    execute_model.mtp_runtime = True  # type: ignore[attr-defined]
    runner_class.execute_model = execute_model  # type: ignore[attr-defined]
