"""The kernel forms, by the names of the torch forms they stand for."""

from mtp_runtime.verify.triton.block import verify_block
from mtp_runtime.verify.triton.exact import verify_exact
from mtp_runtime.verify.triton.tokenwise import verify_tokenwise

METHODS = {"tokenwise": verify_tokenwise, "block": verify_block}
"""Method -> function, the names as in `mtp_runtime.verify.strategy`."""

__all__ = ["METHODS", "verify_block", "verify_exact", "verify_tokenwise"]
