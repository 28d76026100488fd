"""The published command lines and environment for DeepSeek-R1 w8a8 on four A3 nodes (2P1D, release 0.23).

Source: vllm-ascend documentation, "Prefill-Decode Disaggregation (DeepSeek)". NODE is the rank's node, FIRST the first
node of its group, WEIGHTS the weights folder, NIC the network interface.
"""

import json

KV_SIZES = {"prefill": {"dp_size": 2, "tp_size": 8}, "decode": {"dp_size": 32, "tp_size": 1}}
MTP = '{"num_speculative_tokens":1,"method":"deepseek_mtp"}'

PREFILL = """
vllm serve WEIGHTS --host 0.0.0.0 --port PORT --data-parallel-size 2 --data-parallel-rank RANK
--data-parallel-address FIRST --data-parallel-rpc-port 12321 --tensor-parallel-size 8 --enable-expert-parallel
--seed 1024 --served-model-name ds_r1 --max-model-len 40000 --max-num-batched-tokens 16384 --max-num-seqs 8
--enforce-eager --trust-remote-code --gpu-memory-utilization 0.9 --quantization ascend --no-enable-prefix-caching
"""
DECODE = """
vllm serve WEIGHTS --host 0.0.0.0 --port PORT --data-parallel-size 32 --data-parallel-rank RANK
--data-parallel-address FIRST --data-parallel-rpc-port 12321 --tensor-parallel-size 1 --enable-expert-parallel
--seed 1024 --served-model-name ds_r1 --max-model-len 40000 --max-num-batched-tokens 256 --max-num-seqs 40
--trust-remote-code --gpu-memory-utilization 0.94 --quantization ascend --no-enable-prefix-caching
"""


def prefill(values: dict[str, str], kv_port: str) -> list[str]:
    """argv of a P rank. values: placeholder -> text."""
    additional = {"enable_shared_expert_dp": True}
    flags = ["--speculative-config", MTP, "--additional-config", json.dumps(additional)]
    return _words(PREFILL, values) + flags + _transfer("kv_producer", kv_port)


def decode(values: dict[str, str], kv_port: str) -> list[str]:
    """argv of a D rank."""
    additional = {
        "recompute_scheduler_enable": True,
        "multistream_overlap_shared_expert": True,
        "finegrained_tp_config": {"lmhead_tensor_parallel_size": 16},
    }
    flags = ["--speculative-config", MTP, "--additional-config", json.dumps(additional)]
    flags += ["--compilation-config", '{"cudagraph_mode":"FULL_DECODE_ONLY"}']
    return _words(DECODE, values) + flags + _transfer("kv_consumer", kv_port)


def _words(text: str, values: dict[str, str]) -> list[str]:
    return [values.get(word, word) for word in text.split()]


def _transfer(role: str, kv_port: str) -> list[str]:
    config = {
        "kv_connector": "MooncakeLayerwiseConnector",
        "kv_role": role,
        "kv_port": kv_port,
        "kv_connector_extra_config": KV_SIZES,
    }
    return ["--kv-transfer-config", json.dumps(config)]


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
    "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "480",
    "ASCEND_CONNECT_TIMEOUT": "10000",
    "ASCEND_TRANSFER_TIMEOUT": "10000",
    "VLLM_ENGINE_READY_TIMEOUT_S": "1800",
    "HF_HUB_OFFLINE": "1",
}
PREFILL_ENV = COMMON_ENV | {"HCCL_BUFFSIZE": "256"}
DECODE_ENV = COMMON_ENV | {"HCCL_BUFFSIZE": "600"}
