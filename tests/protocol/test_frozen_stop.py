"""A leader that is told to stop while Redis answers nothing goes all the same, whatever its options say."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import redis
from celery import Celery

from celery_leaderbeat import Scheduler, connections
from celery_leaderbeat.redis_url import parse_redis_url
from celery_leaderbeat.restoring import Restorer
from celery_leaderbeat.term import Term
from tests.support.servers import RedisServer
from tests.support.waits import wait_for

#: All servers of a group are frozen.
MUTE = 5


@pytest.fixture
def mute() -> Iterator[list[int]]:
    """The ports of servers that take connections, and never say a word."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(MUTE)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
            listener.listen(16)
        yield [listener.getsockname()[1] for listener in listeners]


def _lead(scheduler: Scheduler) -> None:
    """Tick until it leads, and once more."""

    def term() -> Any:
        scheduler.tick()
        running = scheduler._running
        return running is not None and running.elector.term()

    wait_for(term, what="it leads")
    scheduler.tick()


@pytest.mark.bounded
def test_a_timeout_among_the_options_of_redis_does_not_keep_it_from_stopping(
    one_server: RedisServer,
) -> None:
    app = Celery("frozen", broker=one_server.url(1), set_as_current=False)
    app.conf.leaderbeat_redis_url = f"{one_server.url()}?socket_timeout=5"
    app.conf.leaderbeat_redis_options = {"socket_connect_timeout": 5}
    scheduler = Scheduler(app)

    try:
        _lead(scheduler)
        one_server.freeze()
        began = time.monotonic()
        scheduler.close()
        assert time.monotonic() - began < 1.8
    finally:
        one_server.thaw()
        scheduler.close()
        app.close()


@pytest.mark.bounded
def test_a_redis_that_freezes_as_a_stopping_leader_puts_back_what_it_has_lost_holds_it_up_no_longer_than_it_says(
    one_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = Celery("frozen", broker=one_server.url(1), set_as_current=False)
    app.conf.leaderbeat_redis_url = one_server.url()
    scheduler = Scheduler(app)
    register = Restorer.register

    def freezes(self: Restorer, term: Term) -> Any:
        one_server.freeze()
        return register(self, term)

    try:
        _lead(scheduler)
        monkeypatch.setattr(Restorer, "register", freezes)
        one_server.client().flushdb()
        began = time.monotonic()
        scheduler.close()
        assert 1.0 < time.monotonic() - began < 3.8
    finally:
        one_server.thaw()
        scheduler.close()
        app.close()


@pytest.mark.bounded
@pytest.mark.parametrize("scheme", ["sentinel", "redis+cluster"])
def test_who_has_little_time_asks_no_group_of_frozen_servers_for_long(mute: list[int], scheme: str) -> None:
    target = parse_redis_url(f"{scheme}://{';'.join(f'127.0.0.1:{port}' for port in mute)}", "the test's url")
    client = connections.make_client(target, {}, 0.05, "prefix")
    began = time.monotonic()
    try:
        with pytest.raises(redis.exceptions.ConnectionError):
            client.ping()
    finally:
        connections.close_client(client)
    assert time.monotonic() - began < 0.8
