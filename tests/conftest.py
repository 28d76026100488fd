"""The running stack of the live tests: deployed once, shared by all of them, destroyed by the last."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from live_stack import Stack


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `last` take the stack away: they run when everything else is done."""
    items.sort(key=lambda item: item.get_closest_marker("last") is not None)


@pytest.fixture(scope="session")
def stack() -> Stack:
    """The cluster (MTP_CLUSTER, default local), deployed with `make deploy` on a machine without it."""
    # Not at the top: the engine environment, which runs other tests, lacks what it needs.
    from live_stack import Stack

    return Stack.deploy()
