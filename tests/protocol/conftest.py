"""Fixtures of the protocol tests, and what they have to tell at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.protocol.ground import Ground
from tests.support.servers import REDIS_KINDS, RedisServer, find

_TOLD = pytest.StashKey[dict[str, list[str]]]()
#: The explorer empties its database all the time.
EXPLORED_DB = 5


@pytest.fixture
def ground(redis_server: RedisServer) -> Iterator[Ground]:
    """A ledger on an empty server of each kind in turn."""
    ground = Ground(redis_server.url(), redis_server.client())
    yield ground
    ground.close()


@pytest.fixture
def one_server(redis_servers: Callable[[str], RedisServer]) -> RedisServer:
    """A server of the first kind that is found, empty: for what would take too long on each of them."""
    found = [name for name in REDIS_KINDS if find(name).binary]
    server = redis_servers(found[0] if found else REDIS_KINDS[0])
    server.flush()
    return server


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Tell something at the end of the session: `tell(heading, line)`."""
    told = request.config.stash.setdefault(_TOLD, {})
    return lambda heading, line: told.setdefault(heading, []).append(line)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what the tests have told; the guards only where there is room (`-v`)."""
    for heading, lines in config.stash.get(_TOLD, {}).items():
        if heading == "guards" and terminalreporter.verbosity < 1:
            continue
        terminalreporter.section(heading)
        for line in lines:
            terminalreporter.write_line(line)
