"""Which slots are sent after an outage, and what becomes of the others."""

from __future__ import annotations

import json
import re
from collections import Counter
from datetime import datetime, timedelta, timezone

import pytest

from celery_leaderbeat.tick import parse_tick_key, slot_from_us, slot_to_us
from tests.support.scene import Scene, keys_of, leader
from tests.support.waits import wait_for, wait_until_steady


def minutely(**policy: object) -> dict[str, object]:
    return {"task": "project.record", "crontab": {"minute": "*"}, "policy": policy}


def pretend_outage(scene: Scene, length: timedelta) -> datetime:
    """Let a leader register the entries and stop, as if that had been `length` ago; when the outage began."""
    beat = scene.start_beat()
    leader(scene)
    entries = scene.key("entries")
    wait_for(lambda: scene.redis.hlen(entries) >= len(scene.schedule), 5, "the entries are registered")
    beat.terminate()
    beat.wait(5)
    began = datetime.now(timezone.utc) - length
    for name, text in scene.redis.hgetall(entries).items():
        record = json.loads(text) | {"slot": str(slot_to_us(began))}
        scene.redis.hset(entries, name, json.dumps(record))
    scene.publish_log.unlink(missing_ok=True)
    return began


def minutes_between(after: datetime, until: datetime) -> int:
    return int(until.timestamp() // 60 - after.timestamp() // 60)


@pytest.mark.schedule(
    {
        "default": minutely(),
        "all": minutely(catch_up="all", lookback=3),
        "none": minutely(catch_up="none"),
        "deadline": minutely(catch_up="all", lookback=10, deadline=150),
    }
)
@pytest.mark.matrix("valkey", "redis+rabbitmq")
def test_after_three_days_each_policy_catches_up_what_it_promises_and_says_what_it_does_not(
    scene: Scene,
) -> None:
    began = pretend_outage(scene, timedelta(days=3))
    beat = scene.start_beat()
    leader(scene)
    back = datetime.fromtimestamp(float(scene.lease().since), timezone.utc)
    wait_for(lambda: len(beat.find("are missed")) >= 4, 10, "all entries have said what they miss")
    wait_until_steady(lambda: len(scene.beat_publishes()), 1.0)
    newest = back.replace(second=0, microsecond=0)
    sent: dict[str, list[datetime]] = {name: [] for name in scene.schedule}
    for record in scene.beat_publishes():
        name, slot = parse_tick_key(record.key)
        if slot <= back:
            sent[name].append(slot)
    minute = timedelta(minutes=1)
    assert sent["default"] == [newest]
    assert sent["all"] == [newest - 2 * minute, newest - minute, newest], "oldest first"
    assert sent["none"] == []
    assert sent["deadline"] == sorted(sent["deadline"])
    assert all(back - slot <= timedelta(seconds=151) for slot in sent["deadline"])
    assert len(sent["deadline"]) in (2, 3)
    due = minutes_between(began, back)
    for name in scene.schedule:
        lines = [line.text for line in beat.find(f"Entry '{name}':") if "missed" in line.text]
        counts = [int(match[1]) for text in lines if (match := re.search(r"': (\d+) slots from", text))]
        assert sum(counts) == due - len(sent[name]), (name, lines)
        assert all(re.search(r"catch_up is none|older than", text) for text in lines)
    missed = json.loads(scene.redis.hget(scene.key("entries"), "none"))["missed"]
    assert missed == due


@pytest.mark.schedule({"hourly": {"task": "project.record", "crontab": {"minute": 0}}})
@pytest.mark.matrix("valkey", long=("redis",))
def test_an_hour_that_passed_while_all_were_down_is_sent_once_under_its_own_name(scene: Scene) -> None:
    began = pretend_outage(scene, timedelta(hours=1))
    beats = [scene.start_beat(wait=False) for _ in range(3)]
    leader(scene)
    wait_for(scene.beat_publishes, 5, "the slot is sent")
    wait_until_steady(lambda: len(scene.beat_publishes()), 1.0)
    (record,) = scene.beat_publishes()
    _, slot = parse_tick_key(record.key)
    assert slot == (began + timedelta(hours=1)).replace(minute=0, second=0, microsecond=0)
    assert len(beats) == 3


@pytest.mark.schedule(
    {
        "patient": {"task": "project.fenced", "crontab": {"minute": 0}},
        "strict": {"task": "project.fenced", "every": 3600.0, "policy": {"deadline": 1.0}},
    }
)
@pytest.mark.matrix("valkey", "redis+rabbitmq")
def test_a_slot_that_comes_due_while_the_broker_is_away_is_sent_late_or_missed_past_its_deadline(
    scene: Scene,
) -> None:
    pretend_outage(scene, timedelta(hours=1))
    began = datetime.now(timezone.utc)
    beat = scene.start_beat(cut=("broker",))
    beat.wait_for_log(re.compile(r"Slot patient@.* is not sent yet: no connection to the broker"))
    beat.wait_for_log(re.compile(r"Entry 'strict': the slot .* is missed: older than the deadline"))
    assert not scene.beat_publishes()
    beat.broker_proxy.resume()
    (record,) = wait_for(scene.beat_publishes, 15, "the slot is sent")
    wait_until_steady(lambda: len(scene.beat_publishes()), 1.5)
    assert len(scene.beat_publishes()) == 1
    entry, slot = parse_tick_key(record.key)
    assert entry == "patient"
    assert slot == began.replace(minute=0, second=0, microsecond=0)
    scene.start_worker()
    wait_for(lambda: scene.runs("end"), 10, "it runs")
    wait_for(lambda: scene.slot(record.key).get("state") == "done", 5, "it is done")


@pytest.mark.schedule({"interval": {"task": "project.record", "every": 86400.0}})
@pytest.mark.matrix("valkey")
def test_a_changed_or_new_schedule_never_fires_at_once(scene: Scene) -> None:
    pretend_outage(scene, timedelta(hours=3))
    changed = {
        "interval": {"task": "project.record", "crontab": {"minute": 0, "hour": 0}},
        "new": {"task": "project.record", "crontab": {"minute": 0, "hour": 0, "day_of_week": 0}},
    }
    beat = scene.start_beat(schedule=changed)
    leader(scene)
    beat.wait_for_log("Entry 'interval' is changed.")
    beat.wait_for_log("Entry 'new' is new.")
    stored = json.loads(scene.redis.hget(scene.key("entries"), "interval"))
    assert slot_from_us(int(stored["slot"])) > datetime.now(timezone.utc) - timedelta(minutes=1)
    wait_until_steady(lambda: len(scene.beat_publishes()), 1.5)
    assert not scene.beat_publishes()


@pytest.mark.schedule({"day": {"task": "project.record", "every": 86400.0}})
@pytest.mark.matrix("valkey")
def test_restarts_do_not_move_the_slots_of_a_long_interval(scene: Scene) -> None:
    pretend_outage(scene, timedelta(days=1, hours=1))
    for _ in range(3):
        beat = scene.start_beat()
        leader(scene)
        wait_for(scene.beat_publishes, 5, "the slot of the day is sent")
        beat.terminate()
        beat.wait(5)
    keys = Counter(keys_of(scene.beat_publishes()))
    midnight = datetime.now(timezone.utc).replace(hour=0, minute=0, second=0, microsecond=0)
    assert keys == {f"day@{midnight:%Y-%m-%dT%H:%M:%S}Z": 1}
