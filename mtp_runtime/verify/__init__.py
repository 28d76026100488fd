"""Verification: which drafts are accepted, what is emitted instead. Pure functions over tensors, no engine."""

from mtp_runtime.verify.batch import PLACEHOLDER, DraftBatch, Noise, Verdict
from mtp_runtime.verify.greedy import verify_greedy
from mtp_runtime.verify.strategy import CHOICES, choose, verify_mixed
from mtp_runtime.verify.tokenwise import verify_tokenwise

__all__ = [
    "CHOICES",
    "PLACEHOLDER",
    "DraftBatch",
    "Noise",
    "Verdict",
    "choose",
    "verify_greedy",
    "verify_mixed",
    "verify_tokenwise",
]
