"""The server of the simulations, and what they have to tell at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.simulation.world import BEGAN
from tests.support.faketime_server import FrozenServer, require_frozen_server

_TOLD, _STORIES = "simulation", "simulated stories"


@pytest.fixture(scope="session")
def frozen_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrozenServer]:
    """A Valkey server whose clock stands still until a test moves it."""
    server = require_frozen_server(tmp_path_factory.mktemp("frozen"), BEGAN)
    yield server
    server.stop()


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Tell a line at the end of the session, also from another process of pytest-xdist."""
    return lambda line: record_property(_TOLD, line)


@pytest.fixture
def count_stories(record_property: Callable[[str, object], None]) -> Callable[[int, str], None]:
    """Tell how many stories were told, and what they were like."""
    return lambda count, what: record_property(_STORIES, (count, what))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the tests have told; what each kind of story was like only where there is room (`-v`)."""
    told = [
        (name, value)
        for report in terminalreporter.getreports("passed")
        for name, value in report.user_properties
        if name in (_TOLD, _STORIES)
    ]
    if not told:
        return
    terminalreporter.section("simulation")
    for name, value in told:
        if name == _TOLD:
            terminalreporter.write_line(value)
    stories = [value for name, value in told if name == _STORIES]
    if stories:
        terminalreporter.write_line(f"{sum(count for count, _ in stories)} short stories")
    for count, what in stories if terminalreporter.verbosity > 0 else ():
        terminalreporter.write_line(f"  {count:5} {what}")
