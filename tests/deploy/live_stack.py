"""A deployed cluster as the live tests drive it: through make, HTTP and the process table."""

from __future__ import annotations

import atexit
import http.client
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from mtp_runtime.cli.deployed import Deployed
from mtp_runtime.metrics.scrape import Samples, fetch

ROOT = Path(__file__).resolve().parents[2]
# Another cluster than `local` can be put under test, say one on other ports.
CLUSTER = os.environ.get("MTP_TEST_CLUSTER", "local")
SOURCE = Path(os.environ.get("MTP_INVENTORIES", ROOT / "ansible" / "inventories"))
"""The inventories that `inventories` copies; no test may write here."""
MAKE_LIMIT_S = 1800
PROMPT = "A prompt that is longer than one block of the KV cache, so that decode has something to pull from prefill."


@cache
def inventories() -> Path:
    """This run's own copy of all inventories, which everything is deployed from.

    `make mtp` edits an inventory: a test that is killed must not leave the checkout changed.
    """
    temporary = ROOT / ".local" / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=temporary, prefix="live-inventories-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(SOURCE, folder, dirs_exist_ok=True)
    return folder


def make(*arguments: str, expect: int | None = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs make and returns it; fails with the end of its output when the exit code is another than `expect`."""
    variables = {"INVENTORIES": str(inventories()), **variables}
    command = ["make", "-C", str(ROOT), *arguments, *(f"{name}={value}" for name, value in variables.items())]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=MAKE_LIMIT_S, check=False, stdin=subprocess.DEVNULL
    )
    if expect is not None:
        assert done.returncode == expect, f"{command}: {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    return done


def changed(output: str) -> int:
    """How many tasks of a playbook run changed something."""
    return sum(int(number) for number in re.findall(r"changed=(\d+)", output))


def processes(state: Path, program: str | None = None) -> dict[int, str]:
    """{pid: command line} of the processes that carry the cluster's marker (and the program's)."""
    wanted = {f"MTP_CLUSTER_ROOT={state}".encode()} | ({f"MTP_PROGRAM={program}".encode()} if program else set())
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            # nginx overwrites its environment; its working folder tells whose it is.
            front = program is None and os.readlink(f"/proc/{pid}/cwd") == f"{state}/run"
            if front or wanted <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
                found[int(pid)] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:
            continue
    return found


def listening() -> set[int]:
    """Every TCP port with a listener."""
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A":
                ports.add(int(columns[1].rsplit(":", 1)[1], 16))
    return ports


@dataclass
class Stack:
    """One deployed cluster, the output of its first deployment, and the ports of its plan."""

    cluster: str
    deployed: Deployed
    first_deploy_s: float
    output: str
    ports: set[int] = field(default_factory=set)

    @classmethod
    def deploy(cls, cluster: str = CLUSTER) -> Stack:
        # While tests are written: MTP_REUSE=1 keeps a stack that already runs.
        if not os.environ.get("MTP_REUSE"):
            make("destroy", CLUSTER=cluster)
        start = time.monotonic()
        done = make("deploy", CLUSTER=cluster)
        plan = json.loads((ROOT / ".local" / "clusters" / cluster / "plan.json").read_text())
        wanted = {int(entry["port"]) for entry in plan["listeners"]}
        return cls(cluster, Deployed.find(cluster), time.monotonic() - start, done.stdout, wanted)

    @property
    def state(self) -> Path:
        return self.deployed.folder

    def pids(self) -> dict[str, int]:
        """{program: pid} as supervisor sees it."""
        programs = self.deployed.programs()
        assert programs is not None, "the supervisor does not run"
        return {str(program["name"]): int(program["pid"]) for program in programs}

    def supervisorctl(self, *arguments: str) -> str:
        command = [str(ROOT / ".venv" / "bin" / "supervisorctl"), "-c", "../supervisord.conf", *arguments]
        done = subprocess.run(command, cwd=self.state / "run", capture_output=True, text=True, timeout=120, check=False)
        return done.stdout

    def engine(self, role: str) -> str:
        """Address of the first engine of a role."""
        return next(engine.url for engine in self.deployed.plan.engines if engine.role == role)

    def metrics(self, role: str) -> Samples:
        return fetch(f"{self.engine(role)}/metrics", 10.0)

    def call(
        self, path: str, body: dict[str, Any] | None = None, key: str | None = "", method: str | None = None
    ) -> tuple[int, str]:
        """Status and body of a request to the front; key "" means the right one, None none at all."""
        connection = http.client.HTTPConnection(*self.deployed.plan.front.split(":"), timeout=180)
        connection.request(
            method or ("POST" if body else "GET"), path, json.dumps(body) if body else None, self.headers(key)
        )
        answer = connection.getresponse()
        return answer.status, answer.read().decode("utf-8", "replace")

    def headers(self, key: str | None) -> dict[str, str]:
        found = {"Content-Type": "application/json"}
        if key is not None:
            found["Authorization"] = f"Bearer {key or self.deployed.key()}"
        return found

    def completion(self, tokens: int = 8, **options: Any) -> tuple[int, str]:
        return self.call("/v1/completions", self.request(tokens, **options))

    def request(self, tokens: int, **options: Any) -> dict[str, Any]:
        base = {"model": self.deployed.model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
        return {**base, "ignore_eos": True, **options}

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[str]:
        """The data of each server-sent event; raises when the stream breaks off."""
        connection = http.client.HTTPConnection(*self.deployed.plan.front.split(":"), timeout=180)
        connection.request("POST", path, json.dumps({**body, "stream": True}), self.headers(""))
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        rest = b""
        # read1, not readline: http.client's readline takes a stream that breaks off for one that ends.
        while piece := answer.read1(65536):
            *lines, rest = (rest + piece).split(b"\n")
            yield from (line[6:].decode().strip() for line in lines if line.startswith(b"data: "))


def wait_until(condition: Any, limit_s: float, what: str) -> None:
    """Polls until the condition holds; fails after the limit."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {limit_s} s"
        time.sleep(0.3)


def inventory_copy(folder: Path, cluster: str = CLUSTER) -> Path:
    """A copy of an inventory that one test may spoil; returns its group_vars/all folder."""
    shutil.copytree(inventories() / cluster, folder / cluster)
    return folder / cluster / "group_vars" / "all"
