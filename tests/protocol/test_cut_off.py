"""A leader that was cut off, and replaced, before Redis lost its data: it can't be sure that nobody else has led."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone

import pytest

from celery_leaderbeat.keys import Keys
from celery_leaderbeat.store import Store
from tests.protocol.replica import TTL, Fleet, Replica
from tests.support.proxy import Proxy
from tests.support.servers import RedisServer
from tests.support.waits import wait_for

SOON = 10.0


@pytest.fixture
def proxies(one_server: RedisServer) -> Iterator[tuple[Proxy, Proxy]]:
    """The ways of two replicas to Redis."""
    with Proxy(one_server.port) as first, Proxy(one_server.port) as second:
        yield first, second


def leads(replica: Replica) -> None:
    """It is the leader, and has read all that was decided before."""
    shadow = replica.elector.shadow
    wait_for(replica.elector.term, SOON, "it leads")
    wait_for(lambda: len(shadow), SOON, "it has read along")
    shadow.leads(datetime.now(timezone.utc) + timedelta(seconds=TTL))


def looks(replica: Replica) -> None:
    """It looks at its lease, and who is there, as the tick of a leader does."""
    store, sight = Store(replica.elector.settings), replica.elector.sight
    before = sight.before()
    look = store.look(store.keys.wake)
    store.close()
    sight.held(datetime.now(timezone.utc), before, look)


def pair(start: Fleet, proxies: tuple[Proxy, Proxy]) -> tuple[Replica, Replica]:
    """A leader, and a standby that the leader has seen."""
    one = start("one", url=proxies[0].redis_url())
    leads(one)
    two = start("two", url=proxies[1].redis_url())
    wait_for(lambda: len(two.elector.shadow), SOON, "the other reads along")
    wait_for(lambda: one.elector.sight._others, SOON, "the leader sees the other")
    wait_for(lambda: two.elector._listener.subscribed, SOON, "the other listens")
    looks(one)
    return one, two


def is_sure(replica: Replica) -> bool:
    """Whether what came due in the time that was lost goes as its policies say."""
    assert replica.elector.shadow.lacking({}, datetime.now(timezone.utc)), "all is lost"
    return not replica.elector.shadow.gap_is_open


def test_a_leader_that_was_replaced_while_it_was_cut_off_is_not_sure_of_that_time(
    start: Fleet, proxies: tuple[Proxy, Proxy], keys: Keys, one_server: RedisServer
) -> None:
    one, two = pair(start, proxies)
    proxies[0].cut()
    wait_for(two.elector.term, SOON, "the other has taken over")
    # It dies together with the data.
    proxies[1].cut()
    one_server.client().flushdb()
    proxies[0].resume()
    wait_for(lambda: len(one.began) == 2, SOON, "the first leads again")
    assert one.elector.shadow.led_last, "it has seen nobody else lead"
    assert not is_sure(one)
    proxies[1].resume()


def test_who_has_led_meanwhile_is_elected_rather_than_the_one_that_was_cut_off(
    start: Fleet, proxies: tuple[Proxy, Proxy], keys: Keys, one_server: RedisServer
) -> None:
    one, two = pair(start, proxies)
    proxies[0].cut()
    leads(two)
    one_server.client().flushdb()
    proxies[0].resume()
    wait_for(lambda: len(two.began) == 2, SOON, "the other leads again")
    assert len(one.began) == 1
    assert is_sure(two)


def test_where_all_come_back_to_an_empty_redis_the_silence_of_the_others_makes_the_leader_sure(
    start: Fleet, proxies: tuple[Proxy, Proxy], keys: Keys, one_server: RedisServer
) -> None:
    one, two = pair(start, proxies)
    for proxy in proxies:
        proxy.cut()
    one_server.client().flushdb()
    wait_for(lambda: not two.elector._listener.subscribed, SOON, "both have noticed")
    wait_for(lambda: not one.elector._listener.subscribed, SOON, "both have noticed")
    for proxy in proxies:
        proxy.resume()
    wait_for(lambda: len(one.began) == 2, SOON, "the first leads again")
    assert two.began == []
    assert is_sure(one)


def test_a_leader_that_was_never_cut_off_is_sure_at_once(
    start: Fleet, proxies: tuple[Proxy, Proxy], keys: Keys, one_server: RedisServer
) -> None:
    one, _ = pair(start, proxies)
    proxies[1].cut()
    one_server.client().flushdb()
    wait_for(lambda: len(one.began) == 2, SOON, "the first leads again")
    assert is_sure(one)
    proxies[1].resume()


def test_nor_has_a_replica_that_was_alone_anybody_to_wait_for(
    start: Fleet, proxies: tuple[Proxy, Proxy], keys: Keys, one_server: RedisServer
) -> None:
    one = start("one", url=proxies[0].redis_url())
    leads(one)
    looks(one)
    proxies[0].cut()
    one_server.client().flushdb()
    wait_for(lambda: not one.elector._listener.subscribed, SOON, "it has noticed")
    proxies[0].resume()
    wait_for(lambda: len(one.began) == 2, SOON, "it leads again")
    assert is_sure(one)
