"""A short story in which whoever comes to certain points is struck: killed, or frozen for longer than all leases.

The points are: before and after each script, before and after each publish, and each step of a worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

from celery_leaderbeat.tick import Stamp
from tests.simulation.entries import entry, mix_name
from tests.simulation.faults import Faults
from tests.simulation.invariants import judge
from tests.simulation.virtual import Process
from tests.simulation.world import BEGAN, Work, World
from tests.support.faketime_server import FrozenServer

__all__ = ["Blows", "tell_story"]

#: The number of a point -> `"killed"` or `"frozen"`.
Blows = Mapping[int, str]

_PERIOD = 20.0
_SLOTS = 3
_UNTIL = datetime.fromtimestamp(BEGAN / 1e6, timezone.utc) + timedelta(seconds=_PERIOD * _SLOTS)
#: By then, whatever was left behind has come to its end.
_LONGEST = 600.0
#: Longer than the lease of a leader and that of a run.
_FROZEN = 50.0


class _Strikes(Faults):
    """Strikes whoever comes to certain points."""

    def __init__(self, world: World, blows: Blows) -> None:
        self._world = world
        self._blows = blows
        self._passed = 0
        self.struck: list[str] = []

    def point(self, process: Process, what: str) -> None:
        self._passed += 1
        blow = self._blows.get(self._passed)
        if blow is None:
            return
        self.struck.append(f"{process} {what}")
        self._world.note(f"is {blow} {what}")
        if blow == "frozen":
            self._world.hub.freeze(process, _FROZEN)
        else:
            self._world.kill(process)


def _work(stamp: Stamp, task: Any) -> Work:
    """The first run of the first slot takes longer than a period."""
    first = stamp.slot == _UNTIL - timedelta(seconds=_PERIOD * (_SLOTS - 1)) and stamp.attempt == 1
    return Work((12.0, 12.0) if first else (2.0,))


def tell_story(
    server: FrozenServer, task: str, mix: Mapping[str, Any], blows: Blows, **company: Any
) -> list[str]:
    """Three slots of one entry, of which the first run outlasts the period. Who was struck.

    `company` are arguments of the world: how many replicas and workers there are, and when they come back.
    """
    world = World(
        server,
        f"{task} {mix_name(mix)} {blows}",
        {"job": entry(task, _PERIOD, mix)},
        pace="leisurely",
        make_faults=lambda world: _Strikes(world, blows),
        work=_work,
        **company,
    )
    with world.living():
        world.start()
        world.run(_PERIOD * _SLOTS + 2.0)
        world.run_until_settled(_UNTIL, _LONGEST)
        verdict = judge(world, _UNTIL)
        assert not verdict.broken, world.tell(verdict.broken)
        return world.faults.struck
