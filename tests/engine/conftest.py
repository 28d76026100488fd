"""Engines that several modules of tests look at, and the tests that run only when asked for."""

from __future__ import annotations

import pytest
from graph_arms import Engines


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`full` is for `make test-full`: without -m that names it, it is left out."""
    if "full" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """Engines by name, each started once."""
    return Engines(tmp_path_factory.mktemp("handed-over"))
