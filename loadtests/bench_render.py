"""Reading, checking and rendering every shipped inventory, the last part of `make bench-core`.

Milliseconds, median of rounds in one process, and their range; `rules` asks every rule, the plan's own included.
Aim: the 36 ranks of a3, from files to plan, in less than a second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from mtp_runtime.config import api
from mtp_runtime.config.explain import explain
from mtp_runtime.config.load import load
from mtp_runtime.config.render import render
from mtp_runtime.config.rules import check_cluster

AIM_CLUSTER, AIM_MS = "a3", 1000.0
ROUNDS = 11


@dataclass(frozen=True)
class Row:
    """Milliseconds of one inventory: median of each step; whole: from files to plan, with its range."""

    cluster: str
    ranks: int
    read: float
    rules: float
    render: float
    explain: float
    whole: float
    whole_min: float
    whole_max: float


def measure(name: str, rounds: int) -> Row:
    """One inventory."""
    folder = api.inventories() / name
    _, places = load(folder)

    def times(call: Callable[[], object]) -> list[float]:
        found = []
        for _ in range(rounds):
            start = time.perf_counter()
            call()
            found.append(1000 * (time.perf_counter() - start))
        return found

    checked = api.load_checked(name)
    whole = times(lambda: api.plan(name))
    medians = (
        statistics.median(times(call))
        for call in (
            lambda: load(folder),
            lambda: check_cluster(checked, places),
            lambda: render(checked),
            lambda: explain(checked),
        )
    )
    ranks = len(render(checked)["ranks"])
    return Row(name, ranks, *medians, statistics.median(whole), min(whole), max(whole))


def main() -> int:
    """Measures and prints; 1 when --strict is given and the aim is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--strict", action="store_true", help="exit 1 when the aim is missed")
    options = parser.parse_args()
    names = sorted(file.parent.name for file in api.inventories().glob("*/hosts.yml"))
    rows = [measure(name, options.rounds) for name in names]
    found = next(row for row in rows if row.cluster == AIM_CLUSTER)
    met = found.whole < AIM_MS
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "aim_ms": AIM_MS, "met": met}, indent=2))
    else:
        print(f"\n{'inventory':<14}{'ranks':>6}{'read':>9}{'rules':>9}{'render':>9}{'explain':>9}{'whole, ms':>22}")
        for row in rows:
            whole = f"{row.whole:.0f} ({row.whole_min:.0f} to {row.whole_max:.0f})"
            steps = f"{row.read:>9.1f}{row.rules:>9.1f}{row.render:>9.1f}{row.explain:>9.1f}"
            print(f"{row.cluster:<14}{row.ranks:>6}{steps}{whole:>22}")
        verdict = "met" if met else "MISSED"
        print(f"\n{found.ranks} ranks of {AIM_CLUSTER} in {found.whole:.0f} ms, aim {AIM_MS:.0f} ms: {verdict}")
    return 0 if met or not options.strict else 1


if __name__ == "__main__":
    sys.exit(main())
