"""Steps that fit a graph, for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st
from toy_mla import Mix, make_mix

from mtp_runtime.graphs.planner import Graph, fits

CONTEXT = 12


@st.composite
def counts_of(draw: st.DrawFn, graph: Graph) -> list[int]:
    """Tokens of 0..slots requests, 1..width each; drafts are added where so few tokens have no place in the graph."""
    counts = draw(st.lists(st.integers(1, graph.width), max_size=graph.slots))
    for index in range(len(counts)):
        if fits(len(counts), sum(counts), graph):
            break
        counts[index] = graph.width
    assert fits(len(counts), sum(counts), graph)
    return counts


@st.composite
def mixes_of(draw: st.DrawFn, graph: Graph, hidden: object = None) -> Mix:
    counts = draw(counts_of(graph))
    contexts = draw(st.lists(st.integers(0, CONTEXT), min_size=len(counts), max_size=len(counts)))
    return make_mix(counts, contexts, draw(st.integers(0, 999)), hidden)  # type: ignore[arg-type]
