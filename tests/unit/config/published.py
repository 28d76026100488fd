"""The published command lines and environment that the inventories stand for.

Sources: vllm-ascend documentation at tag v0.23.0: "Prefill-Decode Disaggregation (DeepSeek)" (a3), "DeepSeek-V3.1"
(a3-v31), "DeepSeek-V3.2" (a3-v32), "DeepSeek-R1" (a3-single); the MTP article, section 6 (seed-online). The text is
theirs, with words in capitals for what an operator fills in: WEIGHTS, NODE the rank's node, FIRST the first node of its
group, PORT, RANK, KV_PORT, NIC. Environment: what the release's pages set on a rank, and what a page adds or changes.
"""

import shlex
from dataclasses import dataclass, field

HEAD = """vllm serve WEIGHTS --host 0.0.0.0 --port PORT --data-parallel-size {dp} --data-parallel-rank RANK
--data-parallel-address FIRST --data-parallel-rpc-port {rpc} --tensor-parallel-size {tp} --enable-expert-parallel
"""
R1_SIZES = '{"prefill": {"dp_size": 2, "tp_size": 8}, "decode": {"dp_size": 32, "tp_size": 1}}'
R1_P = (
    HEAD.format(dp=2, tp=8, rpc=12321)
    + """--seed 1024 --served-model-name ds_r1 --max-model-len 40000 --max-num-batched-tokens 16384 --max-num-seqs 8
--enforce-eager --trust-remote-code --gpu-memory-utilization 0.9 --quantization ascend --no-enable-prefix-caching
--speculative-config '{"num_speculative_tokens": 1, "method":"deepseek_mtp"}'
--additional-config '{"enable_shared_expert_dp": true}'
--kv-transfer-config '{"kv_connector": "MooncakeLayerwiseConnector", "kv_role": "kv_producer", "kv_port": "KV_PORT",
"kv_connector_extra_config": SIZES}'"""
).replace("SIZES", R1_SIZES)
R1_D = (
    HEAD.format(dp=32, tp=1, rpc=12321)
    + """--seed 1024 --served-model-name ds_r1 --max-model-len 40000 --max-num-batched-tokens 256 --max-num-seqs 40
--trust-remote-code --gpu-memory-utilization 0.94 --quantization ascend --no-enable-prefix-caching
--speculative-config '{"num_speculative_tokens": 1, "method":"deepseek_mtp"}'
--additional-config '{"recompute_scheduler_enable":true,"multistream_overlap_shared_expert": true,
"finegrained_tp_config": {"lmhead_tensor_parallel_size":16}}'
--compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY"}'
--kv-transfer-config '{"kv_connector": "MooncakeLayerwiseConnector", "kv_role": "kv_consumer", "kv_port": "KV_PORT",
"kv_connector_extra_config": SIZES}'"""
).replace("SIZES", R1_SIZES)
V31_P = (
    HEAD.format(dp=2, tp=8, rpc=12321)
    + """--seed 1024 --served-model-name deepseek_v3 --max-model-len 65536 --max-num-batched-tokens 16384
--max-num-seqs 8 --enforce-eager --trust-remote-code --gpu-memory-utilization 0.9 --quantization ascend
--no-enable-prefix-caching --speculative-config '{"num_speculative_tokens": 1, "method": "mtp"}'
--kv-transfer-config '{"kv_connector": "MooncakeConnectorV1", "kv_role": "kv_producer", "kv_port": "KV_PORT",
"kv_connector_extra_config": SIZES}'"""
).replace("SIZES", R1_SIZES)
V31_D = (
    HEAD.format(dp=32, tp=1, rpc=12321)
    + """--seed 1024 --served-model-name deepseek_v3 --max-model-len 65536 --max-num-batched-tokens 256
--max-num-seqs 28 --trust-remote-code --gpu-memory-utilization 0.92 --quantization ascend --no-enable-prefix-caching
--speculative-config '{"num_speculative_tokens": 1, "method": "mtp"}'
--compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY"}'
--additional-config '{"recompute_scheduler_enable":true,"multistream_overlap_shared_expert": true,
"finegrained_tp_config": {"lmhead_tensor_parallel_size":16}}'
--kv-transfer-config '{"kv_connector": "MooncakeConnectorV1", "kv_role": "kv_consumer", "kv_port": "KV_PORT",
"kv_connector_extra_config": SIZES}'"""
).replace("SIZES", R1_SIZES)
V32_SIZES = '{"prefill": {"dp_size": 2, "tp_size": 16}, "decode": {"dp_size": 8, "tp_size": 4}}'
V32_PROFILER = """--profiler-config '{"profiler": "torch", "torch_profiler_dir": "./vllm_profile",
"torch_profiler_with_stack": false}'
"""
V32_P = (
    HEAD.format(dp=2, tp=16, rpc=12890)
    + """--speculative-config '{"num_speculative_tokens": 1, "method":"deepseek_mtp"}'
"""
    + V32_PROFILER
    + """--seed 1024 --served-model-name deepseek_v3.2 --max-model-len 68000 --max-num-batched-tokens 32560
--trust-remote-code --max-num-seqs 64 --gpu-memory-utilization 0.82 --quantization ascend --enforce-eager
--no-enable-prefix-caching --additional-config '{"layer_sharding": ["q_b_proj", "o_proj"], "enable_dsa_cp": true}'
--kv-transfer-config '{"kv_connector": "MooncakeConnectorV1", "kv_role": "kv_producer", "kv_port": "KV_PORT",
"kv_connector_extra_config": SIZES}'"""
).replace("SIZES", V32_SIZES)
V32_D = (
    HEAD.format(dp=8, tp=4, rpc=12777)
    + """--speculative-config '{"num_speculative_tokens": 2, "method":"deepseek_mtp"}'
"""
    + V32_PROFILER
    + """--seed 1024 --served-model-name deepseek_v3.2 --max-model-len 68000 --max-num-batched-tokens 12
--compilation-config '{"cudagraph_mode":"FULL_DECODE_ONLY", "cudagraph_capture_sizes":[3, 6, 9, 12]}'
--trust-remote-code --max-num-seqs 4 --gpu-memory-utilization 0.95 --no-enable-prefix-caching --quantization ascend
--kv-transfer-config '{"kv_connector": "MooncakeConnectorV1", "kv_role": "kv_consumer", "kv_port": "KV_PORT",
"kv_connector_extra_config": SIZES}' --additional-config '{"recompute_scheduler_enable" : true}'"""
).replace("SIZES", V32_SIZES)
R1_SINGLE = """vllm serve WEIGHTS --host 0.0.0.0 --port 8000 --data-parallel-size 4 --tensor-parallel-size 4
--quantization ascend --seed 1024 --served-model-name deepseek_r1 --enable-expert-parallel --max-num-seqs 16
--max-model-len 16384 --max-num-batched-tokens 4096 --trust-remote-code --gpu-memory-utilization 0.92
--speculative-config '{"num_speculative_tokens":3,"method":"mtp"}'
--compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY"}'"""
ARTICLE = """python -m vllm.entrypoints.openai.api_server --model="/weights/DeepSeek-R1_w8a8/" --trust-remote-code
--max-model-len 40000 --tensor-parallel-size 4 --data_parallel_size 4 --max-num-seqs 16 --no-enable-prefix-caching
--enable_expert_parallel --served-model-name deepseekr1
--speculative-config '{"num_speculative_tokens": 1, "method":"deepseek_mtp"}' --quantization ascend --host 0.0.0.0
--port 1234 --additional-config '{"torchair_graph_config":{"enabled":true,"graph_batch_sizes":[16]},
"enable_weight_nz_layout":true}' --gpu_memory_utilization 0.9"""

COMMON_ENV = {
    "HCCL_IF_IP": "NODE",
    "GLOO_SOCKET_IFNAME": "NIC",
    "TP_SOCKET_IFNAME": "NIC",
    "HCCL_SOCKET_IFNAME": "NIC",
    "OMP_PROC_BIND": "false",
    "OMP_NUM_THREADS": "10",
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    "HCCL_OP_EXPANSION_MODE": "AIV",
    "TASK_QUEUE_ENABLE": "1",
    "VLLM_USE_V1": "1",
    "HCCL_CONNECT_TIMEOUT": "600",
    "HCCL_EXEC_TIMEOUT": "3600",
    "VLLM_RPC_TIMEOUT": "3600000",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "30000",
    "ASCEND_ENABLE_USE_FABRIC_MEM": "1",
    "VLLM_ENGINE_READY_TIMEOUT_S": "1800",
    "HF_HUB_OFFLINE": "1",
}
PD_ENV = COMMON_ENV | {
    "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "480",
    "ASCEND_CONNECT_TIMEOUT": "10000",
    "ASCEND_TRANSFER_TIMEOUT": "10000",
}
V31_ENV = PD_ENV | {"HCCL_CONNECT_TIMEOUT": "120", "HCCL_EXEC_TIMEOUT": "204"}
V32_ENV = (
    PD_ENV
    | {"HCCL_BUFFSIZE": "256"}
    | dict.fromkeys(
        ("ASCEND_AGGREGATE_ENABLE", "ASCEND_TRANSPORT_PRINT", "ACL_OP_INIT_MODE", "ASCEND_A3_ENABLE"),
        "1",
    )
)
FLASHCOMM1 = {"VLLM_ASCEND_ENABLE_FLASHCOMM1": "1"}


@dataclass(frozen=True)
class Published:
    """One rank of an inventory. values: capitals -> what the inventory has; devices: None where all of the host's."""

    cluster: str
    rank: str
    text: str
    values: dict[str, str]
    env: dict[str, str] = field(default_factory=dict)
    devices: str | None = None

    def argv(self) -> list[str]:
        """The words of the command line."""
        text = self.text
        for word in sorted(self.values, key=len, reverse=True):
            text = text.replace(word, self.values[word])
        return shlex.split(text)

    def environment(self) -> dict[str, str]:
        """The environment, filled in."""
        return {key: self.values.get(value, value) for key, value in self.env.items()}


def _pd(weights: str, node: str, first: str, port: int, rank: int, kv_port: str) -> dict[str, str]:
    return {
        "WEIGHTS": f"/mnt/weights/{weights}",
        "NODE": f"192.0.2.{node}",
        "FIRST": f"192.0.2.{first}",
        "PORT": str(port),
        "RANK": str(rank),
        "KV_PORT": kv_port,
        "NIC": "eth0",
    }


def _dies(low: int, count: int) -> str:
    return ",".join(str(n) for n in range(low, low + count))


R1, V31, V32 = "DeepSeek-R1-W8A8-MTP", "DeepSeek-V3.1-w8a8-mtp-QuaRot", "DeepSeek-V3.2-w8a8-mtp-QuaRot"
R1_P_ENV, R1_D_ENV = PD_ENV | {"HCCL_BUFFSIZE": "256"}, PD_ENV | {"HCCL_BUFFSIZE": "600"}
V31_P_ENV, V31_D_ENV = V31_ENV | {"HCCL_BUFFSIZE": "256"} | FLASHCOMM1, V31_ENV | {"HCCL_BUFFSIZE": "1100"}
ONE_NODE = {"WEIGHTS": "/mnt/weights/DeepSeek-R1-W8A8", "NODE": "192.0.2.11", "NIC": "eth0"}
PUBLISHED = (
    Published("a3", "prefill-0", R1_P, _pd(R1, "11", "11", 7100, 0, "36000"), R1_P_ENV, _dies(0, 8)),
    Published("a3", "prefill-3", R1_P, _pd(R1, "12", "12", 7101, 1, "36100"), R1_P_ENV, _dies(8, 8)),
    Published("a3", "decode-0", R1_D, _pd(R1, "21", "21", 7100, 0, "36200"), R1_D_ENV, "0"),
    Published("a3", "decode-16", R1_D, _pd(R1, "22", "21", 7100, 16, "36200"), R1_D_ENV, "0"),
    Published("a3", "decode-31", R1_D, _pd(R1, "22", "21", 7115, 31, "36200"), R1_D_ENV, "15"),
    Published("a3-v31", "prefill-0", V31_P, _pd(V31, "11", "11", 7100, 0, "30000"), V31_P_ENV, _dies(0, 8)),
    Published("a3-v31", "prefill-2", V31_P, _pd(V31, "12", "12", 7100, 0, "30100"), V31_P_ENV, _dies(0, 8)),
    Published("a3-v31", "decode-0", V31_D, _pd(V31, "21", "21", 7100, 0, "30200"), V31_D_ENV, "0"),
    Published("a3-v31", "decode-31", V31_D, _pd(V31, "22", "21", 7115, 31, "30200"), V31_D_ENV, "15"),
    Published("a3-v32", "prefill-0", V32_P, _pd(V32, "11", "11", 9100, 0, "30000"), V32_ENV | FLASHCOMM1, _dies(0, 16)),
    Published("a3-v32", "prefill-1", V32_P, _pd(V32, "12", "11", 9100, 1, "30000"), V32_ENV | FLASHCOMM1, _dies(0, 16)),
    Published("a3-v32", "decode-0", V32_D, _pd(V32, "21", "21", 9100, 0, "30100"), V32_ENV, _dies(0, 4)),
    Published("a3-v32", "decode-7", V32_D, _pd(V32, "22", "21", 9103, 7, "30100"), V32_ENV, _dies(12, 4)),
    Published("a3-single", "single-0", R1_SINGLE, ONE_NODE, COMMON_ENV | {"VLLM_ASCEND_BALANCE_SCHEDULING": "1"}),
    Published("seed-online", "single-0", ARTICLE, {}),
)
