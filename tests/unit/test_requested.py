"""The leader's part of requests, against a ledger that is a dict."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_leaderbeat.errors import StoreUnavailable
from celery_leaderbeat.pauses import Pause, Pauses
from celery_leaderbeat.plan import Plan, Returned
from celery_leaderbeat.policy import Policy
from celery_leaderbeat.records import ALL, ENDS, Request, SlotRecord
from celery_leaderbeat.requested import Requested
from celery_leaderbeat.tick import tick_key

T0 = datetime(2026, 10, 2, 3, tzinfo=timezone.utc)
MINUTE = timedelta(minutes=1)
NOW = T0 + 10.5 * MINUTE
#: Ends from which a request starts a slot again without force.
UNDONE = ("missed", "skipped", "failed", "refused", "abandoned", "unconfirmed")


def minute(number: float) -> datetime:
    return T0 + number * MINUTE


class FakeLedger:
    """Records by tick key."""

    def __init__(self) -> None:
        self.records: dict[str, SlotRecord] = {}
        self.away = False

    def slots(self, keys: Sequence[str]) -> dict[str, SlotRecord | None]:
        if self.away:
            raise StoreUnavailable("away")
        return {key: self.records.get(key) for key in keys}

    def put(self, number: float, state: str, attempt: int = 1, request: str = "", entry: str = "job") -> None:
        key = tick_key(entry, minute(number))
        table = {"state": state, "attempt": str(attempt), "request": request}
        self.records[key] = SlotRecord.read(key, table)


class FakeOrders:
    """Remembers which requests are done with."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.dealt_with: list[datetime] = []

    def note_progress(self, request: Request, dealt_with: datetime) -> None:
        self.dealt_with.append(dealt_with)

    def done_with(self, request: Request) -> None:
        self.done.append(request.id)


class World:
    """Some entries each minute, and a leader's requests."""

    def __init__(self, **policies: Policy) -> None:
        self.ledger, self.orders = FakeLedger(), FakeOrders()
        self.plans: dict[str, Plan] = {}
        self.pauses: dict[str, Pauses] = {}
        for name, policy in (policies or {"job": Policy()}).items():
            self.plans[name] = Plan(name, None, 60, "f", policy)
        self.lead()

    def lead(self) -> None:
        """A new leader begins: what the plans knew is gone."""
        self.taken_up: list[str] = []
        for plan in self.plans.values():
            plan.start(minute(10))
        self.requested = Requested(
            self.ledger,  # type: ignore[arg-type]
            self.orders,  # type: ignore[arg-type]
            self.plans,
            lambda plan: self.taken_up.append(plan.name),
            lambda: None,
        )

    def look(self, *requests: Request) -> None:
        self.requested.look(requests, lambda plan: self.pauses.get(plan.name, Pauses()), NOW)

    def owed(self, name: str = "job") -> dict[datetime, Returned]:
        return self.plans[name].returned

    def claim(self, number: float, request: str, name: str = "job") -> None:
        """Claim a slot that is owed, as the dispatcher does."""
        slot = minute(number)
        self.ledger.put(number, "claimed", self.owed(name)[slot].attempt, request, name)
        self.plans[name].advance(slot)


def request(
    kind: str = "backfill",
    since: float = 1,
    until: float = 4,
    entry: str = "job",
    force: bool = False,
    id: str = "r",  # noqa: A002
    age: timedelta = timedelta(0),
) -> Request:
    return Request(id, kind, entry, minute(since), minute(until), force, "ann@host", NOW - age)


# Which slots


def test_a_run_is_one_slot_of_its_own() -> None:
    world = World()
    world.look(request("run", 10.25, 10.25))
    assert world.owed() == {minute(10.25): Returned(1, "r")}
    assert world.taken_up == ["job"]
    assert world.plans["job"].when == minute(10.25)


def test_a_backfill_is_the_slots_after_its_begin_up_to_its_end() -> None:
    world = World()
    world.look(request(since=1, until=4))
    assert list(world.owed()) == [minute(2), minute(3), minute(4)]
    assert set(world.owed().values()) == {Returned(1, "r")}


def test_what_is_yet_to_come_isnt_backfilled() -> None:
    world = World()
    world.look(request(since=8, until=99))
    assert list(world.owed()) == [minute(9), minute(10)]


@pytest.mark.parametrize(
    ("policy", "numbers"),
    [
        (Policy(), [3]),
        (Policy(lookback=2), [2, 3]),
        (Policy(catch_up="all", lookback=100), [1, 2, 3]),
        (Policy(catch_up="all", lookback=2), [2, 3]),
        (Policy(catch_up="none"), []),
        (Policy(catch_up="all", lookback=100, deadline=511), [2, 3]),
        (Policy(deadline=60), []),
    ],
)
def test_catching_up_after_a_pause_takes_what_the_policy_would_take(
    policy: Policy, numbers: list[float]
) -> None:
    world = World(job=policy)
    world.look(request("catch_up", 1, 4))
    assert list(world.owed()) == [minute(number) for number in numbers]
    assert world.orders.done == ([] if numbers else ["r"])


def test_a_request_for_all_entries_concerns_each_by_its_own_policy() -> None:
    world = World(job=Policy(), every=Policy(catch_up="all", lookback=9), none=Policy(catch_up="none"))
    world.look(request("catch_up", 1, 4, entry=ALL))
    assert [len(world.owed(name)) for name in ("job", "every", "none")] == [1, 3, 0]
    assert sorted(world.taken_up) == ["every", "job"]


# Which attempt


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    "state", [*ENDS, "unconfirmed", "claimed", "sent", "running", "retrying", "returned"]
)
def test_a_slot_with_a_record_is_sent_again_unless_it_is_done_or_under_way(state: str, force: bool) -> None:
    world = World()
    world.ledger.put(3, state, attempt=2)
    world.look(request(since=2.5, until=3.5, force=force))
    if state == "returned":
        expected = 2  # It hasn't been sent as this attempt.
    elif force or state in UNDONE:
        expected = 3
    else:
        expected = None
    assert [back.attempt for back in world.owed().values()] == ([expected] if expected else [])
    assert world.orders.done == ([] if expected else ["r"])
    assert world.requested.forces("r") == (force and expected is not None)


def test_only_an_open_request_forces() -> None:
    world = World()
    assert not world.requested.forces("r")
    assert not world.requested.forces("")
    world.look(request(force=True), request(since=5, until=6, id="other"))
    assert world.requested.forces("r")
    assert not world.requested.forces("other")


# Until it is done


def test_a_request_is_closed_once_each_of_its_slots_is_claimed() -> None:
    world = World()
    asked = request(since=1, until=3)
    world.look(asked)
    world.claim(2, "r")
    world.look(asked)
    assert world.orders.done == []
    world.claim(3, "r")
    world.look(asked)
    assert world.orders.done == ["r"]
    assert not world.requested.forces("r")


def test_it_is_gone_through_once_however_often_it_is_seen() -> None:
    world = World()
    asked = request(since=1, until=3)
    world.look(asked)
    world.claim(2, "r")
    for _ in range(3):
        world.look(asked)
    assert list(world.owed()) == [minute(3)]
    assert world.taken_up == ["job"]


@pytest.mark.parametrize("force", [False, True])
def test_a_new_leader_goes_through_it_again_and_repeats_nothing(force: bool) -> None:
    world = World()
    world.ledger.put(2, "done")
    asked = request(since=1, until=4, force=force)
    world.look(asked)
    if force:
        world.claim(2, "r")
    world.claim(3, "r")
    world.ledger.put(3, "failed", world.ledger.records[tick_key("job", minute(3))].attempt, "r")
    world.lead()
    world.look(asked)
    assert world.owed() == {minute(4): Returned(1, "r")}, "what has been claimed for it isn't claimed again"
    world.claim(4, "r")
    world.look(asked)
    assert world.orders.done == ["r"]


def test_a_claim_for_it_that_was_given_back_is_sent_as_the_same_attempt() -> None:
    world = World()
    world.ledger.put(2, "returned", attempt=3, request="r")
    world.look(request(since=1, until=2))
    assert world.owed() == {minute(2): Returned(3, "r")}


def test_another_request_for_a_slot_counts_anew() -> None:
    world = World()
    world.ledger.put(2, "failed", attempt=2, request="earlier")
    world.look(request(since=1, until=2))
    assert world.owed() == {minute(2): Returned(3, "r")}


def test_a_ledger_that_doesnt_answer_is_asked_again() -> None:
    world = World()
    world.ledger.away = True
    with pytest.raises(StoreUnavailable):
        world.look(request())
    assert world.owed() == {}
    assert world.orders.done == []
    world.ledger.away = False
    world.look(request())
    assert len(world.owed()) == 3


# What can't be done


def test_an_entry_that_no_leader_has_is_named_with_who_asked_and_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    world.look(request(entry="jop"))
    world.look(request(entry="jop"))
    (record,) = caplog.records
    assert (record.levelname, record.action) == ("WARNING", "request_refused")  # type: ignore[attr-defined]
    assert "'jop'" in record.getMessage()
    assert "ann@host" in record.getMessage()
    assert (world.orders.done, world.taken_up) == ([], [])
    world.look(request(entry="jop", age=timedelta(hours=1)))
    assert (world.orders.done, world.taken_up) == (["r"], [])


def test_a_later_leader_goes_on_where_a_backfill_stands() -> None:
    """The records of the first slots may have expired by then."""
    world = World()
    world.look(request())
    world.claim(2, "r")
    world.look(request())
    world.look(request())
    assert world.orders.dealt_with[-1] == minute(3) - timedelta(microseconds=1)
    assert len(world.orders.dealt_with) == 2


def test_too_many_slots_are_refused_as_a_whole(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.look(request(since=-10_001 + 4, until=4))
    (record,) = caplog.records
    assert (record.levelname, record.action) == ("WARNING", "request_refused")  # type: ignore[attr-defined]
    assert "more than 10000 slots" in record.getMessage()
    assert world.owed() == {}
    assert world.orders.done == ["r"]
    world.look(request(since=-10_000 + 4, until=4, id="fewer"))
    assert len(world.owed()) == 10_000


def test_a_schedule_that_fails_costs_the_request_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        def slots_after(self, after: datetime) -> Any:
            raise RuntimeError("no slots today")

    world = World(job=Policy(), other=Policy())
    world.plans["job"].schedule = Failing()
    world.look(request(entry=ALL))
    assert len(world.owed("other")) == 3
    assert world.owed("job") == {}
    assert [(record.levelname, record.entry) for record in caplog.records] == [("ERROR", "job")]  # type: ignore[attr-defined]


def test_what_is_taken_up_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    world = World()
    world.ledger.put(2, "done")
    world.look(request(since=1, until=4))
    (record,) = caplog.records
    assert record.getMessage() == (
        "Entry 'job': ann@host asks for 3 slots up to 2026-10-02T03:04:00Z, of which 2 are to be sent."
    )
    assert (record.action, record.entry, record.count) == ("requested", "job", 2)  # type: ignore[attr-defined]
    caplog.clear()
    world.look(request(since=4, until=5, id="one"))
    assert caplog.messages == [
        "Entry 'job': ann@host asks for 1 slot up to 2026-10-02T03:05:00Z, of which 1 is to be sent."
    ]


def test_catching_up_after_one_pause_waits_while_another_is_in_force() -> None:
    world = World(job=Policy(catch_up="all", lookback=10), other=Policy(catch_up="all", lookback=10))
    world.pauses["job"] = Pauses([Pause(minute(0))])
    asked = request("catch_up", 1, 4, entry=ALL)
    world.look(asked)
    assert (list(world.owed()), len(world.owed("other"))) == ([], 3)
    for number in (1, 2, 3):
        world.claim(number, "r", "other")
    world.look(asked)
    assert not world.orders.done
    world.pauses.clear()
    world.look(asked)
    assert list(world.owed()) == [minute(1), minute(2), minute(3)]


def test_what_somebody_asks_for_by_name_is_sent_while_the_entry_is_paused() -> None:
    world = World()
    world.pauses["job"] = Pauses([Pause(minute(0))])
    world.look(request())
    assert list(world.owed()) == [minute(2), minute(3), minute(4)]
