"""What a test says to the plugin through the environment ends with it."""

from collections.abc import Iterator

import pytest

from mtp_runtime.adapters.settings import settings


@pytest.fixture(autouse=True)
def own_settings() -> Iterator[None]:
    """Settings are read once a process: here once a test."""
    settings.cache_clear()
    yield
    settings.cache_clear()
