"""What a program of ours runs from: its own files and those it imports, as one checksum.

    python -m mtp_runtime.sources MODULE...

The deployment writes it into a program's definition, so that a change restarts exactly the programs that read the
changed file. The files are parsed, not imported: the machine need not have what they import from elsewhere.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def checksum(modules: Sequence[str], root: Path = ROOT) -> str:
    """SHA-256 over names and contents of `files`. Raises ValueError for a module that does not exist."""
    digest = hashlib.sha256()
    for path in sorted(files(modules, root)):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def files(modules: Sequence[str], root: Path = ROOT) -> set[Path]:
    """Files below `root` that the modules are made of.

    A package named here stands for all its modules: what an engine loads by name is imported nowhere. One that is only
    imported stands for its __init__.py. Raises ValueError for a module that does not exist.
    """
    found: set[Path] = set()
    waiting = [name for module in modules for name in _whole(module, root)]
    while waiting:
        name = waiting.pop()
        path = _file(name, root)
        if path is None or path in found:
            continue
        found.add(path)
        waiting += [*_parents(name), *_imports(name, path)]
        found.update((path.parent / "csrc").glob("*.cpp"))  # what its package compiles
    return found


def _whole(module: str, root: Path) -> list[str]:
    """The module, and those below it when it is a package."""
    path = _file(module, root)
    if path is None:
        raise ValueError(f"there is no module {module} in {root}")
    if path.name != "__init__.py":
        return [module]
    below = (found.relative_to(root).with_suffix("") for found in path.parent.rglob("*.py"))
    return [".".join(found.parent.parts if found.name == "__init__" else found.parts) for found in below]


def _file(name: str, root: Path) -> Path | None:
    """Where a dotted name is defined; None for an attribute and for what comes from elsewhere."""
    base = root.joinpath(*name.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def _parents(name: str) -> list[str]:
    """a.b.c -> a, a.b: Python runs their __init__.py first."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _imports(name: str, path: Path) -> Iterator[str]:
    """Names in the import statements of a file, those inside functions too; some are attributes, not modules."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) + 1 - node.level] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def main() -> int:
    """Prints the checksum; exit code 2 for a module that does not exist."""
    if len(sys.argv) < 2:
        print("usage: python -m mtp_runtime.sources MODULE...", file=sys.stderr)
        return 2
    try:
        print(checksum(sys.argv[1:]))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
