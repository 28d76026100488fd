"""What one engine's scrape says about MTP, as counts since that server started.

A server runs one or more engine cores (label `engine`); their counters are added up.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtp_runtime.metrics import names, speedup
from mtp_runtime.metrics.scrape import Samples


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Counts of real drafts: the plugin keeps placeholders out of vLLM's statistics. `per_position` has K entries."""

    drafts: float
    draft_tokens: float
    accepted: float
    per_position: tuple[float, ...]

    @property
    def rate(self) -> float:
        return speedup.acceptance_rate(self.accepted, self.draft_tokens)

    @property
    def length(self) -> float:
        return speedup.acceptance_length(self.accepted, self.drafts)

    @property
    def position_rates(self) -> list[float]:
        return speedup.position_rates(self.per_position, self.drafts)

    def since(self, earlier: DraftCounts | None) -> DraftCounts:
        """The counts between an earlier reading of the same server and this one.

        Counters that fell, or another K, mean a restart in between: then the counts since that restart.
        """
        if earlier is None or self.drafts < earlier.drafts or len(self.per_position) != len(earlier.per_position):
            return self
        return DraftCounts(
            self.drafts - earlier.drafts,
            self.draft_tokens - earlier.draft_tokens,
            self.accepted - earlier.accepted,
            tuple(now - before for now, before in zip(self.per_position, earlier.per_position, strict=True)),
        )


def draft_counts(samples: Samples) -> DraftCounts | None:
    """Draft counts of a server, None when MTP is off there (vLLM then has no such counters)."""
    drafts = samples.total(names.SPEC_DRAFTS)
    draft_tokens = samples.total(names.SPEC_DRAFT_TOKENS)
    accepted = samples.total(names.SPEC_ACCEPTED_TOKENS)
    if drafts is None or draft_tokens is None or accepted is None:
        return None
    positions = samples.by_label(names.SPEC_ACCEPTED_PER_POSITION, names.LABEL_POSITION)
    return DraftCounts(
        drafts=drafts,
        draft_tokens=draft_tokens,
        accepted=accepted,
        per_position=tuple(positions[key] for key in sorted(positions, key=int)),
    )


def mean_tpot(samples: Samples) -> float | None:
    """Mean TPOT (seconds) of the requests with two tokens or more; None when there was none."""
    seconds = samples.total(f"{names.TIME_PER_OUTPUT_TOKEN}_sum")
    requests = samples.total(f"{names.TIME_PER_OUTPUT_TOKEN}_count")
    if seconds is None or requests is None:
        return None
    one_token = samples.total(f"{names.REQUEST_GENERATION_TOKENS}_bucket", le="1.0") or 0.0
    if requests - one_token <= 0:
        return None
    return speedup.mean_tpot(seconds, requests, one_token)
