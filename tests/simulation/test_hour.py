"""An hour of chaos in virtual time, then quiet: every slot is explained, and every guarantee has held.

`LEADERBEAT_SEEDS=20` plays that many hours more, `LEADERBEAT_SEED=7` the one of that seed alone.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_leaderbeat.tick import Stamp
from tests.simulation.entries import mixed_schedule
from tests.simulation.faults import Mischief
from tests.simulation.invariants import judge
from tests.simulation.world import Work, World
from tests.support.faketime_server import FrozenServer

_HOUR = 3600.0
#: After the hour nothing fails any more. By the end of this, what was left behind has come to its end.
_QUIET = 600.0
#: Slots of the last part of the quiet may still be under way.
_UNDER_WAY = 300.0


def _seeds() -> list[int]:
    if "LEADERBEAT_SEED" in os.environ:
        return [int(os.environ["LEADERBEAT_SEED"])]
    return list(range(1, 2 + int(os.environ.get("LEADERBEAT_SEEDS", "0"))))


def _work_of(rng: random.Random) -> Callable[[Stamp, Any], Work]:
    """Bodies as they come: most are short, some outlast run lease and visibility timeout, some fail or retry."""

    def work(stamp: Stamp, task: Any) -> Work:
        chance = rng.random()
        if chance < 0.02:
            return Work((5.0, 25.0, 25.0, 25.0, 25.0))
        if chance < 0.05:
            return Work((rng.uniform(5, 50),))
        end = rng.choices(("done", "failed", "retrying", "requeued"), (86, 6, 6, 2))[0]
        return Work((rng.uniform(0.05, 2), rng.uniform(0.05, 2)), end, rng.choice((0.5, 5.0, 40.0)))

    return work


def _world(server: FrozenServer, seed: int) -> World:
    world = World(
        server,
        seed,
        mixed_schedule(random.Random(seed), 50),
        beats=3,
        workers=4,
        concurrency=4,
        # Nothing expires before it is looked at.
        conf={"leaderbeat_slot_retention": 4 * _HOUR},
        make_faults=Mischief,
        restart_after=lambda world: world.rng.uniform(0.5, 30.0),
    )
    world.work = _work_of(world.rng)
    return world


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", _seeds())
def test_after_an_hour_of_chaos_every_slot_is_explained_and_no_guarantee_is_broken(
    frozen_server: FrozenServer, tell: Callable[[str], None], seed: int
) -> None:
    began = time.monotonic()
    world = _world(frozen_server, seed)
    with world.living():
        world.start()
        world.faults.begin()
        world.run(_HOUR)
        world.calm()
        world.run(_QUIET)
        now = datetime.fromtimestamp(world.hub.now / 1e6, timezone.utc)
        verdict = judge(world, now - timedelta(seconds=_UNDER_WAY))
        assert not verdict.broken, world.tell(verdict.broken)
        took = time.monotonic() - began
        tell(f"seed {seed}: {sum(verdict.ends.values())} slots ({verdict}); {world.journal}; {took:.0f} s")


def test_a_seed_tells_the_same_story_again(frozen_server: FrozenServer) -> None:
    stories = []
    for _ in range(2):
        world = _world(frozen_server, 1)
        with world.living():
            world.start()
            world.faults.begin()
            world.run(200.0)
            stories.append(world.journal.lines)
    assert len(stories[0]) > 500
    assert stories[0] == stories[1]
