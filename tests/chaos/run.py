"""A run: the fleet is started, struck as the seed says, left to settle, and judged."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from celery_leaderbeat.errors import StoreError
from tests.chaos.checker import Verdict, check
from tests.chaos.collect import Collector
from tests.chaos.fleet import Fleet, Setup
from tests.chaos.history import History
from tests.chaos.nemesis import Nemesis
from tests.chaos.plan import Fault, make_plan
from tests.support.servers import RabbitServer
from tests.support.waits import WaitTimeout, wait_for

__all__ = ["Outcome", "run"]

#: After the election, entries that are new have been registered within this time, in seconds.
_REGISTERED = 3.0
#: Longest that is waited for the slots to come to their ends after the last fault, in seconds.
_SETTLE = 90.0
#: What isn't over once nothing has changed for this long, isn't going to be.
_QUIET = 25.0


@dataclass(frozen=True)
class Outcome:
    """A run's plan, history and verdict."""

    plan: Sequence[Fault]
    history: History
    verdict: Verdict


def run(
    setup: Setup,
    directory: Path,
    *,
    seed: int,
    seconds: float,
    kinds: Sequence[str],
    rabbit: RabbitServer | None = None,
    say: Callable[[str], None] = print,
) -> Outcome:
    """Strike a fleet for so many seconds by the plan of `seed`, and judge what came of it."""
    plan = make_plan(
        seed, seconds, beats=setup.beat_names, workers=setup.worker_names, kinds=kinds, links=setup.links
    )
    fleet = Fleet(setup, directory, rabbit)
    trouble: list[str] = []
    try:
        fleet.start()
        collector = Collector(fleet)
        try:
            _wait_for_a_leader(fleet)
            began = fleet.now()
            nemesis = Nemesis(fleet, collector.lose, say)
            nemesis.run(plan, seconds)
            ended = fleet.now()
            fleet.heal()
            say(f"{seconds:7.2f} s  the faults are over")
            _settle(fleet, collector, ended)
            history = collector.history(seed, began, ended, nemesis.struck, trouble)
        finally:
            collector.close()
    finally:
        fleet.stop()
    return Outcome(plan, history, check(history))


def _wait_for_a_leader(fleet: Fleet) -> None:
    scene = fleet.scene
    assert scene is not None
    wait_for(scene.lease, 20, "somebody leads")
    time.sleep(_REGISTERED)


def _settle(fleet: Fleet, collector: Collector, until: float) -> None:
    """Wait until the slots up to a time are at their ends, or nothing changes any more."""
    deadline, steady, last = time.monotonic() + _SETTLE, time.monotonic(), None
    while time.monotonic() < deadline:
        time.sleep(1.0)
        try:
            left = sorted(collector.audit(until))
        except StoreError:
            continue
        if not left:
            return
        if left != last:
            last, steady = left, time.monotonic()
        elif time.monotonic() - steady > _QUIET:
            return
    if last is None:
        raise WaitTimeout("the ledger can't be audited after the faults")
