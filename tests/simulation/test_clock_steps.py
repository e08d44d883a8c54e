"""The server's clock, or those of all replicas, are set in virtual time: each slot has one end, and a true one."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_leaderbeat.audit import Audit
from tests.simulation.entries import entry
from tests.simulation.world import BEGAN, Work, World
from tests.support.faketime_server import FrozenServer

_SCHEDULE = {
    name: entry("fenced.late", period, policy)
    for name, period, policy in (
        ("latest", 20.0, {}),
        ("all", 30.0, {"catch_up": "all"}),
        ("none", 20.0, {"catch_up": "none"}),
        ("late", 20.0, {"deadline": 40.0, "catch_up": "all"}),
        ("jitter", 60.0, {"jitter": 30.0, "catch_up": "all"}),
        ("hourly", 3600.0, {}),
    )
}


class _Story:
    """A world whose clocks are set: the server's, or with `local` those of all replicas."""

    def __init__(self, server: FrozenServer, local: bool) -> None:
        conf: dict[str, Any] = {
            "leaderbeat_slot_retention": 4 * 3600.0,
            "leaderbeat_clock": "local" if local else "redis",
        }
        self.world = World(server, "clocks", _SCHEDULE, conf=conf, work=lambda stamp, task: Work((0.1,)))
        self.local = local
        if local:
            self.set(0.0)

    def set(self, ahead: float) -> None:
        """From now on the clocks are so far ahead."""
        if self.local:
            for replica in self.world.replicas:
                replica.set_clock(ahead)
        else:
            self.world.server_ahead = ahead

    def sent_twice(self) -> list[str]:
        return [
            key
            for key, attempts in self.world.journal.sent.items()
            if len(attempts) > 1 or len(attempts[1]) > 1
        ]

    def audits(self, ahead: float) -> dict[str, Audit]:
        """The ends of all slots, up to what may be under way."""
        since = datetime.fromtimestamp(BEGAN / 1e6 + 5, timezone.utc)
        until = datetime.fromtimestamp(self.world.hub.now / 1e6 + ahead - 100, timezone.utc)
        return {name: self.world.ledger().audit(name, since, until) for name in _SCHEDULE}

    def assert_explained(self, ahead: float, *ends: str) -> None:
        for name, audit in self.audits(ahead).items():
            assert set(audit.counts) <= set(ends), (name, audit.counts)
        assert not self.sent_twice()
        assert not self.world.journal.troubles


@pytest.mark.parametrize("local", [False, True], ids=["server", "local"])
def test_a_clock_that_jumps_ahead_and_is_set_right_leaves_no_slot_unexplained(
    frozen_server: FrozenServer, local: bool
) -> None:
    story = _Story(frozen_server, local)
    with story.world.living():
        story.world.start()
        story.world.run(300)
        story.set(3600.0)
        story.world.run(100)
        story.set(0.0)
        story.world.run(400)
        story.assert_explained(0.0, "done", "missed")
        # What the jump had left out, as far as it lies before the time that was set right, stays missed.
        missed = story.audits(0.0)["latest"].having("missed")
        end = datetime.fromtimestamp(BEGAN / 1e6, timezone.utc) + timedelta(seconds=410)
        assert all(explained.slot <= end for explained in missed)
        assert len(missed) <= 6


def test_after_a_step_back_the_next_leader_takes_nothing_that_was_sent_for_missed(
    frozen_server: FrozenServer,
) -> None:
    story = _Story(frozen_server, local=False)
    with story.world.living():
        story.world.start()
        story.world.run(600)
        story.set(-500.0)
        story.world.run(200)
        for replica in story.world.replicas:
            story.world.kill(replica.process)
        story.world.run(500)
        story.assert_explained(-500.0, "done")
        entries = story.world.ledger().entries()
        assert {name: entries[name].missed for name in _SCHEDULE} == dict.fromkeys(_SCHEDULE, 0)


def test_steps_back_that_add_up_to_more_than_five_minutes_are_as_one(frozen_server: FrozenServer) -> None:
    story = _Story(frozen_server, local=False)
    with story.world.living():
        story.world.start()
        story.world.run(500)
        for ahead in (-200.0, -400.0):
            story.set(ahead)
            story.world.run(20)
        entries = story.world.ledger().entries()
        now = datetime.fromtimestamp(story.world.hub.now / 1e6 - 400, timezone.utc)
        assert max(entries[name].slot for name in _SCHEDULE) <= now, "they count from now"
        story.world.run(500)
        story.assert_explained(-400.0, "done")
        assert sum(entry.missed for entry in story.world.ledger().entries().values()) == 0
