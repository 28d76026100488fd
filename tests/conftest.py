"""For all tests: the running stack of the live ones, deployed once and shared; how hypothesis chooses its examples."""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from leftovers import Machine
    from live_stack import Stack

    MACHINE = pytest.StashKey[Machine]()
else:
    MACHINE = pytest.StashKey()


# What a machine may lack; everything else is installed by the make targets.
MAY_SKIP = ("root may write everywhere", "this machine has no IPv6")
# The same examples every time, so that a test's verdict is about the code alone. `make fuzz` looks for new ones.
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `last` change the stack for good or take it away: they run when everything else is done."""
    items.sort(key=lambda item: item.get_closest_marker("last") is not None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Before the first live test, and so before anything is deployed: what is on the machine, and a mark for what is
    started from here."""
    if session.config.option.collectonly or not any(item.get_closest_marker("live") for item in session.items):
        return
    # Not at the top, here and below: the engine environment, which runs other tests, lacks what they need.
    from leftovers import Machine
    from process_table import RUN

    os.environ[RUN] = uuid.uuid4().hex
    session.config.stash[MACHINE] = Machine.look()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """With MTP_MUST_RUN=1 (continuous integration) a test that is skipped for another reason than MAY_SKIP fails it."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or os.environ.get("MTP_MUST_RUN") != "1":
        return
    skipped = [report for report in reporter.stats.get("skipped", []) if isinstance(report.longrepr, tuple)]
    wrong = [report for report in skipped if not report.longrepr[2].removeprefix("Skipped: ").startswith(MAY_SKIP)]
    for report in wrong:
        reporter.write_line(f"\nskipped, and must run: {report.nodeid}: {report.longrepr[2]}", red=True)
    if wrong:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def machine_before(pytestconfig: pytest.Config) -> Machine:
    """The machine before anything was deployed."""
    return pytestconfig.stash[MACHINE]


@pytest.fixture(scope="session")
def stack() -> Stack:
    """The cluster (MTP_TEST_CLUSTER, default local), deployed with `make deploy` on a machine without it."""
    from live_stack import Stack

    return Stack.deploy()
