"""Time on live beats: zones, changed schedules, schedules of all kinds, and periods that are very short."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import psutil
import pytest

from celery_leaderbeat.ledger import Ledger
from celery_leaderbeat.tick import parse_tick_key, slot_to_us, tick_key
from tests.support.history import assert_gapless, events, plugin
from tests.support.rest import at_rest
from tests.support.scene import Beat, Scene, keys_of, leader
from tests.support.turns import away_from_slots
from tests.support.waits import wait_for, wait_until_steady

PATIENCE = 15

pytestmark = pytest.mark.matrix("valkey")


def begin_and_stop(scene: Scene, **kwargs: object) -> None:
    """Let a leader register the entries, and stop it."""
    beat = scene.start_beat(**kwargs)
    leader(scene)
    beat.wait_for_log(f"Entry {next(iter(scene.schedule))!r} is ")
    entries = scene.key("entries")
    wait_for(lambda: scene.redis.hlen(entries) >= len(scene.schedule), PATIENCE, "the entries are registered")
    beat.terminate()
    beat.wait(5)


def pretend_that_nobody_led_since(scene: Scene, since: datetime) -> None:
    entries = scene.key("entries")
    for name, text in scene.redis.hgetall(entries).items():
        scene.redis.hset(entries, name, json.dumps(json.loads(text) | {"slot": str(slot_to_us(since))}))


@pytest.mark.parametrize("enable_utc", [True, False])
def test_crontabs_are_read_in_the_apps_zone_and_a_changed_zone_moves_only_what_is_to_come(
    scene: Scene, enable_utc: bool
) -> None:
    kolkata, sydney = ZoneInfo("Asia/Kolkata"), ZoneInfo("Australia/Sydney")
    away_from_slots([3600.0])
    now = datetime.now(timezone.utc)
    due = (now - timedelta(hours=2)).replace(second=0, microsecond=0)
    there = due.astimezone(kolkata)
    scene.schedule = {
        "cron": {"task": "project.record", "crontab": {"minute": there.minute, "hour": there.hour}},
        "interval": {"task": "project.record", "every": 3600.0},
    }
    zone = {"timezone": "Asia/Kolkata", "enable_utc": enable_utc}
    begin_and_stop(scene, conf=zone)
    assert not scene.beat_publishes(), "a cold start fires nothing at once"

    pretend_that_nobody_led_since(scene, due - timedelta(hours=1))
    restarted = scene.start_beat(conf=zone)
    leader(scene)
    wait_for(lambda: len(scene.beat_publishes()) >= 2, PATIENCE, "what came due meanwhile is sent")
    keys = keys_of(scene.beat_publishes())
    assert tick_key("cron", due) in keys
    assert {slot.minute for name, slot in map(parse_tick_key, keys) if name == "interval"} == {0}
    restarted.terminate()
    restarted.wait(5)

    sent = len(scene.beat_publishes())
    pretend_that_nobody_led_since(scene, due)
    moved = scene.start_beat(conf=zone | {"timezone": "Australia/Sydney"})
    leader(scene)
    moved.wait_for_log("Entry 'cron' is changed.")
    # The interval goes on: its slots have no zone. Those of the crontab count from now.
    wait_for(lambda: moved.find("it is sent already"), PATIENCE, "the interval's slot is known to be sent")
    wait_until_steady(lambda: len(scene.beat_publishes()), 1.0)
    assert "cron" not in {parse_tick_key(key)[0] for key in keys_of(scene.beat_publishes()[sent:])}
    assert not moved.find("Entry 'interval' is ")
    assert due.astimezone(sydney).hour != there.hour


#: Schedules that have one method of their own.
CUSTOM = """
from datetime import timedelta

from celery import schedules


class ByDue(schedules.BaseSchedule):
    def is_due(self, last_run_at):
        past = self.now().timestamp() % 1
        return past == 0, 1 - past


class ByEstimate(schedules.BaseSchedule):
    def remaining_estimate(self, last_run_at):
        return last_run_at.replace(microsecond=0) + timedelta(seconds=1) - self.now()


class Silent(schedules.BaseSchedule):
    def is_due(self, last_run_at):
        return False, None


class Restless(schedules.BaseSchedule):
    def is_due(self, last_run_at):
        return False, WAIT


WAIT = {wait}
app.conf.beat_schedule |= {{
    name: {{"task": "project.record", "schedule": kind(app=app), "options": {{"leaderbeat": {{"catch_up": "all"}}}}}}
    for name, kind in {kinds}.items()
}}
"""


def custom(scene: Scene, kinds: str, wait: float = 1.0) -> dict[str, str | None]:
    return plugin(scene, CUSTOM.format(kinds=kinds, wait=wait))


@pytest.mark.schedule({})
def test_replicas_derive_the_same_slots_from_schedules_that_have_only_one_method(scene: Scene) -> None:
    env = custom(scene, "{'by-due': ByDue, 'by-estimate': ByEstimate}")
    beats = [scene.start_beat(env=env)]
    leader(scene)
    for _ in range(3):
        sent = len(scene.beat_publishes())
        wait_for(lambda sent=sent: len(scene.beat_publishes()) >= sent + 4, PATIENCE, "slots are sent")
        beats.append(scene.start_beat(env=env))
        beats[-1].wait_for_log("Standing by")
        with at_rest(scene, beats[-2]):
            beats[-2].kill()
        leader(scene, other_than=beats[:-1])
    keys = keys_of(scene.beat_publishes())
    for name in ("by-due", "by-estimate"):
        assert_gapless(keys, name)


def busy_seconds(beat: Beat, seconds: float) -> float:
    """The processor time that a beat takes while it sends for `seconds`."""
    process = psutil.Process(beat.pid)
    before = process.cpu_times()
    psutil.wait_procs([process], timeout=seconds)
    after = process.cpu_times()
    return after.user + after.system - before.user - before.system


@pytest.mark.schedule({"tick": {"task": "project.record", "every": 0.5, "policy": {"catch_up": "all"}}})
@pytest.mark.parametrize("wait", [0, 0.01])
def test_a_schedule_that_always_wants_to_be_asked_at_once_spins_nothing_and_holds_up_nobody(
    scene: Scene, wait: float
) -> None:
    beat = scene.start_beat(env=custom(scene, "{'restless': Restless, 'silent': Silent}", wait))
    leader(scene)
    beat.wait_for_log("Entry 'silent' never comes due")
    beat.wait_for_log("'restless'")
    wait_for(scene.beat_publishes, PATIENCE, "the other entry is sent")
    assert busy_seconds(beat, 3.0) < 1.0, "a third of a processor, where a loop without rest takes all of it"
    keys = keys_of(scene.beat_publishes())
    assert_gapless(keys, period=0.5)
    assert len(keys) >= 5
    assert {parse_tick_key(key)[0] for key in keys} == {"tick"}


@pytest.mark.timed
@pytest.mark.schedule(
    {
        "quick": {"task": "project.record", "every": 0.01, "policy": {"catch_up": "all"}},
        "slow": {"task": "project.record", "every": 1.0, "policy": {"catch_up": "all"}},
    }
)
def test_an_entry_that_is_due_every_ten_milliseconds_is_sent_as_often_and_holds_up_nobody(
    scene: Scene, ledger: Ledger
) -> None:
    scene.start_beat()
    leader(scene)
    wait_for(lambda: len(scene.beat_publishes()) >= 300, PATIENCE, "three seconds are sent")
    keys = keys_of(scene.beat_publishes())
    assert_gapless(keys, "quick", 0.01)
    assert_gapless(keys, "slow")
    late = [
        float(event["t"]) - parse_tick_key(event["key"])[1].timestamp() for event in events(ledger, "claimed")
    ]
    assert min(late) >= 0
    assert sorted(late)[len(late) // 2] < 0.25


@pytest.mark.schedule({"daily": {"task": "project.record", "every": 86400.0}})
def test_a_day_that_becomes_two_seconds_is_sent_once_in_each_two_seconds_from_then_on(scene: Scene) -> None:
    begin_and_stop(scene)
    pretend_that_nobody_led_since(scene, datetime.now(timezone.utc) - timedelta(hours=1))
    changed = datetime.now(timezone.utc)
    every = {"task": "project.record", "every": 2.0, "policy": {"catch_up": "all"}}
    beat = scene.start_beat(schedule={"daily": every})
    leader(scene)
    beat.wait_for_log("Entry 'daily' is changed.")
    wait_for(lambda: len(scene.beat_publishes()) >= 3, PATIENCE, "it is sent")
    slots = [parse_tick_key(key)[1] for key in keys_of(scene.beat_publishes())]
    assert slots[0] > changed, "nothing of the time before"
    assert [later - earlier for earlier, later in itertools.pairwise(slots)] == [timedelta(seconds=2)] * (
        len(slots) - 1
    )
    assert max(Counter(keys_of(scene.beat_publishes())).values()) == 1
