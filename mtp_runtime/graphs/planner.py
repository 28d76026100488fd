"""Which graph a decode step runs in, and what fills its free slots.

Called once a decode step: `choose`, then `plan`. The lists of a plan are what npu_fused_infer_attention_score takes in
TND layout: prefix sums of the query lengths that end in the graph's tokens, and one KV length a slot, 0 on padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import gt

from mtp_runtime.graphs.slots import MAX_SEGMENT, GraphError


class PlanError(GraphError):
    """The step cannot run in this graph."""


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured shape: slots in the batch, width = query tokens of a request with all its drafts (K + 1).

    Raises PlanError where there is no slot, or a width that a slot cannot take (1..16).
    """

    slots: int
    width: int

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise PlanError(f"a graph of {self.slots} slots holds nothing", "use 1 slot or more")
        if not 1 <= self.width <= MAX_SEGMENT:
            raise PlanError(
                f"width {self.width}: a slot takes 1 to {MAX_SEGMENT} tokens", f"use K <= {MAX_SEGMENT - 1}"
            )

    @property
    def tokens(self) -> int:
        """T: query tokens of every step in this graph."""
        return self.slots * self.width


@dataclass(frozen=True, slots=True)
class Plan:
    """One step in one graph: the requests in the first slots, padding in the others.

    requests, tokens: the real ones, padding not counted. actual_seq_lengths: prefix sums of the query lengths, one a
    slot, the last equals graph.tokens. actual_seq_lengths_kv: KV length a slot, the step's own tokens included, 0 on
    padding.
    """

    graph: Graph
    requests: int
    tokens: int
    actual_seq_lengths: list[int]
    actual_seq_lengths_kv: list[int]


def fits(requests: int, total_tokens: int, graph: Graph) -> bool:
    """Whether a step of `requests` requests, each of 1..width tokens and total_tokens together, has a plan in `graph`.

    The tokens left over must fit into the free slots; they reach for one a slot, as no request exceeds the width.
    """
    free = graph.slots - requests
    return (
        free >= 0
        and 0 <= requests <= total_tokens <= requests * graph.width
        and graph.tokens - total_tokens <= MAX_SEGMENT * free
    )


def choose(requests: int, total_tokens: int, graphs: Iterable[Graph]) -> Graph | None:
    """The graph with the fewest slots that the step fits into (`fits`), of two such the one with fewer tokens; or None.

    By slots and not by tokens: three fresh requests have 3 tokens, yet no graph of 2 slots and 4 tokens holds them.
    """
    fitting = (graph for graph in graphs if fits(requests, total_tokens, graph))
    return min(fitting, key=lambda graph: (graph.slots, graph.width), default=None)


def plan(tokens: Sequence[int], kv: Sequence[int], graph: Graph) -> Plan:
    """The lists for one step: requests in their order, then the tokens left over, spread evenly over the free slots.

    tokens: query tokens of each request, 1..width; kv: KV length of each, the step's own tokens included. No requests
    make a dummy step, padding alone. Raises PlanError, naming what is wrong, for anything without a valid plan.
    """
    requests, used = len(tokens), sum(tokens)
    if not (_well_formed(tokens, kv, graph.width) and fits(requests, used, graph)):
        raise _fault(tokens, kv, graph)
    free = graph.slots - requests
    lengths = list(accumulate(tokens))
    lengths += _spread(used, graph.tokens, free)
    return Plan(graph, requests, used, lengths, [*kv, *[0] * free])


def _well_formed(tokens: Sequence[int], kv: Sequence[int], width: int) -> bool:
    if len(tokens) != len(kv):
        return False
    # At most `width` different ones: one pass over the requests instead of two.
    sizes = set(tokens)
    return not sizes or (min(sizes) >= 1 and max(sizes) <= width and not any(map(gt, tokens, kv)))


def _spread(start: int, end: int, slots: int) -> list[int]:
    """Prefix sums that lead from `start` to `end` in `slots` steps; where uneven, the first are a token longer."""
    if not slots:
        return []
    short, longer = divmod(end - start, slots)
    middle = start + longer * (short + 1)
    return [*range(start + short + 1, middle + 1, short + 1), *range(middle + short, end + 1, short)]


def _fault(tokens: Sequence[int], kv: Sequence[int], graph: Graph) -> PlanError:
    """Why the step has no plan: off the path of a step, so it may look again."""
    if len(tokens) != len(kv):
        return PlanError(f"{len(tokens)} token counts, but {len(kv)} KV lengths", "give one of each a request")
    for index, (count, length) in enumerate(zip(tokens, kv, strict=True)):
        if not 1 <= count <= graph.width:
            return PlanError(
                f"request {index} has {count} tokens, and a slot of this graph takes 1 to {graph.width} of a request",
                f"give it 1 to {graph.width} tokens",
            )
        if length < count:
            return PlanError(
                f"request {index} has {count} tokens, but KV length {length}, which includes the step's own tokens",
                f"give it KV length {count} or more",
            )
    return _too_small(len(tokens), sum(tokens), graph)


def _too_small(requests: int, used: int, graph: Graph) -> PlanError:
    if requests > graph.slots:
        what = f"{requests} requests, but the graph has {graph.slots} slots"
    else:
        rest, free = graph.tokens - used, graph.slots - requests
        what = f"{rest} tokens of padding for free slots: {free}, and a slot takes {MAX_SEGMENT} tokens at most"
    needed = _slots_needed(requests, used, graph.width)
    if needed is None:
        return PlanError(what, f"at width {graph.width} no graph holds them: give every request {graph.width} tokens")
    return PlanError(what, f"needs {needed} slots or more")


def _slots_needed(requests: int, used: int, width: int) -> int | None:
    """The smallest n with n width - used <= 16 (n - requests), and a slot a request; None when there is none."""
    short = MAX_SEGMENT * requests - used
    if width == MAX_SEGMENT:
        return None if short else requests
    return max(requests, -(-short // (MAX_SEGMENT - width)))
