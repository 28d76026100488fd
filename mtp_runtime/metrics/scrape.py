"""Fetch and read Prometheus text.

`fetch` raises `ScrapeError` (address and reason) when a server does not answer in time or with something unreadable.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

# An environment's HTTP proxy must never see traffic to the cluster's own addresses.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ScrapeError(RuntimeError):
    """A /metrics address could not be read."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of a scrape: full sample name (with _total, _sum, ...), labels, value."""

    name: str
    labels: dict[str, str]
    value: float


class Samples:
    """All samples of one scrape, by name."""

    def __init__(self, samples: list[Sample]) -> None:
        self._by_name: dict[str, list[Sample]] = {}
        for sample in samples:
            self._by_name.setdefault(sample.name, []).append(sample)

    def __iter__(self) -> Iterator[Sample]:
        for samples in self._by_name.values():
            yield from samples

    def total(self, name: str, **labels: str) -> float | None:
        """Sum over the series of `name` that carry these labels; None (not 0) when there is no such series."""
        values = [
            sample.value
            for sample in self._by_name.get(name, [])
            if all(sample.labels.get(key) == value for key, value in labels.items())
        ]
        return sum(values) if values else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Sums of `name` for each value of `label`."""
        sums: dict[str, float] = {}
        for sample in self._by_name.get(name, []):
            if label in sample.labels:
                key = sample.labels[label]
                sums[key] = sums.get(key, 0.0) + sample.value
        return sums


def parse(text: str) -> Samples:
    """Read Prometheus text format; ScrapeError when it is not that."""
    try:
        return Samples(
            [
                Sample(sample.name, dict(sample.labels), float(sample.value))
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            ]
        )
    except ValueError as error:
        raise ScrapeError(f"not Prometheus text: {error}") from error


def fetch(url: str, timeout_s: float) -> Samples:
    """GET `url` and parse it."""
    try:
        with _OPENER.open(url, timeout=timeout_s) as response:
            text = response.read().decode("utf-8")
    except (OSError, urllib.error.URLError, ValueError) as error:
        raise ScrapeError(f"{url}: {error}") from error
    return parse(text)
