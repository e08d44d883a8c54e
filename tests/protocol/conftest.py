"""Fixtures of the protocol tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import pytest

from celery_leaderbeat.keys import Keys
from celery_leaderbeat.tick import slot_to_us
from tests.protocol.ground import Ground
from tests.protocol.replica import Fleet, Replica
from tests.support.servers import RedisServer

#: The explorer empties its database all the time.
EXPLORED_DB = 5


@pytest.fixture
def ground(redis_server: RedisServer) -> Iterator[Ground]:
    """A ledger on an empty server of each kind in turn."""
    ground = Ground(redis_server.url(), redis_server.client())
    yield ground
    ground.close()


@pytest.fixture
def start(one_server: RedisServer) -> Iterator[Fleet]:
    """Starts replicas without a tick loop."""
    replicas: list[Replica] = []

    def start(holder: str, release: str = "1", url: str = "", **settings: Any) -> Replica:
        replicas.append(Replica(url or one_server.url(), holder, release, **settings))
        return replicas[-1]

    yield start
    for replica in replicas:
        assert replica.elector.stop(5.0)


@pytest.fixture
def keys(one_server: RedisServer) -> Keys:
    """The keys of a ledger that holds one entry."""
    keys = Keys("protocol")
    record = {"slot": str(slot_to_us(datetime.now(timezone.utc))), "fingerprint": "f"}
    one_server.client().hset(keys.entries, "job", json.dumps(record))
    return keys
