"""K that changes in the running engine: no token changes with it, and the drafter loses nothing while it rests."""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import partial

import pytest
from active_k_asks import Driven, Request, books, drive_all, write_graphs
from engine_arms import Arm, start

from mtp_runtime.metrics import names

pytestmark = pytest.mark.engine

K, LIMIT = 3, 256
SEATS = {"eager": 64, "full": 16}
"""Graph mode -> max_num_seqs, and the prompts that stop and resume together."""
RAN, RESTED, WINDOW = 6, 30, 50
"""Of those: steps with drafts, steps without, and the tokens after resuming in which acceptance is compared."""
CHANGED = ["every step", "stays", "on and off"]
Runs = dict[str, tuple[list[Request], list[int]]]


def requests() -> list[Request]:
    """Greedy and seeded ones, of mixed lengths; the last ones enter while the others run, two with a single token."""
    found = []
    for number, book in enumerate(books(14, 60)):
        sampling = {"temperature": 0.0} if number % 3 else {"temperature": 1.0, "seed": 7 + number}
        prompt = book[30:31] if number in (8, 11) else book[: 20 + 5 * (number % 7)]
        found.append(Request(prompt, {**sampling, "max_tokens": 40}, enters=0 if number < 7 else 3 * (number - 6)))
    return found


def changes() -> dict[str, list[int]]:
    """Name -> the active K of each step."""
    generator = random.Random(5)
    stays = [[generator.randrange(K + 1)] * generator.randint(2, 6) for _ in range(30)]
    return {
        "every step": [generator.randrange(K + 1) for _ in range(100)],
        "stays": [k for stay in stays for k in stay],
        "on and off": [K, 0] * 50,
    }


def in_step(count: int) -> list[Request]:
    """Greedy ones that start together, long enough for pause and window."""
    tokens = 1 + RAN * (K + 1) + RESTED + WINDOW
    return [Request(book, {"temperature": 0.0, "max_tokens": tokens}) for book in books(count, 48)]


def at_the_limit() -> list[Request]:
    """Answers that run into the longest context, beside one that does not."""
    sampling = {"temperature": 0.0, "max_tokens": 30}
    return [Request((book * 8)[: LIMIT - 6 - number], sampling) for number, book in enumerate(books(3, 60))] + [
        Request(books(1, 20)[0], sampling)
    ]


def runs(mode: str) -> Runs:
    """Name -> requests and the active K of each step."""
    few, many = requests(), in_step(SEATS[mode])
    return {
        **{str(k): (few, [k]) for k in range(K + 1)},
        **{name: (few, ks) for name, ks in changes().items()},
        "limit, 0": (at_the_limit(), [0]),
        "limit, changed": (at_the_limit(), changes()["every step"]),
        "never stopped": (many, [K]),
        "stopped": (many, [K] * (1 + RAN) + [0] * RESTED + [K]),
    }


@pytest.fixture(scope="module")
def arms() -> dict[str, dict]:
    """Graph mode -> the runs by name, and the graphs of the KV write."""

    def arm(mode: str, **options: object) -> Arm:
        asks = {"runs": partial(drive_all, runs=runs(mode)), "write graphs": write_graphs}
        engine = {"max_model_len": LIMIT, "max_num_batched_tokens": 4096}
        return Arm(K, graph_mode=mode, max_num_seqs=SEATS[mode], engine=engine, asks=asks, **options)

    wanted = {
        "eager": arm("eager", draft_sampling="probabilistic", padding="placeholder"),
        "full": arm("full", padding="slack"),
    }
    found = dict(zip(wanted, start(list(wanted.values())), strict=True))
    for mode, result in found.items():
        assert "error" not in result, f"{mode}: {result['error']}"
    return {mode: result["found"] for mode, result in found.items()}


@pytest.mark.parametrize("mode", SEATS)
@pytest.mark.parametrize("run", ["1", "2", "3", *CHANGED])
def test_no_token_changes_with_k(arms, mode: str, run: str) -> None:
    """Greedy ones and seeded ones, against K fixed at 0."""
    expected = arms[mode]["runs"]["0"].tokens
    assert arms[mode]["runs"][run].tokens == expected
    assert [len(tokens) for tokens in expected] == [40] * len(requests())


@pytest.mark.parametrize("mode", SEATS)
@pytest.mark.parametrize("run", CHANGED)
def test_a_change_holds_from_the_next_step_on(arms, mode: str, run: str) -> None:
    """Each step verifies the drafts that were made with the K of the step before it."""
    found, ks = arms[mode]["runs"][run], changes()[run]
    assert [max(step, default=0) for step in found.scheduled[1:]] == ks[: len(found.scheduled) - 1]
    assert len(set(ks[: len(found.scheduled)])) > 1
    drafted = sum(len(steps) for steps in found.drafts)
    assert found.ours[names.PLUGIN_VERIFY_DRAFT_STEPS] - found.ours[names.PLUGIN_PLACEHOLDER_STEPS] == drafted > 50


@pytest.mark.parametrize("mode", SEATS)
def test_at_zero_the_drafter_only_writes_its_kv(arms, mode: str) -> None:
    """Once a step: no attention, no head. A graph enters no Python of the layer: see the next test."""
    found = arms[mode]["runs"]["0"]
    steps, replays = len(found.scheduled), found.ours[names.PLUGIN_GRAPH_DRAFT_REPLAYS]
    assert not any(found.scheduled)
    assert set(found.calls) == {"do_kv_cache_update"}
    assert found.calls["do_kv_cache_update"] + replays == steps
    assert found.ours[names.PLUGIN_VERIFY_CALLS] == found.ours[names.PLUGIN_ENGINE_DRAFT_STEPS] == 0
    drafting = arms[mode]["runs"]["1"].calls
    assert drafting["forward_mqa"] > 0 and drafting["pick"] == len(arms[mode]["runs"]["1"].scheduled)


def test_the_graphs_of_the_kv_write_end_with_it(arms) -> None:
    assert arms["eager"]["write graphs"] == []
    graphs = arms["full"]["write graphs"]
    assert graphs
    for operators in graphs:
        assert operators[-1] == "mtp_runtime.write_latent_kv.default"
        assert not [name for name in operators[:-1] if name.startswith("mtp_runtime.") or "mla_decode" in name]


@pytest.mark.parametrize("run", ["0", "1", "2", "3", *CHANGED, "stopped"])
def test_with_slack_slots_every_active_k_has_a_graph(arms, run: str) -> None:
    ours = arms["full"]["runs"][run].ours
    assert ours[names.PLUGIN_GRAPH_REPLAYS] > 20
    assert ours[names.PLUGIN_GRAPH_EAGER_STEPS] == 0


@pytest.mark.parametrize("mode", SEATS)
def test_at_zero_nothing_is_drafted_at_the_longest_context_either(arms, mode: str) -> None:
    """There vLLM's drafter does not run and leaves zeros as drafts."""
    still, changed = (arms[mode]["runs"][f"limit, {name}"] for name in ("0", "changed"))
    assert not any(still.scheduled)
    assert changed.tokens == still.tokens
    assert [len(tokens) for tokens in still.tokens] == [6, 7, 8, 30]


def accepted(driven: Driven, starts: Iterable[int]) -> float:
    """Accepted drafts / drafts in the WINDOW tokens after each request's start."""
    steps = [
        step
        for own, start in zip(driven.drafts, starts, strict=True)
        for step in own
        if start <= step.position < start + WINDOW
    ]
    return sum(step.accepted for step in steps) / sum(step.drafted for step in steps)


@pytest.mark.parametrize("mode", SEATS)
def test_after_a_pause_drafts_are_accepted_as_if_there_had_been_none(arms, mode: str) -> None:
    """In the first 50 tokens. What the drafts rest on is the KV of the pause, which was written without drafting."""
    stopped, never = arms[mode]["runs"]["stopped"], arms[mode]["runs"]["never stopped"]
    assert stopped.tokens == never.tokens
    resumed = 1 + RAN + RESTED
    starts = [min(step.position for step in own if step.step > resumed) for own in stopped.drafts]
    assert min(starts) > RESTED
    assert not any(stopped.scheduled[2 + RAN : 1 + resumed])
    before, after = accepted(never, starts), accepted(stopped, starts)
    print(f"{mode}, {len(starts)} prompts: acceptance {after:.4f} after {RESTED} steps at 0, {before:.4f} without them")
    assert abs(after - before) <= 0.03
