"""vLLM's scheduler with the padding of the cluster file, a K that may change, and statistics of real drafts only."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds

from mtp_runtime.adapters.counters import Level
from mtp_runtime.adapters.placeholders import padding
from mtp_runtime.adapters.settings import settings
from mtp_runtime.graphs.slots import SLACK
from mtp_runtime.metrics import names


class MtpScheduler(Scheduler):  # type: ignore[misc]
    """loaded_k: the K that the engine was started with, 0 without MTP. active_k: see there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loaded_k: int = self.num_spec_tokens
        self._active_level = Level(names.PLUGIN_ACTIVE_K)
        Level(names.PLUGIN_LOADED_K).set(self.loaded_k)
        self.active_k = self.loaded_k
        self._padded: dict[str, int] = {}
        self._slack = settings().padding == SLACK

    @property
    def active_k(self) -> int:
        """Drafts that a request gets each step, 0 to the loaded K; settable between any two steps.

        Holds from the next step on: that step still verifies the drafts made before it. Raises ValueError for another
        number.
        """
        return self._active_k

    @active_k.setter
    def active_k(self, k: int) -> None:
        if not 0 <= k <= self.loaded_k:
            raise ValueError(f"active K {k}: use 0 to {self.loaded_k}, the K that is loaded")
        self._active_k = k
        self._active_level.set(k)

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

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """As vLLM's. A drafter without room before the model's limit leaves zeros for the loaded K."""
        drafts = [tokens[: self.active_k] for tokens in draft_token_ids.draft_token_ids]
        super().update_draft_token_ids(DraftTokenIds(draft_token_ids.req_ids, drafts))

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
