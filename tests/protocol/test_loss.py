"""Who is elected after Redis has lost its data: who led last, since that one knows best what was decided."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from celery_leaderbeat.errors import StoreError
from celery_leaderbeat.keys import Keys
from celery_leaderbeat.store import Store
from tests.protocol.replica import Fleet
from tests.support.proxy import Proxy
from tests.support.servers import RedisServer
from tests.support.waits import wait_for

#: Nobody looks at its own lease before it has to.
RARELY = {"renew_interval": 10.0}


def test_a_leader_that_lives_is_woken_by_whoever_sees_the_loss_and_leads_again(
    start: Fleet, keys: Keys, one_server: RedisServer
) -> None:
    one = start("one", **RARELY)
    term = wait_for(one.elector.term, what="one leads")
    others = [start("two", **RARELY), start("three", **RARELY)]
    wait_for(lambda: all(len(other.elector.shadow) for other in others), what="the others read along")
    one_server.client().flushdb()
    wait_for(lambda: len(one.began) == 2, 10, "one leads again")
    assert one.began[1].epoch > term.epoch
    assert [other.began for other in others] == [[], []]


def test_a_leader_that_lives_is_woken_by_a_replica_that_has_just_started_too(
    start: Fleet, keys: Keys, one_server: RedisServer
) -> None:
    # Who has a release wakes a leader in any case.
    one = start("one", release=None, **RARELY)
    wait_for(one.elector.term, what="one leads")
    wait_for(lambda: len(one.elector.shadow), what="one has seen the entry")
    wait_for(lambda: one.elector._listener.subscribed, what="one listens")
    one_server.client().flushdb()
    two = start("two", release=None, **RARELY)
    wait_for(lambda: len(one.began) == 2, 10, "one leads again")
    assert two.began == []


def test_who_stops_is_needed_while_it_has_to_put_back_what_was_lost_and_redis_answers(
    start: Fleet, keys: Keys, one_server: RedisServer
) -> None:
    one = start("one", **RARELY)
    term = wait_for(lambda: one.began and one.elector.term(), what="one leads")
    until = one.elector.trusted_until(term)
    assert until is not None
    shadow, client = one.elector.shadow, one_server.client()

    def is_needed() -> bool:
        return one.elector.is_needed(5.0, 0)

    assert not is_needed(), "it has never led before"
    shadow.leads(until)
    assert not is_needed(), "nothing is lost"
    shadow.begins()
    assert is_needed(), "what it decided before may be lost"
    one_server.freeze()
    try:
        assert not one.elector.is_needed(0.1, 0), "nothing can be put back"
    finally:
        one_server.thaw()
    shadow.leads(until)
    client.set(keys.lease, "somebody")
    assert not is_needed(), "another leads"
    client.delete(keys.lease)
    assert is_needed(), "its lease is gone"


@pytest.fixture
def somebody(one_server: RedisServer, keys: Keys) -> Iterator[None]:
    """Another replica listens, and that is all that can be seen of it."""
    with one_server.client().pubsub() as pubsub:
        pubsub.subscribe(keys.wake)
        wait_for(lambda: pubsub.get_message(timeout=1.0), what="it is subscribed")
        yield


@pytest.mark.usefixtures("somebody")
def test_a_replica_that_has_just_started_leaves_an_empty_ledger_to_the_others_for_a_moment(
    start: Fleet, keys: Keys, one_server: RedisServer
) -> None:
    one_server.client().flushdb()
    began = time.monotonic()
    one = start("one")
    wait_for(one.elector.term, 10, "one leads")
    assert time.monotonic() - began >= 2.0


@pytest.mark.usefixtures("somebody")
def test_a_replica_that_has_just_started_is_elected_over_a_ledger_that_holds_something(
    start: Fleet, keys: Keys
) -> None:
    one = start("one")
    wait_for(one.elector.term, 10, "one leads")
    assert len(one.elector.shadow) == 1


def test_who_cannot_wake_the_others_is_elected_all_the_same(
    start: Fleet, keys: Keys, one_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: Store) -> None:
        raise StoreError("NOPERM")

    monkeypatch.setattr(Store, "wake", refused)
    one = start("one")
    term = wait_for(one.elector.term, what="one leads")
    wait_for(lambda: len(one.elector.shadow), what="one has seen the entry")
    one_server.client().flushdb()
    wait_for(lambda: len(one.began) == 2, 10, "one leads again")
    assert one.began[1].epoch > term.epoch


def test_a_replica_that_starts_as_redis_comes_back_empty_leaves_the_ledger_to_those_that_come_back_later(
    start: Fleet, keys: Keys, one_server: RedisServer
) -> None:
    with Proxy(one_server.port) as first, Proxy(one_server.port) as second:
        one = start("one", url=first.redis_url())
        wait_for(one.elector.term, what="one leads")
        wait_for(lambda: len(one.elector.shadow), what="one has seen the entry")
        for proxy in (first, second):
            proxy.cut()
        one_server.client().flushdb()
        wait_for(lambda: not one.elector._listener.subscribed, what="one has noticed")
        two = start("two", url=second.redis_url())
        wait_for(lambda: two.elector._standby._announced > 0, what="the other has tried once")
        second.resume()
        wait_for(lambda: two.elector._listener.subscribed, what="it listens")
        first.resume()
        wait_for(lambda: len(one.began) == 2, 10, "one leads again")
        assert two.began == []
