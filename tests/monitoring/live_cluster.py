"""The running cluster of the live tests, and `make validate` against it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_runtime.metrics.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
CLUSTERS = ROOT / ".local" / "clusters"
LIMIT_S = 900


@dataclass(frozen=True)
class Validated:
    """A cluster that `make validate` just ran against."""

    folder: Path
    plan: Plan
    report: dict[str, Any]


def run_validate(clusters: Path, cluster: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loadtests.validate", "--clusters-dir", str(clusters), "--cluster", cluster]
    return subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
