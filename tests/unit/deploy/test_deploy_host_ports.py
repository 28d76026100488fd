"""H10 with real sockets: only what keeps our own program from listening is a conflict."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ansible_modules import load

HOLD = "import socket, sys; s = socket.create_server((sys.argv[1], int(sys.argv[2]))); print(flush=True); input()"


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return load("mtp_host")


@pytest.fixture
def sockets() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def free_port() -> int:
    with socket.create_server(("0.0.0.0", 0)) as server:
        return int(server.getsockname()[1])


def facts(module: ModuleType, address: str, port: int, state: str = "/nowhere") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = module.port_facts([{"address": address, "port": port, "owner": "router"}], state)
    return found


@pytest.mark.parametrize(
    ("held", "wanted", "conflict"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.2", "127.0.0.1", False),
        ("127.0.0.1", "127.0.0.2", False),
        ("0.0.0.0", "127.0.0.1", True),
        ("127.0.0.2", "0.0.0.0", True),
        ("127.0.0.1", "localhost", True),
    ],
)
def test_the_address_counts(module: ModuleType, sockets: ExitStack, held: str, wanted: str, conflict: bool) -> None:
    port = free_port()
    sockets.enter_context(socket.create_server((held, port)))
    found = facts(module, wanted, port)
    assert [(entry["pid"], entry["ours"]) for entry in found] == ([(os.getpid(), False)] if conflict else [])


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize(
    ("held", "both", "wanted", "conflict"),
    [
        ("::", True, "127.0.0.1", True),
        ("::", False, "127.0.0.1", False),
        ("::1", False, "127.0.0.1", False),
        ("::1", False, "::1", True),
        ("127.0.0.1", None, "::", True),
    ],
)
def test_ipv6(
    module: ModuleType, sockets: ExitStack, held: str, both: bool | None, wanted: str, conflict: bool
) -> None:
    port = free_port()
    family = socket.AF_INET if both is None else socket.AF_INET6
    sockets.enter_context(socket.create_server((held, port), family=family, dualstack_ipv6=bool(both)))
    assert [entry["pid"] for entry in facts(module, wanted, port)] == ([os.getpid()] if conflict else [])


def test_a_stranger_is_named_before_one_of_ours(module: ModuleType, sockets: ExitStack, tmp_path: Path) -> None:
    port = free_port()
    environment = {"MTP_CLUSTER_ROOT": str(tmp_path)}
    command = [sys.executable, "-c", HOLD, "127.0.0.2", str(port)]
    ours = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert ours.stdout is not None
        ours.stdout.readline()
        (fact,) = facts(module, "0.0.0.0", port, str(tmp_path))
        assert (fact["pid"], fact["ours"]) == (ours.pid, True)
        sockets.enter_context(socket.create_server(("127.0.0.1", port)))
        (fact,) = facts(module, "0.0.0.0", port, str(tmp_path))
        assert (fact["pid"], fact["ours"]) == (os.getpid(), False)
    finally:
        ours.communicate(b"\n", timeout=30)


@pytest.mark.parametrize("address", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_that_is_not_this_machines(module: ModuleType, address: str) -> None:
    (fact,) = facts(module, address, free_port())
    assert (fact["pid"], fact["ours"]) == (None, False)
    assert "may not listen on it: " in fact["command"]


def test_free_ports_are_no_fact(module: ModuleType) -> None:
    for address in ("127.0.0.1", "0.0.0.0", "localhost"):
        assert facts(module, address, free_port()) == []
