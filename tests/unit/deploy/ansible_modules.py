"""The project's Ansible modules, loaded as Ansible loads them: with our module_utils beside Ansible's own."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import ansible.module_utils

ROOT = Path(__file__).resolve().parents[3]


def load(name: str) -> ModuleType:
    """ansible/library/NAME.py."""
    ours = str(ROOT / "ansible" / "module_utils")
    if ours not in ansible.module_utils.__path__:
        ansible.module_utils.__path__.append(ours)
    spec = importlib.util.spec_from_file_location(name, ROOT / "ansible" / "library" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded
