"""What to do about a call that breaks a rule: one sentence a rule, for operators of a server."""

from __future__ import annotations

from mtp_runtime.attention.constraints import FiaConstraintError, Violation

_GRAPH = "set mtp.padding: placeholder, or leave graph sizes to the plan (mtpctl slots and mtpctl plan show it)"
_CODE = "the engine built a call that this operator has no form for: install a release that the plugin knows"
REMEDIES = {
    "F01": _CODE,
    "F02": _CODE,
    "F03": _CODE,
    "F04": _GRAPH,
    "F05": f"capture sizes must be multiples of K + 1: {_GRAPH}",
    "F06": f"padding left more tokens than 16 a slot, or K is above 15: {_GRAPH}, or lower K",
    "F07": "lower max_model_len, or give the KV cache more memory",
    "F08": _CODE,
    "F09": f"a padded slot has a query length and no KV length: {_GRAPH}",
    "F10": "lower max_num_seqs to 4096 or less",
    "F11": "lower max_num_seqs or K",
    "F12": "serve a model with DeepSeek's MLA: latents of 512",
    "F13": "serve a model with DeepSeek's MLA: rope of 64",
    "F14": "choose tp so that heads / tp is 1, 2, 4, 8, 16, 32, 64 or 128",
    "F15": "serve a model with MLA: one KV head",
    "F16": _CODE,
    "F17": _CODE,
    "F18": _CODE,
    "F19": "set block_size to 128",
    "F20": f"the block table has not a row a slot: {_GRAPH}",
    "F21": "lower max_model_len to what a row of the block table holds",
    "F22": "serve in bfloat16 or float16",
    "F23": "do without decode context parallelism, which needs the log-sum-exp",
    "F24": "set block_size to 128 and leave the cache's format to the engine",
    "F25": _CODE,
}
"""Rule id -> remedy."""


class FiaCallRefused(FiaConstraintError):
    """A call that breaks rules, each told with its remedy."""

    def __init__(self, error: FiaConstraintError) -> None:
        ValueError.__init__(self, "\n  ".join((str(error).partition("\n")[0], *map(_told, error.violations))))
        self.violations = error.violations


def _told(violation: Violation) -> str:
    return f"{violation}. Remedy: {REMEDIES[violation.id]}"
