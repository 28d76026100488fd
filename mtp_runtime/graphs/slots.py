"""How many slots a whole-step graph needs, and which graphs to capture.

A graph has a fixed number of slots and d = K + 1 query tokens a slot; the attention operator takes 1 to 16 tokens a
slot (TND layout), and the last prefix sum of the query lengths must equal the graph's tokens. A request fresh from
prefill has one token and no drafts, so a batch of such requests leaves tokens over that no slot can take. Two answers:

- slack: S extra slots that only ever hold padding (`slots_for`);
- placeholder: the fresh request gets K drafts that are rejected for certain, so every request has d tokens.

S: with R requests of t_1..t_R tokens the rest, (R + S) d - sum(t), must fit into the S free slots. It is largest when
every request has one token, and a batch with fewer requests is easier (a missing request takes one token away and adds
a slot of 16). So (R + S) d - R <= 16 S, hence S = ceil(R (d - 1) / (16 - d)); the rest never falls short of one token a
free slot, because no request has more than d. At d = 16 a slot more brings as many tokens as it can take: no answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

# Query tokens of one slot: torch_npu's documentation of npu_fused_infer_attention_score (TND); vllm-ascend asserts it.
MAX_SEGMENT: Final = 16
# The largest K with any whole graph, and the largest one with slack slots.
MAX_K: Final = MAX_SEGMENT - 1
MAX_SLACK_K: Final = MAX_K - 1
SLACK, PLACEHOLDER = "slack", "placeholder"
PADDINGS: Final = (SLACK, PLACEHOLDER)


class GraphError(ValueError):
    """Nothing can be captured or planned like this. what: half a sentence with the numbers; remedy: what would work."""

    def __init__(self, what: str, remedy: str):
        super().__init__(what, remedy)
        self.what, self.remedy = what, remedy

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


class SlotsError(GraphError):
    """No graph has the slots that were asked for."""


@dataclass(frozen=True, slots=True)
class Slots:
    """The slack of one graph: requests and K as asked for, slots = requests + slack_slots, tokens of the whole graph.

    overhead: slack_slots / requests, the share of work a step at a full batch has more than without slack.
    """

    requests: int
    k: int
    slack_slots: int
    slots: int
    tokens: int
    overhead: float


def slots_for(requests: int, k: int) -> Slots:
    """The fewest slots that hold every mix of 1..K+1 tokens of up to `requests` requests (derivation: module).

    K = 0 (MTP off) needs no slack. Raises SlotsError for requests < 1, K < 0, and K >= 15, where no slack is enough.
    """
    check_limits(requests, k)
    if k > MAX_SLACK_K:
        raise SlotsError(
            f"K = {k}: no number of slack slots is enough, {k + 1} tokens a slot of {MAX_SEGMENT} leave no room",
            f"use K <= {MAX_SLACK_K}, or placeholder padding, or piecewise or eager execution",
        )
    slack = -(-requests * k // (MAX_SEGMENT - 1 - k))
    slots = requests + slack
    return Slots(requests, k, slack, slots, slots * (k + 1), slack / requests)


def graph_slots(requests: int, k: int, padding: str) -> list[int]:
    """Slots of the graphs to capture for a server of `requests` requests, ascending; n slots are n (K + 1) tokens.

    Powers of two below `requests`, and one graph for the full batch. Several, because a padded slot computes: with one
    size a single request would pay for the whole batch, with powers of two at most about half of a graph is padding.
    The small ones have no slack of their own: a step that leaves too many tokens over runs in the next larger graph
    (`planner.choose`), so only the largest must hold the slack slots; every step fits there.
    padding: one of PADDINGS. Raises SlotsError for an unknown name, and where no such graph exists.
    """
    if padding not in PADDINGS:
        raise SlotsError(f"padding {padding!r} is unknown", f"use one of {', '.join(PADDINGS)}")
    check_limits(requests, k)
    largest = slots_for(requests, k).slots if padding == SLACK else requests
    return [*_powers_below(requests), largest]


def draft_slots(requests: int) -> list[int]:
    """Slots of the drafter's graphs for its second draft token and later, ascending: every request has one token there.

    Powers of two below `requests`, then `requests`. Raises SlotsError for requests < 1.
    """
    check_limits(requests, 0)
    return [*_powers_below(requests), requests]


def whole_sizes(sizes: Iterable[int], requests: int, k: int) -> list[int]:
    """Graph sizes, tokens, as multiples of K + 1 up to a full batch: rounded up, the larger ones down; ascending.

    So every step of equal requests that fits one of `sizes`, or all of them, has a graph. Raises SlotsError for
    requests < 1 and K outside 0..15.
    """
    check_limits(requests, k)
    return sorted({min(-(-size // (k + 1)), requests) * (k + 1) for size in sizes})


def _powers_below(requests: int) -> list[int]:
    """1, 2, 4, ... < requests."""
    return [1 << n for n in range((requests - 1).bit_length())]


def check_limits(requests: int, k: int) -> None:
    """Raises SlotsError for requests < 1 and for K outside 0..15, which no padding can help."""
    if requests < 1:
        raise SlotsError(f"{requests} requests: a graph holds at least one", "use 1 request or more")
    if not 0 <= k <= MAX_K:
        raise SlotsError(
            f"K = {k}: a slot takes 1 to {MAX_SEGMENT} tokens, so K + 1 must be one of these",
            f"use K from 0 to {MAX_SLACK_K} with slack slots, to {MAX_K} with placeholder padding, "
            "or piecewise or eager execution",
        )
