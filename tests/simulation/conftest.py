"""The server of the simulations, and what they have to tell at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.simulation.world import BEGAN
from tests.support.faketime_server import FrozenServer, require_frozen_server

_TOLD = "simulation"


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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the tests have told."""
    lines = [
        line
        for report in terminalreporter.getreports("passed")
        for name, line in report.user_properties
        if name == _TOLD
    ]
    if lines:
        terminalreporter.section("simulation")
        for line in lines:
            terminalreporter.write_line(line)
