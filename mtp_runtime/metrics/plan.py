"""The part of a rendered plan (`mtpctl render CLUSTER --json`) that metrics and load tests need.

Errors: `PlanError` names the file and the key that is missing or wrong.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mtp_runtime.metrics import names


class PlanError(ValueError):
    """The plan cannot be read; the message names the file, the key and what to do."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine server. `url` is its base address without a path, as `http://127.0.0.1:8300`."""

    url: str
    role: str
    instance: str

    @property
    def decodes(self) -> bool:
        """True for servers whose acceptance and TPOT mean something."""
        return self.role in names.DECODING_ROLES

    @property
    def metrics_url(self) -> str:
        return f"{self.url}/metrics"

    @property
    def address(self) -> str:
        """`host:port`, as Prometheus writes a target."""
        return urlsplit(self.url).netloc


@dataclass(frozen=True, slots=True)
class Plan:
    """Addresses of a cluster (all `host:port`), its MTP switch and the model name clients ask for."""

    cluster: str
    mtp_enabled: bool
    k: int
    engines: tuple[Engine, ...]
    front: str
    router_metrics: str
    prometheus: str
    exporter: str
    scrape_interval_s: int

    @property
    def decoding(self) -> tuple[Engine, ...]:
        return tuple(engine for engine in self.engines if engine.decodes)


def read_plan(path: Path) -> Plan:
    """Read and check the plan at `path`."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise PlanError(f"{path}: no such plan; deploy the cluster first (make deploy CLUSTER=...)") from error
    except json.JSONDecodeError as error:
        raise PlanError(f"{path}: not JSON ({error}); render it again (mtpctl render CLUSTER --json)") from error
    return parse_plan(data, str(path))


def parse_plan(data: Any, source: str) -> Plan:
    """Build a `Plan` from decoded JSON; `source` is the name used in errors."""
    get = _Reader(data, source)
    engines = tuple(
        Engine(
            url=_base_url(get.text(f"targets.vllm.{index}.url"), f"{source}: targets.vllm.{index}.url"),
            role=get.text(f"targets.vllm.{index}.role"),
            instance=get.text(f"targets.vllm.{index}.instance"),
        )
        for index in range(get.length("targets.vllm"))
    )
    if len({engine.instance for engine in engines}) != len(engines):
        raise PlanError(f"{source}: targets.vllm: two engines share an instance name; names must be unique")
    return Plan(
        cluster=get.text("cluster"),
        mtp_enabled=get.boolean("mtp.enabled"),
        k=get.integer("mtp.k"),
        engines=engines,
        front=get.address("router.front"),
        router_metrics=get.address("router.metrics"),
        prometheus=get.address("targets.prometheus"),
        exporter=get.address("targets.exporter"),
        scrape_interval_s=get.integer("targets.prometheus.scrape_interval_s"),
    )


def _base_url(url: str, where: str) -> str:
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme not in {"http", "https"} or not parts.netloc:
        raise PlanError(f"{where}: {url!r} is not an http address")
    return f"{parts.scheme}://{parts.netloc}"


@dataclass(frozen=True, slots=True)
class _Reader:
    """Typed access to nested keys by dotted path."""

    data: Any
    source: str

    def _value(self, path: str) -> Any:
        value = self.data
        for key in path.split("."):
            try:
                value = value[int(key)] if isinstance(value, list) else value[key]
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise PlanError(f"{self.source}: {path} is missing; render the plan again") from error
        return value

    def _typed(self, path: str, kind: type, word: str) -> Any:
        value = self._value(path)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise PlanError(f"{self.source}: {path} must be {word}, not {value!r}")
        return value

    def text(self, path: str) -> str:
        return str(self._typed(path, str, "a string"))

    def integer(self, path: str) -> int:
        return int(self._typed(path, int, "a whole number"))

    def boolean(self, path: str) -> bool:
        return bool(self._typed(path, bool, "true or false"))

    def length(self, path: str) -> int:
        return len(self._typed(path, list, "a list"))

    def address(self, path: str) -> str:
        return f"{self.text(path + '.host')}:{self.integer(path + '.port')}"
