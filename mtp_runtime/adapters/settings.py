"""What the environment of an engine process says to the plugin."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

from mtp_runtime.choice import ATTENTIONS, CHOICES
from mtp_runtime.graphs.slots import PADDINGS

FAULTS = ("verify", "attention")
SWITCH = ("0", "1")


@dataclass(frozen=True, slots=True)
class Settings:
    """verification: auto | tokenwise | block; attention: tnd | batch_expansion | chunked_prefill; padding: placeholder
    | slack; fault: which part raises on purpose (verify, attention), or ''; debug: check the arguments of every
    attention call, not only of the first of each shape.
    """

    verification: str
    attention: str
    padding: str
    fault: str
    debug: bool


@cache
def settings() -> Settings:
    """Read MTP_VERIFICATION (default auto), MTP_ATTENTION (tnd), MTP_PADDING (placeholder), MTP_RUNTIME_FAULT and
    MTP_DEBUG (0), once.

    Raises ValueError for an unknown value.
    """
    fault = os.environ.get("MTP_RUNTIME_FAULT", "")
    return Settings(
        _one_of("MTP_VERIFICATION", CHOICES, "auto"),
        _one_of("MTP_ATTENTION", ATTENTIONS, ATTENTIONS[0]),
        # What vLLM 0.32 does of itself.
        _one_of("MTP_PADDING", PADDINGS, "placeholder"),
        _one_of("MTP_RUNTIME_FAULT", FAULTS, fault) if fault else "",
        _one_of("MTP_DEBUG", SWITCH, "0") == "1",
    )


def _one_of(name: str, known: tuple[str, ...], default: str) -> str:
    value = os.environ.get(name) or default
    if value not in known:
        raise ValueError(
            f"{name}={value!r}: use one of {', '.join(known)}" + " or leave it unset" * (known in (FAULTS, SWITCH))
        )
    return value


class InjectedFault(RuntimeError):
    """Raised on purpose because MTP_RUNTIME_FAULT asks for it."""

    def __init__(self, part: str) -> None:
        super().__init__(f"MTP_RUNTIME_FAULT={part}: injected fault, the request must fail")
