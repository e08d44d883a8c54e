"""Gaps are seen, and every slot is explained: what is missed is said once, and the audit knows each slot's end."""

from __future__ import annotations

import signal
from collections import Counter
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_leaderbeat.ledger import Ledger
from celery_leaderbeat.tick import slot_from_us
from tests.support.history import NOTES_SIGNALS, due_since, events, once, plugin, signals, unexplained
from tests.support.rest import at_rest
from tests.support.scene import Beat, Scene, keys_of, leader
from tests.support.waits import wait_for
from tests.system.test_crashes import PLUGIN, STEPS
from tests.system.test_workers import PATIENCE, state

#: Within so many seconds of the decision a gap is said.
SAID_WITHIN = 2.0
#: Seconds between two slots: a leader that is kept from the processor for a while doesn't fall behind by two of them,
#: the older of which would be missed.
SELDOM = 10.0


def now() -> datetime:
    return datetime.now(timezone.utc)


def every(period: float, task: str = "fenced", **policy: Any) -> dict[str, Any]:
    return {"task": f"project.{task}", "every": period, "policy": policy}


def is_seen(scene: Scene, ledger: Ledger, beat: Beat, entry: str, reason: str) -> None:
    """One line, one signal and one event tell of one range of missed slots; the totals count them."""
    wait_for(lambda: signals(scene, "slots_missed", entry=entry), PATIENCE, f"{entry} is signalled")
    (event,) = events(ledger, "missed", entry=entry)
    (line,) = [line for line in beat.find(f"Entry {entry!r}: ") if "missed" in line.text]
    (told,) = signals(scene, "slots_missed", entry=entry)
    assert line.level == "WARNING"
    assert reason in line.text
    assert reason in told.reason
    assert reason in event["reason"]
    assert told.count == event["count"]
    assert line.t - float(event["t"]) <= SAID_WITHIN
    assert datetime.fromisoformat(told.first) == slot_from_us(int(event["from"]))
    assert datetime.fromisoformat(told.last) == slot_from_us(int(event["to"]))
    if int(event["count"]) > 1:
        assert f"{event['count']} slots from " in line.text
    assert ledger.entries(entry)[entry].missed == int(event["count"])


@pytest.mark.matrix("valkey", "redis+rabbitmq")
@pytest.mark.schedule(
    {
        "none": every(SELDOM, catch_up="none"),
        "deadline": every(SELDOM, catch_up="all", deadline=25),
        "lookback": every(SELDOM, catch_up="all", lookback=2),
        "duplicate": every(SELDOM, catch_up="none", prefer="duplicate"),
        "whole": every(SELDOM, catch_up="all", prefer="duplicate"),
    }
)
def test_slots_that_came_due_while_nobody_led_are_said_once_per_entry_with_the_range(
    scene: Scene, ledger: Ledger
) -> None:
    since = due_since(scene, timedelta(seconds=30.5 * SELDOM))
    beat = scene.start_beat(env=plugin(scene, NOTES_SIGNALS))
    led_since = float(leader(scene) and scene.lease().since)
    wait_for(lambda: len(beat.find("missed")) >= 4, PATIENCE, "all is said")
    for entry, reason in (
        ("none", "catch_up is none"),
        ("deadline", "older than the deadline of 25 s"),
        ("lookback", "older than lookback reaches"),
    ):
        is_seen(scene, ledger, beat, entry, reason)
        (line,) = beat.find(reason)[:1]
        assert line.t - led_since <= SAID_WITHIN
    (line,) = [line for line in beat.find("Entry 'duplicate': ") if "missed" in line.text]
    assert line.level == "INFO"
    assert signals(scene, "slots_missed", entry="duplicate") == []
    (event,) = events(ledger, "missed", entry="duplicate")
    assert int(event["count"]) >= 28
    assert not [line for line in beat.find("Entry 'whole': ") if "missed" in line.text]
    for entry in scene.schedule:
        audit = ledger.audit(entry, since, now())
        assert unexplained(audit) == []
        assert len(audit.slots) >= 30
        missed = audit.having("missed")
        gap = events(ledger, "missed", entry=entry)
        assert len(missed) == sum(int(event["count"]) for event in gap)
        if gap:
            assert missed[0].slot == slot_from_us(int(gap[0]["from"]))
            assert missed[-1].slot == slot_from_us(int(gap[-1]["to"]))
    assert ledger.counts()["missed"] == sum(int(event["count"]) for event in events(ledger, "missed"))


@pytest.mark.matrix("valkey")
@pytest.mark.schedule(
    {
        "born": once("record", options={"expires": "2026-01-01T00:00:00Z"}),
        "queue": once("record", options={"queue": "nonono"}),
        "serializer": once("record", options={"serializer": "nonono"}),
        "good": once("record", options={"expires": 60}),
    }
)
@pytest.mark.conf(task_create_missing_queues=False)
def test_what_cannot_be_sent_or_would_be_born_expired_is_missed_and_seen(
    scene: Scene, ledger: Ledger
) -> None:
    due_since(scene)
    beat = scene.start_beat(env=plugin(scene, NOTES_SIGNALS))
    wait_for(lambda: len(beat.find("missed")) >= 3, PATIENCE, "all is said")
    (good,) = keys_of(wait_for(scene.beat_publishes, PATIENCE, "the good one is sent"))
    wait_for(lambda: state(scene, good) == "sent", PATIENCE, "it is confirmed")
    is_seen(scene, ledger, beat, "born", "born expired: expires is 2026-01-01T00:00:00Z")
    for entry in ("queue", "serializer"):
        (line,) = [line for line in beat.find(f"Entry {entry!r}: ") if "missed" in line.text]
        (told,) = wait_for(lambda: signals(scene, "slots_missed", entry=entry), PATIENCE, "it is signalled")  # noqa: B023
        (event,) = events(ledger, "missed", entry=entry)
        assert line.level == "WARNING"
        assert "it can't be sent: " in told.reason
        assert told.count == event["count"] == "1"
    for entry, end in (("born", "missed"), ("queue", "missed"), ("serializer", "missed"), ("good", "sent")):
        (slot,) = ledger.audit(entry, datetime.fromtimestamp(0, timezone.utc), now()).slots
        assert slot.end == end
    assert [key.partition("@")[0] for key in keys_of(scene.beat_publishes())] == ["good"]


def killed_at(scene: Scene, step: str, nth: int) -> dict[str, str | None]:
    """The environment of a beat that kills itself at the nth call of a step."""
    target, after = STEPS[step]
    source = PLUGIN.format(target=target, after=after, signum=signal.SIGKILL.name, nth=nth)
    return plugin(scene, NOTES_SIGNALS, source)


@pytest.mark.matrix("valkey")
@pytest.mark.conf(leaderbeat_lease_ttl=3, leaderbeat_publish_timeout=0.7)
@pytest.mark.schedule({"job": once("fenced")})
def test_a_slot_whose_leader_died_before_it_confirmed_is_seen_where_a_missed_one_is_preferred(
    scene: Scene, ledger: Ledger
) -> None:
    due_since(scene)
    first = scene.start_beat(env=killed_at(scene, "after the claim", 1), wait=False)
    wait_for(lambda: first.status == "exited", PATIENCE, "the leader dies after its claim")
    beat = scene.start_beat(env=plugin(scene, NOTES_SIGNALS))
    line = beat.wait_for_log("missed", PATIENCE)
    assert line.level == "WARNING"
    assert "claimed it and was gone before it confirmed it" in line.text
    (told,) = wait_for(lambda: signals(scene, "slots_missed"), PATIENCE, "it is signalled")
    (event,) = events(ledger, "missed")
    assert (told.entry, told.count, event["entry"], event["count"]) == ("job", "1", "job", "1")
    assert line.t - float(event["t"]) <= SAID_WITHIN
    assert event["from"] == event["to"]
    assert ledger.counts()["unconfirmed"] == 1
    (slot,) = ledger.audit("job", datetime.fromtimestamp(0, timezone.utc), now()).slots
    assert (slot.end, slot.record.state) == ("missed", "unconfirmed")
    assert "unconfirmed" in slot.reason
    assert scene.beat_publishes() == []


MIXED = {
    "missed": every(0.5, catch_up="all"),
    "duplicate": every(0.5, catch_up="all", prefer="duplicate"),
    "latest": every(0.5),
    "none": every(0.5, catch_up="none"),
    "strict": every(0.5, catch_up="all", deadline=1.0),
    "late": every(1.0, catch_up="all", jitter=0.9),
    "skip": {**every(1.0, catch_up="all", overlap="skip"), "kwargs": {"seconds": 1.3}},
    "queue": {**every(1.0, overlap="queue"), "kwargs": {"seconds": 1.3}},
    "failing": every(1.0, task="failing", catch_up="all"),
}


@pytest.mark.matrix("valkey")
@pytest.mark.conf(leaderbeat_lease_ttl=3, leaderbeat_publish_timeout=0.5)
@pytest.mark.schedule(MIXED)
def test_after_leaders_were_killed_at_their_worst_moments_the_audit_explains_every_slot(
    scene: Scene, ledger: Ledger, tell: Any
) -> None:
    began = now()
    scene.start_worker(pool="threads", concurrency=8)
    steps = ["after the claim", "after the publish", "before the confirm"]
    scene.start_beat(env=plugin(scene, NOTES_SIGNALS), wait=False)
    first = leader(scene)
    wait_for(lambda: len(scene.runs("end")) >= 10, PATIENCE, "runs")
    led = now()
    beats = [scene.start_beat(env=killed_at(scene, step, 4), wait=False) for step in steps]

    def all_are_noted() -> bool:
        return len(scene.publishes("before")) == len(scene.publishes("after"))

    with at_rest(scene, first, also=all_are_noted):
        first.kill()
    for beat in beats:
        wait_for(lambda: beat.status == "exited", PATIENCE, "it leads, and dies")  # noqa: B023
    last = scene.start_beat(env=plugin(scene, NOTES_SIGNALS))
    leader(scene, other_than=[first, *beats])
    back = now()
    wait_for(
        lambda: all(entry.slot > back + timedelta(seconds=1) for entry in ledger.entries().values()),
        PATIENCE,
        "the last leader has caught up",
    )
    until = now()
    open_ends = {"claimed", "sent", "running", "returned", "overdue"}

    def settled() -> bool:
        return not any(open_ends & set(ledger.audit(name, began, back).counts) for name in MIXED)

    wait_for(
        settled,
        PATIENCE,
        lambda: str({name: ledger.audit(name, began, back).counts for name in MIXED}),
        interval=0.2,
    )
    last.terminate()
    last.wait()
    # Before the runs are counted: the newest messages may be begun just now.
    audits = {name: ledger.audit(name, began, until) for name in MIXED}
    runs, published = Counter(keys_of(scene.runs())), Counter(keys_of(scene.beat_publishes()))
    assert max(runs.values()) == 1
    assert published
    for name, spec in MIXED.items():
        audit = audits[name]
        assert unexplained(audit) == []
        assert audit.not_computed == ()
        expected = int((until.timestamp() - led.timestamp()) / spec["every"])
        assert len([slot for slot in audit.slots if slot.slot > led]) >= expected, "none is left out"
        for slot in audit.slots:
            if slot.end in ("done", "failed"):
                assert runs[slot.key] == 1, slot
            elif slot.end in ("missed", "skipped"):
                assert runs[slot.key] == 0, slot
                assert slot.reason
        if spec["policy"].get("prefer") == "duplicate":
            assert "missed" not in audit.counts, audit.having("missed")
        tell("audit", f"{name}: {dict(sorted(audit.counts.items()))}")
    assert {key for key in published if key.partition("@")[0] in MIXED} >= set(runs)
    warned = Counter(told.entry for told in signals(scene, "slots_missed"))
    assert set(warned) <= set(MIXED) - {"duplicate"}


#: A beat that is told to stop while it waits for the ledger's answer.
STOPS_AS_IT_WRITES_OFF = """
import os, signal

from celery_leaderbeat.ledger import Ledger

original = Ledger.write_off


def write_off(self, *args, **kwargs):
    answer = original(self, *args, **kwargs)
    os.kill(os.getpid(), signal.SIGTERM)
    return answer


Ledger.write_off = write_off
"""


@pytest.mark.matrix("valkey")
@pytest.mark.schedule({"job": every(0.5, catch_up="none")})
def test_a_gap_is_said_though_the_leader_is_told_to_stop_as_it_decides_about_it(
    scene: Scene, ledger: Ledger
) -> None:
    before = scene.start_beat()
    wait_for(lambda: len(keys_of(scene.beat_publishes())) >= 2, PATIENCE, "slots are sent")
    before.kill()
    sent = ledger.entries("job")["job"].slot
    wait_for(lambda: now() > sent + timedelta(seconds=2), PATIENCE, "slots are missed")
    beat = scene.start_beat(env=plugin(scene, NOTES_SIGNALS, STOPS_AS_IT_WRITES_OFF))
    assert beat.wait(PATIENCE)["StatusCode"] == 0
    is_seen(scene, ledger, beat, "job", "catch_up is none")
