"""What several live test files share beside the stack."""

from __future__ import annotations

import pytest
from greedy_answers import Served, ask_all
from live_stack import Stack


@pytest.fixture(scope="session")
def served_as_deployed(stack: Stack) -> Served:
    """Answers with K = 1, as the stack was deployed: to be asked before anything breaks it or switches K."""
    assert stack.deployed.plan.k == 1
    return ask_all(stack)
