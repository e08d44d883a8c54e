"""Who is elected after Redis has lost its data: who led last, since that one knows best what was decided."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from celery_leaderbeat.errors import StoreError
from celery_leaderbeat.keys import Keys
from celery_leaderbeat.store import Store
from tests.protocol.replica import Fleet
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
