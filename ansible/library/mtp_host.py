"""Ansible module: what the preflight role has to know about a host. Reads /proc, changes nothing."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: mtp_host
short_description: Facts of a host that the preflight checks judge
options:
  listeners: {description: "of the plan: address, port, owner, file, key", type: list, elements: dict, required: true}
  marker: {description: "MTP_CLUSTER_ROOT=... of this cluster's own processes", type: str, required: true}
  folder: {description: "where the state and the software go", type: path, required: true}
  tools: {description: "programs that must be in PATH", type: list, elements: str, default: []}
"""
LISTEN = "0A"  # state of a listening socket in /proc/net/tcp


def listeners() -> dict[int, set[str]]:
    """{port: socket inodes} of every listening TCP socket."""
    found: dict[int, set[str]] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == LISTEN:
                found.setdefault(int(fields[1].rsplit(":", 1)[1], 16), set()).add(fields[9])
    return found


def owner(inodes: set[str]) -> int | None:
    """A process that holds one of these sockets; None when it cannot be seen (another user's)."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            for descriptor in os.scandir(f"/proc/{process}/fd"):
                if os.readlink(descriptor.path) in wanted:
                    return int(process)
        except OSError:
            continue
    return None


def describe(pid: int | None, marker: str) -> dict[str, object]:
    """Who a process is, and whether it carries this cluster's marker."""
    if pid is None:
        return {"pid": None, "command": "a process of another user", "ours": False}
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        name, folder = Path(f"/proc/{pid}/comm").read_text().strip(), os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return {"pid": pid, "command": "?", "ours": False}
    # nginx overwrites its environment; its working folder tells whose it is.
    front = name == "nginx" and folder == marker.split("=", 1)[1] + "/run"
    return {"pid": pid, "command": command[:120], "ours": front or marker.encode() in environ}


def can_bind(host: str, port: int) -> bool:
    """False when the kernel refuses the port although nobody listens on it (a privileged port, a foreign address)."""
    try:
        with socket.create_server((host, port)):
            return True
    except OSError:
        return False


def port_facts(wanted: list[dict[str, object]], marker: str) -> list[dict[str, object]]:
    """The listeners of the plan that are taken or cannot be had."""
    held, facts = listeners(), []
    for entry in wanted:
        port = int(str(entry["port"]))
        if port in held:
            facts.append({**entry, **describe(owner(held[port]), marker)})
        elif not can_bind(str(entry["address"]), port):
            facts.append({**entry, "pid": None, "command": "nobody, but this user may not listen on it", "ours": False})
    return facts


def memory_available_mb() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) // 1024
    return 0


def own_memory_mb(marker: str) -> int:
    """Resident memory of the cluster's own running processes: a second deploy may count on it."""
    total = 0
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            if marker.encode() in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
                total += int(Path(f"/proc/{process}/statm").read_text().split()[1])
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
            "marker": {"type": "str", "required": True},
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
        memory_mb=memory_available_mb() + own_memory_mb(wanted["marker"]),
        disk_mb=free_disk_mb(wanted["folder"]),
        missing_tools=[tool for tool in wanted["tools"] if shutil.which(tool) is None],
        ports_held=port_facts(wanted["listeners"], wanted["marker"]),
    )


if __name__ == "__main__":
    main()
