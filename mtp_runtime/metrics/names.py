"""Every metric name this project reads or writes, once.

Readers of vLLM's, the router's and the plugin's metrics, the exporter, the dashboard, the load test and the canary
take the names from here. Sources: vLLM 0.32.0 `v1/metrics/loggers.py`, `v1/spec_decode/metrics.py` and
`distributed/kv_transfer/kv_connector/v1/nixl/stats.py`; vllm-router 0.1.17, from its running `/metrics`.
"""

from __future__ import annotations

from typing import Final

# --- vLLM: speculative decoding (present only on servers started with a speculative config) -------------------------
SPEC_DRAFTS: Final = "vllm:spec_decode_num_drafts_total"  # draft steps: decode steps of one request with drafts
SPEC_DRAFT_TOKENS: Final = "vllm:spec_decode_num_draft_tokens_total"
SPEC_ACCEPTED_TOKENS: Final = "vllm:spec_decode_num_accepted_tokens_total"
SPEC_ACCEPTED_PER_POSITION: Final = "vllm:spec_decode_num_accepted_tokens_per_pos_total"  # label: position, from 0

# --- vLLM: latency histograms, seconds (base names: add _sum, _count, _bucket) --------------------------------------
TIME_TO_FIRST_TOKEN: Final = "vllm:time_to_first_token_seconds"
INTER_TOKEN_LATENCY: Final = "vllm:inter_token_latency_seconds"  # per step, not per token: not TPOT when MTP is on
TIME_PER_OUTPUT_TOKEN: Final = "vllm:request_time_per_output_token_seconds"  # mean per request; 0 for one-token ones
REQUEST_GENERATION_TOKENS: Final = "vllm:request_generation_tokens"  # tokens per request; its first bucket is le=1
E2E_LATENCY: Final = "vllm:e2e_request_latency_seconds"

# --- vLLM: load and throughput --------------------------------------------------------------------------------------
REQUESTS_RUNNING: Final = "vllm:num_requests_running"
REQUESTS_WAITING: Final = "vllm:num_requests_waiting"
KV_CACHE_USAGE: Final = "vllm:kv_cache_usage_perc"  # a fraction 0..1 in spite of its name
PROMPT_TOKENS: Final = "vllm:prompt_tokens_total"
GENERATION_TOKENS: Final = "vllm:generation_tokens_total"
REQUEST_SUCCESS: Final = "vllm:request_success_total"  # label: finished_reason
PREEMPTIONS: Final = "vllm:num_preemptions_total"

# --- vLLM: NIXL transfers (counted on the side that pulls the KV cache: decode) -------------------------------------
NIXL_XFER_TIME: Final = "vllm:nixl_xfer_time_seconds"
NIXL_BYTES: Final = "vllm:nixl_bytes_transferred"
NIXL_FAILED_TRANSFERS: Final = "vllm:nixl_num_failed_transfers_total"

# --- our engine plugin, on the engine's own /metrics ----------------------------------------------------------------
PLUGIN_ENGINE_DRAFT_STEPS: Final = "mtp_runtime_engine_draft_steps_total"  # engine steps scheduled with a draft
PLUGIN_VERIFY_CALLS: Final = "mtp_runtime_verify_calls_total"  # of those, the ones our verification decided
PLUGIN_ATTENTION_DRAFT_STEPS: Final = "mtp_runtime_attention_draft_steps_total"  # ... our decode attention computed
PLUGIN_VERIFY_DRAFT_STEPS: Final = "mtp_runtime_verify_draft_steps_total"  # per request, placeholders included
PLUGIN_ATTENTION_DECODE_CALLS: Final = "mtp_runtime_attention_decode_calls_total"  # one a layer
# A request that joins D without drafts is padded by vLLM's scheduler to 1 + K with draft ids of -1. The plugin keeps
# that step out of vLLM's draft statistics and counts it here.
PLUGIN_PLACEHOLDER_STEPS: Final = "mtp_runtime_verify_placeholder_steps_total"
PLUGIN_PLACEHOLDER_TOKENS: Final = "mtp_runtime_verify_placeholder_tokens_total"
# With graph_mode full or piecewise; all three stay 0 with eager.
PLUGIN_GRAPH_REPLAYS: Final = "mtp_runtime_graph_replays_total"  # steps of the target in a static graph
PLUGIN_GRAPH_DRAFT_REPLAYS: Final = "mtp_runtime_graph_draft_replays_total"  # passes of the drafter in one
PLUGIN_GRAPH_EAGER_STEPS: Final = "mtp_runtime_graph_eager_steps_total"  # decode steps and passes that fit no graph

# Gauges. Active is 0 to loaded; loaded is 0 where MTP is off.
PLUGIN_ACTIVE_K: Final = "mtp_runtime_active_k"  # drafts a request gets each step
PLUGIN_LOADED_K: Final = "mtp_runtime_loaded_k"  # the K that the server was started with

# Gauge on the Ascend engines: 1 or 0, label: patch. Absent means that the plugin found nothing to do.
PATCH_ACTIVE: Final = "mtp_patch_active"

# --- vllm-router ----------------------------------------------------------------------------------------------------
ROUTER_REQUESTS: Final = "vllm_router_requests_total"
ROUTER_PD_REQUESTS: Final = "vllm_router_pd_requests_total"
ROUTER_DURATION: Final = "vllm_router_generate_duration_seconds"  # without prefill/decode; has no route label
ROUTER_PD_DURATION: Final = "vllm_router_pd_request_duration_seconds"
ROUTER_WORKER_HEALTH: Final = "vllm_router_worker_health"

# --- our exporter ---------------------------------------------------------------------------------------------------
ACCEPTANCE_RATE: Final = "mtp_acceptance_rate"
ACCEPTANCE_LENGTH: Final = "mtp_acceptance_length"
ACCEPTANCE_RATE_POSITION: Final = "mtp_acceptance_rate_position"
TPOT: Final = "mtp_tpot_seconds"
ENGINE_UP: Final = "mtp_exporter_engine_up"
SCRAPE_FAILURES: Final = "mtp_exporter_scrape_failures_total"

# Labels of the exporter's series, and of every scraped series (the scrape configuration adds the same two).
LABEL_ROLE: Final = "instance_role"
LABEL_INSTANCE: Final = "engine_instance"
LABEL_POSITION: Final = "position"

# --- Prometheus jobs ------------------------------------------------------------------------------------------------
JOB_VLLM: Final = "vllm"
JOB_ROUTER: Final = "router"
JOB_EXPORTER: Final = "mtp-exporter"
JOB_PROMETHEUS: Final = "prometheus"

# Roles that decode. A prefill server yields one token a request, so acceptance and TPOT mean nothing there.
DECODING_ROLES: Final = frozenset({"decode", "single"})
