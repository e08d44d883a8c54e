"""Wall clocks that step, or are off, on live beats: no slot twice, none lost, none early, and one warning."""

from __future__ import annotations

import json
import re
from collections import Counter
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from celery_leaderbeat.ledger import Ledger
from celery_leaderbeat.tick import parse_tick_key, slot_to_us
from tests.support.faketime import WallClock
from tests.support.history import assert_gapless, events
from tests.support.rest import at_rest
from tests.support.scene import Beat, Scene, keys_of, leader
from tests.support.waits import wait_for

HOUR = 3600.0
PATIENCE = 15

pytestmark = [
    pytest.mark.matrix("valkey"),
    pytest.mark.schedule(
        {
            "tick": {
                "task": "project.record",
                "every": 0.5,
                "policy": {"prefer": "duplicate", "catch_up": "all"},
            }
        }
    ),
]


def wait_for_slots(scene: Scene, more: int) -> None:
    sent = len(scene.beat_publishes())
    wait_for(lambda: len(scene.beat_publishes()) >= sent + more, PATIENCE, f"{more} more slots are sent")


def assert_never_early(ledger: Ledger) -> None:
    """Each slot was claimed when the server's clock had reached it."""
    for event in events(ledger, "claimed"):
        _, slot = parse_tick_key(event["key"])
        assert float(event["t"]) >= slot.timestamp(), event


def complaints(beat: Beat) -> list[str]:
    return [line.text for line in beat.find("off the clock of the Redis server", since=0)]


@pytest.mark.parametrize("step", [HOUR, -HOUR], ids=["forward", "back"])
def test_a_step_of_the_leaders_wall_clock_moves_no_slot(
    scene: Scene, ledger: Ledger, tmp_path: Path, step: float
) -> None:
    clock = WallClock(tmp_path / "clock")
    beat = scene.start_beat(env=clock.env)
    leader(scene)
    wait_for_slots(scene, 3)
    assert complaints(beat) == []
    clock.set(step)
    beat.wait_for_log("off the clock of the Redis server", timeout=PATIENCE)
    wait_for_slots(scene, 4)
    clock.set(0.0)
    beat.wait_for_log("agrees with the clock of the Redis server again", timeout=PATIENCE)
    wait_for_slots(scene, 4)
    assert_gapless(keys_of(scene.beat_publishes()), period=0.5)
    assert_never_early(ledger)
    (warning,) = complaints(beat)
    assert re.search(rf"is {step:.0f}\.0 s off", warning) or re.search(rf"is {step:.1f} s off", warning)
    assert len(events(ledger, "elected")) == 1


@pytest.mark.parametrize("offset", [90.0, -90.0], ids=["ahead", "behind"])
def test_a_standby_whose_clock_is_off_goes_on_with_the_same_slots_when_it_leads(
    scene: Scene, ledger: Ledger, tmp_path: Path, offset: float
) -> None:
    first = scene.start_beat()
    leader(scene)
    second = scene.start_beat(env=WallClock(tmp_path / "clock", offset).env)
    second.wait_for_log("Standing by", timeout=PATIENCE)
    wait_for_slots(scene, 3)
    first.terminate()
    leader(scene, other_than=first)
    second.wait_for_log("off the clock of the Redis server", timeout=PATIENCE)
    wait_for_slots(scene, 4)
    third = scene.start_beat()
    third.wait_for_log("Standing by", timeout=PATIENCE)
    # Killed before it has confirmed a slot, it would leave that in doubt, and the entry prefers a duplicate.
    with at_rest(scene, second):
        second.kill()
    leader(scene, other_than=(first, second))
    wait_for_slots(scene, 4)
    assert_gapless(keys_of(scene.beat_publishes()), period=0.5)
    assert_never_early(ledger)
    assert len(complaints(second)) == 1
    assert complaints(first) == complaints(third) == []


@pytest.mark.schedule(
    {
        "expiring": {"task": "project.record", "every": 1.0, "options": {"expires": 20}},
        "later": {"task": "project.record", "every": 1.0, "options": {"countdown": 1}},
        "short-lived": {"task": "project.short_lived", "every": 1.0},
    }
)
@pytest.mark.matrix("valkey", "valkey+rabbitmq")
@pytest.mark.parametrize("offset", [90.0, -90.0], ids=["ahead", "behind"])
def test_messages_of_a_leader_whose_clock_is_off_expire_and_wait_by_the_fleets_time(
    scene: Scene, tmp_path: Path, offset: float
) -> None:
    scene.start_beat(env=WallClock(tmp_path / "clock", offset).env)
    entries = ("expiring", "later", "short-lived")

    def of(entry: str, keys: list[str]) -> list[str]:
        return [key for key in keys if key.startswith(f"{entry}@")]

    def sent() -> dict[str, list[str]]:
        return {entry: of(entry, keys_of(scene.beat_publishes())) for entry in entries}

    # What a worker takes at once, RabbitMQ delivers even where its time is over.
    wait_for(lambda: all(len(keys) >= 3 for keys in sent().values()), PATIENCE, "messages wait in the queue")
    waiting = {key for keys in sent().values() for key in keys}
    scene.start_worker()
    wait_for(lambda: waiting <= {run.key for run in scene.runs()}, PATIENCE, "all of them run")
    waited = [run.t - parse_tick_key(run.key)[1].timestamp() for run in scene.runs() if "later@" in run.key]
    assert min(waited) >= 1.0


def test_a_stored_slot_from_the_future_is_reset_aloud_and_the_entry_goes_on(
    scene: Scene, ledger: Ledger
) -> None:
    first = scene.start_beat()
    leader(scene)
    wait_for_slots(scene, 3)
    first.terminate()
    first.wait(5)
    entries = scene.key("entries")
    record = json.loads(scene.redis.hget(entries, "tick"))
    tomorrow = datetime.now(timezone.utc) + timedelta(days=1)
    scene.redis.hset(entries, "tick", json.dumps(record | {"slot": str(slot_to_us(tomorrow))}))
    second = scene.start_beat()
    leader(scene)
    wait_for_slots(scene, 4)
    (warning,) = [line.text for line in second.find("lay in the future", since=0)]
    assert "'tick'" in warning
    assert max(Counter(keys_of(scene.beat_publishes())).values()) == 1
    assert_never_early(ledger)


@pytest.mark.conf(leaderbeat_clock="local")
@pytest.mark.schedule({"tick": {"task": "project.record", "every": 1.0}})
def test_the_local_clock_is_followed_where_it_is_asked_for_and_no_slot_is_sent_twice(
    scene: Scene, ledger: Ledger, tmp_path: Path
) -> None:
    clock = WallClock(tmp_path / "clock")
    beat = scene.start_beat(env=clock.env)
    leader(scene)
    wait_for_slots(scene, 2)
    clock.set(HOUR)
    beat.wait_for_log(re.compile(r"due went forward by 3600 s"), timeout=PATIENCE)
    beat.wait_for_log(
        re.compile(r"Entry 'tick': 35\d\d slots .* missed: older than lookback"), timeout=PATIENCE
    )
    wait_for_slots(scene, 2)
    clock.set(0.0)
    beat.wait_for_log(re.compile(r"due went back by 3600 s"), timeout=PATIENCE)
    wait_for_slots(scene, 3)
    published = scene.beat_publishes()
    assert max(Counter(keys_of(published)).values()) == 1
    for message in published:
        # Its own clock says when it was sent.
        assert message.t >= parse_tick_key(message.key)[1].timestamp()
    assert len(complaints(beat)) == 1
    assert len(events(ledger, "elected")) == 1
