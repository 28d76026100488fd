"""An inventory as it was in a git revision. Reads with git, changes nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from .api import inventories
from .files import MAX_FILE_BYTES, NAMES, Files, shown
from .problems import ConfigError, Problem

HERE = "command line"
TIMEOUT_S = 60


def at_revision(name: str, revision: str, root: Path | None = None) -> tuple[Files, str]:
    """The inventory's files at a revision (`HEAD`, a branch, a tag, a commit), and the commit's short name.

    Errors: ConfigError where there is no git checkout, no such revision, or no such inventory in it.
    """
    root = (root or inventories()).resolve()
    prefix = _git(root, "rev-parse", "--show-prefix")
    if prefix is None:
        raise _refuse("REV", f"{root} is no git checkout.", "compare with what is deployed: --deployed")
    commit = None
    if revision and revision.isprintable() and not revision.startswith("-"):
        commit = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if not commit:
        last = (_git(root, "rev-parse", "--verify", "--quiet", "HEAD") or b"").decode()[:9]
        has = f"the last commit is {last}" if last else "there is no commit yet"
        message = f"{revision[:100]!r} is no revision of this checkout; {has}."
        raise _refuse("REV", message, "name a commit, a branch, a tag, or HEAD~1")
    whole, short = commit.decode(), commit.decode()[:9]
    folder = f"{prefix.decode()}{name}/"
    listed = _git(root, "ls-tree", "-r", "-z", "--long", "--full-tree", whole, "--", folder) or b""
    sizes = {}
    for line in listed.decode("utf-8", "replace").split("\0"):
        if "\t" in line:
            about, path = line.split("\t", 1)
            size = about.split()[3]
            sizes[path.removeprefix(folder)] = int(size) if size.isdecimal() else 0
    if not sizes and (root / name).is_dir():
        message = f"inventory {name} is not in {revision} yet, only in the working tree."
        commit_it = f"commit it (git add {shown(root / name)}, git commit), and diff compares with that commit"
        raise _refuse("CLUSTER", message, f"{commit_it}; `mtpctl render {name}` shows all of it now")
    if not sizes:
        message = f"there was no inventory {name} in {revision}."
        raise _refuse(
            "CLUSTER", message, "compare with a revision that has it; `mtpctl render` shows all of the new one"
        )

    def read(section: str) -> bytes:
        file = NAMES[section]
        if file not in sizes:
            raise FileNotFoundError(f"{folder}{file}")
        if sizes[file] > MAX_FILE_BYTES:
            return b" " * (MAX_FILE_BYTES + 1)
        return _git(root, "cat-file", "blob", f"{whole}:{folder}{file}", strip=False) or b""

    return Files(name, read, lambda section: f"{revision}:{folder}{NAMES[section]}"), short


def _git(folder: Path, *words: str, strip: bool = True) -> bytes | None:
    """What git says; None when it fails or is not there."""
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        command = ["git", "-C", str(folder), *words]
        done = subprocess.run(command, capture_output=True, check=False, env=env, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    return done.stdout.rstrip(b"\n") if strip else done.stdout


def _refuse(key: str, message: str, remedy: str) -> ConfigError:
    return ConfigError([Problem("C08", HERE, key, message, remedy)])
