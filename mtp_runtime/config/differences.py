"""Where our command lines differ from the published ones, and why: the one list, for all inventories.

Source of the published ones: vllm-ascend documentation of release 0.23 (a3, a3-v31, a3-v32, a3-single) and the example
of the MTP article (seed-online). A test compares them flag by flag, the JSON in them key by key: a difference not
listed here fails, and so does an entry that no longer differs.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """One flag or variable. kind: argv or env; name: the flag, a key of its JSON after a dot; clusters: inventories."""

    kind: str
    name: str
    published: str
    ours: str
    reason: str
    clusters: tuple[str, ...]


ASCEND_23 = ("a3", "a3-v31", "a3-v32", "a3-single")


ONLY_V32 = "the pages of R1 and V3.1 do without it, and the environment here is one for all ranks of a release"


DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "argv",
        "--host",
        "0.0.0.0",
        "the node's address",
        "a rank answers on the cluster network only; clients come in through the router, which checks the key",
        (*ASCEND_23, "seed-online"),
    ),
    Difference(
        "argv",
        "(program)",
        "python -m vllm.entrypoints.openai.api_server --model WEIGHTS",
        "vllm serve WEIGHTS",
        "the same server under the name that vLLM documents for it",
        ("seed-online",),
    ),
    Difference(
        "argv",
        "--kv-transfer-config.kv_port",
        "30000, 30100, 30200",
        "36000 and more, 100 apart for each group of ranks",
        "the published ones lie among the ports that the transport of 16 devices takes at random (rule R01)",
        ("a3-v31", "a3-v32"),
    ),
    Difference(
        "argv",
        "--additional-config.enable_flashcomm1",
        "(environment: VLLM_ASCEND_ENABLE_FLASHCOMM1=1)",
        "true on P",
        "the same switch as a key: the release's migration guide asks for it, the variable will be removed",
        ("a3-v31", "a3-v32"),
    ),
    Difference(
        "env",
        "VLLM_ASCEND_ENABLE_FLASHCOMM1",
        "1 on P",
        "(not set)",
        "it is additional_config.enable_flashcomm1 here",
        ("a3-v31", "a3-v32"),
    ),
    Difference(
        "argv",
        "--additional-config.enable_balance_scheduling",
        "(environment: VLLM_ASCEND_BALANCE_SCHEDULING=1)",
        "true",
        "the same switch as a key: the release's migration guide asks for it, the variable will be removed",
        ("a3-single",),
    ),
    Difference(
        "env",
        "VLLM_ASCEND_BALANCE_SCHEDULING",
        "1",
        "(not set)",
        "it is additional_config.enable_balance_scheduling here",
        ("a3-single",),
    ),
    Difference(
        "argv",
        "--profiler-config",
        "torch profiler into ./vllm_profile",
        "(not given)",
        "a serving cluster is not profiled by default: the profiler's routes and files are for one investigation",
        ("a3-v32",),
    ),
    Difference(
        "env",
        "ASCEND_AGGREGATE_ENABLE",
        "1",
        "(not set)",
        ONLY_V32,
        ("a3-v32",),
    ),
    Difference(
        "env",
        "ASCEND_TRANSPORT_PRINT",
        "1",
        "(not set)",
        "it prints transfers: for debugging",
        ("a3-v32",),
    ),
    Difference(
        "env",
        "ACL_OP_INIT_MODE",
        "1",
        "(not set)",
        ONLY_V32,
        ("a3-v32",),
    ),
    Difference(
        "env",
        "ASCEND_A3_ENABLE",
        "1",
        "(not set)",
        ONLY_V32,
        ("a3-v32",),
    ),
    Difference(
        "env",
        "HCCL_CONNECT_TIMEOUT",
        "120",
        "600",
        "120 s is too short for a group of 32 ranks (vllm-ascend#9447); one value on all ranks",
        ("a3-v31",),
    ),
    Difference(
        "env",
        "HCCL_EXEC_TIMEOUT",
        "204",
        "3600",
        "a first step may take as long as its compilation; one value on all ranks",
        ("a3-v31",),
    ),
    Difference(
        "env",
        "MTP_VERIFICATION",
        "(not set)",
        "mtp.verification",
        "read by this project's plugin",
        ASCEND_23,
    ),
    Difference(
        "env",
        "MTP_PADDING",
        "(not set)",
        "mtp.padding",
        "read by this project's plugin",
        ("a3", "a3-v31", "a3-v32"),
    ),
)
