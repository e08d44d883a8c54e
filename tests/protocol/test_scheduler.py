"""The whole scheduler in this process, over a real server: what only its parts together do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from celery import Celery

from celery_leaderbeat import Scheduler, signals
from tests.support.servers import RedisServer
from tests.support.waits import wait_for


@pytest.fixture
def app(one_server: RedisServer) -> Iterator[Celery]:
    app = Celery("whole", broker=one_server.url(1), set_as_current=False)
    app.conf.update(
        leaderbeat_redis_url=one_server.url(), leaderbeat_lease_ttl=2.0, leaderbeat_renew_interval=0.5
    )
    app.conf.beat_schedule = {
        "tick": {"task": "a.task", "schedule": 0.2, "options": {"leaderbeat": {"catch_up": "all"}}}
    }
    yield app
    app.close()


def test_a_leader_that_finds_its_lapsed_lease_again_remembers_all_that_it_decided_when_data_are_lost_later(
    app: Celery, one_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    missed: list[dict[str, Any]] = []

    def note(**told: Any) -> None:
        missed.append(told)

    signals.slots_missed.connect(note)
    scheduler = Scheduler(app)
    client = one_server.client()

    def ticks(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(min(scheduler.tick(), 0.02))

    def term() -> Any:
        ticks(0.01)
        return elector.term()

    def lapses() -> bool:
        held = elector._lease._held
        if held is not None:
            # A renewal that is under way would undo it.
            elector._lease._held = replace(held, until=0.0)
        elector._wake()
        return "its lease could not be renewed in time" in caplog.text

    try:
        scheduler.tick()
        elector = scheduler._running.elector
        first = wait_for(term, what="it leads")
        ticks(0.5)
        wait_for(lapses, what="its trust lapses")
        assert wait_for(term, what="it leads again") == first
        # Past the time up to which the first part of the term was trusted.
        ticks(3.0)
        # What has come due and isn't decided as the data are lost, is unsent as far as it knows.
        time.sleep(0.5)
        client.flushdb()
        assert (
            wait_for(lambda: term() not in (None, first) and term(), what="it leads anew").epoch > first.epoch
        )
        ticks(0.5)
        assert missed == []
    finally:
        scheduler.close()
        signals.slots_missed.disconnect(note)


def test_an_error_as_it_stops_does_not_keep_the_lease(
    app: Celery, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = Scheduler(app)
    try:
        scheduler.tick()
        running = scheduler._running
        wait_for(lambda: (scheduler.tick(), running.elector.term())[1], what="it leads")
        with monkeypatch.context() as patch:
            patch.setattr(running.dispatcher, "close", lambda _: 1 / 0)
            scheduler.close()
        assert "Stopping met an error" in caplog.text
        assert running.elector.term() is None
        assert not running.elector.alive
        assert running.dispatcher._ledger.leader() is None
    finally:
        scheduler.close()
