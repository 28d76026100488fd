"""K, graph mode, padding and attention switched on the running stack: only what they touch restarts, greedy tokens stay
the same through P and D, and the drafts are accepted as the model's documentation says.

The first stack is what was deployed, the last one is left running.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
from greedy_answers import PROMPTS, Served, ask, ask_all
from live_stack import CLUSTER, Stack, inventories, make
from sampled_answers import SEEDS, sample
from two_sample import same_distribution

from mtp_runtime.metrics import names
from mtp_runtime.model import limits, prompts

pytestmark = [pytest.mark.live, pytest.mark.last]

NEAR_TIE = 1e-4  # logits this close may swap: float32 sums differ with the number of rows in a step
NEAR_TIES_ALLOWED = PROMPTS // 100


@dataclass(frozen=True)
class Named:
    """A way to run decode, and what a switch to it from the one before restarts."""

    k: int
    restarted: frozenset[str] = frozenset({"decode-0"})
    graph_mode: str = "full"
    padding: str = "auto"
    attention: str = "tnd"

    def values(self) -> dict[tuple[str, str], str]:
        """(file, key) -> value of the inventory."""
        return {
            ("serving.yml", "graph_mode"): self.graph_mode,
            ("mtp.yml", "padding"): self.padding,
            ("mtp.yml", "attention"): self.attention,
        }


DEPLOYED = "as deployed"
STACKS = {
    "slack, K = 3": Named(3, padding="slack"),
    "piecewise, K = 2": Named(2, graph_mode="piecewise", padding="placeholder", attention="batch_expansion"),
    "slack, K = 7": Named(7, padding="slack"),
    "eager, slack, K = 1": Named(1, graph_mode="eager", padding="slack"),
    "off": Named(0, frozenset({"prefill-0", "decode-0"})),
}
"""In this order after the deployed one. The exporter reads the plan when it starts, so it restarts too."""
WITH_DRAFTS = [DEPLOYED, *(name for name, way in STACKS.items() if way.k)]
GRAPHS = [name for name, way in STACKS.items() if way.graph_mode != "eager"]


def switch(stack: Stack, way: Named) -> None:
    """Edit the inventory and `make mtp`, as the operator does."""
    folder = inventories() / CLUSTER / "group_vars" / "all"
    for (file, key), value in way.values().items():
        text = (folder / file).read_text()
        edited, count = re.subn(rf"^( +{key}:).*$", rf"\1 {value}", text, flags=re.MULTILINE)
        assert count == 1, f"{file}: {count} lines with {key}"
        (folder / file).write_text(edited)
    before = stack.pids()
    make("mtp", CLUSTER=CLUSTER, K=str(way.k))
    now = stack.pids()
    assert {name for name in before if now[name] != before[name]} == way.restarted | {"exporter"}


SAMPLED = ("slack, K = 3", "off")
"""The stacks whose sampled answers are compared."""


@dataclass(frozen=True)
class Answers:
    """Stack -> what was served greedily, its steps in graphs and outside, and [SEEDS][tokens] for those in SAMPLED."""

    greedy: dict[str, Served]
    graphs: dict[str, tuple[float, float]]
    sampled: dict[str, list[list[int]]]


def graph_steps(stack: Stack) -> tuple[float, float]:
    """Decode's steps that replayed a graph, and those that fitted none."""
    now = stack.metrics("decode")
    return now.total(names.PLUGIN_GRAPH_REPLAYS) or 0.0, now.total(names.PLUGIN_GRAPH_EAGER_STEPS) or 0.0


@pytest.fixture(scope="module")
def answers(stack: Stack, served_as_deployed: Served) -> Answers:
    """MTP is off from here on."""
    found = Answers({DEPLOYED: served_as_deployed}, {}, {})
    for name, way in STACKS.items():
        switch(stack, way)
        found.greedy[name] = ask_all(stack)
        found.graphs[name] = graph_steps(stack)
        if name in SAMPLED:
            found.sampled[name] = sample(stack)
    return found


@pytest.fixture(scope="module")
def served(answers: Answers) -> dict[str, Served]:
    """Stack -> greedy answers."""
    return answers.greedy


def k_of(name: str) -> int:
    return 1 if name == DEPLOYED else STACKS[name].k


def test_sampled_answers_are_distributed_as_without_mtp(answers: Answers) -> None:
    """Joint distribution of the first tokens, one seed an answer, MTP on against off: chi-square, alpha 1e-4.

    What it can see is worked out from its cells and printed; a difference of Cohen's w of 0.35 must be found nine times
    in ten. Finer ones are the business of the tests without a server, which draw 300 000 samples.
    """
    on, off = (answers.sampled[name] for name in SAMPLED)
    found = same_distribution(off, on)
    print(f"{SEEDS} seeds: chi-square {found.statistic:.1f}, {found.freedom} degrees of freedom, p = {found.p:.3f}; ")
    print(f"finds a difference of w = {found.detectable():.3f} nine times in ten")
    assert found.freedom >= 3, "the answers hardly vary: another prompt or temperature is needed"
    assert found.detectable() < 0.35


def test_the_prompts_are_of_mixed_length_and_longer_than_a_block() -> None:
    words = [len(prompts.completion(number).split()) for number in range(PROMPTS)]
    assert min(words) > 16 and max(words) > 5 * min(words)


def first_difference(off: list[int], on: list[int]) -> int | None:
    return next((place for place, pair in enumerate(zip(off, on, strict=True)) if pair[0] != pair[1]), None)


def gap(stack: Stack, number: int, off: list[int], place: int) -> float:
    """Without MTP, how far the two best logits of a prompt's answer lie apart at a place. K = 0 must be running."""
    choice = ask(stack, number, logprobs=2)
    assert choice["token_ids"][:place] == off[:place], f"prompt {number}: K = 0 does not answer as it did before"
    first, second = sorted(choice["logprobs"]["top_logprobs"][place].values(), reverse=True)[:2]
    return float(first - second)


@pytest.mark.parametrize("name", WITH_DRAFTS)
def test_greedy_tokens_are_those_without_mtp(stack: Stack, served: dict[str, Served], name: str) -> None:
    near_ties, wrong = [], []
    for number, (off, on) in enumerate(zip(served["off"].tokens, served[name].tokens, strict=True)):
        place = first_difference(off, on)
        if place is not None:
            apart = gap(stack, number, off, place)
            (near_ties if apart <= NEAR_TIE else wrong).append((number, place, apart))
    print(f"{name}: near ties (prompt, place, gap): {near_ties}")
    assert wrong == []
    assert len(near_ties) <= NEAR_TIES_ALLOWED


@pytest.mark.parametrize("name", WITH_DRAFTS)
def test_k_drafts_a_step(served: dict[str, Served], name: str) -> None:
    counts, k = served[name].counts, k_of(name)
    assert counts is not None and counts.drafts > 0
    # A request near its end is given fewer drafts than K.
    assert 0.8 * k * counts.drafts < counts.draft_tokens <= k * counts.drafts


@pytest.mark.parametrize("name", GRAPHS)
def test_decode_runs_in_its_graphs(answers: Answers, name: str) -> None:
    """Every decode step has a graph, also the first ones of requests that come from P with one token."""
    replays, eager = answers.graphs[name]
    assert replays > 100
    assert eager == 0


def test_no_draft_without_mtp(served: dict[str, Served]) -> None:
    counts = served["off"].counts
    assert counts is None or counts.drafts == 0


def test_drafts_are_accepted_as_documented(served: dict[str, Served]) -> None:
    """The limits that the weights meet without an engine (`docs/model.md`), met by the running stack."""
    one, three = served[DEPLOYED].counts, served["slack, K = 3"].counts
    assert one is not None and three is not None
    print(f"acceptance at K=1 {one.rate:.4f}, acceptance length at K=3 {three.length:.3f}")
    assert limits.broken("acceptance_k1_greedy", one.rate) is None
    assert limits.broken("acceptance_length_k3", three.length) is None
