"""The simulation's own checks: what they find, and what they let pass."""

from __future__ import annotations

import functools
from datetime import datetime, timedelta, timezone

import pytest

from celery_leaderbeat.audit import Explanation
from celery_leaderbeat.orders import Orders
from celery_leaderbeat.records import SlotRecord
from tests.simulation.entries import entry
from tests.simulation.faults import Faults, Replaced
from tests.simulation.invariants import _Slot, judge
from tests.simulation.journal import Journal, Run
from tests.simulation.virtual import Hub, Process
from tests.simulation.world import BEGAN, World
from tests.support.faketime_server import FrozenServer

_BEGAN = datetime.fromtimestamp(BEGAN / 1e6, timezone.utc)


@pytest.mark.parametrize(("given_up_at", "broken"), [(4, True), (5, True), (6, False)])
def test_a_slot_that_is_given_up_before_an_unfrozen_leader_would_have_published_it_is_found(
    given_up_at: int, broken: bool
) -> None:
    hub = Hub(BEGAN)
    journal = Journal(hub)
    hub.run(BEGAN + given_up_at)
    journal.answered(None, "doubt", ["{s}:slot:job@now"], [], [1, "unconfirmed"], None)
    hub.run(BEGAN + 100)
    journal.published("job@now", BEGAN + 5)
    assert bool(journal.violations) == broken


def test_whoever_is_thawed_goes_on_with_all_its_threads() -> None:
    hub, process = Hub(BEGAN), Process("frozen", "beat")
    woke: list[int] = []

    def sleeper(seconds: float) -> None:
        hub.sleep(seconds)
        woke.append(hub.now - BEGAN)

    hub.start(process, lambda: sleeper(1.0), lambda: sleeper(2.0), lambda: sleeper(4.0))
    hub.at(BEGAN, lambda: hub.freeze(process, 10.0))
    hub.at(BEGAN + 3_000_000, lambda: hub.thaw(process))
    hub.run(BEGAN + 20_000_000)
    assert woke == [3_000_000, 3_000_000, 4_000_000]


@pytest.mark.parametrize(("asks_again_after", "broken"), [(4.0, True), (6.0, False)])
def test_a_run_may_go_on_beside_a_later_slot_only_where_it_had_been_taken_for_dead(
    asks_again_after: float, broken: bool
) -> None:
    """Its begin was never answered; its message asks again, before or after its lease of 5 s is over."""
    hub = Hub(BEGAN)
    journal = Journal(hub, exclusive={"job"})
    earlier, later, worker = "job@1", "job@2", Process("worker", "worker")

    def begin(run: str, key: str, state: str) -> None:
        args = [run, 1, 1, "", "slot", "0", 5000, 60_000, "worker", key]
        journal.answered(worker, "begin", [], args, ["run", state], None)

    begin("first", earlier, "sent")
    hub.run(BEGAN + int(asks_again_after * 1e6))
    begin("again", earlier, "running")
    journal.enter(earlier, "again", 1, worker)
    begin("other", later, "sent")
    journal.enter(later, "other", 1, worker)
    assert bool(journal.violations) == broken


class _Unknown(Faults):
    """Nobody hears of a message, and its leader doesn't know that."""

    def __init__(self, message_leaves: bool) -> None:
        self._message_leaves = message_leaves

    def publish(self) -> str:  # type: ignore[override]
        return "" if self._message_leaves else "unknown"


@pytest.mark.parametrize("message_leaves", [False, True])
def test_what_is_asked_for_may_wait_for_an_unfinished_slot_and_for_nothing_else(
    frozen_server: FrozenServer, message_leaves: bool
) -> None:
    job = {"task": "fenced.late", "schedule": 10.0, "options": {"leaderbeat": {"overlap": "skip"}}}
    world = World(frozen_server, 1, {"job": job}, beats=1, make_faults=lambda world: _Unknown(message_leaves))
    with world.living():
        world.start()
        world.run(15.0)
        world.tended = False
        world.kill(world.replicas[0].process)
        world.run(10.0)
        Orders(world.ledger(), "somebody").backfill("job", _BEGAN, _BEGAN + timedelta(seconds=25))
        broken = judge(world, _BEGAN + timedelta(seconds=21)).broken
        assert [text.rpartition(": ")[2] for text in broken] == (
            ["overdue isn't an explanation"] if message_leaves else []
        )


@pytest.mark.parametrize("workers", [0, 1])
def test_a_slot_may_wait_for_one_of_before_a_loss_and_for_nothing_else(
    frozen_server: FrozenServer, workers: int
) -> None:
    """The slot of 03:00:10 isn't judged; nobody begins it, or it is done, and then its leader is gone."""
    policy = {"overlap": "queue", "catch_up": "all"}
    job = {"task": "fenced.late", "schedule": 10.0, "options": {"leaderbeat": policy}}
    world = World(frozen_server, 1, {"job": job}, beats=1, workers=workers)
    with world.living():
        world.start()
        world.run(15.0)
        world.tended = False
        world.kill(world.replicas[0].process)
        world.run(10.0)
        broken = judge(world, _BEGAN + timedelta(seconds=21), after=_BEGAN + timedelta(seconds=11)).broken
        assert [text.rpartition(": ")[2] for text in broken] == (
            ["overdue isn't an explanation"] if workers else []
        )


@pytest.mark.parametrize(
    ("ended", "attempt", "broken"),
    [
        ("requeued", 1, False),
        ("retrying", 1, False),
        ("", 1, False),
        ("failed", 1, True),
        ("done", 1, True),
        ("requeued", 2, True),
    ],
)
def test_a_slot_that_counts_as_missed_may_have_been_begun_as_an_earlier_attempt_and_not_have_ended(
    ended: str, attempt: int, broken: bool
) -> None:
    """Its second attempt is unconfirmed."""
    table = {"state": "unconfirmed", "slot": str(BEGAN), "attempt": "2", "on_crash": "rerun"}
    missed = Explanation("job@now", _BEGAN, "missed", "unconfirmed", True, SlotRecord.read("job@now", table))
    run = Run("run", "job@now", 1, attempt, BEGAN, None, BEGAN, ended)
    job = {"task": "fenced.late", "options": {"leaderbeat": {"on_crash": "rerun"}}}
    found = [what for what in _Slot(missed, job, Journal(Hub(BEGAN)), [run], False)._sent() if "ran" in what]
    assert bool(found) == broken


def test_whoever_finds_the_lease_lost_wakes_those_who_are_connected(frozen_server: FrozenServer) -> None:
    world = World(frozen_server, 1, {}, beats=0, make_faults=Replaced)
    woken: list[str] = []
    with world.living():
        for name in ("near", "cut off", "dead"):
            process = Process(name, "beat")
            process.alive = name != "dead"
            world.listens(process, name, functools.partial(woken.append, name))
        assert isinstance(world.faults, Replaced)
        world.faults._cut("cut off", 5.0)
        world.ledger().store.wake()
        assert woken == ["near"]


@pytest.mark.parametrize(("holds", "broken"), [("ours", True), ("another's", False), ("", False)])
def test_a_leader_may_rely_on_its_own_clock_until_it_hears_that_its_lease_was_lost_with_other_data(
    holds: str, broken: bool
) -> None:
    hub = Hub(BEGAN)
    journal = Journal(hub)
    journal.epoch, journal._lease = 7, ("ours", BEGAN + 5)
    journal.went_back(holds)
    journal._lease = ("", 0)
    journal.trusted("job@now", 7)
    assert bool(journal.violations) == broken


def test_a_setting_of_one_world_does_not_reach_the_next(frozen_server: FrozenServer) -> None:
    entries = {"job": entry("plain.early", 5.0, {})}
    clocks = []
    for conf in ({"leaderbeat_clock": "local", "leaderbeat_lease_ttl": 3}, {"leaderbeat_lease_ttl": 5}, {}):
        with World(frozen_server, 1, entries, conf=conf).living() as world:
            clocks.append((world.settings.clock, world.settings.lease_ttl))
    assert clocks == [("local", 3.0), ("redis", 5.0), ("redis", 15.0)]
