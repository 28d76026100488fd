"""What a rule is."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from .checks import Finding
from .placement import Rank
from .schema import Cluster

Where = Literal["files", "check", "weights", "host", "construction", "warning", "command"]
WHERE_TEXT = {
    "files": "while the files are read",
    "check": "`mtpctl check`",
    "weights": "`mtpctl weights`",
    "host": "deployment, on the host",
    "construction": "cannot be broken: there is no key for it",
    "warning": "`mtpctl check`, as a warning",
    "command": "`mtpctl diff`",
}


@dataclass(frozen=True)
class Rule:
    """One rule. message says what must hold; check finds what breaks it in a cluster, check_plan in a rendered plan.

    warn finds what is allowed but deserves a look; it also gets the MTP layers of the weights, None when unknown.
    """

    id: str
    name: str
    message: str
    source: str
    remedy: str
    where: Where = "check"
    check: Callable[[Cluster, list[Rank]], Iterable[Finding]] | None = None
    check_plan: Callable[[dict[str, Any]], Iterable[Finding]] | None = None
    warn: Callable[[Cluster, int | None], Iterable[Finding]] | None = None
