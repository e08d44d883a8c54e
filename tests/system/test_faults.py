"""Faults that were found by attacking real replicas, each with its kind."""

from __future__ import annotations

import itertools
import json
import re
import signal
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support.containers import LeaderbeatSetup
from tests.support.rest import at_rest
from tests.support.scene import Scene, keys_of, leader
from tests.support.waits import wait_for
from tests.system.test_slots import pretend_outage

GOOD = {"good": {"task": "project.record", "every": 1.0, "policy": {"catch_up": "all"}}}


def runs_of(stage: Any, entry: str) -> list[str]:
    return [key for key in keys_of(stage.beat_publishes()) if key.startswith(f"{entry}@")]


def wait_for_good(stage: Any, count: int, timeout: float) -> None:
    before = len(runs_of(stage, "good"))
    wait_for(lambda: len(runs_of(stage, "good")) >= before + count, timeout, f"{count} good slots are sent")


@pytest.mark.schedule(
    {
        **GOOD,
        "queue": {"task": "project.record", "every": 1.0, "options": {"queue": "nonono"}},
        "serializer": {"task": "project.record", "every": 1.0, "options": {"serializer": "nonono"}},
        "type": {"task": "project.record", "every": 1.0, "options": {"queue": "list"}},
    }
)
@pytest.mark.conf(task_create_missing_queues=False)
@pytest.mark.matrix("valkey", "redis+rabbitmq")
def test_entries_that_cannot_be_sent_hold_up_no_other(scene: Scene) -> None:
    beat = scene.start_beat()
    wait_for_good(scene, 5, 20)
    for entry in ("queue", "serializer", "type"):
        beat.wait_for_log(re.compile(rf"Entry '{entry}': the slot .* is missed: it can't be sent: "))
    assert max(Counter(keys_of(scene.beat_publishes())).values()) == 1
    assert not beat.find("steps down")


@pytest.mark.schedule(GOOD)
@pytest.mark.matrix("valkey", "redis+rabbitmq")
def test_a_receiver_that_exits_costs_only_its_own_message(scene: Scene, tmp_path: Path) -> None:
    plugin = tmp_path / "exits.py"
    plugin.write_text(
        "from celery.signals import before_task_publish\n"
        "app.conf.beat_schedule['bad'] = {'task': 'project.bad', 'schedule': 1.0}\n"
        "def exits(sender, **_):\n"
        "    if sender == 'project.bad':\n"
        "        raise SystemExit(3)\n"
        "before_task_publish.connect(exits, weak=False)\n"
    )
    beat = scene.start_beat(env={"LB_PLUGIN": str(plugin)})
    wait_for_good(scene, 5, 20)
    assert beat.status == "running"
    beat.wait_for_log(re.compile(r"Entry 'bad': the slot .* is missed"))


@pytest.mark.schedule({"quick": {"task": "project.record", "every": 0.1}, **GOOD})
@pytest.mark.matrix("valkey")
def test_a_month_of_a_quick_entry_is_passed_over_at_once(scene: Scene) -> None:
    pretend_outage(scene, timedelta(days=30))
    beat = scene.start_beat()
    line = beat.wait_for_log(
        re.compile(r"Entry 'quick': 2592\d{4} slots from .* are missed: older than lookback")
    )
    assert line.level == "WARNING"
    wait_for_good(scene, 3, 15)
    assert not beat.find("No longer the leader")


@pytest.mark.schedule(GOOD)
@pytest.mark.workers(0)
@pytest.mark.beats(1, proxied=("broker",))
@pytest.mark.matrix("valkey", "redis+rabbitmq")
def test_the_first_slot_after_a_broken_connection_to_the_broker_is_sent(
    celery_setup: LeaderbeatSetup,
) -> None:
    wait_for_good(celery_setup, 1, 15)
    for _ in range(4):
        wait_for_good(celery_setup, 1, 15)
        # A message that is on its way would be in doubt.
        with at_rest(celery_setup, celery_setup.beats[0]):
            celery_setup.beats[0].broker_proxy.reset()
    wait_for_good(celery_setup, 2, 15)
    keys = runs_of(celery_setup, "good")
    seconds = [int(key[-3:-1]) for key in keys]
    assert all((b - a) % 60 == 1 for a, b in itertools.pairwise(seconds)), keys
    assert not celery_setup.beats[0].find("is missed")


@pytest.mark.schedule(GOOD)
@pytest.mark.matrix("valkey", long=("redis",))
@pytest.mark.parametrize(
    "spoil",
    [
        lambda redis, key: redis.hset(key("entries"), "good", "{garbage"),
        lambda redis, key: redis.hset(key("entries"), "other", "[]"),
        lambda redis, key: redis.hset(key("entries"), b"\xff\xfe", "{}"),
        lambda redis, key: (
            redis.hset(key("slot:good@x"), mapping={"state": "claimed", "epoch": "x", "slot": "y"}),
            redis.zadd(key("unfinished"), {"good@x": 1}),
        ),
        lambda redis, key: redis.set(key("epoch"), "garbage"),
    ],
    ids=["entry", "other", "name", "record", "epoch"],
)
def test_one_unreadable_value_in_redis_stops_nothing(scene: Scene, spoil: Any) -> None:
    first = scene.start_beat()
    wait_for_good(scene, 1, 15)
    first.terminate()
    first.wait(5)
    spoil(scene.redis, scene.key)
    second = scene.start_beat()
    wait_for_good(scene, 4, 20)
    assert second.status == "running"
    assert "Traceback" not in second.text(0)
    assert json.loads(scene.redis.hget(scene.key("entries"), "good"))["count"] >= 4


@pytest.mark.schedule(GOOD)
@pytest.mark.matrix("valkey")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT], ids=["term", "int"])
def test_a_second_signal_at_any_moment_of_the_exit_changes_nothing(
    scene: Scene, signum: signal.Signals
) -> None:
    for wait in (0.001, 0.01, 0.03, 0.06, 0.1, 0.15):
        beat = scene.start_beat()
        leader(scene)
        beat.kill(signum.name)
        time.sleep(wait)
        beat.kill(signum.name)
        assert beat.wait(5)["StatusCode"] == 0, f"after {wait} s"
        assert "Traceback" not in beat.text(0)
        assert scene.lease() is None
