"""Inventories that are checked and rendered only: `make deploy` says why, before any host is touched."""

from __future__ import annotations

import subprocess

import pytest
from ansible_modules import ROOT

REFUSED = {
    "a3": "comes with the container images",
    "seed-online": "vllm-ascend 0.11.0 is checked and rendered only",
    "lab": "run in containers on several hosts",
}


@pytest.mark.parametrize("cluster", REFUSED)
def test_it_says_why_and_changes_nothing(cluster: str) -> None:
    done = subprocess.run(
        ["make", "-C", str(ROOT), "deploy", f"CLUSTER={cluster}"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = " ".join(done.stdout.split())
    assert done.returncode == 2
    assert REFUSED[cluster] in said and "Nothing was changed" in said
    assert not (ROOT / ".local" / "clusters" / cluster).exists()
