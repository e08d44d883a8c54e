"""A crash at every call of a short story, for every legal mix of policies: the guarantees hold, the audit explains.

A story is three slots of one entry, of which the first run outlasts the period, with two replicas and two workers.
It is told again and again; in the k-th telling, whoever comes to the k-th point is killed there, or frozen for
longer than all leases. The points are: before and after each script, before and after each publish, and each step of
a worker. The last telling is the one in which nobody comes to the k-th point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_leaderbeat.tick import Stamp
from tests.simulation.entries import MIXES, entry, mix_name
from tests.simulation.faults import Faults
from tests.simulation.invariants import judge
from tests.simulation.virtual import Process
from tests.simulation.world import BEGAN, Work, World
from tests.support.faketime_server import FrozenServer

_PERIOD = 20.0
_SLOTS = 3
#: By then, whatever was left behind has come to its end.
_LONGEST = 400.0
_FROZEN = 50.0


class _StrikeAt(Faults):
    """Strikes whoever comes to the k-th point."""

    def __init__(self, world: World, number: int, freezes: bool) -> None:
        self._world = world
        self._left = number
        self._freezes = freezes
        self.struck = ""

    def point(self, process: Process, what: str) -> None:
        self._left -= 1
        if self._left != 0:
            return
        self.struck = f"{process} {what}"
        self._world.note(f"is {'frozen' if self._freezes else 'killed'} {what}")
        if self._freezes:
            self._world.hub.freeze(process, _FROZEN)
        else:
            self._world.kill(process)


def _tell_story(
    server: FrozenServer, task: str, mix: Mapping[str, Any], number: int, freezes: bool
) -> tuple[str, str]:
    """Who was struck, and how the slots ended."""

    def work(stamp: Stamp, task: Any) -> Work:
        first = stamp.slot.timestamp() == BEGAN / 1e6 + _PERIOD and stamp.attempt == 1
        return Work((12.0, 12.0) if first else (2.0,))

    world = World(
        server,
        f"{task} {mix_name(mix)} {number} {freezes}",
        {"job": entry(task, _PERIOD, mix)},
        unhurried=True,
        make_faults=lambda world: _StrikeAt(world, number, freezes),
        work=work,
    )
    with world.living():
        world.start()
        world.run(_PERIOD * _SLOTS + 2.0)
        world.run_until_settled(_LONGEST)
        until = datetime.fromtimestamp(BEGAN / 1e6, timezone.utc) + timedelta(seconds=_PERIOD * _SLOTS)
        verdict = judge(world, until)
        assert not verdict.broken, world.tell(verdict.broken)
        return world.faults.struck, str(verdict)


@pytest.mark.parametrize("freezes", [False, True], ids=["killed", "frozen"])
@pytest.mark.parametrize("mix", MIXES, ids=mix_name)
def test_whoever_is_struck_at_whichever_point_no_guarantee_is_broken(
    frozen_server: FrozenServer, tell: Callable[[str], None], mix: Mapping[str, Any], freezes: bool
) -> None:
    number = 0
    struck = "somebody"
    while struck:
        number += 1
        struck, _ = _tell_story(frozen_server, "fenced.late", mix, number, freezes)
    assert number > 20
    tell(f"{mix_name(mix)}, {'frozen' if freezes else 'killed'}: {number} stories")
