"""A crash at every call of a short story, for every legal mix of policies: the guarantees hold, the audit explains.

A story is three slots of one entry, of which the first run outlasts the period, with two replicas and two workers.
It is told again and again; in the k-th telling, whoever comes to the k-th point is killed there, or frozen for
longer than all leases. The points are: before and after each script, before and after each publish, and each step of
a worker. The last telling is the one in which nobody comes to the k-th point.

In other tellings somebody else is struck soon after: while the others make up for the first blow.

`LEADERBEAT_EXHAUSTIVE=1` tells every story for every `catch_up`, and far more of the latter kind.
"""

from __future__ import annotations

import itertools
import os
import random
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

EXHAUSTIVE = os.environ.get("LEADERBEAT_EXHAUSTIVE", "").lower() in ("1", "true", "yes")

_PERIOD = 20.0
_SLOTS = 3
_UNTIL = datetime.fromtimestamp(BEGAN / 1e6, timezone.utc) + timedelta(seconds=_PERIOD * _SLOTS)
#: By then, whatever was left behind has come to its end.
_LONGEST = 600.0
#: Longer than the lease of a leader and that of a run.
_FROZEN = 50.0
#: Stories of two blows for each mix.
_DOUBLES = 500 if EXHAUSTIVE else 12

#: Each mix of the other policies, with one `catch_up` after the other.
_FEWER = [mix for i, mix in enumerate(MIXES) if i % 3 == (i // 3) % 3]
_CHOSEN = MIXES if EXHAUSTIVE else _FEWER

Blows = Mapping[int, str]


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


def _tell_story(server: FrozenServer, task: str, mix: Mapping[str, Any], blows: Blows) -> list[str]:
    """Tell one story. Who was struck."""
    world = World(
        server,
        f"{task} {mix_name(mix)} {blows}",
        {"job": entry(task, _PERIOD, mix)},
        unhurried=True,
        make_faults=lambda world: _Strikes(world, blows),
        work=_work,
    )
    with world.living():
        world.start()
        world.run(_PERIOD * _SLOTS + 2.0)
        world.run_until_settled(_UNTIL, _LONGEST)
        verdict = judge(world, _UNTIL)
        assert not verdict.broken, world.tell(verdict.broken)
        return world.faults.struck


@pytest.mark.timeout(3600 if EXHAUSTIVE else 120)
@pytest.mark.parametrize("blow", ["killed", "frozen"])
@pytest.mark.parametrize("mix", _CHOSEN, ids=mix_name)
def test_whoever_is_struck_at_whichever_point_no_guarantee_is_broken(
    frozen_server: FrozenServer, tell: Callable[[str], None], mix: Mapping[str, Any], blow: str
) -> None:
    for number in itertools.count(1):
        if not _tell_story(frozen_server, "fenced.late", mix, {number: blow}):
            break
    assert number > 20
    tell(f"{mix_name(mix)}, {blow} at each of {number - 1} points")


@pytest.mark.parametrize("mix", [mix for mix in _FEWER if mix["overlap"] == "allow"], ids=mix_name)
@pytest.mark.parametrize("task", ["fenced.early", "plain.late"])
def test_nor_where_a_task_acknowledges_early_or_never_says_that_it_is_done(
    frozen_server: FrozenServer, tell: Callable[[str], None], mix: Mapping[str, Any], task: str
) -> None:
    if task == "plain.late" and mix["on_crash"] == "rerun":
        pytest.skip("refused at start")
    for number in itertools.count(1):
        if not _tell_story(frozen_server, task, mix, {number: "killed"}):
            break
    assert number > 20
    tell(f"{task}, {mix_name(mix)}, killed at each of {number - 1} points")


@pytest.mark.timeout(3600 if EXHAUSTIVE else 120)
@pytest.mark.parametrize("mix", _CHOSEN, ids=mix_name)
def test_nor_by_a_second_blow_while_the_others_make_up_for_the_first(
    frozen_server: FrozenServer, tell: Callable[[str], None], mix: Mapping[str, Any]
) -> None:
    rng = random.Random(mix_name(mix))
    struck = 0
    for _ in range(_DOUBLES):
        first = rng.randrange(1, 40)
        blows = {
            first: rng.choice(("killed", "frozen")),
            first + rng.randrange(1, 16): rng.choice(("killed", "frozen")),
        }
        struck += len(_tell_story(frozen_server, "fenced.late", mix, blows)) == 2
    tell(f"{mix_name(mix)}, two blows: {_DOUBLES} stories, {struck} of them with both")
    assert struck > _DOUBLES // 4
