"""vLLM's scheduler with the padding of the cluster file, a K that may change, and statistics of real drafts only."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from mtp_runtime.adapters.vllm_cpu.settings import settings
from mtp_runtime.graphs.slots import SLACK


class MtpScheduler(Scheduler):  # type: ignore[misc]
    """active_k: drafts a request gets each step, 0 to the loaded K."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loaded_k = self.active_k = self.num_spec_tokens
        self._padded: dict[str, int] = {}
        self._slack = settings().padding == SLACK

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """As vLLM's. With slack a request that enters keeps its one token; else it gets placeholders up to K."""
        self.num_spec_tokens = self.active_k
        if self._slack:
            # Where K follows a table, vLLM pads nothing; it looks K up by the number of requests.
            self.dynamic_sd_lookup = _Same(self.active_k)
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.num_spec_tokens = self.loaded_k  # statistics have a place for each draft that may be under way

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        """As vLLM's; placeholders are drafts that never were."""
        self._padded = padding(scheduler_output)
        if self._padded:
            known = scheduler_output.num_invalid_spec_tokens or {}
            scheduler_output.num_invalid_spec_tokens = {**known, **self._padded}
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_spec_decoding_stats(
        self, spec_decoding_stats: Any, num_draft_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        """As vLLM's; a step of placeholders is not a draft step at all."""
        if kwargs.get("request_id") in self._padded:
            return spec_decoding_stats
        return super().make_spec_decoding_stats(spec_decoding_stats, num_draft_tokens, *args, **kwargs)


class _Same(list[int]):
    """A table with one entry for every number of requests."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self._value = value

    def __getitem__(self, index: Any) -> Any:
        return self._value


def padding(scheduler_output: Any) -> dict[str, int]:
    """Request -> its placeholder drafts. Only a request that enters can have them: it has no drafts of its own yet.

    With asynchronous scheduling the scheduler knows no draft's value and writes -1 for all: the value decides nothing.
    """
    entering = {request.req_id for request in scheduler_output.scheduled_new_reqs}
    entering |= set(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
    drafts = scheduler_output.scheduled_spec_decode_tokens
    return {request: len(drafts[request]) for request in entering if drafts.get(request)}
