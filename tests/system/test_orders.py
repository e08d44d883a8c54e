"""What people ask of a running fleet: pause, resume, run now, backfill, carried out by whichever replica leads."""

from __future__ import annotations

import itertools
from collections import Counter
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest

from celery_leaderbeat.ledger import Ledger
from celery_leaderbeat.orders import Orders
from celery_leaderbeat.records import ALL
from celery_leaderbeat.tick import parse_tick_key, tick_key
from tests.support.history import (
    NOTES_SIGNALS,
    PERIOD,
    due_since,
    events,
    once,
    plugin,
    run_lease,
    runner,
    signals,
    unexplained,
)
from tests.support.scene import Scene, keys_of, leader
from tests.support.waits import wait_for, wait_until_steady
from tests.system.test_workers import PATIENCE, starts, state

#: Within so many seconds the leader heeds an order; the machine may be busy with others.
SOON = 1.0 + 0.5

SLOW_TO_PUBLISH = """
import time

from celery.signals import before_task_publish

before_task_publish.connect(lambda **_: time.sleep(0.05), weak=False)
"""


@pytest.fixture
def orders(ledger: Ledger) -> Orders:
    """An operator."""
    return Orders(ledger, by="anna@office")


def every_second(task: str = "record", **policy: Any) -> dict[str, Any]:
    return {"task": f"project.{task}", "every": 1.0, "policy": {"catch_up": "all", **policy}}


def now() -> datetime:
    return datetime.now(timezone.utc)


def sent(scene: Scene, entry: str) -> list[SimpleNamespace]:
    """What beats have sent of an entry."""
    return [message for message in scene.beat_publishes() if message.key.startswith(f"{entry}@")]


def slot_of(message: SimpleNamespace) -> datetime:
    return parse_tick_key(message.key)[1]


def wait_for_slots(scene: Scene, entry: str, count: int) -> None:
    """Wait until so many more slots of an entry are sent."""
    before = len(sent(scene, entry))
    wait_for(
        lambda: len(sent(scene, entry)) >= before + count, PATIENCE, f"{count} slots of {entry} are sent"
    )


def skipped_slots(ledger: Ledger, entry: str) -> int:
    """How many slots of an entry are skipped."""
    found = ledger.entries(entry).get(entry)
    return found.skipped if found else 0


# Pause


@pytest.mark.matrix("valkey")
@pytest.mark.conf(leaderbeat_lease_ttl=3)
@pytest.mark.schedule({"job": every_second(), "other": every_second()})
def test_a_pause_counts_within_a_second_and_for_the_next_leader_too(
    scene: Scene, ledger: Ledger, orders: Orders
) -> None:
    began = now()
    beats = [scene.start_beat(env=plugin(scene, NOTES_SIGNALS), wait=False) for _ in "ab"]
    first = leader(scene)
    wait_for_slots(scene, "job", 2)
    since = orders.pause("job", note="the data base moves")
    wait_for(lambda: skipped_slots(ledger, "job") >= 2, PATIENCE, "slots are skipped")
    first.kill()
    second = leader(scene, other_than=first)
    before = skipped_slots(ledger, "job")
    wait_for(lambda: skipped_slots(ledger, "job") >= before + 3, PATIENCE, "the next leader skips as well")
    wait_for_slots(scene, "other", 2)
    assert max(message.t for message in sent(scene, "job")) <= since.timestamp() + SOON
    assert all(slot_of(message) <= since for message in sent(scene, "job"))
    for beat in (first, second):
        (line,) = [line for line in beat.find("skipped") if "'job'" in line.text]
        assert line.level == "INFO"
        assert "paused: the data base moves" in line.text
    assert len(beats) == 2
    audit = ledger.audit("job", began, now())
    assert unexplained(audit) == []
    skipped = audit.having("skipped")
    assert len(skipped) >= 5
    assert {slot.reason for slot in skipped} == {"paused: the data base moves"}
    assert min(slot.slot for slot in skipped) >= since
    (paused,) = events(ledger, "paused")
    assert (paused["entry"], paused["by"], paused["reason"]) == ("job", "anna@office", "the data base moves")
    assert {told.entry for told in signals(scene, "slots_skipped")} == {"job"}
    assert signals(scene, "slots_missed", entry="job") == []


@pytest.mark.matrix("valkey")
@pytest.mark.schedule(
    {
        "latest": every_second(catch_up="latest"),
        "all": every_second(catch_up="all", lookback=3),
        "none": every_second(catch_up="none"),
    }
)
@pytest.mark.parametrize("catch_up", [False, True], ids=["plain", "catch_up"])
def test_a_resume_catches_up_only_where_it_is_asked_to_and_then_as_the_policy_says(
    scene: Scene, ledger: Ledger, orders: Orders, catch_up: bool
) -> None:
    began = now()
    scene.start_beat()
    for name in scene.schedule:
        wait_for(lambda: sent(scene, name), PATIENCE, f"{name} is sent")  # noqa: B023
    since = orders.pause(ALL)
    for name in scene.schedule:
        wait_for(lambda: skipped_slots(ledger, name) >= 4, PATIENCE, f"{name} is skipped")  # noqa: B023
    assert orders.resume(ALL, catch_up=catch_up)
    # The pause's own end: a slot may come due between that and the answer.
    ((pause,),) = orders.look()[0].values()
    resumed = pause.until
    assert resumed is not None
    for name in scene.schedule:
        wait_for_slots(scene, name, 2 + (3 if catch_up and name == "all" else 0))
    wait_for(
        lambda: not ledger.store.fields(ledger.store.keys.requests), PATIENCE, "the request is carried out"
    )
    caught_up = {
        name: sorted(slot_of(message) for message in sent(scene, name) if since <= slot_of(message) < resumed)
        for name in scene.schedule
    }
    counts = {name: len(slots) for name, slots in caught_up.items()}
    if catch_up:
        assert (counts["latest"], counts["all"]) == (1, 3)
        assert caught_up["latest"] == caught_up["all"][-1:], "the newest"
        assert all(b - a == timedelta(seconds=1) for a, b in itertools.pairwise(caught_up["all"]))
        # What came due less than a second ago isn't overdue.
        assert counts["none"] <= 1
    else:
        assert set(counts.values()) == {0}
    assert max(Counter(keys_of(scene.beat_publishes())).values()) == 1
    for name in scene.schedule:
        audit = ledger.audit(name, began, now())
        assert unexplained(audit) == []
        assert {slot.reason for slot in audit.having("skipped")} == {"paused"}


@pytest.mark.matrix("valkey")
@pytest.mark.schedule({"job": every_second(), "other": every_second()})
def test_a_pause_of_all_entries_pauses_each_and_leaves_each_ones_own_pause(
    scene: Scene, ledger: Ledger, orders: Orders
) -> None:
    scene.start_beat()
    wait_for_slots(scene, "other", 1)
    orders.pause("job", note="its own")
    since = orders.pause(ALL, note="maintenance")
    wait_for(lambda: skipped_slots(ledger, "other") >= 2, PATIENCE, "the other one is skipped")
    wait_for(lambda: skipped_slots(ledger, "job") >= 2, PATIENCE, "it is skipped")
    assert all(slot_of(message) <= since for message in scene.beat_publishes())
    assert orders.resume(ALL)
    assert not orders.resume(ALL), "it isn't paused any more"
    wait_for_slots(scene, "other", 3)
    assert all(slot_of(message) <= since for message in sent(scene, "job"))
    assert orders.resume("job")
    wait_for_slots(scene, "job", 1)


@pytest.mark.matrix("valkey")
@pytest.mark.schedule({"job": every_second()})
def test_a_pause_with_an_end_ends_by_itself(scene: Scene, ledger: Ledger, orders: Orders) -> None:
    began = now()
    scene.start_beat()
    wait_for_slots(scene, "job", 1)
    until = (now() + timedelta(seconds=4)).replace(microsecond=0)
    since = orders.pause("job", until=until, note="for a while")
    wait_for(
        lambda: [message for message in sent(scene, "job") if slot_of(message) > since],
        PATIENCE,
        "it goes on",
    )
    wait_for_slots(scene, "job", 1)
    after = sorted(slot_of(message) for message in sent(scene, "job") if slot_of(message) > since)
    assert after[0] == until, "the end is the first instant after the pause"
    audit = ledger.audit("job", began, now())
    assert unexplained(audit) == []
    assert [slot.slot for slot in audit.having("skipped")] == [
        slot.slot for slot in audit.slots if since <= slot.slot < until
    ]


@pytest.mark.matrix("valkey")
@pytest.mark.schedule({"job": once("hanging", policy={"on_crash": "rerun"})})
def test_what_is_to_be_rerun_waits_for_the_end_of_a_pause(
    scene: Scene, ledger: Ledger, orders: Orders
) -> None:
    due_since(scene)
    workers = [scene.start_worker(env=plugin(scene, run_lease(1.0))) for _ in "ab"]
    scene.start_beat()
    run = wait_for(scene.runs, PATIENCE, "it runs")[0]
    orders.pause("job")
    runner(workers, run).kill()
    wait_for(lambda: state(scene, run.key) == "returned", PATIENCE, "it is to be sent again")
    wait_until_steady(lambda: len(scene.beat_publishes()), 2.0)
    assert len(scene.beat_publishes()) == 1
    assert ledger.slot(run.key).attempt == 2
    orders.resume("job")
    wait_for(lambda: state(scene, run.key) == "done", PATIENCE, lambda: f"done: {scene.slot(run.key)}")
    assert [each.attempt for each in scene.runs()] == [1, 2]


# Run now


@pytest.mark.bounded
@pytest.mark.matrix("valkey", "redis+rabbitmq")
@pytest.mark.schedule({"job": {"task": "project.fenced", "every": PERIOD}, "other": every_second()})
def test_run_now_runs_once_under_a_key_of_its_own_even_while_paused(
    scene: Scene, ledger: Ledger, orders: Orders
) -> None:
    scene.start_worker()
    scene.start_beat()
    wait_for_slots(scene, "other", 1)
    before = ledger.entries("job")["job"]
    orders.pause("job")
    keys, heeded = [], []
    for _ in range(3):
        asked = now()
        keys.append(orders.run_now("job"))
        answered = now()
        wait_for(
            lambda: state(scene, keys[-1]) == "done", PATIENCE, lambda: f"it runs: {scene.slot(keys[-1])}"
        )
        (message,) = [message for message in sent(scene, "job") if message.key == keys[-1]]
        heeded.append(message.t - asked.timestamp())
        entry, slot = parse_tick_key(keys[-1])
        assert entry == "job"
        # To the millisecond.
        assert asked - timedelta(milliseconds=1) <= slot <= answered + timedelta(milliseconds=1)
    assert max(heeded) <= SOON, heeded
    assert len(set(keys)) == 3
    wait_for(lambda: not ledger.store.fields(ledger.store.keys.requests), PATIENCE, "nothing is left to do")
    assert [run.key for run in scene.runs() if run.key in keys] == keys
    assert ledger.entries("job")["job"].slot == before.slot, "the schedule goes on where it was"
    audit = ledger.audit("job", datetime.fromtimestamp(0, timezone.utc), now())
    asked_for = [slot for slot in audit.slots if not slot.called_for]
    assert [(slot.key, slot.end) for slot in asked_for] == [(key, "done") for key in keys]
    assert {event["by"] for event in events(ledger, "requested", entry="job")} == {"anna@office"}


@pytest.mark.matrix("valkey")
@pytest.mark.schedule({"job": {"task": "project.fenced", "every": PERIOD}})
def test_orders_that_nobody_leads_for_wait_and_those_for_nothing_are_said(
    scene: Scene, ledger: Ledger, orders: Orders
) -> None:
    key = orders.run_now("job")
    orders.run_now("no such entry")
    beat = scene.start_beat()
    scene.start_worker()
    wait_for(lambda: state(scene, key) == "done", PATIENCE, lambda: f"it runs: {scene.slot(key)}")
    line = beat.wait_for_log("'no such entry', which this leader doesn't have: nothing is sent", PATIENCE)
    assert line.level == "WARNING"
    assert "anna@office" in line.text
    # What is done is over with the leader's next look at the orders; newer code may have the other entry.
    wait_for(lambda: [request.entry for request in orders.look()[1]] == ["no such entry"], PATIENCE)
    assert keys_of(scene.runs()) == [key]


# Backfill


def minutely(task: str = "fenced", **policy: Any) -> dict[str, Any]:
    return {"task": f"project.{task}", "every": 60.0, "policy": policy}


def slots_between(since: datetime, until: datetime) -> list[datetime]:
    """The whole minutes in (since, until]."""
    first = since.replace(second=0, microsecond=0) + timedelta(minutes=1)
    return [first + timedelta(minutes=i) for i in range(int((until - first) / timedelta(minutes=1)) + 1)]


@pytest.mark.matrix("redis+rabbitmq")
@pytest.mark.schedule({"job": minutely()})
def test_a_backfill_runs_the_missing_slots_and_with_force_all_as_a_further_attempt(
    scene: Scene, ledger: Ledger, orders: Orders
) -> None:
    since = due_since(scene, timedelta(minutes=6))
    scene.start_worker()
    scene.start_beat()
    (done,) = wait_for(lambda: scene.runs("end"), PATIENCE, "the latest slot runs")
    until = slot_of(done)
    keys = [tick_key("job", slot) for slot in slots_between(since, until)]
    assert len(keys) >= 5
    orders.backfill("job", since, until)
    wait_for(lambda: {state(scene, key) for key in keys} == {"done"}, PATIENCE, "all are done")
    wait_for(lambda: not ledger.store.fields(ledger.store.keys.requests), PATIENCE, "it is carried out")
    assert Counter(run.key for run in scene.runs() if run.key in keys) == Counter(keys), "each once"
    assert {run.attempt for run in scene.runs()} == {1}
    order = [run.key for run in scene.runs() if run.key in keys[:-1]]
    assert order == keys[:-1], "oldest first"

    orders.backfill("job", since, until, force=True)
    wait_for(lambda: len(starts(scene, keys[0])) == 2, PATIENCE, "it runs again")
    wait_for(
        lambda: {(ledger.slot(key).state, ledger.slot(key).attempt) for key in keys} == {("done", 2)},
        PATIENCE,
        "all are done again",
    )
    wait_for(lambda: not ledger.store.fields(ledger.store.keys.requests), PATIENCE, "it is carried out")
    for key in keys:
        assert [run.attempt for run in starts(scene, key)] == [1, 2]
    audit = ledger.audit("job", since, until)
    assert (unexplained(audit), audit.counts) == ([], {"done": len(keys)})


@pytest.mark.matrix("valkey")
@pytest.mark.conf(leaderbeat_lease_ttl=3, leaderbeat_publish_timeout=0.7)
@pytest.mark.schedule({"job": minutely(prefer="duplicate"), "careful": minutely(prefer="missed")})
def test_a_backfill_whose_leader_is_killed_in_the_middle_runs_each_slot_once(
    scene: Scene, ledger: Ledger, orders: Orders
) -> None:
    since = due_since(scene, timedelta(minutes=61))
    scene.start_worker(pool="threads", concurrency=4)
    slow = plugin(scene, SLOW_TO_PUBLISH)
    beats = [scene.start_beat(env=slow, wait=False) for _ in "ab"]
    first = leader(scene)
    wait_for(lambda: len(scene.runs("end")) >= 2, PATIENCE, "the latest slots run")
    until = min(slot_of(run) for run in scene.runs("end"))
    slots = slots_between(since, until)
    keys = {entry: [tick_key(entry, slot) for slot in slots] for entry in scene.schedule}
    assert len(slots) >= 60
    for entry in keys:
        orders.backfill(entry, since, until)
    wait_for(lambda: len(scene.beat_publishes()) >= 50, PATIENCE, "it is in the middle")
    first.kill()
    killed = len(scene.beat_publishes())
    assert killed < 110
    leader(scene, other_than=first)
    wait_for(lambda: not ledger.store.fields(ledger.store.keys.requests), PATIENCE, "it is carried out")

    def settled(entry: str) -> bool:
        ends = {record and record.state for record in ledger.slots(keys[entry]).values()}
        return ends <= {"done", "unconfirmed", "missed"}

    for entry in keys:
        wait_for(
            lambda: settled(entry),  # noqa: B023
            PATIENCE,
            lambda: str(ledger.audit(entry, since, until).counts),  # noqa: B023
        )
    runs = Counter(keys_of(scene.runs()))
    assert max(runs.values()) == 1
    assert {run.attempt for run in scene.runs()} == {1}
    assert [key for key in keys["job"] if not runs[key]] == [], "what prefers a duplicate is never lost"
    published = Counter(keys_of(scene.beat_publishes()))
    assert max(published[key] for key in keys["careful"]) == 1
    lost = [key for key in keys["careful"] if not runs[key]]
    assert len(lost) <= 32, "at most what was claimed together"
    told = [line for beat in beats for line in beat.find("was gone before it confirmed")]
    assert len(told) <= 1, "neighbours are one range"
    assert len(told) == 1 or not lost
    audit = ledger.audit("careful", since, until)
    assert unexplained(audit) == []
    assert [slot.key for slot in audit.having("missed")] == lost
    assert ledger.audit("job", since, until).counts == {"done": len(slots)}

    orders.backfill("careful", since, until)
    wait_for(
        lambda: ledger.audit("careful", since, until).counts == {"done": len(slots)},
        PATIENCE,
        lambda: f"what it has cost is made good: {ledger.audit('careful', since, until).counts}",
    )
    assert max(Counter(keys_of(scene.runs())).values()) == 1
