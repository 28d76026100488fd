"""What a role's steps run as: graph mode, padding, slots, graph sizes. The formulas are mtp_runtime.graphs'. Pure."""

from typing import Any, NamedTuple

from mtp_runtime import releases
from mtp_runtime.graphs.slots import MAX_K, MAX_SLACK_K, PLACEHOLDER, SLACK, graph_slots, slots_for
from mtp_runtime.graphs.strategy import choose_padding

from .engine_types import CompilationConfig
from .schema import Cluster, GraphMode, Role

CUDAGRAPH_MODE: dict[GraphMode, str] = {"piecewise": "PIECEWISE", "full": "FULL_DECODE_ONLY"}
GRAPH_MODE: dict[str, GraphMode] = {
    "NONE": "eager",
    "PIECEWISE": "piecewise",
    "FULL": "full",
    "FULL_DECODE_ONLY": "full",
    "FULL_AND_PIECEWISE": "full",
}


# Up to so many requests every number of them gets a graph; a captured size costs streams and memory.
MOST_GRAPHS = 8
# The sizes that vLLM makes itself, tokens; platform.py of vllm-ascend ends them at max_num_seqs x (K + 1), or OWN_MOST.
OWN_MOST = 512
OWN_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, OWN_MOST + 1, 16))


class Padding(NamedTuple):
    """method: SLACK, PLACEHOLDER, or None where there is nothing to choose; why: half a sentence for people."""

    method: str | None
    why: str


def on_cpu(cluster: Cluster) -> bool:
    """The engine is ours to configure down to its graphs."""
    return cluster.topology.engine == "vllm-cpu"


def stated(cluster: Cluster, role: Role) -> CompilationConfig:
    """compilation_config of a role; an empty one where nothing is written."""
    return cluster.role_serving(role).compilation_config or CompilationConfig.model_validate({})


def torchair_sizes(cluster: Cluster, role: Role) -> list[int] | None:
    """graph_batch_sizes of a role that decodes in torchair graphs, in requests; empty: the engine's.

    None without them, and in a line that has no torchair: R46 speaks there.
    """
    found = releases.find(cluster.topology.engine, cluster.topology.release)
    if found and releases.TORCHAIR not in found.graphs:
        return None
    config = cluster.role_serving(role).additional_config
    torchair = config.torchair_graph_config if config else None
    return list(torchair.graph_batch_sizes or ()) if torchair and torchair.enabled else None


def graph_mode(cluster: Cluster, role: Role) -> GraphMode | None:
    """The mode in force for a role; None where nothing is stated and the engine chooses (vllm-ascend)."""
    serving = cluster.role_serving(role)
    if on_cpu(cluster):
        # P decodes nothing, and its prompts have no fixed shape.
        return "eager" if role == "prefill" else serving.graph_mode or "eager"
    if serving.graph_mode or serving.enforce_eager:
        return serving.graph_mode or "eager"
    if torchair_sizes(cluster, role) is not None:
        return "full"
    written = stated(cluster, role).cudagraph_mode
    return None if written is None else GRAPH_MODE[written]


def padding(cluster: Cluster, role: Role) -> Padding:
    """What a request without drafts gets. The same in every graph mode: switching graphs on changes nothing else."""
    k, wanted, serving = cluster.draft_tokens(role), cluster.mtp.padding, cluster.role_serving(role)
    if k == 0:
        return Padding(None, "MTP is off, every request has one token a step")
    if wanted != "auto":
        return Padding(wanted, "asked for by mtp.padding")
    if not on_cpu(cluster):
        if role == "single":
            return Padding(None, "auto: without a hand-over the engine has drafts for every decode step")
        release = releases.find(cluster.topology.engine, cluster.topology.release)
        if release and PLACEHOLDER not in release.padding:
            return Padding(None, f"auto: left to the engine, {release.line} has no placeholders")
        if serving.additional_config and serving.additional_config.recompute_scheduler_enable:
            return Padding(PLACEHOLDER, "auto: recompute_scheduler_enable gives placeholders")
        return Padding(None, "auto: left to the engine, recompute_scheduler_enable is off")
    if k > MAX_K or serving.max_num_seqs is None:
        return Padding(PLACEHOLDER, "auto: max_num_seqs is not stated, so slack cannot be sized")
    chosen = choose_padding(serving.max_num_seqs, k)
    return Padding(chosen.padding, f"auto: {chosen.why}")


def full_slots(cluster: Cluster, role: Role) -> int | None:
    """Slots of a step at a full batch, slack slots included; None without max_num_seqs.

    Slack slots exist in whole-step graphs. `mtp.padding: slack` counts them in every mode: a graph may be switched on.
    """
    requests, k = cluster.role_serving(role).max_num_seqs, cluster.draft_tokens(role)
    if requests is None:
        return None
    asked = cluster.mtp.padding == SLACK or graph_mode(cluster, role) == "full"
    slack = role != "prefill" and asked and padding(cluster, role).method == SLACK
    return slots_for(requests, k).slots if slack and k <= MAX_SLACK_K else requests


def derived_tokens(cluster: Cluster, role: Role) -> int | None:
    """max_num_batched_tokens where none is written: what a full step of D takes; on CPU a whole prompt too."""
    slots = full_slots(cluster, role)
    step = None if slots is None else slots * (cluster.draft_tokens(role) + 1)
    if on_cpu(cluster):
        return max(cluster.model.max_model_len, step or 0)
    return step if role == "decode" else None


def batched_tokens(cluster: Cluster, role: Role) -> int | None:
    """Tokens that one step may take: the stated ones, else the derived ones; None = the engine's choice."""
    return cluster.role_serving(role).max_num_batched_tokens or derived_tokens(cluster, role)


def written_sizes(cluster: Cluster, role: Role) -> list[int] | None:
    """cudagraph_capture_sizes as a list, where one is written."""
    written = stated(cluster, role).cudagraph_capture_sizes
    return written if isinstance(written, list) else None


def sizes_in_force(cluster: Cluster, role: Role) -> list[int] | None:
    """Sizes that are written or asked for with auto; None where neither is, or auto cannot be answered."""
    if stated(cluster, role).cudagraph_capture_sizes != "auto":
        return written_sizes(cluster, role)
    k, requests = cluster.draft_tokens(role), cluster.role_serving(role).max_num_seqs
    most = MAX_SLACK_K if cluster.mtp.padding == SLACK else MAX_K
    return None if requests is None or k > most else capture_sizes(cluster, role)


def capture_sizes(cluster: Cluster, role: Role) -> list[int]:
    """Graph sizes, query tokens: the stated ones; else n x (K + 1) for the slots worth a graph: on CPU, with auto, and
    where the engine's own sizes have none for a full batch.

    Empty: no graphs, or on vllm-ascend the engine's choice. The cluster must have passed R03, R21 and R43.
    """
    serving, mode = cluster.role_serving(role), graph_mode(cluster, role)
    if mode == "eager":
        return []
    if torchair := torchair_sizes(cluster, role):
        return [size * (cluster.draft_tokens(role) + 1) for size in sorted(set(torchair))]
    if written := written_sizes(cluster, role):
        return sorted(set(written))
    auto = stated(cluster, role).cudagraph_capture_sizes == "auto"
    asked = on_cpu(cluster) or auto or misses_full_batch(cluster, role)
    if not asked or serving.max_num_seqs is None:
        return []
    k = cluster.draft_tokens(role)
    if not on_cpu(cluster):
        return [count * (k + 1) for count in _ascend_slots(cluster, role, serving.max_num_seqs)]
    # Without drafts there is nothing to pad for; PLACEHOLDER adds no slots.
    slots = graph_slots(serving.max_num_seqs, k, padding(cluster, role).method or PLACEHOLDER)
    return [count * (k + 1) for count in slots]


def misses_full_batch(cluster: Cluster, role: Role) -> bool:
    """Whether vllm-ascend, left to itself, runs a full decode step of K + 1 tokens a request eagerly (vLLM#37865).

    Above OWN_MOST tokens it means to.
    """
    serving, k = cluster.role_serving(role), cluster.draft_tokens(role)
    if on_cpu(cluster) or role == "prefill" or k == 0 or serving.max_num_seqs is None:
        return False
    left = serving.graph_mode == "full" and torchair_sizes(cluster, role) is None
    left = left and stated(cluster, role).max_cudagraph_capture_size is None
    tokens = serving.max_num_seqs * (k + 1)
    return left and k <= MAX_K and cluster.mtp.padding != SLACK and tokens <= OWN_MOST and tokens not in OWN_SIZES


def _ascend_slots(cluster: Cluster, role: Role, requests: int) -> list[int]:
    """Slots worth a graph of vllm-ascend. With slack one graph: it gets a step's graph by tokens (R05)."""
    slots = full_slots(cluster, role) or requests
    if slots > requests:
        return [slots]
    few = requests <= MOST_GRAPHS
    return list(range(1, requests + 1)) if few else graph_slots(requests, cluster.draft_tokens(role), PLACEHOLDER)


def compilation_config(cluster: Cluster, role: Role) -> dict[str, Any] | None:
    """--compilation-config of a role; None = no such flag."""
    serving, mode = cluster.role_serving(role), graph_mode(cluster, role)
    written = stated(cluster, role).model_dump(exclude_none=True)
    asked = written.pop("cudagraph_capture_sizes", None) or misses_full_batch(cluster, role)
    if asked and (sizes := capture_sizes(cluster, role)):
        written["cudagraph_capture_sizes"] = sizes
    if not on_cpu(cluster):
        # torchair has its own key, and no cudagraph_mode beside it.
        if serving.graph_mode in CUDAGRAPH_MODE and torchair_sizes(cluster, role) is None:
            written = {"cudagraph_mode": CUDAGRAPH_MODE[serving.graph_mode], **written}
        return written or None
    if mode is None or mode == "eager":
        return None
    # Mode 0: torch.compile traces nothing, the graphs are the plugin's.
    head = {"mode": 0, "cudagraph_mode": CUDAGRAPH_MODE[mode]}
    return {**head, **written, "cudagraph_capture_sizes": capture_sizes(cluster, role)}
