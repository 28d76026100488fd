"""vllm-ascend's schedulers of D with statistics of real drafts only.

They give a new request K placeholder drafts, and count them as drafts: each request lowers the acceptance that
`vllm:spec_decode_*` tell by K drafts that never were.
"""

from __future__ import annotations

from typing import Any

from vllm_ascend.core.recompute_scheduler import AsyncRecomputeScheduler, RecomputeScheduler

from mtp_runtime.adapters.placeholders import padding


class _RealDrafts:
    """Before a scheduler: a step of placeholders is no draft step."""

    _padded: dict[str, int]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """As the engine's."""
        self._padded = padding(scheduler_output)
        return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]

    def make_spec_decoding_stats(
        self, spec_decoding_stats: Any, num_draft_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        """As the engine's; nothing for a request whose drafts are placeholders."""
        if kwargs.get("request_id") in self._padded:
            return spec_decoding_stats
        return super().make_spec_decoding_stats(spec_decoding_stats, num_draft_tokens, *args, **kwargs)  # type: ignore[misc]


class MtpRecomputeScheduler(_RealDrafts, RecomputeScheduler):  # type: ignore[misc]
    """For `--no-async-scheduling`."""


class MtpAsyncRecomputeScheduler(_RealDrafts, AsyncRecomputeScheduler):  # type: ignore[misc]
    """For asynchronous scheduling, the default."""
