"""Copies of the shipped inventories."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from inventory_copy import Copy

from mtp_runtime.config.api import inventories


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[str], Copy]:
    """copy('local') -> a writable copy of that inventory."""

    def make(name: str) -> Copy:
        shutil.copytree(inventories() / name, tmp_path / name)
        return Copy(tmp_path, name)

    return make
