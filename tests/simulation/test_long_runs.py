"""Runs that last a hundred times their lease, longer than the broker waits for an acknowledgement: each runs once."""

from __future__ import annotations

import pytest

from celery_leaderbeat.orders import Orders
from tests.simulation.broker import VISIBILITY
from tests.simulation.entries import entry
from tests.simulation.world import Work, World
from tests.support.faketime_server import FrozenServer

_LEASE, _LEASES = 3.0, 100
_DAY = 86_400.0


@pytest.mark.parametrize("on_crash", ["auto", "skip", "rerun"])
def test_a_run_that_lasts_a_hundred_leases_is_not_started_twice_while_it_renews(
    frozen_server: FrozenServer, on_crash: str
) -> None:
    lasts = _LEASE * _LEASES
    world = World(
        frozen_server,
        f"long {on_crash}",
        {name: entry("fenced.late", _DAY, {"on_crash": on_crash}) for name in ("one", "two")},
        workers=1,
        concurrency=4,
        conf={"leaderbeat_run_lease": _LEASE},
        pace="brisk",
        work=lambda stamp, task: Work((lasts / 10,) * 10),
    )
    with world.living():
        world.start()
        keys = {Orders(world.ledger(), "somebody").run_now(name) for name in world.schedule}
        world.run(lasts + 100.0)
        journal = world.journal
        assert not [*journal.violations, *journal.troubles]
        sent = {
            (key, attempt): len(sent)
            for key, copies in journal.sent.items()
            for attempt, sent in copies.items()
        }
        assert sent == {(key, 1): 1 for key in keys}, "nothing is sent again"
        assert sorted((run.key, run.ended) for run in journal.runs.values()) == [
            (key, "done") for key in sorted(keys)
        ]
        bodies = [(key, body.end) for key in sorted(keys) for body in journal.bodies[key]]
        assert bodies == [(key, "done") for key in sorted(keys)]
        assert lasts > 3 * VISIBILITY
        again = [line for _, _, line in journal.lines if line.startswith("the broker delivers")]
        assert len(again) == 2, "the broker has given up waiting, and delivered each again"
        # One thread of the process for both runs, every third of the lease.
        renewals = [line for _, _, line in journal.lines if line.startswith("renew_run")]
        assert 3 * _LEASES - 3 <= len(renewals) <= 3 * _LEASES + 3
        assert renewals.count("renew_run -> [1, 1]") >= 3 * _LEASES - 6
