"""A short story from a number: some replicas, workers and entries, a minute or two of trouble, then quiet."""

from __future__ import annotations

import functools
import gc
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from celery.schedules import crontab

from celery_leaderbeat.orders import Orders
from celery_leaderbeat.tick import Stamp
from tests.simulation.emptied import unexplained
from tests.simulation.entries import MIXES, entry
from tests.simulation.invariants import Verdict, judge
from tests.simulation.journal import Journal
from tests.simulation.trouble import Trouble
from tests.simulation.world import BEGAN, Work, World
from tests.support.faketime_server import FrozenServer

__all__ = ["Told", "tell"]

#: Seconds after which everything that was left behind has come to its end, once nothing fails any more.
_LONGEST = 160.0
#: In one of so many stories Redis is emptied, and nothing troubles the leaders otherwise.
_ONE_IN = 8
_BEGAN = datetime.fromtimestamp(BEGAN / 1e6, timezone.utc)


@dataclass
class Told:
    """What a story was like.

    Attributes:
        broken: the guarantees that were broken, with the part of the story that tells of the first.
        ends: how many slots have which end.
        faults: how many faults of which kind happened.
        messages: how many messages reached the broker.
        runs: how many runs the ledger let in.
        seconds: how long the story took, in virtual time.
    """

    seed: int
    broken: list[str] = field(default_factory=list)
    about: str = ""
    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    messages: int = 0
    runs: int = 0
    seconds: float = 0.0
    journal: Journal | None = None


def _policy(rng: random.Random) -> dict[str, Any]:
    policy = dict(rng.choice(MIXES))
    if rng.random() < 0.15:
        policy["jitter"] = rng.choice((1.0, 5.0))
    if rng.random() < 0.1:
        policy["deadline"] = rng.choice((10.0, 40.0))
    if policy["on_crash"] == "rerun":
        policy["max_attempts"] = rng.choice((1, 2, 3, 5))
    return policy


def _schedule(rng: random.Random) -> dict[str, dict[str, Any]]:
    """One to five entries."""
    schedule = {}
    for number in range(rng.choice((1, 2, 3, 5))):
        policy = _policy(rng)
        needs_fence = policy["on_crash"] == "rerun" or policy["overlap"] != "allow"
        # What a worker that acknowledges early takes with it to the grave counts as unfinished for an hour.
        early = 0.3 if policy["overlap"] != "allow" else 2
        task = rng.choices(
            ("fenced.late", "fenced.early", "plain.late"), (6, early, 0 if needs_fence else 1)
        )[0]
        if rng.random() < 0.05:
            schedule[f"cron-{number}"] = entry(task, crontab(), policy)
        else:
            schedule[f"every-{number}"] = entry(task, rng.choice((10.0, 10.0, 15.0, 20.0, 30.0)), policy)
    return schedule


def _work_of(rng: random.Random) -> Callable[[Stamp, Any], Work]:
    """Bodies as they come; how long they are and how they end is the story's own."""
    longest = rng.choice((0.5, 3.0, 12.0, 30.0))
    ends = ("done", "failed", "retrying", "requeued")
    weights = rng.choice(((1, 0, 0, 0), (8, 1, 1, 0), (6, 1, 2, 1)))
    countdown = rng.choice((0.5, 3.0, 15.0))

    def work(stamp: Stamp, task: Any) -> Work:
        pieces = tuple(rng.uniform(0.01, longest) for _ in range(rng.choice((1, 2, 3))))
        return Work(pieces, rng.choices(ends, weights)[0], countdown)

    return work


def _world(server: FrozenServer, seed: int, emptied: bool) -> World:
    rng = random.Random(f"story {seed}")
    lease = rng.choice((12.0, 18.0))
    conf: Mapping[str, Any] = {
        "leaderbeat_lease_ttl": lease,
        "leaderbeat_run_lease": rng.choice((10.0, 30.0)),
        # Nothing expires before it is looked at.
        "leaderbeat_slot_retention": 7200.0,
    }
    back = rng.choice((0.5, 5.0, 20.0))
    world = World(
        server,
        f"story {seed}",
        _schedule(rng),
        beats=rng.choice((1, 2, 2, 3)),
        workers=rng.choice((1, 2, 3)),
        concurrency=rng.choice((1, 2)),
        conf=conf,
        # Who finds out first that Redis is empty depends on it.
        pace="their own" if emptied else "brisk",
        make_faults=functools.partial(Trouble, leaders_are_well=emptied),
        restart_after=lambda world: world.rng.uniform(0.2, back),
        redelivered_after=rng.choice(((0.5,), (5.0,), (0.5, 5.0, 11.0, 31.0))),
    )
    world.work = _work_of(world.rng)
    return world


def tell(server: FrozenServer, seed: int, keep: bool = False, emptied: bool | None = None) -> Told:
    """Tell the story of a seed, and judge it.

    Parameters:
        keep: keep its journal, every line of it.
        emptied: whether it is one in which Redis is emptied under leaders that are well; None leaves that to the seed.
    """
    if emptied is None:
        emptied = seed % _ONE_IN == 0
    # A story is over before there is much to collect, and to look for that takes a tenth of its time.
    collects = gc.isenabled()
    gc.disable()
    try:
        return _tell(server, seed, keep, emptied)
    finally:
        if collects:
            gc.enable()


def _tell(server: FrozenServer, seed: int, keep: bool, emptied: bool) -> Told:
    world = _world(server, seed, emptied)
    told = Told(seed)
    trouble = world.rng.choice((15.0, 20.0, 30.0, 45.0))
    with world.living():
        world.start()
        world.run(world.rng.uniform(0.0, 8.0))
        world.faults.begin()
        world.run_and_look(trouble)
        until = datetime.fromtimestamp(world.hub.now / 1e6, timezone.utc)
        world.calm()
        # What waits is soon done now, and nobody holds it back, so that the story comes to its end.
        orders = Orders(world.ledger(), "somebody@somewhere")
        for name in world.schedule:
            orders.resume(name, catch_up=False)
        world.work = lambda stamp, task: Work((0.01,))
        world.run_until_settled(until, _LONGEST)
        after = None
        if world.emptied_at:
            after = datetime.fromtimestamp(world.emptied_at / 1e6, timezone.utc) + timedelta(seconds=1)
        verdict: Verdict = judge(world, until, after)
        if emptied:
            verdict.broken += unexplained(world, until)
        if verdict.broken:
            told.broken, told.about = verdict.broken, world.tell(verdict.broken)
        told.ends = verdict.ends
    told.faults = world.faults.happened
    told.messages = sum(
        len(copies) for attempts in world.journal.sent.values() for copies in attempts.values()
    )
    told.runs = len(world.journal.runs)
    told.seconds = (world.hub.now - BEGAN) / 1e6
    if keep:
        told.journal = world.journal
    return told
