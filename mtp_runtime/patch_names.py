"""Names of the patches that our runtime puts on vllm-ascend, as `mtp.patches` and MTP_PATCHES spell them.

Here without an engine, for the cluster files; mtp_runtime/adapters/vllm_ascend/registry.py has a patch for each.
"""

from collections.abc import Collection

PATCH_NAMES = ("sampler", "padding", "graph_sizes", "attention", "placeholders")
NONE = "none"


def variable(off: Collection[str]) -> str | None:
    """MTP_PATCHES for some patches switched off: those that are on, `none` where none is; None: unset, all on."""
    on = [name for name in PATCH_NAMES if name not in off]
    return None if len(on) == len(PATCH_NAMES) else ",".join(on) or NONE
