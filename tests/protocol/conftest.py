"""Fixtures of the protocol tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.protocol.ground import Ground
from tests.protocol.replica import Fleet, Replica
from tests.support.servers import REDIS_KINDS, RedisServer, find

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
def start(one_server: RedisServer) -> Iterator[Fleet]:
    """Starts replicas without a tick loop."""
    replicas: list[Replica] = []

    def start(holder: str, release: str = "1", **settings: Any) -> Replica:
        replicas.append(Replica(one_server.url(), holder, release, **settings))
        return replicas[-1]

    yield start
    for replica in replicas:
        assert replica.elector.stop(5.0)
