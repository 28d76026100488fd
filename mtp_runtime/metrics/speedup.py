"""What MTP is worth, as pure formulas over plain numbers.

Words: a *draft step* is one decode step of one request that carried K drafts; *ITL* is the time between two steps of
one request and *TPOT* the time per output token, both in seconds. Times given and returned are seconds, rates are
fractions in [0, 1]. Every function raises ValueError, with the numbers, for input that no real run can produce.

Source: the seed article's performance section (TPOT = ITL / (1 + acceptance rate) at K = 1) and vLLM's definition of
the mean acceptance length (bonus token included).
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def acceptance_rate(accepted: float, draft_tokens: float) -> float:
    """Accepted draft tokens / draft tokens, a fraction in [0, 1]."""
    return _share(accepted, draft_tokens, "accepted tokens", "draft tokens")


def acceptance_length(accepted: float, drafts: float) -> float:
    """Tokens that one draft step yields on average: 1 + accepted tokens / draft steps."""
    _require(_finite(accepted) and accepted >= 0, f"accepted tokens must be >= 0, not {accepted}")
    _require(_finite(drafts) and drafts > 0, f"draft steps must be > 0, not {drafts}")
    return 1.0 + accepted / drafts


def position_rates(accepted_per_position: Sequence[float], drafts: float) -> list[float]:
    """For each draft position the share of draft steps in which it was accepted; shape [K] in, [K] out.

    Not conditional on the position before: with drafts always K long, their sum is acceptance length - 1.
    """
    return [
        _share(accepted, drafts, f"accepted tokens at position {position}", "draft steps")
        for position, accepted in enumerate(accepted_per_position)
    ]


def mean_tpot(seconds_sum: float, requests: float, one_token_requests: float = 0.0) -> float:
    """Mean TPOT of finished requests, seconds, from vLLM's per-request histogram.

    vLLM observes 0 for a request of one token, which has no time between tokens; those are left out of the mean.
    """
    decoding = requests - one_token_requests
    _require(_finite(seconds_sum) and seconds_sum >= 0, f"sum of TPOT must be >= 0 s, not {seconds_sum}")
    _require(
        _finite(decoding) and one_token_requests >= 0 and decoding > 0,
        f"need a request of two tokens or more; have {requests} requests, {one_token_requests} of one token",
    )
    return seconds_sum / decoding


def step_cost(itl_with_s: float, itl_without_s: float) -> float:
    """How much longer a step takes with MTP than without: ITL with / ITL without."""
    return _ratio(itl_with_s, itl_without_s, "ITL with MTP", "ITL without MTP")


def gain(length: float, cost: float) -> float:
    """TPOT speed-up from MTP: acceptance length / step cost; below 1 MTP loses."""
    _require(_finite(length) and length >= 1, f"acceptance length must be >= 1, not {length}")
    _require(_finite(cost) and cost > 0, f"step cost must be > 0, not {cost}")
    return length / cost


def _share(part: float, whole: float, part_name: str, whole_name: str) -> float:
    _require(_finite(whole) and whole > 0, f"{whole_name} must be > 0, not {whole}")
    _require(
        _finite(part) and 0 <= part <= whole,
        f"{part_name} must lie between 0 and the {whole_name} ({whole}), not {part}",
    )
    return part / whole


def _ratio(top: float, bottom: float, top_name: str, bottom_name: str) -> float:
    _require(_finite(top) and top > 0, f"{top_name} must be > 0 s, not {top}")
    _require(_finite(bottom) and bottom > 0, f"{bottom_name} must be > 0 s, not {bottom}")
    return top / bottom


def _finite(value: float) -> bool:
    return math.isfinite(value)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
