"""Ansible module: what the preflight role has to know about a host. Reads /proc, changes nothing."""

from __future__ import annotations

import ipaddress
import os
import platform
import shutil
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ansible.module_utils.basic import AnsibleModule

from ansible.module_utils.mtp_processes import belongs, pids

DOCUMENTATION = r"""
module: mtp_host
short_description: Facts of a host that the preflight checks judge
options:
  listeners: {description: "of the plan: address, port, owner, file, key", type: list, elements: dict, required: true}
  state_dir: {description: "state folder of the cluster, known to its processes", type: path, required: true}
  folder: {description: "where the state and the software go", type: path, required: true}
  tools: {description: "programs that must be in PATH", type: list, elements: str, default: []}
"""
LISTEN = "0A"  # state of a listening socket in /proc/net/tcp
if TYPE_CHECKING:
    Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Listening(NamedTuple):
    """One listening TCP socket."""

    address: Address
    port: int
    inode: str


def plain(address: Address) -> Address:
    """::ffff:127.0.0.1 -> 127.0.0.1."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def kernel_address(text: str) -> Address:
    """0100007F -> 127.0.0.1: 32-bit words in the machine's byte order."""
    words = (int(text[at : at + 8], 16) for at in range(0, len(text), 8))
    return plain(ipaddress.ip_address(b"".join(word.to_bytes(4, sys.byteorder) for word in words)))


def listening() -> list[Listening]:
    """Every listening TCP socket of the host."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            address, port = fields[1].rsplit(":", 1)
            if fields[3] == LISTEN:
                found.append(Listening(kernel_address(address), int(port, 16), fields[9]))
    return found


def refusal(address: str, port: int) -> tuple[Address | None, str] | None:
    """None when a program can listen there, else the IP address tried and what the system says.

    The kernel decides, not a comparison of port numbers: a port held on another address is free on this one.
    """
    number = None
    try:
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        number = plain(ipaddress.ip_address(place[0]))
        # Some programs take IPv4 too when they listen on ::, so it must be free there as well.
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        with socket.create_server(place[:2], family=family, dualstack_ipv6=both):
            return None
    except OSError as error:
        return number, error.strerror or str(error)


def owners(inodes: set[str]) -> list[int]:
    """Processes that hold one of these sockets, as far as this user may see."""
    wanted, found = {f"socket:[{inode}]" for inode in inodes}, []
    for pid in pids():
        try:
            if any(os.readlink(descriptor.path) in wanted for descriptor in os.scandir(f"/proc/{pid}/fd")):
                found.append(pid)
        except OSError:
            continue
    return found


def describe(pid: int, state: str) -> dict[str, Any]:
    """Who a process is, and whether it is of this cluster."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        command = "?"
    return {"pid": pid, "command": command[:120], "ours": belongs(pid, state)}


def holder(address: Address | None, port: int, reason: str, state: str) -> dict[str, Any]:
    """Who keeps us from listening there; a stranger before one of ours."""
    inodes = {
        held.inode
        for held in listening()
        if held.port == port and address is not None and (held.address == address or is_every(held.address, address))
    }
    if not inodes:
        return {"pid": None, "command": f"nobody, but this user may not listen on it: {reason}", "ours": False}
    # One search a socket: of another user's the holder cannot be seen.
    found = [[describe(pid, state) for pid in owners({inode})] for inode in sorted(inodes)]
    unseen = {"pid": None, "command": "a process of another user", "ours": False}
    every = [entry for entries in found for entry in entries or [unseen]]
    return min(every, key=lambda entry: entry["ours"])


def is_every(*addresses: Address) -> bool:
    """One of them is 0.0.0.0 or ::, which meets all others."""
    return any(address.is_unspecified for address in addresses)


def port_facts(wanted: list[dict[str, Any]], state: str) -> list[dict[str, Any]]:
    """The listeners of the plan that are taken or cannot be had."""
    facts = []
    for entry in wanted:
        port = int(entry["port"])
        refused = refusal(str(entry["address"]), port)
        if refused:
            address, reason = refused
            facts.append({**entry, **holder(address, port, reason, state)})
    return facts


def memory_available_mb() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) // 1024
    return 0


def own_memory_mb(state: str) -> int:
    """Resident memory of the cluster's own running processes: a second deploy may count on it."""
    total = 0
    for pid in pids():
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) if belongs(pid, state) else 0
        except OSError:
            continue
    return total * os.sysconf("SC_PAGE_SIZE") >> 20


def free_disk_mb(folder: str) -> int:
    path = Path(folder)
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free >> 20


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "listeners": {"type": "list", "elements": "dict", "required": True},
            "state_dir": {"type": "path", "required": True},
            "folder": {"type": "path", "required": True},
            "tools": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    wanted = module.params
    module.exit_json(
        changed=False,
        system=platform.system(),
        machine=platform.machine(),
        python=".".join(map(str, sys.version_info[:3])),
        memory_mb=memory_available_mb() + own_memory_mb(wanted["state_dir"]),
        disk_mb=free_disk_mb(wanted["folder"]),
        missing_tools=[tool for tool in wanted["tools"] if shutil.which(tool) is None],
        ports_held=port_facts(wanted["listeners"], wanted["state_dir"]),
    )


if __name__ == "__main__":
    main()
