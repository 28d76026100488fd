"""Reads a Prometheus server: instant queries and fresh snapshots of an engine's counters.

Errors: `PrometheusError` with the address, the query and the reason.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass

from mtp_runtime.metrics import names
from mtp_runtime.metrics.scrape import Sample, Samples

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_TIMEOUT_S = 10.0
_POLL_S = 0.5


class PrometheusError(RuntimeError):
    """Prometheus did not answer, refused a query or had no fresh data in time."""


@dataclass(frozen=True, slots=True)
class Prometheus:
    """The HTTP API of the Prometheus at `address` (host:port)."""

    address: str

    def query(self, expression: str) -> list[Sample]:
        """Instant query, now. One sample a series; `name` is empty for computed values."""
        url = f"http://{self.address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        try:
            with _OPENER.open(url, timeout=_TIMEOUT_S) as response:
                body = json.load(response)
        except urllib.error.HTTPError as error:
            detail = error.read().decode("utf-8", "replace")[:300]
            raise PrometheusError(f"{self.address}: query {expression!r}: {error} {detail}") from error
        except (OSError, ValueError) as error:
            raise PrometheusError(f"{self.address}: query {expression!r}: {error}") from error
        return [_sample(item["metric"], item["value"][1]) for item in body["data"]["result"]]

    def engine_counters(self, instance: str, newer_than: float, wait_s: float) -> Samples:
        """All series of one engine from a scrape that began after `newer_than` (Unix time).

        Waits up to `wait_s` for that scrape: counters read before it would miss the traffic just finished.
        """
        selector = f'{{job="{names.JOB_VLLM}",{names.LABEL_INSTANCE}="{instance}"}}'
        deadline = time.monotonic() + wait_s
        while True:
            stamps = self.query(f"timestamp({names.GENERATION_TOKENS}{selector})")
            if stamps and min(sample.value for sample in stamps) > newer_than:
                return Samples(self.query(selector))
            if time.monotonic() >= deadline:
                seen = f"the last is from {stamps[0].value:.1f}" if stamps else "there is none"
                raise PrometheusError(
                    f"{self.address}: no scrape of {instance} after {newer_than:.1f} within {wait_s:.0f} s; {seen}"
                )
            time.sleep(_POLL_S)


def _sample(metric: dict[str, str], value: str) -> Sample:
    labels = {key: text for key, text in metric.items() if key != "__name__"}
    return Sample(metric.get("__name__", ""), labels, float(value))
