"""What the environment of an engine process says to the plugin."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

from mtp_runtime.choice import CHOICES

FAULTS = ("verify", "attention")


@dataclass(frozen=True, slots=True)
class Settings:
    """verification: auto | tokenwise | block; fault: which part raises on purpose (verify, attention), or ''."""

    verification: str
    fault: str


@cache
def settings() -> Settings:
    """Read MTP_VERIFICATION (default auto) and MTP_RUNTIME_FAULT once. Raises ValueError for an unknown value."""
    verification = os.environ.get("MTP_VERIFICATION") or "auto"
    if verification not in CHOICES:
        raise ValueError(f"MTP_VERIFICATION={verification!r}: use one of {', '.join(CHOICES)}")
    fault = os.environ.get("MTP_RUNTIME_FAULT", "")
    if fault and fault not in FAULTS:
        raise ValueError(f"MTP_RUNTIME_FAULT={fault!r}: use one of {', '.join(FAULTS)} or leave it unset")
    return Settings(verification, fault)


class InjectedFault(RuntimeError):
    """Raised on purpose because MTP_RUNTIME_FAULT asks for it."""

    def __init__(self, part: str) -> None:
        super().__init__(f"MTP_RUNTIME_FAULT={part}: injected fault, the request must fail")
