"""A broken and a sound variant of an inventory for every rule that is checked before deployment.

breaks: edits of a shipped inventory that must be answered with the rule's id at `key`.
holds: the nearest edits that must break no rule at all.
"""

from dataclasses import dataclass, field
from typing import Any

from inventory_copy import DELETE


@dataclass(frozen=True)
class Case:
    """base: shipped inventory; text: (section, old, new) on the file's text, for what no YAML writer produces."""

    rule: str
    base: str
    key: str
    breaks: dict[str, Any] = field(default_factory=dict)
    holds: dict[str, Any] = field(default_factory=dict)
    text: tuple[str, str, str] | None = None


OVERLAP = "serving.prefill.additional_config.multistream_overlap_shared_expert"
RECOMPUTE = "additional_config.recompute_scheduler_enable"
BALANCE = "additional_config.enable_balance_scheduling"
FINE = "serving.decode.additional_config.finegrained_tp_config"
FINE_P = "serving.prefill.additional_config.finegrained_tp_config"
CAPTURE = "serving.decode.compilation_config.cudagraph_capture_sizes"
CAPTURE_MAX = "serving.decode.compilation_config.max_cudagraph_capture_size"

FLASHCOMM1_D = "serving.decode.additional_config.enable_flashcomm1"
MAX_SEQS = "serving.decode.max_num_seqs"
MODE = "serving.decode.graph_mode"
EAGER = "serving.decode.enforce_eager"
CUDAGRAPH = "serving.decode.compilation_config.cudagraph_mode"
K = "mtp.num_speculative_tokens"
RECOMPUTE_D = "serving.decode.additional_config.recompute_scheduler_enable"
# a3 with slack slots instead of placeholders: 40 requests, K = 1, 3 slots of slack, 86 tokens.
SLACK_A3 = {"mtp.padding": "slack", RECOMPUTE_D: False}
OLD = {"topology.release": "0.18.0"}

MEMORY = "serving.decode.gpu_memory_utilization"
HCCL = "serving.decode.hccl_buffsize"
TORCHAIR = "additional_config.torchair_graph_config"
TORCHAIR_SIZES = f"{TORCHAIR}.graph_batch_sizes"
SCHEDULER = "serving.additional_config.ascend_scheduler_config.enabled"
# a3 on the 0.11 line: decode in one torchair graph of 40 requests.
TORCHAIR_A3 = {
    "topology.release": "0.11.0",
    "mtp.padding": "auto",
    "serving.decode.additional_config": {"torchair_graph_config": {"enabled": True, "graph_batch_sizes": [40]}},
}

CASES = (
    Case("C01", "local", "mtp.num_drafts", {"mtp.num_drafts": 2}, {K: 2}),
    Case("C01", "local", "topology.decode.ports", {"topology.decode.ports": 8300}),
    Case("C01", "local", "all.vars", {"hosts.all.vars": {"x": 1}}),
    Case("C01", "local", "nmtp", text=("mtp", "mtp:\n", "nmtp: 1\nmtp:\n")),
    Case("C02", "local", "mtp.num_speculative_tokens", {"mtp.num_speculative_tokens": "1"}),
    Case("C02", "local", "mtp.num_speculative_tokens", {"mtp.num_speculative_tokens": True}),
    Case("C02", "local", "mtp.num_speculative_tokens", {"mtp.num_speculative_tokens": 1.5}),
    Case("C02", "local", "mtp.enabled", text=("mtp", "enabled: true", "enabled: yes"), holds={"mtp.enabled": False}),
    Case("C02", "local", "topology.decode", {"topology.decode": 8300}),
    Case("C02", "local", "(file)", text=("mtp", "mtp:", "- mtp:")),
    Case("C03", "local", "mtp.num_speculative_tokens", {"mtp.num_speculative_tokens": -1}),
    Case("C03", "local", "mtp.verification", {"mtp.verification": "typical"}, {"mtp.verification": "block"}),
    Case("C03", "local", "topology.decode.port", {"topology.decode.port": 65536}, {"topology.decode.port": 65535}),
    Case("C03", "local", "model.path", {"model.path": "{{ weights }}"}),
    Case(
        "C05",
        "local",
        "mtp.enabled",
        text=("mtp", "  enabled: true\n", "  enabled: true\n  enabled: false\n"),
        holds={K: 2},
    ),
    Case("C06", "local", "(file)", text=("mtp", "enabled: true", "enabled: [true"), holds={K: 2}),
    Case("C07", "local", "model.max_model_len", text=("model", "  max_model_len: 8192\n", "")),
    Case("C07", "local", "mtp", text=("mtp", "mtp:", "ntp:"), holds={"model.max_model_len": 4096}),
    Case("R01", "a3", "all.hosts.p0.kv_port", {"hosts.all.hosts.p0.kv_port": 35999}),
    Case(
        "R01",
        "a3",
        "all.hosts.p0.kv_port",
        {"hosts.all.hosts.p0.kv_port": 65530},
        {"hosts.all.hosts.p0.kv_port": 50000},
    ),
    Case("R01", "a3", "all.hosts.p0.kv_port", {"serving.router.port": 36016}, {"serving.router.port": 36017}),
    Case(
        "R01",
        "a3-v31",
        "topology.prefill.kv_port",
        {"serving.router.port": 36016},
        {"serving.router.port": 36017},
    ),
    Case("R02", "local", "mtp.num_speculative_tokens", {"mtp.num_speculative_tokens": 0}, {"mtp.enabled": False}),
    Case(
        "R03",
        "local",
        "mtp.num_speculative_tokens",
        {"mtp.num_speculative_tokens": 16},
        {"mtp.num_speculative_tokens": 15},
    ),
    Case("R03", "local", "mtp.num_speculative_tokens", {"mtp.enabled": False, "mtp.num_speculative_tokens": 16}),
    Case(
        "R04", "a3", "serving.decode.compilation_config.cudagraph_capture_sizes", {CAPTURE: [2, 7]}, {CAPTURE: [2, 80]}
    ),
    Case("R04", "a3", "serving.decode.compilation_config.cudagraph_capture_sizes", {CAPTURE: [2, 82]}, {CAPTURE: [80]}),
    Case(
        "R04",
        "a3",
        "serving.decode.compilation_config.cudagraph_capture_sizes",
        {CAPTURE: [2, 40], CAPTURE_MAX: 38},
        {CAPTURE: [2, 40], CAPTURE_MAX: 40},
    ),
    Case("R04", "a3", CAPTURE_MAX, {CAPTURE: [2, 80], CAPTURE_MAX: 82}, {CAPTURE: [2, 80], CAPTURE_MAX: 80}),
    Case("R04", "a3", CAPTURE, {CAPTURE: [2, 7], MODE: None, CUDAGRAPH: "FULL"}, {CAPTURE: [2, 7], MODE: "piecewise"}),
    Case("R04", "local", CAPTURE, {CAPTURE: [2, 7], MODE: "piecewise"}, {CAPTURE: [2, 6], MODE: "piecewise"}),
    Case("R04", "local", CAPTURE, {CAPTURE: [2, 6], MODE: "full"}, {CAPTURE: [2, 8], MODE: "full"}),
    Case(
        "R04",
        "local",
        CAPTURE,
        {CAPTURE: [2, 8], MODE: "full", "mtp.padding": "slack"},
        {CAPTURE: [2, 10], MODE: "full", "mtp.padding": "slack"},
    ),
    Case("R04", "local", CAPTURE, {CAPTURE: [2, 10], MODE: "full"}, {CAPTURE: [2, 10], MODE: "eager"}),
    Case(
        "R04",
        "seed-online",
        f"serving.{TORCHAIR_SIZES}",
        {f"serving.{TORCHAIR_SIZES}": [16, 32]},
        {f"serving.{TORCHAIR_SIZES}": [8, 16]},
    ),
    Case("R04", "a3-v32", CAPTURE_MAX, {CAPTURE_MAX: 15}, {CAPTURE_MAX: 12}),
    Case("R05", "a3", CAPTURE, SLACK_A3, {**SLACK_A3, CAPTURE: [86]}),
    Case(
        "R05",
        "a3",
        f"serving.decode.{TORCHAIR_SIZES}",
        {**TORCHAIR_A3, f"serving.decode.{TORCHAIR_SIZES}": [8, 40]},
        TORCHAIR_A3,
    ),
    Case("R05", "a3", CAPTURE, {**SLACK_A3, CAPTURE: [2, 86]}, {**SLACK_A3, MODE: "piecewise"}),
    Case("R05", "a3", CAPTURE, {**SLACK_A3, CAPTURE: [80]}, {CAPTURE: [2, 80]}),
    Case("R05", "a3", MAX_SEQS, {**SLACK_A3, MAX_SEQS: None, CAPTURE: [86]}, {MAX_SEQS: None}),
    Case(
        "R06",
        "a3",
        "serving.decode.max_num_batched_tokens",
        {**SLACK_A3, CAPTURE: [86], "serving.decode.max_num_batched_tokens": 85},
        {**SLACK_A3, CAPTURE: [86], "serving.decode.max_num_batched_tokens": 86},
    ),
    Case(
        "R06",
        "a3",
        "serving.decode.max_num_batched_tokens",
        {"serving.decode.max_num_batched_tokens": 79},
        {"serving.decode.max_num_batched_tokens": 80},
    ),
    # 4 requests and a slot of slack need 15 tokens at K = 2: only placeholders fit 12.
    Case(
        "R06",
        "a3-v32",
        "serving.decode.max_num_batched_tokens",
        {"mtp.padding": "slack", RECOMPUTE_D: False, "serving.decode.max_num_batched_tokens": 12},
        {"serving.decode.max_num_batched_tokens": 12},
    ),
    Case(
        "R08",
        "a3",
        "topology.decode.internal_dp",
        {"topology.decode.internal_dp": True},
        {"topology.decode.internal_dp": False},
    ),
    Case(
        "R08",
        "a3-single",
        "topology.single.internal_dp",
        {"topology.single.dp": 8},
        {"topology.single.internal_dp": False, "topology.single.rpc_port": 12321, "serving.router.port": 8090},
    ),
    Case(
        "R08",
        "a3",
        "topology.decode.dp",
        {"topology.decode.dp": 48},
        {"hosts.all.children.prefill.hosts": {"p0": None}, "hosts.all.hosts.p1": DELETE},
    ),
    Case(
        "R08",
        "a3",
        "topology.prefill.tp",
        {"topology.prefill.tp": 32, "topology.prefill.dp": 1},
        {"topology.prefill.tp": 16, "topology.prefill.dp": 1},
    ),
    Case(
        "R09",
        "a3",
        "serving.prefill.additional_config.recompute_scheduler_enable",
        {f"serving.prefill.{RECOMPUTE}": True},
        {f"serving.prefill.{RECOMPUTE}": False},
    ),
    Case(
        "R09", "a3", "serving.decode.additional_config.enable_balance_scheduling", {f"serving.decode.{BALANCE}": True}
    ),
    Case(
        "R09",
        "a3-v32",
        "serving.decode.additional_config.layer_sharding",
        {"serving.decode.additional_config.layer_sharding": ["o_proj"]},
        {"serving.prefill.additional_config.layer_sharding": ["o_proj"]},
    ),
    Case(
        "R10",
        "a3",
        f"{FINE}.lmhead_tensor_parallel_size",
        {f"{FINE}.lmhead_tensor_parallel_size": 12},
        {f"{FINE}.lmhead_tensor_parallel_size": 8},
    ),
    Case("R10", "a3", f"{FINE}.lmhead_tensor_parallel_size", {"model.moe": False, "topology.expert_parallel": False}),
    Case(
        "R10",
        "a3",
        f"{FINE}.mlp_tensor_parallel_size",
        {f"{FINE}.mlp_tensor_parallel_size": 5},
        {f"{FINE}.mlp_tensor_parallel_size": 4, f"{FINE}.embedding_tensor_parallel_size": 4},
    ),
    Case(
        "R10",
        "a3",
        f"{FINE}.oproj_tensor_parallel_size",
        {f"{FINE}.oproj_tensor_parallel_size": 4, RECOMPUTE_D: False, "mtp.padding": "auto"},
        {f"{FINE}.oproj_tensor_parallel_size": 0, RECOMPUTE_D: False, "mtp.padding": "auto"},
    ),
    Case(
        "R10",
        "a3",
        f"{FINE_P}.embedding_tensor_parallel_size",
        {f"{FINE_P}.embedding_tensor_parallel_size": 2},
        # The engine asks for it from 0.23.0 on only.
        {f"{FINE_P}.embedding_tensor_parallel_size": 2, "topology.release": "0.18.0"},
    ),
    Case(
        "R10",
        "a3",
        f"{FINE}.oproj_tensor_parallel_size",
        {f"{FINE}.oproj_tensor_parallel_size": 4, MODE: "eager"},
        {f"{FINE}.oproj_tensor_parallel_size": 4},
    ),
    Case(
        "R11",
        "a3",
        OVERLAP,
        {OVERLAP: True, "serving.prefill.additional_config.enable_shared_expert_dp": False},
        {OVERLAP: True},
    ),
    Case("R11", "a3", OVERLAP, {OVERLAP: True, "topology.expert_parallel": False}),
    Case("R15", "a3", MEMORY, {MEMORY: 0.97}, {MEMORY: 0.96}),
    Case("R15", "a3", MEMORY, {MEMORY: 0.97, "mtp.enabled": False}, {MEMORY: 0.97, "mtp.method": "ngram"}),
    Case("R15", "a3", MEMORY, {MEMORY: 0.95, HCCL: 1200}, {MEMORY: 0.94, HCCL: 1200}),
    Case("R15", "a3", MEMORY, {"topology.device_memory_gib": 32}, {"topology.device_memory_gib": 32, MEMORY: 0.93}),
    Case(
        "R15",
        "a3",
        "topology.device_memory_gib",
        {"topology.device_memory_gib": 2, MEMORY: None},
        {"topology.device_memory_gib": 32, MEMORY: None},
    ),
    Case(
        "R17",
        "a3",
        "mtp.disable_padded_drafter_batch",
        {"mtp.disable_padded_drafter_batch": True},
        {"mtp.disable_padded_drafter_batch": True, MODE: "piecewise"},
    ),
    Case(
        "R17",
        "a3",
        "mtp.disable_padded_drafter_batch",
        {"mtp.disable_padded_drafter_batch": True, MODE: None, CUDAGRAPH: "FULL"},
        {"mtp.disable_padded_drafter_batch": True, MODE: None, CUDAGRAPH: "FULL", EAGER: True},
    ),
    Case(
        "R17",
        "a3-single",
        "mtp.disable_padded_drafter_batch",
        {"mtp.disable_padded_drafter_batch": True, "serving.graph_mode": None},
        {"mtp.disable_padded_drafter_batch": True, "serving.graph_mode": "piecewise"},
    ),
    Case("R17", "local", "mtp.disable_padded_drafter_batch", {"mtp.disable_padded_drafter_batch": True, MODE: "full"}),
    Case("R18", "seed-online", SCHEDULER, {"topology.release": "0.9.1", SCHEDULER: True}, {SCHEDULER: True}),
    Case(
        "R18",
        "seed-online",
        SCHEDULER,
        {"topology.release": "main-2025-08"},
        {"topology.release": "main-2025-08", SCHEDULER: True},
    ),
    Case("R18", "seed-online", K, {"topology.release": "0.9.1", K: 2}, {"topology.release": "0.9.1", SCHEDULER: False}),
    Case("R18", "seed-online", K, {"topology.release": "main-2025-09", K: 2}, {"topology.release": "main-2025-09"}),
    Case("R18", "seed-online", K, {"topology.release": "main-2025-09", K: 3, "mtp.enabled": False}, {K: 3}),
    Case("R19", "seed-online", "mtp.method", {"mtp.method": "mtp"}, {"mtp.method": "ngram"}),
    Case("R19", "local", "mtp.method", {"mtp.method": "mpt"}, {"mtp.method": "deepseek_mtp"}),
    Case("R19", "local", "mtp.method", {"mtp.method": "ngram"}),
    Case("R19", "a3", "mtp.method", {"mtp.method": "medusa"}, {"mtp.method": "ngram"}),
    Case(
        "R20",
        "local",
        "model.max_model_len",
        {"model.max_position_embeddings": 8191},
        {"model.max_position_embeddings": 8193},
    ),
    Case(
        "R20",
        "a3",
        "model.max_model_len",
        {"topology.release": "0.18.0", "model.max_position_embeddings": 40000},
        {"topology.release": "0.18.0", "model.max_position_embeddings": 40001},
    ),
    Case(
        "R20",
        "local",
        "serving.kv_cache_bytes",
        {"serving.kv_cache_bytes": 100_000_000},
        {"serving.kv_cache_bytes": 500_000_000},
    ),
    Case("R21", "local", "mtp.padding", {"mtp.padding": "slack", K: 15}, {"mtp.padding": "slack", K: 14}),
    Case("R21", "local", "mtp.padding", {"mtp.padding": "slack", K: 15, "mtp.enabled": False}, {K: 15}),
    Case("R30", "local", "topology.decode.port", {"topology.decode.port": 8200}, {"topology.decode.port": 8201}),
    Case("R30", "local", "serving.router.backend_port", {"serving.router.backend_port": 8000}),
    Case(
        "R30",
        "local",
        "serving.router.port",
        {"serving.router.host": "0.0.0.0", "serving.router.port": 8350},
        {"serving.router.host": "0.0.0.0"},
    ),
    Case("R30", "local", "monitoring.exporter_port", {"monitoring.exporter_port": 9090}),
    Case("R31", "local", "topology.connector", {"topology.connector": None}, {"topology.connector": "NixlConnector"}),
    Case("R31", "local-single", "topology.connector", {"topology.connector": "NixlConnector"}),
    Case(
        "R31",
        "local",
        "topology.single",
        {"topology.single": {"port": 8400}, "hosts.all.children.single": {"hosts": {"localhost": None}}},
    ),
    Case("R31", "local", "topology.prefill", {"topology.prefill": None, "hosts.all.children.prefill": None}),
    Case("R32", "local", "topology.decode", {"topology.decode": None}),
    Case("R32", "local", "all.children.decode", {"hosts.all.children.decode": {"hosts": {}}}),
    Case("R32", "local", "all.children.router", {"hosts.all.children.router": None}),
    Case(
        "R32",
        "local-single",
        "serving.decode",
        {"serving.decode": {"max_num_seqs": 2}},
        {"serving.single": {"max_num_seqs": 2}},
    ),
    Case(
        "R32",
        "local",
        "all.hosts.spare",
        {"hosts.all.hosts.spare": {}},
        {"hosts.all.hosts.localhost.ansible_python_interpreter": "/usr/bin/python3"},
    ),
    Case("R33", "local", "topology.release", {"topology.release": "0.31.0"}),
    Case("R33", "local", "topology.connector", {"topology.connector": "MooncakeConnectorV1"}),
    Case("R33", "local", "topology.decode.dp", {"topology.decode.dp": 2, "topology.decode.rpc_port": 12321}),
    Case("R33", "local", "topology.decode.tp", {"topology.decode.tp": 2}),
    Case("R33", "a3", "topology.devices_per_host", {"topology.devices_per_host": None}),
    Case("R33", "a3", "topology.expert_parallel", {"model.moe": False}),
    Case("R33", "a3", "topology.runner", {"topology.runner": "supervisor"}, {"topology.runner": "container"}),
    Case(
        "R33", "a3", "topology.connector", {"topology.release": "0.9.1"}, {"topology.connector": "MooncakeConnectorV1"}
    ),
    Case(
        "R34",
        "local",
        "serving.max_num_batched_tokens",
        {"serving.max_num_batched_tokens": 8191},
        {"serving.max_num_batched_tokens": 8193},
    ),
    Case(
        "R35",
        "local",
        "serving.kv_cache_bytes",
        {"model.num_hidden_layers": None},
        {"model.num_hidden_layers": None, "serving.kv_cache_bytes": 500_000_000},
    ),
    Case("R35", "local", "serving.kv_cache_bytes", {"serving.kv_cache_bytes": None}),
    Case("R36", "local", "topology.decode.side_channel_port", {"topology.decode.side_channel_port": None}),
    Case(
        "R36", "a3", "topology.prefill.kv_port", {"topology.devices_per_host": None, "hosts.all.hosts.p0.kv_port": None}
    ),
    Case(
        "R36",
        "a3",
        "topology.decode.rpc_port",
        {"topology.decode.rpc_port": None},
        {"hosts.all.hosts.p0.kv_port": None, "hosts.all.hosts.d0.kv_port": None},
    ),
    Case("R37", "local", "all.hosts.localhost.rank_port", {"hosts.all.hosts.localhost.rank_port": 8700}),
    Case(
        "R37",
        "a3",
        "all.hosts.p0.rank_port",
        {
            "hosts.all.children.single": {"hosts": {"p0": None}},
            "topology.single": {"port": 7300},
            "hosts.all.hosts.p0.rank_port": 7200,
        },
        {"hosts.all.hosts.p0.rank_port": 7200},
    ),
    Case(
        "R38",
        "a3",
        "mtp.draft_model",
        {"mtp.method": "eagle3"},
        {"mtp.method": "eagle3", "mtp.draft_model": "/mnt/weights/eagle"},
    ),
    Case("R38", "local", "mtp.draft_model", {"mtp.draft_model": "drafter"}),
    Case(
        "C03", "local", "mtp.draft_sampling", {"mtp.draft_sampling": "random"}, {"mtp.draft_sampling": "probabilistic"}
    ),
    Case("R39", "a3", "mtp.draft_sampling", {"mtp.draft_sampling": "probabilistic"}, {"mtp.draft_sampling": "greedy"}),
    Case("R39", "a3", "mtp.draft_sampling", {"mtp.draft_sampling": "probabilistic", "mtp.enabled": False}),
    Case(
        "R40",
        "local",
        "serving.router.backend_host",
        {"serving.router.backend_host": "192.0.2.11"},
        {"serving.router.backend_host": "localhost"},
    ),
    Case(
        "R40",
        "local-single",
        "serving.router.metrics_host",
        {"serving.router.metrics_host": "a-name"},
        {"serving.router.metrics_host": "::1"},
    ),
    Case("R40", "local", "monitoring.host", {"monitoring.host": "::"}, {"monitoring.host": "127.0.0.2"}),
    Case("R40", "local", "monitoring.host", {"monitoring.host": "10.0.0.1"}),
    Case(
        "R40",
        "a3",
        "serving.router.backend_host",
        {"serving.router.backend_host": "0.0.0.0"},
        {"serving.router.backend_host": "192.0.2.11", "serving.router.metrics_host": "p0"},
    ),
    Case("R40", "a3", "monitoring.host", {"monitoring.host": "0"}),
    Case("R40", "a3", "monitoring.host", {"monitoring.host": "::ffff:0.0.0.0"}),
    Case("R41", "a3", "mtp.attention", {"mtp.attention": "batch_expansion"}, {"mtp.attention": "tnd"}),
    Case("R41", "a3", "mtp.attention", {"mtp.attention": "chunked_prefill", "mtp.enabled": False}),
    Case(
        "R42",
        "local",
        "mtp.attention",
        {"mtp.attention": "chunked_prefill", MODE: "full"},
        {"mtp.attention": "chunked_prefill", MODE: "eager"},
    ),
    Case(
        "R42",
        "local-single",
        "mtp.attention",
        {"mtp.attention": "chunked_prefill", "serving.graph_mode": "piecewise"},
        {"mtp.attention": "batch_expansion", "serving.graph_mode": "piecewise"},
    ),
    Case("R43", "local", "serving.enforce_eager", {"serving.enforce_eager": True}, {"serving.graph_mode": "eager"}),
    Case("R43", "local", EAGER, {EAGER: False}, {MODE: "piecewise"}),
    Case("R43", "local", CUDAGRAPH, {CUDAGRAPH: "FULL_DECODE_ONLY", MODE: "full"}, {MODE: "full"}),
    Case("R43", "local", CAPTURE_MAX, {CAPTURE_MAX: 8, MODE: "full"}, {CAPTURE_MAX: 8, CAPTURE: [8], MODE: "full"}),
    Case(
        "R43",
        "local",
        "serving.prefill.graph_mode",
        {"serving.prefill.graph_mode": "full"},
        {"serving.prefill.graph_mode": "eager", "serving.graph_mode": "full"},
    ),
    Case(
        "R43",
        "local",
        "serving.decode.max_num_seqs",
        {MODE: "full", MAX_SEQS: None, "serving.kv_cache_bytes": 500_000_000},
        {MODE: "full", MAX_SEQS: None, "serving.kv_cache_bytes": 500_000_000, CAPTURE: [2, 4]},
    ),
    Case("R43", "a3", MODE, {EAGER: True}, {EAGER: False}),
    Case("R43", "a3", MODE, {CUDAGRAPH: "PIECEWISE"}, {CUDAGRAPH: "FULL_AND_PIECEWISE"}),
    Case("R43", "a3", MODE, {EAGER: False, MODE: "eager"}, {EAGER: True, MODE: "eager"}),
    Case(
        "R43",
        "seed-online",
        f"serving.{TORCHAIR}.enabled",
        {"serving.enforce_eager": True},
        {"serving.graph_mode": "full"},
    ),
    Case("R43", "seed-online", f"serving.{TORCHAIR}.enabled", {"serving.graph_mode": "piecewise"}),
    Case(
        "R43",
        "seed-online",
        "serving.graph_mode",
        {"topology.release": "0.9.1", "serving.additional_config": None},
        {"topology.release": "0.9.1", "serving.additional_config": None, "serving.graph_mode": "eager"},
    ),
    Case("R43", "a3-v32", CAPTURE, {MAX_SEQS: None}, {MAX_SEQS: None, CAPTURE: [3, 6]}),
    Case("R44", "local", K, {K: DELETE, "model.path": "no/such/folder"}, {K: DELETE}),
    Case("R44", "a3", K, {K: None}, {K: None, "mtp.enabled": False}),
    Case("R45", "a3", "mtp.padding", {RECOMPUTE_D: False}, {RECOMPUTE_D: False, "mtp.padding": "auto"}),
    Case("R45", "a3", "mtp.padding", {"mtp.padding": "slack", CAPTURE: [86]}, {"mtp.padding": "auto"}),
    Case("R45", "a3", "mtp.padding", {**TORCHAIR_A3, "mtp.padding": "placeholder"}, TORCHAIR_A3),
    Case(
        "R46",
        "a3",
        f"serving.decode.{TORCHAIR}.enabled",
        {f"serving.decode.{TORCHAIR}.enabled": True},
        {f"serving.decode.{TORCHAIR}": None},
    ),
    Case(
        "R46",
        "seed-online",
        f"serving.{TORCHAIR}.enable_multistream_shared_expert",
        {f"serving.{TORCHAIR}.enable_multistream_shared_expert": False, "topology.release": "0.9.1"},
        {f"serving.{TORCHAIR}.enable_multistream_shared_expert": False},
    ),
    Case(
        "R46",
        "a3",
        "serving.decode.additional_config.enable_weight_nz_layout",
        {"serving.decode.additional_config.enable_weight_nz_layout": True},
    ),
    Case(
        "R46",
        "a3",
        "serving.decode.additional_config.ascend_scheduler_config.enabled",
        {f"serving.decode.{SCHEDULER[8:]}": False},
    ),
    Case(
        "R46",
        "a3-single",
        "serving.additional_config.enable_balance_scheduling",
        {"topology.release": "0.18.0"},
        {"topology.release": "0.18.0", "serving.additional_config": None},
    ),
    Case("R46", "seed-online", "mtp.disable_padded_drafter_batch", {"mtp.disable_padded_drafter_batch": True}),
    Case(
        "R46",
        "seed-online",
        "serving.compilation_config.max_cudagraph_capture_size",
        {"serving.compilation_config.max_cudagraph_capture_size": 32},
    ),
    Case(
        "R46",
        "seed-online",
        "serving.additional_config.finegrained_tp_config.lmhead_tensor_parallel_size",
        {"serving.additional_config.finegrained_tp_config.lmhead_tensor_parallel_size": 4},
    ),
    Case("R46", "local", "mtp.patches", {"mtp.patches": {"sampler": False}}),
    Case("R46", "local", "serving.hccl_buffsize", {"serving.hccl_buffsize": 200}, {"serving.hccl_buffsize": None}),
    Case("R46", "local", f"serving.decode.{RECOMPUTE}", {f"serving.decode.{RECOMPUTE}": True}),
    Case(
        "R47",
        "a3-v32",
        "serving.prefill.additional_config.enable_dsa_cp",
        {"serving.prefill.additional_config.enable_flashcomm1": False},
        {"serving.prefill.additional_config.enable_dsa_cp": False},
    ),
    Case(
        "R47", "a3", FLASHCOMM1_D, {FLASHCOMM1_D: True}, {"serving.prefill.additional_config.enable_flashcomm1": True}
    ),
    Case(
        "R47",
        "a3-v31",
        "serving.prefill.additional_config.enable_flashcomm1",
        {"topology.expert_parallel": False},
        {"topology.expert_parallel": False, "serving.prefill.additional_config.enable_flashcomm1": False},
    ),
)

HOSTS = "hosts.all.hosts"
CASES += (
    Case(
        "R32",
        "a3",
        "all.children.decode.hosts.dl",
        {"hosts.all.children.decode.hosts": {"d0": None, "dl": None}},
        {"hosts.all.children.decode.hosts": {"d0": None, "d1": None}},
    ),
    Case("R48", "a3", "all.hosts.d1.address", {f"{HOSTS}.d1.address": "0.0.0.0"}, {f"{HOSTS}.d1.address": "10.0.0.9"}),
    Case("R48", "lab", "all.hosts.d0.address", {f"{HOSTS}.d0.address": "::"}, {f"{HOSTS}.d0.address": "fd00::12"}),
    Case("R48", "lab", "all.hosts.d0.address", {f"{HOSTS}.d0.address": "127.0.0.1"}, {f"{HOSTS}.d0.address": "d0.lan"}),
    Case("R48", "lab", "all.hosts.d0.address", {f"{HOSTS}.d0.address": "localhost"}),
    Case("R48", "a3", "all.hosts.d1.address", {f"{HOSTS}.d1.address": "192.0.2.21"}),
    Case("R48", "a3", "all.hosts.d1.address", {f"{HOSTS}.d1.address": "d1.example"}),
    Case(
        "R48",
        "a3",
        "all.hosts.d1",
        {f"{HOSTS}.d1": {"nic": "eth0"}},
        {f"{HOSTS}.d1": {"nic": "eth0", "ansible_host": "192.0.2.22"}},
    ),
    Case(
        "R49",
        "a3",
        "all.hosts.d1",
        {f"{HOSTS}.d1.nic": None},
        {f"{HOSTS}.{host}.nic": None for host in ("p0", "p1", "d0", "d1")},
    ),
    Case("R50", "a3", "model.path", {"model.path": "weights/R1"}, {"model.path": "/weights/R1"}),
    Case("R50", "a3", "model.path", {"model.path": "deepseek-ai/DeepSeek-R1"}),
    Case("R50", "a3", "model.manifest", {"model.manifest": "manifest.json"}, {"model.manifest": None}),
    Case("R50", "a3", "mtp.draft_model", {"mtp.method": "eagle3", "mtp.draft_model": "someone/eagle"}),
    Case("R50", "local", "model.path", {"model.path": "~/weights"}),
)

# Warnings stop nothing: breaks must be answered with the warning at `key`, holds with none at all.
WARNED = (
    Case(
        "R13",
        "a3-single",
        "topology.single.tp",
        {"topology.single.tp": 16, "topology.single.dp": 1},
        {"topology.single.tp": 2, "topology.single.dp": 8},
    ),
    Case(
        "R13",
        "a3-v32",
        "topology.prefill.tp",
        {"serving.prefill.graph_mode": "piecewise"},
        {"topology.prefill.tp": 16},
    ),
    Case("R13", "a3", "topology.decode.tp", {"model.num_attention_heads": 16}, {"model.num_attention_heads": None}),
    Case("W01", "local", K, {K: 2}, {K: 1}),
    Case("W02", "local", K, {K: 3}, {K: 3, "mtp.enabled": False}),
    Case("W03", "a3", "mtp.padding", {**SLACK_A3, CAPTURE: [86], **OLD}, {**SLACK_A3, CAPTURE: [86]}),
    Case("W04", "a3", "topology.release", {"topology.release": "0.18.0"}, {"topology.release": "0.23.0"}),
    Case(
        "W05",
        "a3",
        "serving.router.host",
        {"serving.router.host": "192.0.2.12"},
        {"serving.router.host": "0.0.0.0", "monitoring.host": "127.0.0.1"},
    ),
    Case("W05", "a3", "serving.router.host", {"serving.router.host": "127.0.0.1"}, {"serving.router.host": "front"}),
    Case("W05", "a3", "monitoring.host", {"monitoring.host": "203.0.113.9"}, {"monitoring.host": "192.0.2.11"}),
    Case("W06", "a3", MAX_SEQS, {MAX_SEQS: None, "serving.decode.max_num_batched_tokens": 79}, {MAX_SEQS: 40}),
    Case("W06", "a3-single", "serving.max_num_seqs", {"serving.max_num_seqs": None}, {"serving.max_num_seqs": 8}),
)
