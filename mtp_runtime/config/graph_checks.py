"""The checks about graphs, their sizes and padding (R04, R05, R06, R17, R21, R42, R43, R45, W03). Pure."""

from collections.abc import Iterator

from mtp_runtime import releases
from mtp_runtime.choice import CHUNKED_PREFILL
from mtp_runtime.graphs.slots import MAX_K, MAX_SLACK_K, PLACEHOLDER, SLACK, SlotsError, slots_for

from .checks import Finding, decoding_roles, serving_key
from .graph_plan import (
    GRAPH_MODE,
    batched_tokens,
    full_slots,
    graph_mode,
    on_cpu,
    padding,
    sizes_in_force,
    stated,
    torchair_sizes,
    written_sizes,
)
from .placement import Rank
from .problems import KeyPath
from .schema import Cluster, Role

SIZES = ("compilation_config", "cudagraph_capture_sizes")
TORCHAIR_SIZES = ("additional_config", "torchair_graph_config", "graph_batch_sizes")
PADDING: KeyPath = ("mtp", "padding")


def capture_sizes(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R04. On CPU for both kinds of graph: its plugin takes no other shapes."""
    yield from _torchair_sizes(cluster)
    for role in cluster.active_roles():
        mode, config = graph_mode(cluster, role), stated(cluster, role)
        sizes, most = sizes_in_force(cluster, role), config.max_cudagraph_capture_size
        if not sizes or not (mode == "full" or (mode == "piecewise" and on_cpu(cluster))):
            continue
        key, step = serving_key(cluster, role, *SIZES), cluster.draft_tokens(role) + 1
        slots = full_slots(cluster, role)
        for size in sizes:
            if size % step:
                yield Finding(key, f"capture size {size} of {role} is no multiple of K + 1 = {step}.")
            elif slots and size > slots * step:
                yield Finding(key, f"capture size {size} of {role} is above {slots * step} = slots x (K + 1).")
            if most and size > most:
                yield Finding(key, f"capture size {size} of {role} is above the maximum {most}; it would be dropped.")
        if most and max(sizes) < most:
            message = f"max_cudagraph_capture_size {most} of {role} is above the largest size, {max(sizes)}."
            yield Finding(serving_key(cluster, role, "compilation_config", "max_cudagraph_capture_size"), message)
        if slots and mode == "full" and on_cpu(cluster) and max(sizes) < slots * step:
            yield Finding(
                key, f"a full batch of {role} needs capture size {slots * step}; the largest is {max(sizes)}."
            )


def _torchair_sizes(cluster: Cluster) -> Iterator[Finding]:
    """R04 for torchair: its sizes are requests, K + 1 tokens each, and those above max_num_seqs are dropped."""
    for role in cluster.active_roles():
        sizes, requests = torchair_sizes(cluster, role), cluster.role_serving(role).max_num_seqs
        key = serving_key(cluster, role, *TORCHAIR_SIZES)
        for size in sizes or ():
            if requests and size > requests:
                yield Finding(key, f"graph_batch_sizes {size} of {role} is above max_num_seqs {requests}: dropped.")


def _single_torchair_graph(cluster: Cluster) -> Iterator[Finding]:
    """R05 for torchair: D gets its graph by tokens, whatever the padding (the MTP article, section 8)."""
    sizes, requests = torchair_sizes(cluster, "decode"), cluster.role_serving("decode").max_num_seqs
    key = serving_key(cluster, "decode", *TORCHAIR_SIZES)
    if sizes is not None and (len(set(sizes)) != 1 or requests not in (None, sizes[0])):
        wanted = f"[{requests}] (max_num_seqs)" if requests else "one size"
        yield Finding(key, f"graph_batch_sizes {sizes} of decode: with prefill apart it must be {wanted}.")


def single_graph(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R05."""
    found = releases.find(cluster.topology.engine, cluster.topology.release)
    k = cluster.draft_tokens("decode")
    if k and "decode" in cluster.active_roles() and torchair_sizes(cluster, "decode") is not None:
        yield from _single_torchair_graph(cluster)
        return
    if "decode" not in cluster.active_roles() or found is None or found.dispatch_by_slots or k > MAX_SLACK_K:
        return
    if graph_mode(cluster, "decode") != "full" or padding(cluster, "decode").method != SLACK:
        return
    slots, sizes = full_slots(cluster, "decode"), sizes_in_force(cluster, "decode")
    if slots is None:
        key = serving_key(cluster, "decode", "max_num_seqs")
        yield Finding(key, "slack padding needs max_num_seqs of decode: the slack slots are counted from it.")
        return
    needed = slots * (k + 1)
    if set(sizes or ()) != {needed}:
        written = f"{sizes} are written" if sizes else "none is written, the engine would choose several"
        message = f"decode needs the one capture size {needed} = {slots} slots (slack included) x (K + 1); {written}."
        yield Finding(serving_key(cluster, "decode", *SIZES) if sizes else ("serving", "decode", *SIZES), message)


def tokens_of_a_step(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R06."""
    for role in decoding_roles(cluster):
        serving, step = cluster.role_serving(role), cluster.draft_tokens(role) + 1
        slots, tokens = full_slots(cluster, role), batched_tokens(cluster, role)
        if slots and serving.max_num_seqs and tokens and tokens < slots * step:
            slack = f", {slots - serving.max_num_seqs} of them slack" if slots > serving.max_num_seqs else ""
            message = f"max_num_batched_tokens {tokens} of {role} is below {slots} slots x {step} tokens{slack}."
            yield Finding(serving_key(cluster, role, "max_num_batched_tokens"), message)


def tokens_unknown(cluster: Cluster, mtp_layers: int | None) -> Iterator[Finding]:
    """W06."""
    for role in decoding_roles(cluster):
        k = cluster.draft_tokens(role)
        if k and cluster.role_serving(role).max_num_seqs is None:
            tokens = batched_tokens(cluster, role)
            limit = f"max_num_batched_tokens {tokens}" if tokens else "the engine's max_num_batched_tokens"
            message = f"max_num_seqs of {role} is left to the engine: whether {limit} holds a full step of {k + 1} "
            yield Finding(
                serving_key(cluster, role, "max_num_seqs"), message + "tokens a request was not checked (R06)."
            )


def padded_drafter(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R17."""
    if not (cluster.mtp.enabled and cluster.mtp.disable_padded_drafter_batch):
        return
    for role in cluster.active_roles():
        mode, key = graph_mode(cluster, role), ("mtp", "disable_padded_drafter_batch")
        if mode == "full":
            yield Finding(key, f"disable_padded_drafter_batch together with a full graph on {role}.")
        elif mode is None:
            yield Finding(
                key, f"disable_padded_drafter_batch, and {role} states no graph_mode: the engine's has a full graph."
            )


def slack_possible(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R21. Refused with MTP off too: switching on must not need a second edit. Above MAX_K R03 speaks."""
    if cluster.mtp.padding == SLACK and cluster.mtp.k <= MAX_K:
        try:
            slots_for(1, cluster.mtp.k)
        except SlotsError as error:
            yield Finding(PADDING, f"{error.what}.")


def eager_attention(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R42."""
    for role in decoding_roles(cluster):
        mode = graph_mode(cluster, role)
        if cluster.mtp.attention == CHUNKED_PREFILL and mode in ("full", "piecewise"):
            message = f"attention chunked_prefill together with graph_mode {mode} on {role}: "
            yield Finding(("mtp", "attention"), message + "a prefill has no fixed shape to capture.")


def graph_keys(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R43."""
    found: dict[KeyPath, Finding] = {}
    for role in cluster.active_roles():
        checks = _cpu_keys(cluster, role) if on_cpu(cluster) else _ascend_keys(cluster, role)
        # A key above the roles is one finding.
        found.update({one.key: one for one in checks})
    yield from found.values()


def _cpu_keys(cluster: Cluster, role: Role) -> Iterator[Finding]:
    serving, config = cluster.role_serving(role), stated(cluster, role)
    if serving.enforce_eager is not None:
        key = serving_key(cluster, role, "enforce_eager")
        yield Finding(key, "on the CPU engine graph_mode says it; enforce_eager could contradict it.")
    if config.cudagraph_mode:
        key = serving_key(cluster, role, "compilation_config", "cudagraph_mode")
        yield Finding(key, "on the CPU engine graph_mode says it; cudagraph_mode could contradict it.")
    if config.max_cudagraph_capture_size and not written_sizes(cluster, role):
        key = serving_key(cluster, role, "compilation_config", "max_cudagraph_capture_size")
        yield Finding(key, "a largest size without sizes: on the CPU engine they are derived, none is left out.")
    over = cluster.serving.prefill
    if role == "prefill" and over and over.graph_mode not in (None, "eager"):
        yield Finding(("serving", "prefill", "graph_mode"), "P of the CPU engine is always eager: it decodes nothing.")
    if graph_mode(cluster, role) != "eager" and serving.max_num_seqs is None and not written_sizes(cluster, role):
        key = serving_key(cluster, role, "max_num_seqs")
        yield Finding(key, f"graph_mode {serving.graph_mode} of {role} needs max_num_seqs: the sizes follow from it.")


def _ascend_keys(cluster: Cluster, role: Role) -> Iterator[Finding]:
    serving, written = cluster.role_serving(role), stated(cluster, role).cudagraph_mode
    mode, key = serving.graph_mode, serving_key(cluster, role, "graph_mode")
    torchair = torchair_sizes(cluster, role) is not None
    if torchair and (serving.enforce_eager or mode not in (None, "full") or written not in (None, "NONE")):
        switch = serving_key(cluster, role, "additional_config", "torchair_graph_config", "enabled")
        yield Finding(switch, f"torchair graphs on {role} together with another graph mode or eager.")
        return
    if stated(cluster, role).cudagraph_capture_sizes == "auto" and serving.max_num_seqs is None:
        sizes = serving_key(cluster, role, *SIZES)
        yield Finding(sizes, f"auto of {role} needs max_num_seqs: the sizes follow from it.")
    found = releases.find(cluster.topology.engine, cluster.topology.release)
    if found and not torchair and found.graphs == (releases.TORCHAIR,) and graph_mode(cluster, role) != "eager":
        message = f"{found.line} has torchair graphs only: {role} needs torchair_graph_config.enabled or "
        remedy = f"set serving.{role}.additional_config.torchair_graph_config.enabled: true and no other graph key, or "
        yield Finding(key, message + "graph_mode: eager.", f"{remedy}serving.{role}.graph_mode: eager")
    if mode is None or torchair:
        return
    if serving.enforce_eager is not None and serving.enforce_eager != (mode == "eager"):
        yield Finding(key, f"graph_mode {mode} contradicts enforce_eager {serving.enforce_eager} on {role}.".lower())
    if written is not None and GRAPH_MODE[written] != mode:
        yield Finding(key, f"graph_mode {mode} contradicts cudagraph_mode {written} on {role}.")


def padding_scheduler(cluster: Cluster, ranks: list[Rank]) -> Iterator[Finding]:
    """R45. With MTP off too: switching on must not need a second edit."""
    if on_cpu(cluster) or "decode" not in cluster.active_roles():
        return
    config = cluster.role_serving("decode").additional_config
    placeholders = bool(config and config.recompute_scheduler_enable)
    found = releases.find(cluster.topology.engine, cluster.topology.release)
    if found and cluster.mtp.padding == PLACEHOLDER and PLACEHOLDER not in found.padding:
        lines = releases.named(r for r in releases.RELEASES if PLACEHOLDER in r.padding)
        yield Finding(PADDING, f"{found.line} has no placeholders; lines that have them: {lines}.")
    elif cluster.mtp.padding == PLACEHOLDER and not placeholders:
        yield Finding(PADDING, "padding placeholder without recompute_scheduler_enable on decode, which gives them.")
    if cluster.mtp.padding == SLACK and placeholders:
        yield Finding(PADDING, "padding slack beside recompute_scheduler_enable on decode, which gives placeholders.")


def slack_elsewhere(cluster: Cluster, mtp_layers: int | None) -> Iterator[Finding]:
    """W03."""
    found = releases.find(cluster.topology.engine, cluster.topology.release)
    if cluster.mtp.enabled and cluster.mtp.padding == SLACK and found and SLACK not in found.padding:
        lines = releases.named(line for line in releases.RELEASES if SLACK in line.padding)
        message = f"padding slack renders nothing on {found.line}: slack slots are this project's runtime, in {lines}."
        yield Finding(PADDING, message)
