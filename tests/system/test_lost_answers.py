"""Redis did what it was asked, and its answer never arrived."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest

from tests.support.containers import LeaderbeatSetup
from tests.support.scene import Scene, keys_of, leader
from tests.support.waits import wait_for
from tests.system.test_slots import pretend_outage

#: Lets the nth call of one script run in Redis, and then fails as if its answer hadn't come.
PLUGIN = """
from celery_leaderbeat.errors import StoreUnavailable
from celery_leaderbeat.store import Store
original, calls = Store.run, []

def run(self, script, keys, args=()):
    answer = original(self, script, keys, args)
    if script == {script!r}:
        calls.append(1)
        if len(calls) in {nth}:
            raise StoreUnavailable("Redis gave no answer to the script " + script + ": as the test wants it")
    return answer

Store.run = run
"""


def losing(directory: Path, script: str, *nth: int) -> dict[str, str]:
    path = directory / f"lose_{script}.py"
    path.write_text(PLUGIN.format(script=script, nth=nth))
    return {"LB_PLUGIN": str(path)}


@pytest.mark.schedule({"tick": {"task": "project.fenced", "every": 1.0, "policy": {"catch_up": "all"}}})
@pytest.mark.beats(0)
@pytest.mark.matrix("valkey", long=("redis",))
@pytest.mark.parametrize("script", ["elect", "renew", "register", "claim", "confirm"])
def test_a_leader_whose_answer_is_lost_goes_on_and_sends_each_slot_once(
    celery_setup: LeaderbeatSetup, tmp_path: Path, script: str
) -> None:
    first = {"elect": 1, "register": 1}.get(script, 2)
    beat = celery_setup.add_beat(
        env=losing(tmp_path, script, first, first + 1),
        # Renewed a few times while the test lasts, and kept by a leader that waits for the processor for a while.
        conf={"leaderbeat_lease_ttl": 6, "leaderbeat_renew_interval": 1},
    )
    leader(celery_setup)
    wait_for(lambda: len(celery_setup.runs("end")) >= 6, 30, "six runs")
    assert beat.status == "running"
    assert max(Counter(keys_of(celery_setup.beat_publishes())).values()) == 1
    runs = Counter(keys_of(celery_setup.runs()))
    assert max(runs.values()) == 1
    seconds = sorted(int(key[-3:-1]) for key in runs)
    assert len(set(seconds)) == len(seconds)
    epochs = {record.epoch for record in celery_setup.beat_publishes()}
    assert len(epochs) == 1, "it went on under the epoch that it had been given"
    assert not beat.find("Standing by for"), "it never stood by for itself"


@pytest.mark.schedule({"tick": {"task": "project.record", "crontab": {}, "policy": {"catch_up": "none"}}})
@pytest.mark.matrix("valkey")
def test_missed_slots_are_reported_although_the_answer_was_lost(scene: Scene, tmp_path: Path) -> None:
    pretend_outage(scene, timedelta(minutes=5))
    beat = scene.start_beat(env=losing(tmp_path, "miss", 1))
    line = beat.wait_for_log("are missed: catch_up is none")
    assert line.level == "WARNING"
    assert scene.redis.hget(scene.key("counts"), "missed") in ("5", "6")


@pytest.mark.schedule({"tick": {"task": "project.fenced", "every": 1.0}})
@pytest.mark.workers(0)
@pytest.mark.beats(1)
@pytest.mark.matrix("valkey", "redis+rabbitmq")
@pytest.mark.parametrize("script", ["begin", "finish"])
def test_a_worker_whose_answer_is_lost_runs_the_slot_once_and_tells_its_end(
    celery_setup: LeaderbeatSetup, tmp_path: Path, script: str
) -> None:
    leader(celery_setup)
    celery_setup.add_worker(env=losing(tmp_path, script, 2))
    wait_for(lambda: len(celery_setup.runs("end")) >= 5, 25, "five runs")
    sent = keys_of(celery_setup.beat_publishes())[:5]
    wait_for(
        lambda: set(sent) <= set(keys_of(celery_setup.runs("end"))), 15, "all of the first five have run"
    )
    assert max(Counter(keys_of(celery_setup.runs())).values()) == 1
    wait_for(
        lambda: {celery_setup.slot(key).get("state") for key in sent} == {"done"}, 10, "all of them are done"
    )
    assert not celery_setup.workers[0].find("refused")
