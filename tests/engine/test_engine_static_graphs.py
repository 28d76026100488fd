"""Graphs in a real engine behave as captured ones: they read their buffers and nothing else, enter no model code, and
write what is theirs."""

from __future__ import annotations

import pytest
from engine_arms import config
from graph_arms import FULL, MORE_BURSTS, OFF, PAIRWISE
from graph_watch import Seen
from greedy_answers_equal import assert_equal, differences

pytestmark = pytest.mark.engine

ENGINE, EAGER_ENGINE = "full-tnd-slack-k3", "eager-tnd-slack-k3"
K = 3
WHOLE = [one.name for one in [*PAIRWISE, *MORE_BURSTS] if one.graph_mode == FULL]


def parts(seen: Seen) -> list[tuple[str, int, int]]:
    """What was replayed, in order."""
    return [(replay.part, replay.slots, replay.width) for replay in seen.replays]


def poisoned(engines, run: str) -> tuple[list, list]:
    """Near ties and wrong tokens of the five requests that ran with poison."""
    off, found = engines[OFF]["reference"]["mixed"], engines[ENGINE]["static"]["poisoned"][run]
    return differences(off.tokens[9:14], off.gaps[9:14], found.tokens)


def test_spoiled_buffers_change_no_token(engines) -> None:
    """va#7144, va#7460: ids, positions, slots, block tables, hidden states and host lists are garbage before each
    replay, slots and blocks those of other requests; padding sets all of them."""
    off, found = engines[OFF]["reference"]["mixed"], engines[ENGINE]["static"]["poisoned"]
    assert poisoned(engines, "padded") == poisoned(engines, "resting") == ([], [])
    assert {replay.part for replay in found["resting"].seen.replays} == {"target", "write"}
    assert any(replay.kv[-1] == 0 for replay in found["padded"].seen.of("target")), "no replay had padding"
    assert_equal(off.tokens, off.gaps, found["batch"].tokens, "a batch with spoiled buffers")


def test_padding_that_keeps_its_slots_is_seen(engines) -> None:
    """Else the test before this one would show nothing: with the slots of padding left, neighbours' KV is lost."""
    _, wrong = poisoned(engines, "slots left")
    assert wrong


@pytest.mark.parametrize("name", WHOLE)
def test_a_replay_enters_no_model_code(engines, name: str) -> None:
    """A request's decode steps: the models' Python runs for its prompt alone."""
    alone = engines[name]["matrix"]["alone"]
    assert len(alone.seen.of("target")) == len(alone.seen.steps) - 1 > 0
    assert alone.seen.forwards == {"target": 1, "drafter": 1}


def test_target_and_drafter_write_their_own_kv(engines) -> None:
    """va#9367: in each step the target changes the KV of its layers and the drafter that of its one layer."""
    layers = config()["num_hidden_layers"]
    found = engines[ENGINE]["static"]["written"]
    assert [part for part, _ in found] == ["target", "drafter"] * (len(found) // 2)
    assert len(found) > 4
    for part, changed in found:
        mine = [f"model.layers.{layer}." for layer in (range(layers) if part == "target" else [layers])]
        assert len(changed) == len(mine)
        assert all(name.startswith(prefix) for name, prefix in zip(changed, mine, strict=True))


def test_a_dummy_step_has_the_shapes_of_a_real_one(engines) -> None:
    """vLLM#40589, vLLM#44185, va#10117: an idle rank runs the target once and the drafter K times, as others do."""
    dummy = engines[ENGINE]["dummy"]
    assert parts(dummy.real) == [("target", 1, K + 1), ("first", 1, K + 1), *[("later", 1, 1)] * (K - 1)]
    assert parts(dummy.seen) == parts(dummy.real)
    assert dummy.seen.forwards == {"target": 0, "drafter": 0}


@pytest.mark.parametrize("name", [ENGINE, "piecewise-batch_expansion-slack-k3", EAGER_ENGINE])
def test_a_dummy_step_leaves_nothing_behind(engines, name: str) -> None:
    """One pass of the target and K of the drafter, in a graph or not; no KV changes, no token does, and nothing is
    counted but replays."""
    dummy, off = engines[name]["dummy"], engines[OFF]["reference"]["mixed"]
    assert len(dummy.seen.replays) + sum(dummy.seen.forwards.values()) == 1 + K
    assert dummy.changed == []
    assert_equal(off.tokens[9:12], off.gaps[9:12], dummy.tokens, f"{name}, around a dummy step")
    for ours in dummy.ours:
        assert {name for name, count in ours.items() if count} <= {"graph_replays", "graph_draft_replays"}
        assert ours["graph_replays"] + ours["graph_draft_replays"] == len(dummy.seen.replays)


@pytest.mark.parametrize("name", [ENGINE, EAGER_ENGINE])
def test_each_depth_accepts_as_many_drafts_in_a_batch_as_alone(engines, name: str) -> None:
    """TRT-LLM#17240, va#10878, va#14236: depths after the first see their own request and their own lengths."""
    found = engines[name]["static" if name == ENGINE else "acceptance"]
    found = found["acceptance"] if name == ENGINE else found
    [batch], alone = found["batch"], found["alone"]
    assert batch.accepted == [sum(depth) for depth in zip(*(one.accepted for one in alone), strict=True)]
    assert batch.drafts == sum(one.drafts for one in alone)
    flat = [later / earlier for earlier, later in zip(batch.accepted, batch.accepted[1:], strict=False)]
    assert all(share > 0.7 for share in flat), f"conditional acceptance falls with depth: {batch.accepted}"


def test_attention_is_one_call_a_layer_a_step(engines) -> None:
    """Eager, TND, ragged: whatever the requests' tokens, one call in each layer of the target and one a draft."""
    calls, answer = engines[EAGER_ENGINE]["attention_calls"]
    steps = answer.seen.steps
    assert any(len(set(step)) > 1 for step in steps) and all(max(step) <= K + 1 for step in steps)
    assert calls == len(steps) * (config()["num_hidden_layers"] + K)
