"""NIXL's progress thread must not spin.

nixl 1.5.1 starts a thread in each agent that drives transfers, and its Python interface fixes that thread's pause
(`pthrDelay`) at 0: it polls without a break and takes a whole core from the engine, idle or not (measured: 0.9 s of CPU
a second; with a pause of 1 ms 0.02 s). The thread itself is needed: a prefill server serves decode's reads with it.
"""

from __future__ import annotations

import os
from typing import Any

PAUSE_US = 1000
"""Longest pause of the thread, microseconds; events of the transport wake it earlier."""


def install() -> bool:
    """Gives every agent made from now on the pause. False where nixl is not installed; it then has no thread either."""
    # vLLM sets this itself, but only where nixl is not imported yet.
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    try:
        from nixl import _api as api
    except ImportError:
        return False
    original = api.nixlBind.nixlAgentConfig
    if getattr(original, "mtp_runtime_pause", False):
        return True

    class PausingConfig(original):  # type: ignore[misc, valid-type]
        """nixl's agent configuration, with the pause in place of 0."""

        mtp_runtime_pause = True

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, PAUSE_US if name == "pthrDelay" and value == 0 else value)

    api.nixlBind.nixlAgentConfig = PausingConfig
    return True
