"""Slots that are sent late on purpose: `jitter`."""

from __future__ import annotations

import itertools
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest

from celery_leaderbeat.policy import send_time
from celery_leaderbeat.tick import parse_tick_key, tick_key
from tests.support.history import due_since
from tests.support.scene import Scene, keys_of, leader
from tests.support.waits import wait_for
from tests.system.test_workers import PATIENCE

#: Seconds that a busy machine may add to a send.
LATE = 0.7


def job(every: float, jitter: float) -> dict[str, Any]:
    return {"task": "project.fenced", "every": every, "policy": {"jitter": jitter, "catch_up": "all"}}


def delay(sent: SimpleNamespace) -> float:
    """How long after its slot a message was sent."""
    return sent.t - parse_tick_key(sent.key)[1].timestamp()


def planned(entry: str, slot: datetime, every: float, jitter: float) -> float:
    """The delay that the tick key stands for: the same for everybody."""
    return (send_time(entry, slot, slot + timedelta(seconds=every), jitter) - slot).total_seconds()


def next_slot(every: float) -> datetime:
    now = datetime.now(timezone.utc).timestamp()
    return datetime.fromtimestamp((now // every + 1) * every, timezone.utc)


@pytest.mark.bounded
@pytest.mark.matrix("valkey")
@pytest.mark.schedule({"one": job(2.0, 1.5), "two": job(2.0, 1.5), "capped": job(2.0, 3600.0)})
def test_entries_of_the_same_slot_are_sent_at_delays_of_their_own_under_the_nominal_time(
    scene: Scene,
) -> None:
    scene.start_worker(pool="threads", concurrency=4)
    scene.start_beat()
    wait_for(lambda: len(scene.runs("end")) >= 9, PATIENCE, "three slots each")
    sent = scene.beat_publishes()
    late: dict[str, list[float]] = {entry: [] for entry in scene.schedule}
    for message in sent:
        entry, slot = parse_tick_key(message.key)
        expected = planned(entry, slot, 2.0, scene.schedule[entry]["policy"]["jitter"])
        assert 0 <= expected < 2.0, "never at the next slot or after it"
        assert expected - 0.05 <= delay(message)
        late[entry].append(delay(message) - expected)
        # However close by chance: what is planned for this slot isn't the same for both.
        assert planned("one", slot, 2.0, 1.5) != planned("two", slot, 2.0, 1.5)
    for entry, times in late.items():
        assert max(times) <= LATE, (entry, times)
    for entry in scene.schedule:
        slots = [slot for name, slot in map(parse_tick_key, keys_of(sent)) if name == entry]
        assert all(b - a == timedelta(seconds=2) for a, b in itertools.pairwise(slots)), "none is left out"
    for run in scene.runs():
        entry, slot = parse_tick_key(run.key)
        assert datetime.fromisoformat(run.slot) == slot, "self.tick.slot is the nominal time"
        assert slot.timestamp() % 2 == 0


@pytest.mark.bounded
@pytest.mark.matrix("valkey")
@pytest.mark.conf(leaderbeat_lease_ttl=3)
def test_another_leader_sends_a_slot_at_the_delay_that_the_first_had_in_mind(scene: Scene) -> None:
    every = jitter = 10.0
    slot = next_slot(every)
    # The entries have to be known before it.
    if (slot - datetime.now(timezone.utc)).total_seconds() < 6.0:
        slot += timedelta(seconds=every)
    names = {f"entry-{number}": planned(f"entry-{number}", slot, every, jitter) for number in range(1000)}
    # The leader is killed while these wait for their time.
    early = next(name for name, wait in names.items() if wait < 0.3)
    late = [min(names, key=lambda name: abs(names[name] - wait)) for wait in (6.0, 7.5, 9.0)]
    scene.schedule = {name: job(every, jitter) for name in (early, *late)}
    # However long the beats take to start, the entries are known.
    due_since(scene, timedelta(milliseconds=1))
    # One that is alone leads at once.
    first = scene.start_beat()
    assert leader(scene) is first
    beats = [first, scene.start_beat()]

    def sent(name: str) -> list[SimpleNamespace]:
        return [message for message in scene.beat_publishes() if message.key == tick_key(name, slot)]

    (message,) = wait_for(lambda: sent(early), PATIENCE, "the early one is sent")
    assert message.pid == first.pid
    # A leader that dies before it has confirmed the message leaves that slot in doubt.
    wait_for(lambda: "sent_at" in scene.slot(tick_key(early, slot)), PATIENCE, "it is confirmed")
    first.kill()
    second = leader(scene, other_than=first)
    added = []
    for name in late:
        (message,) = wait_for(lambda: sent(name), PATIENCE, f"{name} is sent")  # noqa: B023
        assert message.pid == second.pid
        assert names[name] - 0.05 <= delay(message)
        added.append(delay(message) - names[name])
    assert max(added) <= LATE, added
    assert len(sent(early)) == 1
    assert not any(beat.find("missed") for beat in beats)
