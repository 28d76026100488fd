"""Every plan against the operator's constraints, exhaustively for small servers and by example for large ones."""

from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_runtime.graphs.planner import Graph, Plan, PlanError, choose, fits, plan
from mtp_runtime.graphs.slots import PADDINGS, SLACK, draft_slots, graph_slots, slots_for

KV = 5000
SMALL = [(requests, k) for requests in range(1, 7) for k in range(5)]


def assert_valid(found: Plan, tokens: Sequence[int], kv: Sequence[int], graph: Graph) -> None:
    """What npu_fused_infer_attention_score demands in TND layout with paged KV, and what a step of a graph does."""
    ends, lengths = found.actual_seq_lengths, found.actual_seq_lengths_kv
    segments = [end - before for before, end in pairwise([0, *ends])]
    padding = graph.slots - len(tokens)
    assert (found.graph, found.requests, found.tokens) == (graph, len(tokens), sum(tokens))
    assert len(ends) == len(lengths) == graph.slots
    assert all(1 <= segment <= 16 for segment in segments)
    assert ends[-1] == graph.tokens
    assert segments[: len(tokens)] == list(tokens)
    assert lengths == [*kv, *[0] * padding]
    if padding:
        assert max(segments[len(tokens) :]) - min(segments[len(tokens) :]) <= 1


def check(tokens: Sequence[int], graph: Graph) -> None:
    kv = [KV + index for index in range(len(tokens))]
    assert_valid(plan(tokens, kv, graph), tokens, kv, graph)


def has_plan(tokens: Sequence[int], graph: Graph) -> bool:
    """By trying, not by the formula."""
    try:
        check(tokens, graph)
    except PlanError:
        return False
    return True


def mixes(requests: int, width: int) -> Iterator[tuple[int, ...]]:
    """Every multiset of token counts of 0..requests requests."""
    for count in range(requests + 1):
        yield from combinations_with_replacement(range(1, width + 1), count)


def graphs_of(requests: int, k: int, padding: str = SLACK) -> list[Graph]:
    return [Graph(slots, k + 1) for slots in graph_slots(requests, k, padding)]


def test_the_example() -> None:
    found = plan([1] * 16, [KV] * 16, Graph(18, 2))
    assert found.actual_seq_lengths == [*range(1, 17), 26, 36]
    assert found.actual_seq_lengths_kv == [KV] * 16 + [0, 0]


def test_a_full_batch_leaves_the_slack_slots_at_full_width() -> None:
    assert plan([2] * 16, [KV] * 16, Graph(18, 2)).actual_seq_lengths == list(range(2, 37, 2))


def test_uneven_padding_differs_by_one_token() -> None:
    assert plan([1, 3], [KV, KV], Graph(5, 3)).actual_seq_lengths == [1, 4, 8, 12, 15]


@pytest.mark.parametrize(("requests", "k"), SMALL)
def test_every_mix_has_a_plan_in_the_graph_with_slack(requests: int, k: int) -> None:
    graph = Graph(slots_for(requests, k).slots, k + 1)
    for tokens in mixes(requests, k + 1):
        check(tokens, graph)
        check(tokens[::-1], graph)


@given(st.data())
def test_every_mix_has_a_plan_in_a_large_graph_with_slack(data: st.DataObject) -> None:
    requests, k = data.draw(st.integers(1, 300)), data.draw(st.integers(0, 14))
    tokens = data.draw(st.lists(st.integers(1, k + 1), max_size=requests))
    check(tokens, Graph(slots_for(requests, k).slots, k + 1))


@given(st.integers(1, 300), st.integers(1, 14))
def test_one_slot_less_and_the_worst_step_has_no_plan(requests: int, k: int) -> None:
    slots = slots_for(requests, k).slots
    check([1] * requests, Graph(slots, k + 1))
    with pytest.raises(PlanError, match=f"needs {slots} slots or more"):
        plan([1] * requests, [KV] * requests, Graph(slots - 1, k + 1))


@given(st.integers(1, 100), st.integers(0, 15), st.integers(0, 20))
def test_with_placeholders_every_batch_has_a_plan_without_slack(requests: int, k: int, absent: int) -> None:
    check([k + 1] * max(0, requests - absent), Graph(requests, k + 1))


@given(st.integers(1, 100), st.data())
def test_every_batch_of_the_drafter_has_a_plan(requests: int, data: st.DataObject) -> None:
    running = data.draw(st.integers(0, requests))
    graph = choose(running, running, [Graph(slots, 1) for slots in draft_slots(requests)])
    assert graph is not None
    check([1] * running, graph)


@pytest.mark.parametrize("width", range(1, 17))
def test_a_dummy_step_is_padding_alone(width: int) -> None:
    assert plan([], [], Graph(3, width)) == Plan(Graph(3, width), 0, 0, [width, 2 * width, 3 * width], [0, 0, 0])


@pytest.mark.parametrize(("requests", "k"), [*SMALL, (3, 15), (5, 14)])
def test_fits_is_what_trying_finds(requests: int, k: int) -> None:
    for slots in range(1, requests + 4):
        graph = Graph(slots, k + 1)
        for tokens in mixes(requests if k < 5 else 2, k + 1):
            assert fits(len(tokens), sum(tokens), graph) == has_plan(tokens, graph)


@pytest.mark.parametrize(
    ("requests", "tokens"), [(-1, 0), (-1, -1), (0, 1), (2, 1), (2, 5), (3, 0), (19, 19), (19, 36)]
)
def test_a_step_that_cannot_be_fits_nowhere(requests: int, tokens: int) -> None:
    assert not fits(requests, tokens, Graph(18, 2))
    assert choose(requests, tokens, [Graph(18, 2)]) is None


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize(("requests", "k"), SMALL)
def test_choose_takes_the_smallest_graph_that_has_a_plan(requests: int, k: int, padding: str) -> None:
    graphs = graphs_of(requests, k, padding)
    for tokens in mixes(requests + 1, k + 1):
        found = choose(len(tokens), sum(tokens), reversed(graphs))
        assert found == next((graph for graph in graphs if has_plan(tokens, graph)), None)
        assert found or padding != SLACK or len(tokens) > requests


@given(st.data())
def test_choose_takes_the_smallest_graph_of_a_large_server(data: st.DataObject) -> None:
    requests, k = data.draw(st.integers(1, 300)), data.draw(st.integers(0, 14))
    tokens = data.draw(st.lists(st.integers(1, k + 1), max_size=requests))
    graphs = graphs_of(requests, k)
    assert choose(len(tokens), sum(tokens), graphs) == next(graph for graph in graphs if has_plan(tokens, graph))


def test_a_graph_is_chosen_by_slots_and_not_by_tokens() -> None:
    graphs = graphs_of(16, 1)
    by_tokens = min((graph for graph in graphs if graph.tokens >= 3), key=lambda graph: graph.tokens)
    assert not has_plan([1, 1, 1], by_tokens)
    assert choose(3, 3, graphs) == Graph(4, 2)
    # One fresh request among eight: a token too many for 8 slots, so the large graph.
    assert choose(8, 16, graphs) == Graph(8, 2)
    assert choose(8, 15, graphs) == Graph(18, 2)


def test_among_graphs_of_several_widths_slots_decide_and_then_the_width() -> None:
    assert choose(2, 2, [Graph(5, 1), Graph(3, 2)]) == Graph(3, 2)
    assert choose(2, 2, [Graph(2, 2), Graph(2, 1), Graph(4, 1)]) == Graph(2, 1)


@pytest.mark.parametrize(
    ("tokens", "kv", "graph", "says"),
    [
        ([1, 0], [9, 9], Graph(4, 2), ["request 1 has 0 tokens", "1 to 2"]),
        ([1, -3], [9, 9], Graph(4, 2), ["request 1 has -3 tokens"]),
        ([3], [9], Graph(4, 2), ["request 0 has 3 tokens", "1 to 2"]),
        ([2, 2, 2], [9, 9, 9], Graph(2, 2), ["3 requests", "2 slots", "needs 3 slots or more"]),
        ([1] * 16, [9] * 16, Graph(17, 2), ["18 tokens of padding", "16 tokens at most", "needs 18 slots or more"]),
        ([1] * 4, [9] * 4, Graph(4, 2), ["4 tokens of padding for free slots: 0", "needs 5 slots or more"]),
        ([1] * 5, [9] * 5, Graph(4, 2), ["5 requests", "4 slots", "needs 6 slots or more"]),
        ([1, 16], [99, 99], Graph(4, 16), ["47 tokens of padding", "width 16", "give every request 16 tokens"]),
        ([16, 16], [99, 99], Graph(1, 16), ["needs 2 slots or more"]),
        ([1, 1], [9], Graph(4, 2), ["2 token counts", "1 KV lengths"]),
        ([], [9], Graph(4, 2), ["0 token counts"]),
        ([1], [-1], Graph(4, 2), ["KV length -1"]),
        ([2, 2], [9, 1], Graph(4, 2), ["request 1", "KV length 1,", "step's own tokens", "KV length 2 or more"]),
        ([1], [0], Graph(4, 2), ["KV length 0"]),
    ],
)
def test_what_has_no_plan_is_named(tokens: list[int], kv: list[int], graph: Graph, says: list[str]) -> None:
    with pytest.raises(PlanError) as refused:
        plan(tokens, kv, graph)
    assert all(text in str(refused.value) for text in says), str(refused.value)


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 12), st.integers(9, 15))
def test_the_slots_that_an_error_asks_for_are_enough_and_not_too_many(
    tokens: list[int], slots: int, width: int
) -> None:
    graph = Graph(slots, width)
    if has_plan(tokens, graph):
        return
    with pytest.raises(PlanError) as refused:
        plan(tokens, [KV] * len(tokens), graph)
    needed = int(refused.value.remedy.split()[1])
    assert has_plan(tokens, Graph(needed, width))
    assert not has_plan(tokens, Graph(needed - 1, width))


@pytest.mark.parametrize(("slots", "width", "says"), [(0, 2, "0 slots"), (4, 0, "width 0"), (4, 17, "width 17")])
def test_a_graph_that_cannot_be(slots: int, width: int, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Graph(slots, width)


def test_a_plan_leaves_its_input_alone() -> None:
    tokens, kv = (1, 2), (7, 8)
    first, second = plan(tokens, kv, Graph(4, 2)), plan(tokens, kv, Graph(4, 2))
    first.actual_seq_lengths_kv[0] = 99
    assert second.actual_seq_lengths_kv == [7, 8, 0, 0]
    assert (tokens, kv) == ((1, 2), (7, 8))
