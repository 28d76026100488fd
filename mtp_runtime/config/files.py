"""Where an inventory's files come from: a folder, or anything else that has their bytes."""

import errno
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .problems import ConfigError, Problem

HOSTS_FILE = "hosts.yml"
REPOSITORY = Path(__file__).resolve().parents[2]
VARS_FOLDER = "group_vars/all"
SECTIONS = ("model", "topology", "mtp", "serving", "monitoring")
# Section -> its file below the inventory's folder.
NAMES = {"hosts": HOSTS_FILE, **{section: f"{VARS_FOLDER}/{section}.yml" for section in SECTIONS}}
MAX_FILE_BYTES = 1 << 18
# Ansible reads variables from files with these suffixes.
READ_BY_ANSIBLE = ("", ".yml", ".yaml", ".json")
# Beside the variables Ansible reads an inventory's whole folder, subfolders too, but for hidden files and names with
# these ends (INVENTORY_IGNORE_EXTS of ansible-core). Which of the rest it understands, its configuration says.
PASSED_OVER = (".bak", ".cfg", ".md", ".orig", ".pyc", ".pyo", ".retry", ".rpm", ".rst", ".swp", ".txt", "~")
VARS_FOLDERS = ("group_vars", "host_vars", "vars_plugins")


@dataclass(frozen=True)
class Files:
    """One inventory's files. read: section -> bytes, OSError where there are none; shown: section -> name for people.

    strays: files that Ansible would read and we would not, as people see them.
    """

    name: str
    read: Callable[[str], bytes]
    shown: Callable[[str], str]
    strays: tuple[str, ...] = ()


def on_disk(folder: Path, overrides: dict[str, str] | None = None) -> Files:
    """The files of ansible/inventories/<name>. overrides: section -> text to take instead of the file.

    Errors: ConfigError when there is no such inventory.
    """
    if not folder.is_dir():
        known = sorted(p.name for p in folder.parent.glob("*") if (p / HOSTS_FILE).is_file())
        message = f"there is no inventory {folder.name!r}; known: {', '.join(known) or 'none'}."
        raise ConfigError([Problem("C04", shown(folder), "(folder)", message, "name one of the known inventories")])

    def read(section: str) -> bytes:
        text = (overrides or {}).get(section)
        if text is not None:
            return text.encode("utf-8", "surrogatepass")
        file = folder / NAMES[section]
        if file.exists() and not file.is_file() and not file.is_dir():
            # Reading a pipe would wait for its writer.
            raise OSError(errno.EINVAL, "No regular file", str(file))
        with file.open("rb") as stream:
            return stream.read(MAX_FILE_BYTES + 1)

    strays = tuple(shown(place) for place in _strays(folder))
    return Files(folder.name, read, lambda section: shown(folder / NAMES[section]), strays)


def _strays(folder: Path) -> list[Path]:
    known = {folder / name for name in NAMES.values()} | {folder / VARS_FOLDER}
    variables = [*folder.glob("group_vars/*"), *folder.glob("host_vars/*"), *folder.glob(f"{VARS_FOLDER}/*")]
    found = [p for p in variables if p.suffix in READ_BY_ANSIBLE]
    found += [p for p in folder.glob("*") if p.name not in VARS_FOLDERS and not p.name.endswith(PASSED_OVER)]
    return sorted(p for p in found if p not in known and not p.name.startswith("."))


def shown(file: Path) -> str:
    """A path as messages and plans name it: from the repository root when it lies inside. A link is named itself."""
    file = file.parent.resolve() / file.name
    return str(file.relative_to(REPOSITORY)) if file.is_relative_to(REPOSITORY) else str(file)
