"""What `make bench-engine` measures: engines, arms, who takes turns with whom, and what must be reached. Plain data."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from mtp_runtime.choice import ATTENTIONS, BATCH_EXPANSION, CHUNKED_PREFILL, TND
from mtp_runtime.config.engines import CPU_ATTENTION
from mtp_runtime.config.graph_plan import CUDAGRAPH_MODE
from mtp_runtime.config.schema import GraphMode
from mtp_runtime.graphs.slots import PADDINGS, PLACEHOLDER, SLACK, graph_slots

BLOCK: Final = 16
"""KV entries of a block."""
KV_ROW_BYTES: Final = (512 + 64) * 4
"""One KV entry of one layer: latent and rope, float32."""
MOST_ENGINES: Final = 6
"""Alive at once: each takes about 1 GB."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine process: K drafts, how decode steps run, and slots, the most requests at once.

    plugin: False for stock vLLM, which runs eagerly in its own way. Raises ValueError for what does not exist.
    """

    k: int
    mode: GraphMode = "eager"
    padding: str = PLACEHOLDER
    attention: str = TND
    plugin: bool = True
    slots: int = 4

    def __post_init__(self) -> None:
        if self.padding not in PADDINGS or self.attention not in ATTENTIONS or self.k < 0 or self.slots < 1:
            raise ValueError(f"no such engine: {self}")
        if not self.plugin and (self.mode, self.padding, self.attention) != ("eager", PLACEHOLDER, TND):
            raise ValueError(f"stock vLLM has no choice of mode, padding and attention: {self}")
        if self.k == 0 and self.padding != PLACEHOLDER:
            raise ValueError(f"without drafts there is nothing to pad: {self}")

    @property
    def name(self) -> str:
        """As printed: what differs from TND attention and our plugin is said, and padding where a graph has it."""
        words = [f"K={self.k}", self.mode]
        words += [self.padding] if self.mode == "full" and self.k else []
        words += [self.attention] if self.attention != TND else []
        words += [] if self.plugin else ["stock"]
        return " ".join(words)

    @property
    def graph_sizes(self) -> list[int]:
        """Tokens of the graphs, as a rank's plan has them."""
        if self.mode == "eager":
            return []
        return [slots * (self.k + 1) for slots in graph_slots(self.slots, self.k, self.padding)]

    def environment(self) -> dict[str, str]:
        """What the process needs beside `cpu_env`."""
        if not self.plugin:
            return {"VLLM_PLUGINS": ""}
        env = {"MTP_ATTENTION": self.attention, "MTP_PADDING": self.padding}
        return {**env, "VLLM_USE_BREAKABLE_CUDAGRAPH": "1"} if self.mode == "piecewise" else env

    def kv_bytes(self, model: str, length: int) -> int:
        """Memory in which every slot reaches its longest context, drafts included, and the null block."""
        config = json.loads((Path(model) / "config.json").read_text())
        layers = config["num_hidden_layers"] + bool(self.k)
        return (self.slots * -(-(length + self.k) // BLOCK) + 1) * BLOCK * layers * KV_ROW_BYTES

    def arguments(self, model: str, length: int) -> dict[str, Any]:
        """Arguments of vLLM's LLM. length: max_model_len. Stock too has a deployed rank's backend."""
        found: dict[str, Any] = {
            "model": model,
            "dtype": "float32",
            "attention_backend": CPU_ATTENTION,
            "skip_tokenizer_init": True,
            "max_model_len": length,
            "max_num_seqs": self.slots,
            # Requests that come together are prefilled in one step.
            "max_num_batched_tokens": self.slots * length,
            "kv_cache_memory_bytes": self.kv_bytes(model, length),
            "seed": 0,
            "use_tqdm_on_load": False,
        }
        if self.k:
            drafter = {"method": "mtp", "num_speculative_tokens": self.k, "attention_backend": CPU_ATTENTION}
            found["speculative_config"] = drafter
        if self.mode == "eager":
            return {**found, "enforce_eager": True}
        graphs = {"mode": 0, "cudagraph_mode": CUDAGRAPH_MODE[self.mode], "cudagraph_capture_sizes": self.graph_sizes}
        return {**found, "compilation_config": graphs}


@dataclass(frozen=True, slots=True)
class Arm:
    """What is measured: an engine that serves so many requests at once, with so many of its K drafts active.

    active_k: None for all of them. Raises ValueError for more than the engine has.
    """

    engine: Engine
    at_once: int = 1
    active_k: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.at_once <= self.engine.slots:
            raise ValueError(f"{self.at_once} requests at once, the engine has {self.engine.slots} slots")
        if self.active_k is not None and not (self.engine.plugin and 0 <= self.active_k <= self.engine.k):
            raise ValueError(f"{self.active_k} drafts active, the engine has {self.engine.k}")

    @property
    def drafts(self) -> int:
        """K in force."""
        return self.engine.k if self.active_k is None else self.active_k

    @property
    def name(self) -> str:
        """As printed."""
        active = "" if self.active_k is None else f" active {self.active_k}"
        return f"{self.engine.name}{active}" + (f", {self.at_once} at once" if self.at_once > 1 else "")

    def without_mtp(self) -> Arm:
        """What the gain is measured against: no MTP, the rest alike, in TND."""
        engine = Engine(0, self.engine.mode, slots=self.engine.slots)
        return Arm(engine, self.at_once)

    def eager(self) -> Arm:
        """What a mode and a way of attention are measured against: eager in TND, the rest alike."""
        engine = Engine(self.engine.k, slots=self.engine.slots)
        return replace(self, engine=engine)


@dataclass(frozen=True, slots=True)
class Target:
    """What the median of a figure of one arm must reach: `at_most` a limit, else at least it."""

    figure: str
    arm: Arm
    at_most: bool
    limit: float

    def line(self, value: float) -> str:
        """The verdict as printed."""
        title = {"step_cost": "step cost", "gain": "TPOT gain"}[self.figure]
        words = f"at {'most' if self.at_most else 'least'} {self.limit}"
        return f"{title} {self.arm.name}: {value:.3f}, {words}: {'met' if self.met(value) else 'MISSED'}"

    def met(self, value: float) -> bool:
        """Whether it is reached."""
        return value <= self.limit if self.at_most else value >= self.limit


@dataclass(frozen=True, slots=True)
class Group:
    """Arms that take turns; their engines live at the same time. Raises ValueError for too many of them."""

    title: str
    arms: tuple[Arm, ...]

    def __post_init__(self) -> None:
        if len(self.engines) > MOST_ENGINES:
            raise ValueError(f"{self.title}: {len(self.engines)} engines, at most {MOST_ENGINES}")

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Each once, in the order of the arms."""
        return tuple(dict.fromkeys(arm.engine for arm in self.arms))

    @property
    def at_once(self) -> tuple[int, ...]:
        """Numbers of requests at once, ascending."""
        return tuple(sorted({arm.at_once for arm in self.arms}))


@dataclass(frozen=True, slots=True)
class Part:
    """One --part: its groups, one after the other; what its table shows; its defaults.

    prompts: a round, for each request at once; tokens: a prompt; length: max_model_len.
    """

    title: str
    groups: tuple[Group, ...]
    columns: tuple[str, ...]
    prompts: int
    tokens: int
    length: int
    targets: tuple[Target, ...] = ()


def _arms(engines: tuple[Engine, ...], at_once: tuple[int, ...]) -> tuple[Arm, ...]:
    return tuple(Arm(engine, requests) for requests in at_once for engine in engines)


COST = Part(
    "step cost and gain of one request, eager, and against stock vLLM",
    (
        Group(
            "eager",
            _arms((Engine(0), Engine(1), Engine(3), Engine(1, plugin=False), Engine(3, plugin=False)), (1,)),
        ),
    ),
    ("itl_ms", "tpot_ms", "step_cost", "acceptance", "acceptance_length", "gain"),
    prompts=3,
    tokens=64,
    length=1024,
    targets=(
        Target("step_cost", Arm(Engine(1)), at_most=True, limit=1.35),
        Target("step_cost", Arm(Engine(3)), at_most=True, limit=1.6),
        Target("gain", Arm(Engine(1)), at_most=False, limit=1.35),
        Target("gain", Arm(Engine(3)), at_most=False, limit=1.6),
    ),
)

_MODES = (
    Engine(0),
    Engine(0, "piecewise"),
    Engine(0, "full"),
    Engine(1),
    Engine(1, "piecewise"),
    Engine(1, "full"),
)
_PADDINGS = (Engine(0, "full"), Engine(1, "full", PLACEHOLDER), Engine(1, "full", SLACK))
_WAYS = (
    Engine(0),
    Engine(0, attention=BATCH_EXPANSION),
    Engine(1),
    Engine(1, attention=BATCH_EXPANSION),
    Engine(1, attention=CHUNKED_PREFILL),
)
MODES = Part(
    "graph modes, padding and ways of attention at K = 0 and 1",
    (
        Group("graph modes", _arms(_MODES, (1, 4))),
        Group("padding of whole graphs", _arms(_PADDINGS, (1, 4))),
        Group("ways of attention", _arms(_WAYS, (1,))),
    ),
    ("itl_ms", "tpot_ms", "over_eager", "step_cost", "acceptance_length", "gain"),
    prompts=1,
    tokens=48,
    length=512,
)

_SIXTEEN = {k: Engine(k, "full", slots=16) for k in range(4)}


def _paddings(*drafts: int) -> tuple[Arm, ...]:
    """K = 0 and these K: at 1, 4 and 16 requests with placeholders, at 16 with slack too."""
    both = (_SIXTEEN[0], *(_SIXTEEN[k] for k in drafts))
    slack = tuple(replace(_SIXTEEN[k], padding=SLACK) for k in drafts)
    return _arms(both, (1, 4, 16)) + _arms(slack, (16,))


LOAD = Part(
    "K under load, whole graphs, 16 slots",
    (Group("K = 1, 2", _paddings(1, 2)), Group("K = 3", _paddings(3))),
    ("itl_ms", "tpot_ms", "tokens_per_second", "step_cost", "acceptance_length", "gain"),
    prompts=1,
    tokens=40,
    length=512,
)


def _active(mode: GraphMode, padding: str, at_once: int) -> tuple[Arm, ...]:
    loaded = Engine(1, mode, padding)
    return (Arm(loaded, at_once, 0), Arm(loaded, at_once))


ACTIVE_K = Part(
    "K = 1 loaded and switched off while it serves, against an engine without MTP",
    (
        Group(
            "active K",
            tuple(
                arm
                for at_once in (1, 4)
                for arm in (
                    Arm(Engine(0), at_once),
                    *_active("eager", PLACEHOLDER, at_once),
                    Arm(Engine(0, "full"), at_once),
                    *_active("full", PLACEHOLDER, at_once),
                    *_active("full", SLACK, at_once),
                )
            ),
        ),
    ),
    ("itl_ms", "tpot_ms", "step_cost", "acceptance_length", "gain"),
    prompts=1,
    tokens=48,
    length=512,
)

PARTS: Final = {"cost": COST, "modes": MODES, "load": LOAD, "active-k": ACTIVE_K}
