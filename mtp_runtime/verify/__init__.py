"""Verification: which drafts are accepted, what is emitted instead. Pure functions over tensors, no engine."""

from mtp_runtime.verify.batch import PLACEHOLDER, DraftBatch, Noise, Verdict, to_rows
from mtp_runtime.verify.block import verify_block
from mtp_runtime.verify.exact import verify_exact, verify_greedy
from mtp_runtime.verify.strategy import STRATEGIES, verify_mixed
from mtp_runtime.verify.tokenwise import verify_tokenwise

__all__ = [
    "PLACEHOLDER",
    "STRATEGIES",
    "DraftBatch",
    "Noise",
    "Verdict",
    "to_rows",
    "verify_block",
    "verify_exact",
    "verify_greedy",
    "verify_mixed",
    "verify_tokenwise",
]
