"""A deployed cluster as the commands see it: its state folder, its plan, its key, its programs."""

from __future__ import annotations

import http.client
import json
import os
import socket
import xmlrpc.client
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_runtime.config.api import repository
from mtp_runtime.metrics.plan import Plan, read_plan


class NotDeployed(RuntimeError):
    """There is no such deployed cluster; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Deployed:
    """State folder `.local/clusters/NAME`, the plan in it, the model's name and weights folder."""

    folder: Path
    plan: Plan
    model: str
    weights: Path

    @classmethod
    def find(cls, cluster: str) -> Deployed:
        """The state of a cluster on this machine. Errors: NotDeployed, and PlanError for an unreadable plan."""
        folder = repository() / ".local" / "clusters" / cluster
        path = folder / "plan.json"
        if not path.is_file():
            raise NotDeployed(f"{cluster}: not deployed here; start with make deploy CLUSTER={cluster}")
        model = json.loads(path.read_text(encoding="utf-8"))["model"]
        return cls(folder, read_plan(path), model["name"], Path(model["path"]))

    @staticmethod
    def names() -> list[str]:
        """Clusters deployed on this machine."""
        return sorted(plan.parent.name for plan in (repository() / ".local" / "clusters").glob("*/plan.json"))

    @property
    def key_file(self) -> Path:
        return self.folder / "secrets" / "api_key"

    def key(self) -> str:
        return self.key_file.read_text(encoding="utf-8").strip()

    def log(self, program: str) -> str:
        """Log file of a program."""
        return str(self.folder / "logs" / f"{program}.log")

    def programs(self) -> list[dict[str, Any]] | None:
        """Supervisor's view of every program (name, statename, pid, description); None when it does not run."""
        here = Path.cwd()
        try:
            # A relative socket path: an absolute one may not be longer than 107 bytes.
            os.chdir(self.folder / "run")
            proxy = xmlrpc.client.ServerProxy("http://localhost", transport=_UnixTransport("supervisor.sock"))
            return [dict(item) for item in proxy.supervisor.getAllProcessInfo()]  # type: ignore[union-attr, arg-type]
        except (OSError, xmlrpc.client.Error):
            return None
        finally:
            os.chdir(here)


class _UnixTransport(xmlrpc.client.Transport):
    """XML-RPC over a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def make_connection(self, host: Any) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("localhost", timeout=10)
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(10)
        connection.sock.connect(self._path)
        return connection
