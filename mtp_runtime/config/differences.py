"""Where our A3 command lines differ from the published ones (DeepSeek-R1 w8a8, 4 nodes, 2P1D), and why.

Source of the published ones: vllm-ascend documentation, "Prefill-Decode Disaggregation (DeepSeek)", release 0.23.
A test compares them flag by flag: a difference not listed here fails, and so does an entry that no longer differs.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """One flag or variable. kind: argv or env."""

    kind: str
    name: str
    published: str
    ours: str
    reason: str


DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "argv",
        "--host",
        "0.0.0.0",
        "the node's address",
        "a rank answers on the cluster network only; clients come in through the router, which checks the key",
    ),
    Difference(
        "env",
        "MTP_VERIFICATION",
        "(not set)",
        "mtp.verification",
        "read by this project's plugin",
    ),
)
