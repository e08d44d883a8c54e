"""Two hundred workers killed at random points of a task with `on_crash: "rerun"`: nothing is lost or done twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

from celery_leaderbeat.tick import Stamp
from tests.simulation.entries import entry
from tests.simulation.faults import Faults
from tests.simulation.invariants import judge
from tests.simulation.virtual import Process
from tests.simulation.world import BEGAN, RUN_LEASE, Work, World
from tests.support.faketime_server import FrozenServer

_KILLS = 200
#: Seconds between two sweeps, and what a replica needs for one.
_SWEEP = 2.0 + 1.0
_ENTRIES = 12
_PERIOD = 60.0
#: So often a slot may be run; none is killed so often.
_ATTEMPTS = 12


class _WorkersDie(Faults):
    """Kills workers, at random points of what they do, until there were enough."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.killed = 0

    def point(self, process: Process, what: str) -> None:
        if process.kind == "worker" and self.killed < _KILLS and self._world.rng.random() < 0.12:
            self.killed += 1
            self._world.note(f"is killed {what}")
            self._world.kill(process)


def _work(rng: random.Random) -> Callable[[Stamp, Any], Work]:
    return lambda stamp, task: Work((rng.uniform(0.1, 10), rng.uniform(0.1, 10), rng.uniform(0.1, 20)))


def test_two_hundred_killed_workers_lose_nothing_and_each_slot_is_done_once(
    frozen_server: FrozenServer, tell: Callable[[str], None]
) -> None:
    policy = {"prefer": "duplicate", "on_crash": "rerun", "max_attempts": _ATTEMPTS}
    world = World(
        frozen_server,
        "two hundred",
        {f"job-{n}": entry("fenced.late", _PERIOD, policy) for n in range(_ENTRIES)},
        workers=8,
        concurrency=2,
        make_faults=_WorkersDie,
        restart_after=lambda world: world.rng.uniform(0.1, 5.0),
    )
    world.work = _work(world.rng)
    with world.living():
        world.start()
        while world.faults.killed < _KILLS:
            world.run(_PERIOD)
        until = datetime.fromtimestamp(world.hub.now / 1e6, timezone.utc)
        world.run(1.0)
        world.run_until_settled(until - timedelta(seconds=_PERIOD), 1800.0)
        verdict = judge(world, until)
        assert not verdict.broken, world.tell(verdict.broken)
        assert set(verdict.ends) == {"done"}, verdict

        waits = list(_waits(world))
        assert len(waits) > _KILLS // 3
        assert max(waits) <= RUN_LEASE + _SWEEP
        took = (world.hub.now - BEGAN) / 1e6
        tell(
            f"{world.faults.killed} workers killed in {took:.0f} s of virtual time: {verdict}; {len(waits)} runs "
            f"that died were sent again after {min(waits):.1f} to {max(waits):.1f} s"
        )


def _waits(world: World) -> list[float]:
    """Seconds from each begin of a run that died, or its last renewal, to the sending of the next attempt."""
    waits = []
    for run in world.journal.runs.values():
        again = world.journal.sent[run.key].get(run.attempt + 1)
        if again is not None:
            leased_from = run.leased_until - round(RUN_LEASE * 1e6)
            waits.append((again[0].at - leased_from) / 1e6)
    return waits
