"""What a message looks like at the broker: routed as plain Celery would, stamped, and leaving its entry alone."""

from __future__ import annotations

import json
import re
import statistics
import time
import uuid
from datetime import datetime
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue

from celery_leaderbeat.tick import task_id
from tests.support.scene import Beat, Scene, keys_of
from tests.support.waits import wait_for

#: The machine may be busy with others.
PATIENCE = 40.0

STAMP = ("leaderbeat_tick_key", "leaderbeat_fencing_epoch", "leaderbeat_slot", "leaderbeat_attempt")


def messages(scene: Scene, queue: str, *, exchange: str = "", priority: bool = False) -> list[Any]:
    """Take what waits in a queue; on RabbitMQ, one with priorities has to be asked for as such."""
    arguments = {"x-max-priority": 9} if priority and scene.rabbit else None
    with Connection(scene.broker_url) as connection:
        bound = Queue(queue, Exchange(exchange), queue, queue_arguments=arguments)(connection.default_channel)
        found = []
        while (message := bound.get(no_ack=True)) is not None:
            found.append(message)
        return found


def plugin(scene: Scene, source: str) -> dict[str, str]:
    """The environment that runs this source in a process."""
    path = scene.directory / f"plugin{len(scene.beats)}.py"
    path.write_text(source)
    return {"LB_PLUGIN": str(path)}


def stop(beat: Beat) -> None:
    """End a beat in good order."""
    beat.terminate()
    assert beat.wait()["StatusCode"] == 0


def sends(scene: Scene, entry: str) -> list[Any]:
    """What was sent for one entry."""
    return [record for record in scene.beat_publishes() if (record.key or "").startswith(f"{entry}@")]


def sent_by(scene: Scene, *entries: str, times: int = 1) -> None:
    """Wait until each entry was sent so often."""
    wait_for(
        lambda: all(len(sends(scene, entry)) >= times for entry in entries), PATIENCE, f"{entries} are sent"
    )


def overdue(scene: Scene, entry: str, seconds: float) -> None:
    """Take the entry's last decided slot back in time, as if nobody had led for so long."""
    kept = json.loads(scene.redis.hget(scene.key("entries"), entry))
    kept["slot"] = str(int(kept["slot"]) - int(seconds * 1_000_000))
    scene.redis.hset(scene.key("entries"), entry, json.dumps(kept))


def one_second(task: str = "fenced", **fields: Any) -> dict[str, Any]:
    """An entry."""
    return {"task": f"project.{task}", "every": 1.0, **fields}


# Options and routes


@pytest.mark.matrix("valkey", "redis+rabbitmq")
@pytest.mark.conf(
    task_routes={"project.record": {"queue": "routed"}, "elsewhere.*": {"queue": "other-routed"}},
    task_queue_max_priority=9,
)
@pytest.mark.schedule(
    {
        "options": one_second(
            kwargs={"seconds": 0},
            options={
                "queue": "q",
                "priority": 3,
                "expires": 60,
                "headers": {"tenant": "acme", "nested": {"a": [1]}},
                "shadow": "nick",
                "time_limit": 7,
                "ignore_result": True,
            },
        ),
        "routes": one_second("record"),
        "unknown": {"task": "elsewhere.job", "every": 1.0, "args": [1, "two"], "kwargs": {"three": 3}},
    }
)
def test_options_and_routes_are_those_of_plain_celery(scene: Scene) -> None:
    beat = scene.start_beat()
    sent_by(scene, "options", "routes", "unknown")
    stop(beat)
    before = time.time()

    message = messages(scene, "q", exchange="q", priority=True)[0]
    sent = sends(scene, "options")[0]
    headers = message.headers
    assert message.properties["priority"] == 3
    assert headers["tenant"] == "acme"
    assert headers["nested"] == {"a": [1]}
    assert headers["shadow"] == "nick"
    assert headers["timelimit"] == [7, None]
    assert headers["ignore_result"] is True
    expires = datetime.fromisoformat(headers["expires"]).timestamp()
    assert expires == pytest.approx(sent.t + 60, abs=3)
    assert expires > before

    routed = messages(scene, "routed", exchange="routed", priority=True)[0]
    assert routed.headers["task"] == "project.record"

    other = messages(scene, "other-routed", exchange="other-routed", priority=True)[0]
    assert other.headers["task"] == "elsewhere.job"
    assert other.payload[:2] == [[1, "two"], {"three": 3}]

    for each, entry in ((message, "options"), (routed, "routes"), (other, "unknown")):
        found = each.headers
        assert found["leaderbeat_tick_key"].startswith(f"{entry}@")
        assert found["leaderbeat_tick_key"] == f"{entry}@{found['leaderbeat_slot']}"
        assert type(found["leaderbeat_fencing_epoch"]) is int
        assert found["leaderbeat_attempt"] == 1
        assert found["celery_beat_task"] is True
        assert not [name for name in found if "leaderbeat" in name and name not in STAMP]


@pytest.mark.matrix("valkey", "redis+rabbitmq")
def test_a_task_that_beat_has_not_imported_runs_in_a_worker_that_has(scene: Scene) -> None:
    forget = "app.finalize()\napp.tasks.pop('project.fenced')\n"
    beat = scene.start_beat(schedule={"tick": one_second()}, env=plugin(scene, forget))
    scene.start_worker()
    wait_for(lambda: scene.runs("end"), PATIENCE, "it runs")
    stop(beat)
    (run,) = [run for run in scene.runs() if run.key == sends(scene, "tick")[0].key]
    assert (run.task, run.attempt) == ("project.fenced", 1)


@pytest.mark.matrix("valkey")
def test_sends_leave_the_entrys_own_dicts_as_they_are(scene: Scene) -> None:
    """Each send has its own tick key, and neither `beat_schedule` nor the scheduler's entries learn of it."""
    source = """
import json, os, sys
from celery.signals import after_task_publish, beat_init

LOG = "entries.jsonl"
services = []
beat_init.connect(lambda sender, **_: services.append(sender), weak=False)


@after_task_publish.connect(weak=False)
def dump(headers, **_):
    entry = services[0].scheduler.schedule["tick"]
    line = {
        "conf": app.conf.beat_schedule["tick"],
        "entry": [entry.args, entry.kwargs, entry.options],
        "key": headers["leaderbeat_tick_key"],
    }
    # What a careless receiver writes to stays with its own message.
    headers["nested"]["a"].append(2)
    headers["mine"] = "changed"
    with open(LOG, "a") as file:
        file.write(json.dumps(line) + "\\n")
"""
    options = {
        "headers": {"mine": "value", "nested": {"a": [1]}},
        "queue": "q",
        "leaderbeat": {"prefer": "missed"},
    }
    entry = {
        "task": "project.fenced",
        "schedule": 1.0,
        "args": [],
        "kwargs": {"seconds": 0},
        "options": options,
    }
    beat = scene.start_beat(schedule={"tick": {"raw": entry}}, env=plugin(scene, source))
    sent_by(scene, "tick", times=3)
    stop(beat)
    lines = [json.loads(line) for line in (beat.directory / "entries.jsonl").read_text().splitlines()]
    assert len(lines) >= 3
    for line in lines:
        assert line["conf"] == entry
        assert line["entry"] == [[], {"seconds": 0}, options]
    found = messages(scene, "q", exchange="q")
    keys = [message.headers["leaderbeat_tick_key"] for message in found]
    assert len(set(keys)) == len(keys) >= 3
    assert keys == keys_of(sends(scene, "tick"))
    for message in found:
        assert message.headers["mine"] == "value"
        assert message.headers["nested"] == {"a": [1]}
        assert message.headers["leaderbeat_tick_key"] == f"tick@{message.headers['leaderbeat_slot']}"
        assert "leaderbeat" not in message.headers


@pytest.mark.matrix("valkey", long=("redis+rabbitmq",))
@pytest.mark.schedule({"tick": one_second()})
def test_the_task_id_of_a_slot_is_the_same_from_every_replica(scene: Scene) -> None:
    epochs = []
    for _ in range(2):
        beat = scene.start_beat()
        wait_for(lambda: beat.pid in {sent.pid for sent in scene.beat_publishes()}, PATIENCE, "it sends")  # noqa: B023
        epochs.append(scene.lease().epoch)
        stop(beat)
    assert epochs[0] < epochs[1]
    sent = scene.beat_publishes()
    assert {record.epoch for record in sent} == set(epochs)
    for record in sent:
        assert record.id == task_id(scene.prefix, record.key, 1)
        assert uuid.UUID(record.id).version == 5
        assert scene.slot(record.key)["task_id"] == record.id
    assert len({record.id for record in sent}) == len(sent)


# Expiry


@pytest.mark.matrix("valkey", "redis+rabbitmq")
@pytest.mark.schedule({"hourly": {"task": "project.fenced", "every": 3600.0, "options": {"expires": 30}}})
def test_a_relative_expiry_counts_from_the_send_also_for_an_overdue_slot(scene: Scene) -> None:
    first = scene.start_beat()
    first.wait_for_log("Entry 'hourly' is new", PATIENCE)
    stop(first)
    overdue(scene, "hourly", 7200)
    beat = scene.start_beat()
    sent_by(scene, "hourly")
    stop(beat)
    sent = sends(scene, "hourly")[-1]
    message = messages(scene, "celery")[-1]
    expires = datetime.fromisoformat(message.headers["expires"]).timestamp()
    assert expires == pytest.approx(sent.t + 30, abs=3)
    slot = datetime.fromisoformat(message.headers["leaderbeat_slot"].replace("Z", "+00:00"))
    assert slot.timestamp() % 3600 == 0
    assert slot.timestamp() <= sent.t


@pytest.mark.matrix("valkey")
def test_a_message_that_would_be_expired_at_its_birth_is_missed_and_says_so(scene: Scene) -> None:
    source = """
from datetime import datetime, timedelta, timezone

from celery_leaderbeat.signals import slots_missed

past = datetime(2020, 1, 1, tzinfo=timezone.utc)
app.conf.timezone = "Europe/Berlin"
expires = {
    "aware": past,
    "naive": datetime(2020, 1, 1),
    "text": past.isoformat(),
    "zero": 0,
    "negative": timedelta(seconds=-5),
    "good": datetime.now(timezone.utc) + timedelta(hours=1),
    # Celery reads naive times as UTC, here and in the worker. In Berlin's time this would be past.
    "soon": datetime.now(timezone.utc).replace(tzinfo=None) + timedelta(minutes=30),
    "never": None,
}
app.conf.beat_schedule = {
    name: {"task": "project.fenced", "schedule": 1.0, "options": {"expires": value}}
    for name, value in expires.items()
}


@slots_missed.connect(weak=False)
def missed(entry, first, last, count, reason, **_):
    with open("missed", "a") as file:
        file.write(f"{entry}|{first.isoformat()}|{last.isoformat()}|{count}|{reason}\\n")
"""
    beat = scene.start_beat(env=plugin(scene, source))
    sent_by(scene, "good", "soon", "never", times=2)
    bad = ("aware", "naive", "text", "zero", "negative")
    for entry in bad:
        beat.wait_for_log(re.compile(rf"Entry '{entry}': the slot \S+Z is missed: born expired"), PATIENCE)
    stop(beat)
    assert not any(sends(scene, entry) for entry in bad)
    entries = {name: json.loads(text) for name, text in scene.redis.hgetall(scene.key("entries")).items()}
    lines = [line.split("|") for line in (beat.directory / "missed").read_text().splitlines()]
    for entry in bad:
        mine = [line for line in lines if line[0] == entry]
        assert len(mine) == len(beat.find(f"Entry '{entry}': the slot"))
        # The signal to stop may come between the record and the report.
        assert entries[entry]["missed"] - len(mine) in (0, 1)
        assert {line[3] for line in mine} == {"1"}
        assert all(line[1] == line[2] and line[4].startswith("born expired") for line in mine)
        slots = [datetime.fromisoformat(line[1]) for line in mine]
        assert slots == sorted(set(slots)), "each slot is reported once"
        assert entries[entry]["count"] == 0
    assert {line.level for line in beat.find("born expired")} == {"WARNING"}
    assert not beat.find("Traceback")


# Arguments


@pytest.mark.matrix("valkey")
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("kwargs", "'kwargs': {'seconds': object()}"),
        ("args of a task that beat hasn't imported", "'task': 'elsewhere.job', 'args': (object(),)"),
        ("a signature that the task doesn't have", "'args': (1, 2, 3)"),
        ("serializer", "'options': {'serializer': 'no-such'}"),
        ("compression", "'options': {'compression': 'no-such'}"),
    ],
    ids=["kwargs", "args", "signature", "serializer", "compression"],
)
def test_what_cannot_be_serialised_is_missed_with_the_reason(scene: Scene, name: str, fields: str) -> None:
    source = f"""
app.conf.beat_schedule = {{
    "bad": {{"task": "project.fenced", "schedule": 1.0, {fields}}},
    "good": {{"task": "project.fenced", "schedule": 1.0}},
}}
"""
    beat = scene.start_beat(env=plugin(scene, source))
    sent_by(scene, "good", times=2)
    assert sends(scene, "bad") == []
    line = beat.wait_for_log(re.compile(r"Entry 'bad': the slot \S+ is missed: it can't be sent: \S+"), 10)
    assert line.level == "WARNING"
    assert beat.find("Entry 'bad' can't be sent: ")[0].level == "ERROR"

    def missed() -> list[dict[str, str]]:
        return [record for record in _records(scene, "bad") if record["state"] == "missed"]

    found = wait_for(missed, PATIENCE, lambda: f"missed: {_records(scene, 'bad')}")
    stop(beat)
    assert all(record["reason"].startswith("it can't be sent: ") for record in found)
    assert "unconfirmed" not in scene.redis.hgetall(scene.key("counts"))


@pytest.mark.matrix("valkey")
@pytest.mark.conf(leaderbeat_lease_ttl=6, leaderbeat_publish_timeout=1, leaderbeat_stall_timeout=3)
@pytest.mark.parametrize("fault", ["object()", "1"], ids=["arguments", "router"])
def test_an_entry_that_can_never_be_sent_costs_the_others_no_slot_and_the_leader_no_lead(
    scene: Scene, fault: str
) -> None:
    """Also where the router of its task raises what a broken connection to Redis may raise too."""
    source = f"""
def route(name, *_, **__):
    return {{"elsewhere.job": {{}}}}[name] if name.startswith("elsewhere.un") else None


app.conf.task_routes = (route,)
app.conf.beat_schedule = {{
    "bad": {{"task": "elsewhere.unrouted" if {fault!r} == "1" else "elsewhere", "schedule": 1.0, "args": ({fault},)}},
    # A leader that is held up for long is late with the good one, again and again.
    "good": {{"task": "project.fenced", "schedule": 1.0, "options": {{"leaderbeat": {{"catch_up": "all"}}}}}},
}}
"""
    beats = [scene.start_beat(env=plugin(scene, source)) for _ in "ab"]
    sent_by(scene, "good")
    epoch = wait_for(scene.lease, PATIENCE, "a leader").epoch
    first = _time(sends(scene, "good")[0].slot)
    sent_by(scene, "good", times=6)
    assert not [line for beat in beats for line in beat.find("it can't publish")]
    assert wait_for(scene.lease, PATIENCE, "a leader").epoch == epoch
    late = {sent.slot: sent.t - _time(sent.slot) for sent in sends(scene, "good")}
    assert [_time(slot) - first for slot in late][:6] == list(range(6)), f"without a gap: {late}"
    assert statistics.median(late.values()) < 1.0, "before the next one is due"
    assert sends(scene, "bad") == []


def _time(slot: str) -> float:
    return datetime.fromisoformat(slot.replace("Z", "+00:00")).timestamp()


def _records(scene: Scene, entry: str) -> list[dict[str, str]]:
    begin = scene.key(f"slot:{entry}@")
    return [scene.redis.hgetall(key) for key in scene.redis.scan_iter(count=1000) if key.startswith(begin)]


@pytest.mark.matrix("valkey")
def test_lazy_arguments_are_evaluated_at_each_send(scene: Scene) -> None:
    source = """
import itertools, threading, time

from celery.beat import BeatLazyFunc

numbers = itertools.count(1)


def broken():
    raise LookupError("not today")


app.conf.beat_schedule = {
    "lazy": {
        "task": "elsewhere.job",
        "schedule": 1.0,
        "args": (BeatLazyFunc(next, numbers),),
        "kwargs": {"at": BeatLazyFunc(time.time), "plain": 1},
    },
    "broken": {"task": "project.record", "schedule": 1.0, "args": (BeatLazyFunc(broken),)},
}
"""
    beat = scene.start_beat(env=plugin(scene, source))
    sent_by(scene, "lazy", times=3)
    stop(beat)
    payloads = [message.payload[:2] for message in messages(scene, "celery")]
    assert [args for args, _ in payloads] == [[number] for number in range(1, len(payloads) + 1)]
    for (_, kwargs), sent in zip(payloads, sends(scene, "lazy"), strict=True):
        assert kwargs["plain"] == 1
        assert kwargs["at"] == pytest.approx(sent.t, abs=2)
    assert sends(scene, "broken") == []
    reason = re.compile(r"Entry 'broken': the slot \S+ is missed: its arguments can't be built: LookupError")
    assert len(beat.find(reason)) >= 2
