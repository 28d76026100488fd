"""Makes the control environment, .venv, and keeps it while it is what requirements/control.txt asks for.

Usage: PYTHON requirements/control_env.py (`make venv` runs it). Plain Python, nothing need be installed.

A stamp in the environment says what it was made from: the Python and the contents of control.txt and pyproject.toml, so
a checkout that only touches files rebuilds nothing. Supervisor and the exporter of a deployed cluster run out of the
environment: it is not rebuilt under them. Exit code 2, with a message, when that or the Python stands in the way.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAMP = Path(".venv", ".stamp")
PIP = ("-m", "pip", "install", "-qq", "--no-deps")


class Refused(Exception):
    """The environment cannot be made now; the message says what to do."""


def wanted(root: Path) -> dict[str, str]:
    """What the environment should be made from. The Python's own path, not that of an environment made with it."""

    def checksum(name: str) -> str:
        return hashlib.sha256((root / name).read_bytes()).hexdigest()

    return {
        "python": os.path.realpath(sys.executable),
        "packages": checksum("requirements/control.txt"),
        "project": checksum("pyproject.toml"),
    }


def made_from(root: Path) -> dict[str, str]:
    """The stamp; empty when there is no complete environment."""
    try:
        found = json.loads((root / STAMP).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def ensure(root: Path) -> None:
    """Makes the environment when it is not what is wanted. Raises Refused."""
    want, have = wanted(root), made_from(root)
    if want == have:
        return
    python = root / ".venv" / "bin" / "python"
    if {**have, "project": want["project"]} != want:
        check_python()
        # Without a stamp it is half made or gone: nothing runs well out of it, and stopping what does needs it.
        if (root / STAMP).exists():
            check_unused(root, have, want)
        say("control environment: .venv (about half a minute)")
        for folder in ("tmp", "cache"):
            (root / ".local" / folder).mkdir(parents=True, exist_ok=True)
        run(root, want["python"], "-m", "venv", "--clear", ".venv")
        run(root, python, *PIP, "--require-hashes", "-r", "requirements/control.txt")
    # A running program has read what this replaces.
    run(root, python, *PIP, "--no-build-isolation", "-e", ".")
    (root / STAMP).write_text(json.dumps(want))


def check_python() -> None:
    """Raises Refused when this Python cannot make the environment."""
    if sys.version_info[:2] != (3, 11):
        raise Refused(f"{sys.executable} is not Python 3.11; set PYTHON=/path/to/python3.11")
    if not all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")):
        raise Refused(f"{sys.executable} has no venv module (Debian: apt-get install python3-venv)")


def check_unused(root: Path, have: dict[str, str], want: dict[str, str]) -> None:
    """Raises Refused while programs of a deployed cluster run out of the environment."""
    tool = root / "ansible" / "module_utils" / "mtp_processes.py"
    command = [sys.executable, str(tool), "running", str(root / ".local" / "clusters")]
    clusters = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    if clusters:
        other = "the Python" if have.get("packages") == want["packages"] else "requirements/control.txt"
        destroy = " and ".join(f"make destroy CLUSTER={name}" for name in clusters)
        raise Refused(f"{other} changed while programs run out of .venv; first {destroy}. Nothing was changed.")


def run(root: Path, *command: str | Path) -> None:
    """Raises Refused when the command fails; its own output says why."""
    if subprocess.run(list(map(str, command)), cwd=root, check=False).returncode:
        raise Refused(f"failed: {' '.join(map(str, command))}")


def say(text: str) -> None:
    print(f"\033[1m==> {text}\033[0m", flush=True)


def main() -> int:
    try:
        ensure(ROOT)
    except Refused as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
