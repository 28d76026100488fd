"""The engines of the graph tests, each started once: every pair of two modes' values, and what single tests need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import graph_asks as asks
from engine_arms import Arm, start
from graph_prompts import CONTEXT, SEATS
from midflight_asks import midflight
from static_asks import acceptance, attention_calls, dummy_step, static

from mtp_runtime.choice import ATTENTIONS, BATCH_EXPANSION, CHUNKED_PREFILL, TND
from mtp_runtime.graphs.slots import PADDINGS, PLACEHOLDER, SLACK

EAGER, PIECEWISE, FULL = MODES = ("eager", "piecewise", "full")
KS = (1, 2, 3, 7)


@dataclass(frozen=True)
class Combination:
    """How an engine decodes."""

    graph_mode: str
    attention: str
    padding: str
    k: int

    @property
    def name(self) -> str:
        """Of the engine."""
        return f"{self.graph_mode}-{self.attention}-{self.padding}-k{self.k}"

    def arm(self) -> Arm:
        """The engine, asked what all of them are asked."""
        modes = {name: getattr(self, name) for name in ("graph_mode", "attention", "padding")}
        return Arm(self.k, max_num_seqs=SEATS, engine={"max_model_len": CONTEXT}, asks={"matrix": asks.matrix}, **modes)


def every_combination() -> list[Combination]:
    """All that the configuration lets through: chunked prefill has no fixed shape to capture (rule R42)."""
    given = (Combination(*values) for values in product(MODES, ATTENTIONS, PADDINGS, KS))
    return [one for one in given if one.attention != CHUNKED_PREFILL or one.graph_mode == EAGER]


def pairs(one: Combination) -> set[tuple[str, Any, str, Any]]:
    """The pairs of values that occur in it."""
    named = sorted(vars(one).items())
    return {(*first, *second) for first, second in combinations(named, 2)}


PAIRWISE = [
    Combination(FULL, TND, PLACEHOLDER, 1),
    Combination(FULL, BATCH_EXPANSION, PLACEHOLDER, 2),
    Combination(FULL, TND, SLACK, 3),
    Combination(FULL, BATCH_EXPANSION, SLACK, 7),
    Combination(PIECEWISE, BATCH_EXPANSION, PLACEHOLDER, 1),
    Combination(PIECEWISE, TND, SLACK, 2),
    Combination(PIECEWISE, BATCH_EXPANSION, SLACK, 3),
    Combination(PIECEWISE, TND, PLACEHOLDER, 7),
    Combination(EAGER, CHUNKED_PREFILL, SLACK, 1),
    Combination(EAGER, CHUNKED_PREFILL, PLACEHOLDER, 2),
    Combination(EAGER, CHUNKED_PREFILL, PLACEHOLDER, 3),
    Combination(EAGER, CHUNKED_PREFILL, SLACK, 7),
    Combination(EAGER, BATCH_EXPANSION, PLACEHOLDER, 1),
    Combination(EAGER, TND, SLACK, 3),
]
"""Each of 4 K with each of 3 attentions, chunked prefill eager only, and two eager ones: 14 is the fewest possible."""
MORE_BURSTS = [
    Combination(FULL, TND, SLACK, 1),
    Combination(FULL, TND, SLACK, 2),
    Combination(FULL, TND, PLACEHOLDER, 3),
]
"""With those above: whole graphs with either padding at K = 1, 2 and 3."""
OFF, SMALL = "off", "small graphs"
PREFILL = Combination(PIECEWISE, BATCH_EXPANSION, PLACEHOLDER, 1)
"""P: there attention is an operator of its own, which is where the connector saves."""
DECODE = [Combination(FULL, TND, padding, k) for padding, k in product(PADDINGS, (1, 3))]


def connector(folder: str) -> dict[str, Any]:
    """kv_transfer_config of P and D. It does nothing but where an ask tells it to."""
    return {
        "kv_connector": "OneTokenLeft",
        "kv_connector_module_path": "handoff_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": folder},
    }


def arms(folder: str) -> dict[str, Arm]:
    """Name -> engine. folder: what P hands over."""
    found = {one.name: one.arm() for one in every_combination()}

    def ask(one: Combination, **more: Callable[[Any], Any]) -> None:
        found[one.name].asks.update(more)

    ask(Combination(FULL, TND, SLACK, 3), midflight=midflight, static=static, dummy=dummy_step)
    ask(Combination(PIECEWISE, BATCH_EXPANSION, SLACK, 3), midflight=midflight, dummy=dummy_step)
    ask(Combination(EAGER, TND, SLACK, 3), attention_calls=attention_calls, acceptance=acceptance, dummy=dummy_step)
    ask(PREFILL, hand_over=asks.hand_over)
    for one in [PREFILL, *DECODE]:
        found[one.name].engine["kv_transfer_config"] = connector(folder)
    for one in DECODE:
        ask(one, handed_over=asks.handed_over)
    for arm in found.values():
        # Else no two requests would ever have the same id.
        arm.env["VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"] = "1"
    found[OFF] = replace(Combination(EAGER, TND, PLACEHOLDER, 1).arm(), k=0, asks={"reference": asks.reference})
    found[SMALL] = replace(Combination(FULL, TND, SLACK, 3).arm(), capture_slots=[1, 2, 4])
    return found


class Engines:
    """Name of an engine -> what it found; started when first asked for, P before any D."""

    def __init__(self, folder: Path) -> None:
        self.arms = arms(str(folder))
        self._results: dict[str, dict[str, Any]] = {}

    def __getitem__(self, name: str) -> dict[str, Any]:
        if name in {one.name for one in DECODE}:
            self[PREFILL.name]
        if name not in self._results:
            [self._results[name]] = start([self.arms[name]])
        result = self._results[name]
        assert "error" not in result, f"{name}: {result['error']}"
        return result["found"]
