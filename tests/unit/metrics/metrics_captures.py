"""Helpers of the metrics tests: captured scrapes read without the code under test, and a plan to go with them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

FIXTURES = Path(__file__).parents[2] / "monitoring" / "fixtures"
Serve = Callable[[str], str]


def raw(text: str, name: str, label: str = "") -> float:
    """The value of the only line of `name` whose labels contain `label`, read without the code under test."""
    found = re.findall(rf"^{re.escape(name)}\{{[^}}]*{re.escape(label)}[^}}]*\}} (\S+)$", text, flags=re.MULTILINE)
    assert len(found) == 1, f"{name} {label}: {len(found)} lines"
    return float(found[0])


def plan_data(decode_url: str, exporter_port: int) -> dict[str, object]:
    return {
        "cluster": "test",
        "mtp": {"enabled": True, "k": 1},
        "router": {"front": {"host": "127.0.0.1", "port": 8000}, "metrics": {"host": "127.0.0.1", "port": 8101}},
        "targets": {
            "vllm": [
                {"url": "http://127.0.0.1:8200", "role": "prefill", "instance": "prefill-0"},
                {"url": decode_url, "role": "decode", "instance": "decode-0"},
            ],
            "prometheus": {"host": "127.0.0.1", "port": 9090, "scrape_interval_s": 5},
            "exporter": {"host": "127.0.0.1", "port": exporter_port},
        },
    }
