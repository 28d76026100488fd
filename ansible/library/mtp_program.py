"""Ansible module: one program under the cluster's supervisor, running, healthy and as the plan has it.

The program is a shell script (programs/NAME.sh) that an operator can read and run by hand. It is restarted only when
that script changes: the script names everything the program depends on, checksums included.
"""

from __future__ import annotations

import http.client
import os
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
import xmlrpc.client
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from supervisor.xmlrpc import SupervisorTransport

DOCUMENTATION = r"""
module: mtp_program
short_description: A supervised program of an MTP cluster
options:
  name: {description: program name, type: str, required: true}
  state_dir: {description: state folder of the cluster, type: path, required: true}
  state: {description: present or absent, type: str, default: present, choices: [present, absent]}
  argv: {description: command line, type: list, elements: str}
  env: {description: environment, type: dict, default: {}}
  secrets: {description: "environment read from files at start: {VARIABLE: file}", type: dict, default: {}}
  depends: {description: "what else must restart it: {name: checksum}", type: dict, default: {}}
  health_url: {description: address that answers 200 once the program is up, type: str}
  timeout_s: {description: seconds until it must be healthy, type: int, default: 60}
  stop_s: {description: seconds between SIGTERM and SIGKILL, type: int, default: 20}
"""
ALREADY_STARTED = 60  # supervisor.xmlrpc.Faults
UP = {"RUNNING", "STARTING"}
LOG_LINES = 25


class Supervisor:
    """The cluster's supervisor. Its socket has a relative path: absolute ones may not be longer than 107 bytes."""

    def __init__(self, state: Path) -> None:
        self.state = state
        os.chdir(state / "run")
        transport = SupervisorTransport(None, None, serverurl="unix://supervisor.sock")
        self.rpc = xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport).supervisor

    def info(self, name: str) -> dict[str, Any] | None:
        try:
            return dict(self.rpc.getProcessInfo(name))  # type: ignore[arg-type]
        except xmlrpc.client.Fault:
            return None

    def remove(self, name: str) -> None:
        """Stops the whole process group, ends what ignored the signal, and forgets the program."""
        if self.info(name):
            self.rpc.stopProcessGroup(name)
            self.rpc.removeProcessGroup(name)
            environment = {"MTP_CLUSTER_ROOT": str(self.state), "MTP_PROGRAM": name}
            subprocess.run(
                [sys.executable, str(self.state / "bin" / "end_former.py")],
                env=environment,
                stdout=subprocess.DEVNULL,
                check=False,
            )

    def add(self, name: str) -> None:
        self.rpc.reloadConfig()
        if self.info(name) is None:
            self.rpc.addProcessGroup(name)


def script(params: dict[str, Any], state: Path) -> str:
    """The program as a shell script."""
    quote = shlex.quote
    lines = [
        "#!/bin/sh",
        f"# {params['name']}: written by the deployment from the plan; it can be run by hand.",
        "set -eu",
    ]
    lines += [f"# {name}: {value}" for name, value in sorted(params["depends"].items())]
    lines += [f"cd {quote(str(state / 'run'))}"]
    marker = {"MTP_CLUSTER_ROOT": str(state), "MTP_PROGRAM": params["name"], "SPT_NOENV": "1"}
    lines += [f"export {name}={quote(str(value))}" for name, value in sorted({**params["env"], **marker}.items())]
    lines += [f'{name}="$(cat {quote(path)})"; export {name}' for name, path in sorted(params["secrets"].items())]
    # A former self that outlived its parent (an orphaned engine core) would hold the port and spin a core.
    lines += [f"{quote(sys.executable)} ../bin/end_former.py"]
    lines += ["exec " + " \\\n  ".join(quote(part) for part in params["argv"])]
    return "\n".join(lines) + "\n"


def configuration(params: dict[str, Any], state: Path) -> str:
    """The supervisor section. Whole process groups are stopped: a server's child must not survive it."""

    def escape(path: Path) -> str:
        return str(path).replace("%", "%%")

    name = params["name"]
    return "\n".join(
        [
            f"[program:{name}]",
            f"command=/bin/sh {shlex.quote(escape(state / 'programs' / (name + '.sh')))}",
            "autostart=true",
            "autorestart=true",
            "startsecs=1",
            "startretries=3",
            "stopasgroup=true",
            "killasgroup=true",
            f"stopwaitsecs={params['stop_s']}",
            "redirect_stderr=true",
            f"stdout_logfile={escape(state / 'logs' / (name + '.log'))}",
            "stdout_logfile_maxbytes=20MB",
            "stdout_logfile_backups=2",
            "",
        ]
    )


def healthy(url: str | None) -> bool:
    if url is None:
        return True
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=5) as answer:
            return answer.status == http.HTTPStatus.OK
    except (urllib.error.URLError, OSError, http.client.HTTPException):
        return False


def tail(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()[-LOG_LINES:]
    except OSError:
        return []


def wait(supervisor: Supervisor, params: dict[str, Any]) -> str | None:
    """None once the program is healthy, else why it is not. A program that died is not waited for."""
    name, end, first = params["name"], time.monotonic() + params["timeout_s"], None
    while time.monotonic() < end:
        info = supervisor.info(name) or {"statename": "unknown to the supervisor", "pid": 0}
        first = first or info["pid"]
        if info["statename"] not in UP or info["pid"] != first:
            return f"it ended while starting ({info['statename']})"
        if info["statename"] == "RUNNING" and healthy(params["health_url"]):
            return None
        time.sleep(0.5)
    return f"it was not healthy within {params['timeout_s']} s ({params['health_url']})"


def write(path: Path, text: str, mode: int) -> None:
    path.write_text(text)
    path.chmod(mode)


def ensure_present(module: AnsibleModule, state: Path) -> None:
    params = module.params
    name = params["name"]
    files = {
        state / "programs" / f"{name}.sh": (script(params, state), 0o700),
        state / "programs" / f"{name}.conf": (configuration(params, state), 0o600),
    }
    stale = [path.name for path, (text, _) in files.items() if not path.is_file() or path.read_text() != text]
    # In check mode a first run has no supervisor to ask.
    alive = (state / "run" / "supervisor.sock").exists()
    supervisor = Supervisor(state) if alive else None
    info = supervisor.info(name) if supervisor else None
    running = bool(info and info["statename"] in UP)
    if module.check_mode or supervisor is None:
        if supervisor is None and not module.check_mode:
            module.fail_json(msg=f"{name}: the cluster's supervisor does not run")
        module.exit_json(changed=bool(stale) or not running)
    if stale:
        supervisor.remove(name)
        for path, (text, mode) in files.items():
            write(path, text, mode)
        supervisor.add(name)
    if (stale or not running) and (found := supervisor.info(name)) and found["statename"] not in UP:
        try:
            supervisor.rpc.startProcess(name, False)
        except xmlrpc.client.Fault as fault:
            if fault.faultCode != ALREADY_STARTED:  # supervisor starts an added program by itself, a moment later
                raise
    problem = wait(supervisor, params)
    if problem:
        log = state / "logs" / f"{name}.log"
        if stale or not running:
            supervisor.remove(name)  # not left restarting for ever
            (state / "programs" / f"{name}.conf").unlink(missing_ok=True)
        module.fail_json(msg=f"{name}: {problem}. Read {log}; its last lines:", log=tail(log))
    module.exit_json(changed=bool(stale) or not running, restarted=bool(stale))


def ensure_absent(module: AnsibleModule, state: Path) -> None:
    name = module.params["name"]
    files = [state / "programs" / f"{name}{suffix}" for suffix in (".conf", ".sh")]
    changed = any(path.exists() for path in files)
    if changed and not module.check_mode:
        if (state / "run" / "supervisor.sock").exists():
            Supervisor(state).remove(name)
        for path in files:
            path.unlink(missing_ok=True)
    module.exit_json(changed=changed)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "state_dir": {"type": "path", "required": True},
            "state": {"type": "str", "default": "present", "choices": ["present", "absent"]},
            "argv": {"type": "list", "elements": "str"},
            "env": {"type": "dict", "default": {}},
            "secrets": {"type": "dict", "default": {}, "no_log": False},
            "depends": {"type": "dict", "default": {}},
            "health_url": {"type": "str"},
            "timeout_s": {"type": "int", "default": 60},
            "stop_s": {"type": "int", "default": 20},
        },
        required_if=[("state", "present", ["argv"])],
        supports_check_mode=True,
    )
    state = Path(module.params["state_dir"])
    try:
        (ensure_present if module.params["state"] == "present" else ensure_absent)(module, state)
    except (OSError, xmlrpc.client.Error) as error:
        module.fail_json(msg=f"{module.params['name']}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
