"""Drafts over whole answers: right at every depth for every request, and what makes them wrong is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="drafting runs in the engine environment")

from counting_model import (  # noqa: E402
    BLOCK,
    VOCAB,
    Meddle,
    Server,
    SumLayer,
    continued,
    prompts_of,
)
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor  # noqa: E402

from mtp_runtime.drafting.proposer import DraftStep  # noqa: E402
from mtp_runtime.graphs.padding import NO_SLOT  # noqa: E402
from mtp_runtime.graphs.planner import Graph  # noqa: E402
from mtp_runtime.graphs.slots import draft_slots, slots_for  # noqa: E402

pytestmark = pytest.mark.engine

MAX_LEN = 34
BATCHES = [1, 8]


def wrong(draft: int) -> int:
    return (draft + 1) % VOCAB


def reject_some(step: int, request: int, drafts: list[int]) -> list[int]:
    """Another place at each step, none at some."""
    place = (step * 3 + request) % 5
    return [wrong(draft) if depth == place else draft for depth, draft in enumerate(drafts)]


def shorten_some(step: int, request: int, drafts: list[int]) -> list[int]:
    """Dynamic K: as many drafts as it happens, none at some steps."""
    return drafts[: (step + request) % 4]


def both(step: int, request: int, drafts: list[int]) -> list[int]:
    return shorten_some(step, request, reject_some(step, request, drafts))


MEDDLES: dict[str, Meddle | None] = {
    "all stand": None,
    "some fall": reject_some,
    "all fall": lambda step, request, drafts: [wrong(draft) for draft in drafts],
    "ragged": shorten_some,
    "ragged, some fall": both,
}


def assert_right(server: Server, requests: int) -> None:
    """Every draft that nobody meddled with stood, and every answer is the one that no draft took part in."""
    assert server.acceptance() == [1.0 if tried else 0.0 for tried in server.tried]
    for request, prompt in zip(server.requests, prompts_of(requests), strict=True):
        assert request.tokens == continued(prompt, len(request.tokens))
        assert len(request.tokens) in (MAX_LEN, MAX_LEN + 1)


# Right at every depth


@pytest.mark.parametrize(
    ("k", "meddle"), [*((3, name) for name in MEDDLES), *((k, "ragged, some fall") for k in (1, 2, 7))]
)
@pytest.mark.parametrize("requests", BATCHES)
def test_a_right_drafter_is_right_at_every_depth(requests: int, k: int, meddle: str) -> None:
    """TRT-LLM#17240, va#10878, #14236: conditional acceptance is flat over depth, for one request and for a batch, in
    graphs, whatever was accepted before, with all stale KV made unreadable."""
    server = Server(prompts_of(requests), k, MAX_LEN, meddle=MEDDLES[meddle], poison=True).finish()
    assert_right(server, requests)
    if meddle == "all stand":
        assert server.acceptance() == [1.0] * k
    assert all(graph is not None for graph in server.target_graphs)
    assert all(graph is not None for _, _, graph in server.passes)


@pytest.mark.parametrize("requests", BATCHES)
def test_graphs_and_the_model_itself_draft_the_same(requests: int) -> None:
    servers = [Server(prompts_of(requests), 3, MAX_LEN, static, meddle=both) for static in (True, False)]
    while servers[0].running:
        for server in servers:
            server.step()
        assert servers[0].requests == servers[1].requests
        for layer in ("target", "mtp"):
            mine, theirs = (getattr(server, layer).cache for server in servers)
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def test_acceptance_does_not_decay_over_a_long_answer() -> None:
    """va#13523: it fell to 0 over a long run on D."""
    prompts = prompts_of(3)
    server = Server(prompts, 1, 150, meddle=reject_some)
    windows = []
    while server.running:
        before = server.tried[0], server.accepted[0]
        for _ in range(15):
            if server.running:
                server.step()
        windows.append((server.accepted[0] - before[1]) / max(server.tried[0] - before[0], 1))
    assert len(windows) > 4 and set(windows) == {1.0}
    assert [request.tokens for request in server.requests] == [
        continued(prompt, len(request.tokens)) for prompt, request in zip(prompts, server.requests, strict=True)
    ]


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 999))
@settings(max_examples=15, deadline=None)
def test_any_server_with_any_drafts(requests: int, k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def any_drafts(step: int, request: int, drafts: list[int]) -> list[int]:
        fates = torch.randint(4, (len(drafts) + 1,), generator=generator).tolist()
        kept = drafts[: len(drafts) - fates.pop()] if fates[-1] else drafts
        return [wrong(draft) if fate == 0 else draft for fate, draft in zip(fates, kept, strict=False)]

    server = Server(prompts_of(requests), k, 20, meddle=any_drafts, poison=True, seed=seed).finish()
    assert server.accepted == server.tried
    for request, prompt in zip(server.requests, prompts_of(requests), strict=True):
        assert request.tokens == continued(prompt, len(request.tokens))


# What each pass is given


@pytest.mark.parametrize("meddle", MEDDLES)
def test_the_first_pass_has_the_targets_shape_and_the_others_one_token_a_request(meddle: str) -> None:
    """Whatever was accepted, so the same graphs are used; the lengths of a depth are its own (va#10878, #14236)."""
    k, requests = 3, 4
    server = Server(prompts_of(requests), k, MAX_LEN, meddle=MEDDLES[meddle])
    while server.running:
        running, table = list(server.running), [server.requests[index].blocks for index in server.running]
        counts = [1 + len(server.requests[index].drafts) for index in running]
        server.passes.clear()
        server.step()
        (depths, steps, graphs) = zip(*server.passes, strict=True)
        assert depths == (0, 1, 2)
        assert len(steps[0].input_ids) == sum(counts) and graphs[0] == server.target_graphs[-1]
        last = [len(server.requests[index].tokens) - 2 for index in running]
        for depth, step in enumerate(steps[1:], 1):
            assert graphs[depth].slots in draft_slots(requests) and graphs[depth].width == 1
            wanted = [place + depth for place in last]
            inside = [place < MAX_LEN for place in wanted]
            assert step.positions.tolist() == [place * good for place, good in zip(wanted, inside, strict=True)]
            assert step.kv == [place * good + 1 for place, good in zip(wanted, inside, strict=True)]
            assert step.slot_mapping.tolist() == [
                row[place // BLOCK] * BLOCK + place % BLOCK if good else NO_SLOT
                for row, place, good in zip(table, wanted, inside, strict=True)
            ]


def changed(before: Tensor, after: Tensor) -> set[int]:
    """Slots with another entry."""
    same = (before == after) | (before.isnan() & after.isnan())
    return set((~same).flatten(0, 1).any(-1).nonzero().flatten().tolist())


class Careful(Server):
    """Looks at both caches around every pass of the MTP layer."""

    def run(self, step: DraftStep, depth: int) -> tuple[Tensor, Tensor]:
        target, own = self.target.cache.clone(), self.mtp.cache.clone()
        result = super().run(step, depth)
        assert changed(target, self.target.cache) == set(), "the target's cache is the target's"
        written = set(step.slot_mapping.tolist()) - {NO_SLOT}
        assert changed(own, self.mtp.cache) <= written
        rows = self.mtp.cache.flatten(0, 1)[sorted(written)]
        assert rows.isfinite().all()
        return result


@pytest.mark.parametrize("meddle", MEDDLES)
def test_a_pass_writes_its_own_slots_of_its_own_cache_alone(meddle: str) -> None:
    """va#9367: the drafter's KV went to the target's slots, and the target went wrong."""
    server = Careful(prompts_of(5), 3, MAX_LEN, meddle=MEDDLES[meddle]).finish()
    assert_right(server, 5)
    blocks = [block for request in server.requests for block in request.blocks]
    assert len(set(blocks)) == len(blocks)
    for layer in (server.target, server.mtp):
        assert layer.cache[0].isnan().all(), "nothing wrote to the null block"
        for request in server.requests:
            rows = layer.cache[request.blocks].flatten(0, 1)
            assert rows[MAX_LEN:].isnan().all(), "nor past max_len"


def test_rejected_tokens_leave_stale_kv_that_is_overwritten_before_it_is_read() -> None:
    """Their entries are there after the step, differ from the right ones, and the next step puts the right ones in."""
    server = Server(prompts_of(2), 3, MAX_LEN, meddle=lambda step, request, drafts: [wrong(d) for d in drafts])
    reference = Server(prompts_of(2), 3, MAX_LEN).finish()
    overwritten = 0
    server.step()
    while server.running:
        before = [layer.cache.clone() for layer in (server.target, server.mtp)]
        lengths = [len(request.tokens) for request in server.requests]
        server.step()
        for request, known, length in zip(server.requests, reference.requests, lengths, strict=True):
            assert request.tokens == known.tokens[: len(request.tokens)]
            for layer, kept, theirs in zip(
                (server.target, server.mtp), before, (reference.target, reference.mtp), strict=True
            ):
                rows, old, right = (
                    cache[blocks].flatten(0, 1)
                    for cache, blocks in (
                        (layer.cache, request.blocks),
                        (kept, request.blocks),
                        (theirs.cache, known.blocks),
                    )
                )
                # What stands for good after this step: KV behind every token but the last.
                good = len(request.tokens) - 1
                assert torch.equal(rows[:good], right[:good])
                overwritten += int((old[length - 1 : good] != right[length - 1 : good]).any())
        server.running = [index for index in server.running if len(server.requests[index].tokens) < MAX_LEN - 4]
    assert overwritten > 20, "stale entries were there"


def test_more_requests_than_the_graphs_hold_run_eagerly() -> None:
    """va#8392, #3597: more tokens than the largest graph crashed the drafter. Here it runs, seen, and drafts right."""
    server = Server(prompts_of(8), 3, MAX_LEN, graph_requests=4, meddle=both, poison=True).finish()
    assert_right(server, 8)
    assert server.target_passes.eager and server.first_passes.eager and server.later_passes.eager
    assert server.target_passes.eager == server.target_graphs.count(None)


def test_the_graphs_are_those_of_the_slots() -> None:
    """va#3909, va#6524: every pass runs in a multiple of K + 1 tokens, one-token steps after the hand-off too."""
    requests, k = 8, 3
    server = Server(prompts_of(requests), k, MAX_LEN, meddle=both).finish()
    largest = Graph(slots_for(requests, k).slots, k + 1)
    assert server.target_graphs[0] == largest, "eight fresh requests of one token"
    assert {graph.width for graph in server.target_graphs} == {k + 1}
    tokens = {graph.tokens for depth, _, graph in server.passes if depth == 0}
    assert all(size % (k + 1) == 0 for size in tokens)
    assert {graph.width for depth, _, graph in server.passes if depth} == {1}


# Faults that were made elsewhere, made here on purpose: each is seen, and where


class LengthsOfTheFirstPass(Server):
    """va#10878: all depths share one buffer of lengths."""

    since = 0

    def run(self, step: DraftStep, depth: int) -> tuple[Tensor, Tensor]:
        if depth == self.since:
            self.kept = step.kv
        return super().run(replace(step, kv=self.kept) if depth > self.since else step, depth)


class LengthsOfTheSecondPass(LengthsOfTheFirstPass):
    """va#14236: the one-token passes share one buffer."""

    since = 1


class RowsOfAnotherRequest(Server):
    """TRT-LLM#17240: from the second pass on, rows are mapped to requests as in some other step."""

    def run(self, step: DraftStep, depth: int) -> tuple[Tensor, Tensor]:
        return super().run(replace(step, block_table=step.block_table.roll(1, 0)) if depth else step, depth)


class SlotsOfTheFirstPass(Server):
    """The slot of a depth is that of the one before it: an entry is overwritten and the next place has none."""

    def run(self, step: DraftStep, depth: int) -> tuple[Tensor, Tensor]:
        before = torch.where(step.slot_mapping > 0, step.slot_mapping - 1, NO_SLOT)
        return super().run(replace(step, slot_mapping=before) if depth else step, depth)


class HiddenStatesOfAnotherPlace(Server):
    """SGLang#7927, #7242: the hidden states that came with the hand-off were not those of the place."""

    def run(self, step: DraftStep, depth: int) -> tuple[Tensor, Tensor]:
        return super().run(step if depth else replace(step, hidden_states=step.hidden_states.roll(1, 0)), depth)


class LastTokenInsteadOfLastAccepted(Server):
    """The drafts start where the request's step ends, and not where its accepted tokens do."""

    def last_accepted(self, last: list[int], ends: list[int]) -> Tensor:
        return torch.tensor([end - 1 for end in ends])


class OneCacheForBoth(Server):
    """va#9367: the drafter writes where the target's KV is."""

    def layers(self, blocks: int) -> tuple[SumLayer, SumLayer]:
        layer = SumLayer(blocks)
        return layer, layer


def acceptance(kind: type[Server], requests: int, k: int = 3, meddle: Meddle | None = None) -> list[float]:
    return kind(prompts_of(requests), k, MAX_LEN, meddle=meddle).finish().acceptance()


@pytest.mark.parametrize("requests", BATCHES)
def test_shared_lengths_are_seen_from_the_second_depth_on(requests: int) -> None:
    first, *deeper = acceptance(LengthsOfTheFirstPass, requests)
    assert first == 1.0 and min(deeper) < 0.4
    first, second, third = acceptance(LengthsOfTheSecondPass, requests)
    assert first == second == 1.0 and third < 0.4
    assert acceptance(LengthsOfTheFirstPass, requests, k=1) == [1.0], "K = 1 does not see it"


def test_a_stale_request_map_is_seen_in_a_batch_alone() -> None:
    assert acceptance(RowsOfAnotherRequest, 1) == [1.0] * 3, "one request does not see it"
    first, *deeper = acceptance(RowsOfAnotherRequest, 8)
    assert first == 1.0 and max(deeper) < 0.4


@pytest.mark.parametrize("kind", [SlotsOfTheFirstPass, HiddenStatesOfAnotherPlace])
def test_wrong_slots_and_hidden_states_are_seen(kind: type[Server]) -> None:
    found = acceptance(kind, 8)
    assert min(found) < 0.4 and acceptance(Server, 8) == [1.0] * 3


def test_drafts_from_the_wrong_place_are_seen_where_tokens_were_rejected() -> None:
    assert acceptance(LastTokenInsteadOfLastAccepted, 8) == [1.0] * 3
    assert acceptance(LastTokenInsteadOfLastAccepted, 8, meddle=reject_some)[0] < 0.9


def test_a_drafter_in_the_targets_cache_makes_the_target_wrong() -> None:
    prompts = prompts_of(2)
    server = OneCacheForBoth(prompts, 3, MAX_LEN).finish()
    assert all(
        request.tokens != continued(prompt, len(request.tokens))
        for request, prompt in zip(server.requests, prompts, strict=True)
    )


def test_the_toy_is_sensitive() -> None:
    """It says many things, and one other token, or two in another order, make every later one another."""
    tokens = continued([3, 1, 4], 30)
    assert len(set(tokens)) > 12
    for prompt in ([4, 1, 4], [3, 1, 5], [1, 3, 4], [3, 4, 1]):
        assert not any(a == b for a, b in zip(tokens[3:], continued(prompt, 30)[3:], strict=True))
