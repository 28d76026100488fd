"""Writes requirements/NAME.txt from requirements/NAME.in: exact versions and sha256 hashes, no index addresses.

Usage: python requirements/lock.py NAME [--skip PACKAGE ...] [--no-deps PACKAGE ...]

pip itself resolves (`pip install --dry-run --report`), so the lock is what pip would install on this kind of machine:
CPython 3.11, Linux, x86-64. `--no-deps` packages are locked without their dependencies, `--skip` packages are left out.
Install such a lock with `pip install --no-deps --require-hashes -r requirements/NAME.txt`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def canonical(name: str) -> str:
    """PEP 503 name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def resolve(requirements: list[str], *, no_deps: bool) -> dict[str, tuple[str, str]]:
    """Returns {canonical name: (version, sha256)} of what pip would install into an empty environment."""
    if not requirements:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        report, wanted = Path(folder, "report.json"), Path(folder, "wanted.in")
        wanted.write_text("\n".join(requirements) + "\n")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--report", str(report), "-r", str(wanted)] + (["--no-deps"] if no_deps else [])
        subprocess.run(command, check=True)
        items = json.loads(report.read_text())["install"]
    return {
        canonical(item["metadata"]["name"]): (
            item["metadata"]["version"],
            item["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for item in items
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(path.stem for path in HERE.glob("*.in")))
    parser.add_argument("--skip", nargs="*", default=[])
    parser.add_argument("--no-deps", nargs="*", default=[], dest="bare")
    args = parser.parse_args()

    lines = [line.split("#")[0].strip() for line in (HERE / f"{args.name}.in").read_text().splitlines()]
    lines = [line for line in lines if line]
    bare = {canonical(name) for name in args.bare}

    def is_bare(line: str) -> bool:
        return canonical(re.split(r"[<>=!~\[ ;]", line)[0]) in bare

    packages = resolve([line for line in lines if not is_bare(line)], no_deps=False)
    packages |= resolve([line for line in lines if is_bare(line)], no_deps=True)
    for name in args.skip:
        packages.pop(canonical(name), None)

    out = [
        f"# Generated from {args.name}.in by lock.py (`make lock`): CPython 3.11, Linux, x86-64.",
        f"# Install: pip install --no-deps --require-hashes -r requirements/{args.name}.txt",
    ]
    for name in sorted(packages):
        version, digest = packages[name]
        out.append(f"{name}=={version} \\\n    --hash=sha256:{digest}")
    (HERE / f"{args.name}.txt").write_text("\n".join(out) + "\n")
    print(f"requirements/{args.name}.txt: {len(packages)} packages")


if __name__ == "__main__":
    main()
