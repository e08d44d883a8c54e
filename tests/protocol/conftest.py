"""Fixtures of the protocol tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.protocol.ground import Ground
from tests.support.servers import RedisServer

#: The explorer empties its database all the time.
EXPLORED_DB = 5


@pytest.fixture
def ground(redis_server: RedisServer) -> Iterator[Ground]:
    """A ledger on an empty server of each kind in turn."""
    ground = Ground(redis_server.url(), redis_server.client())
    yield ground
    ground.close()
