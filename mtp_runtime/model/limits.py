"""What the model must be able to do: the numbers, without an engine or torch, so that tests of a running stack and the
offline measurement (`quality`) hold it to the same ones."""

from __future__ import annotations

from collections.abc import Callable

LIMITS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "perplexity_ratio": ("at most 1.25", lambda x: x <= 1.25),
    "parsed": ("at least 0.9", lambda x: x >= 0.9),
    "distinct_4": ("at least 0.5", lambda x: x >= 0.5),
    "most_repeated_8": ("at most 3", lambda x: x <= 3),
    "acceptance_k1_greedy": ("0.75 to 0.95", lambda x: 0.75 <= x <= 0.95),
    "acceptance_length_k3": ("at least 2.6", lambda x: x >= 2.6),
}
"""What each value must be, in words and as a check; values without a limit are reported only."""


def broken(name: str, value: float) -> str | None:
    """The limit that a value does not meet, as text; None when it does."""
    text, met = LIMITS[name]
    return None if met(value) else f"{name}: {value:.4g}, must be {text}"
