"""What becomes of runs whose worker dies or freezes: `on_crash`, with real workers that are killed."""

from __future__ import annotations

import re
import time
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import pytest

from celery_leaderbeat.ledger import Ledger
from celery_leaderbeat.tick import tick_key
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
)
from tests.support.scene import Beat, Scene, Worker, leader
from tests.support.waits import wait_for, wait_until_steady
from tests.system.test_workers import (
    IMPATIENT,
    NOTES_REFUSALS,
    PATIENCE,
    ends,
    nothing_left,
    refusals,
    starts,
    state,
)

#: Seconds: a run lease in these tests, the leader's sweep, and what a busy machine adds.
LEASE, SWEEP, MARGIN = 1.0, 2.0, 1.5
#: A run lease for runs of several seconds: a busy machine may keep them from the processor for longer than the other.
STEADY = 3.0
RERUN = {"on_crash": "rerun"}


def job(task: str, on_crash: str = "rerun", **fields: Any) -> dict[str, Any]:
    """A schedule of one entry, of which `due_since` makes one slot due."""
    policy = {"on_crash": on_crash, **fields.pop("policy", {})}
    return {"job": once(task, policy=policy, **fields)}


def slot_of(scene: Scene) -> str:
    """The tick key of that slot."""
    (entry,) = scene.schedule
    newest = int(time.time() // PERIOD * PERIOD)
    return tick_key(entry, _instant(newest))


def _instant(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, timezone.utc)


def worker_env(scene: Scene, lease: float = LEASE) -> dict[str, str | None]:
    """A short run lease, and refusals are noted."""
    return plugin(scene, run_lease(lease), NOTES_REFUSALS)


def start_beat(scene: Scene, **options: Any) -> Beat:
    """A beat that notes its signals."""
    return scene.start_beat(env=plugin(scene, NOTES_SIGNALS), **options)


def first_run(scene: Scene, attempt: int = 1) -> SimpleNamespace:
    """Wait for an attempt at the slot to begin."""
    key = slot_of(scene)

    def begun() -> list[SimpleNamespace]:
        return [run for run in starts(scene, key) if run.attempt == attempt]

    return wait_for(begun, PATIENCE, lambda: f"attempt {attempt} begins: {scene.slot(key)}")[0]


def has_ended(scene: Scene, wanted: str = "done") -> None:
    """Wait for the slot's end."""
    key = slot_of(scene)
    wait_for(lambda: state(scene, key) == wanted, PATIENCE, lambda: f"{wanted}: {scene.slot(key)}")


def some_workers(scene: Scene, lease: float = LEASE, count: int = 2, **options: Any) -> list[Worker]:
    """Workers that are ready."""
    workers = [scene.start_worker(env=worker_env(scene, lease), wait=False, **options) for _ in range(count)]
    for worker in workers:
        worker.wait_for_log(worker.ready_prompt, PATIENCE)
    return workers


# Rerun


@pytest.mark.matrix("valkey", "redis+rabbitmq")
@pytest.mark.parametrize("pool", ["solo", "prefork"])
@pytest.mark.schedule(job("hanging"))
def test_a_run_killed_in_mid_run_is_sent_again_within_run_lease_and_sweep_and_runs_once(
    scene: Scene, ledger: Ledger, pool: str
) -> None:
    due_since(scene)
    workers = some_workers(scene, pool=pool)
    beat = start_beat(scene)
    run = first_run(scene)
    first = runner(workers, run)
    killed = time.time()
    first.kill()
    has_ended(scene)
    key = slot_of(scene)
    dead, again = starts(scene, key)
    assert (again.key, again.attempt, dead.attempt) == (key, 2, 1), "the same tick key, and self.tick.attempt"
    assert again.id != dead.id
    assert again.t - killed <= LEASE + SWEEP + MARGIN
    assert [end.attempt for end in ends(scene, key)] == [2]
    assert [int(sent.attempt) for sent in scene.beat_publishes()] == [1, 2]
    record = ledger.slot(key)
    assert (record.state, record.attempt, record.epoch) == ("done", 2, scene.lease().epoch)
    (died,) = signals(scene, "run_died")
    assert (died.key, died.attempt, died.next) == (key, "1", "rerun")
    (line,) = beat.find(f"Slot {key}: its run on")
    assert line.level == "WARNING"
    assert "It is sent again as attempt 2." in line.text
    story = [fields["event"] for _, fields in ledger.events() if fields.get("key") == key]
    # A worker may be quicker than the leader that notes that it has sent.
    assert [name for name in story if name not in ("refused", "sent")] == [
        *("claimed", "started", "died", "rerun"),
        *("claimed", "started", "done"),
    ]


@pytest.mark.matrix("valkey")
@pytest.mark.schedule(job("hanging_early"))
def test_an_early_acknowledging_task_is_rerun_as_well_and_warned_about(scene: Scene) -> None:
    due_since(scene)
    workers = some_workers(scene)
    beat = start_beat(scene)
    line = beat.wait_for_log("acknowledges early", PATIENCE)
    assert line.level == "WARNING"
    assert line.text.startswith("Entry 'job' has on_crash 'rerun', and its task project.hanging_early")
    runner(workers, first_run(scene)).kill()
    has_ended(scene)
    assert [run.attempt for run in starts(scene, slot_of(scene))] == [1, 2]


@pytest.mark.matrix("valkey")
@pytest.mark.conf(leaderbeat_lease_ttl=3)
@pytest.mark.schedule(job("hanging"))
def test_a_run_that_died_together_with_the_leader_is_sent_again_by_the_next_one(scene: Scene) -> None:
    due_since(scene)
    workers = some_workers(scene)
    beats = [start_beat(scene, wait=False) for _ in "ab"]
    run = first_run(scene)
    first = leader(scene)
    first.kill()
    runner(workers, run).kill()
    has_ended(scene)
    again = starts(scene, slot_of(scene))[-1]
    assert (again.attempt, again.epoch > run.epoch) == (2, True)
    assert len(beats) == 2


@pytest.mark.matrix("valkey")
@pytest.mark.schedule(job("hanging", policy={"max_attempts": 2}, kwargs={"until": 99}))
def test_a_slot_whose_runs_all_die_is_abandoned_after_max_attempts_with_one_error(
    scene: Scene, ledger: Ledger
) -> None:
    due_since(scene)
    workers = some_workers(scene, count=3)
    beat = start_beat(scene)
    for attempt in (1, 2):
        runner(workers, first_run(scene, attempt)).kill()
    has_ended(scene, "abandoned")
    key = slot_of(scene)
    (line,) = wait_for(lambda: beat.find("is abandoned"), PATIENCE, "it is logged")
    assert line.level == "ERROR"
    assert f"Slot {key} is abandoned" in line.text
    assert "attempt 2" in line.text
    assert "(`leaderbeat backfill`, or `leaderbeat run` for a slot that isn't the schedule's)" in line.text
    (told,) = wait_for(lambda: signals(scene, "slot_abandoned"), PATIENCE, "it is signalled")
    assert (told.key, told.entry, told.attempt) == (key, "job", "2")
    wait_until_steady(lambda: len(scene.runs()), SWEEP + 1.0)
    assert [run.attempt for run in starts(scene, key)] == [1, 2]
    assert len(beat.find("is abandoned")) == 1
    assert [died.next for died in signals(scene, "run_died")] == ["rerun", "abandoned"]
    now = _instant(int(time.time()))
    (explained,) = [slot for slot in ledger.audit("job", _instant(0), now).slots if slot.key == key]
    assert explained.end == "abandoned"
    assert "attempt 2 of 2" in explained.reason


@pytest.mark.matrix("valkey")
@pytest.mark.schedule(job("hanging", kwargs={"seconds": 4, "then": 4}))
def test_the_ghost_of_a_superseded_attempt_cannot_mark_the_slot_as_done(scene: Scene) -> None:
    due_since(scene)
    workers = some_workers(scene, STEADY)
    start_beat(scene)
    run = first_run(scene)
    ghost = runner(workers, run)
    ghost.freeze()
    again = first_run(scene, attempt=2)
    key = slot_of(scene)
    ghost.thaw()
    line = ghost.wait_for_log(f"The slot {key} is done by a run that no longer held it", PATIENCE)
    assert line.level == "WARNING"
    assert (state(scene, key), scene.slot(key)["attempt"]) == ("running", "2")
    has_ended(scene)
    assert f":{again.pid}" in scene.slot(key)["worker"]
    assert [(end.attempt, end.pid) for end in ends(scene, key)] == [(1, run.pid), (2, again.pid)]


@pytest.mark.matrix("valkey")
@pytest.mark.schedule(job("hanging", kwargs={"seconds": 5, "check": True, "then": 1}))
def test_check_raises_in_the_ghost_of_a_superseded_attempt(scene: Scene) -> None:
    due_since(scene)
    workers = some_workers(scene, STEADY)
    start_beat(scene)
    run = first_run(scene)
    ghost = runner(workers, run)
    ghost.freeze()
    again = first_run(scene, attempt=2)
    ghost.thaw()
    ghost.wait_for_log("StaleTick", PATIENCE)
    has_ended(scene)
    assert [(end.attempt, end.pid) for end in ends(scene, slot_of(scene))] == [(2, again.pid)]


@pytest.mark.matrix("valkey")
@pytest.mark.schedule(job("acks_late", kwargs={"fail": True}))
def test_an_ordinary_exception_is_a_failure_and_is_not_rerun(scene: Scene) -> None:
    due_since(scene)
    scene.start_worker(env=worker_env(scene))
    start_beat(scene)
    has_ended(scene, "failed")
    wait_until_steady(lambda: len(scene.runs()), LEASE + SWEEP)
    assert len(starts(scene, slot_of(scene))) == len(scene.beat_publishes()) == 1
    assert state(scene, slot_of(scene)) == "failed"


@pytest.mark.matrix("valkey")
@pytest.mark.parametrize(
    ("task", "kwargs", "last"),
    [("autoretrying", {}, "failed"), ("retrying", {"times": 2, "countdown": 2.0}, "done")],
)
def test_celerys_own_retries_go_on_within_the_attempt(
    scene: Scene, task: str, kwargs: dict[str, Any], last: str
) -> None:
    scene.schedule = job(task, kwargs=kwargs)
    due_since(scene)
    scene.start_worker(env=worker_env(scene))
    beat = start_beat(scene)
    has_ended(scene, last)
    assert [(run.attempt, run.retries) for run in starts(scene, slot_of(scene))] == [(1, 0), (1, 1), (1, 2)]
    assert len(scene.beat_publishes()) == 1
    assert not beat.find("died")


@pytest.mark.matrix("valkey")
@pytest.mark.schedule(job("retrying", kwargs={"times": 1, "seconds": 2}))
def test_a_retry_that_is_killed_is_rerun_from_the_beginning_of_the_next_attempt(scene: Scene) -> None:
    due_since(scene)
    workers = some_workers(scene, STEADY)
    start_beat(scene)
    key = slot_of(scene)
    (retry,) = wait_for(
        lambda: [run for run in starts(scene, key) if run.retries == 1], PATIENCE, "the retry begins"
    )
    runner(workers, retry).kill()
    has_ended(scene)
    assert [(run.attempt, run.retries) for run in starts(scene, key)] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert [end.attempt for end in ends(scene, key)] == [2]


# Auto


@pytest.mark.matrix("valkey")
@pytest.mark.schedule(job("hanging_early", "auto"))
def test_without_acks_late_a_killed_run_stays_as_it_is_and_is_warned_about_once(
    scene: Scene, ledger: Ledger
) -> None:
    due_since(scene)
    workers = some_workers(scene)
    beat = start_beat(scene)
    runner(workers, first_run(scene)).kill()
    key = slot_of(scene)
    line = beat.wait_for_log(f"Slot {key}: its run on", PATIENCE)
    assert line.level == "WARNING"
    assert "Nothing runs it again unless the broker delivers its message again" in line.text
    beat.terminate()
    beat.wait()
    second = start_beat(scene)
    leader(scene)
    wait_until_steady(lambda: len(scene.runs()), SWEEP + 1.0)
    assert not second.find("its run on"), "the next leader doesn't say it again"
    assert len(starts(scene, key)) == 1
    record = ledger.slot(key)
    assert (record.state, record.died_at is not None) == ("running", True)
    assert [died.next for died in signals(scene, "run_died")] == ["redelivery"]
    now = _instant(int(time.time()))
    (explained,) = [slot for slot in ledger.audit("job", _instant(0), now).slots if slot.key == key]
    assert (explained.end, re.sub(" on .* ", " ", explained.reason)) == ("running", "its run died")
    assert len(events(ledger, "died")) == 1


@pytest.mark.matrix("valkey", "redis+rabbitmq")
@pytest.mark.conf(broker_transport_options=IMPATIENT)
@pytest.mark.schedule(job("acks_late", "auto", kwargs={"seconds": 3}))
def test_with_acks_late_the_brokers_redelivery_runs_once_the_run_lease_is_over(scene: Scene) -> None:
    due_since(scene)
    lease = 3.0
    workers = some_workers(scene, lease)
    start_beat(scene)
    run = first_run(scene)
    runner(workers, run).kill()
    has_ended(scene)
    dead, again = starts(scene, slot_of(scene))
    assert again.t - dead.t >= lease - 0.1, "not before the run lease is over"
    assert (again.attempt, again.id) == (1, dead.id), "the broker's copy, not the leader's"
    assert len(scene.beat_publishes()) == 1
    assert len(ends(scene, slot_of(scene))) == 1


# Skip


@pytest.mark.matrix("valkey", "redis+rabbitmq")
@pytest.mark.conf(broker_transport_options=IMPATIENT)
@pytest.mark.schedule(job("acks_late", "skip", kwargs={"seconds": 5}))
def test_with_on_crash_skip_the_redelivery_is_refused_and_the_slot_is_abandoned(scene: Scene) -> None:
    due_since(scene)
    workers = some_workers(scene)
    beat = start_beat(scene)
    run = first_run(scene)
    dead = runner(workers, run)
    dead.kill()
    has_ended(scene, "abandoned")
    refused = wait_for(lambda: refusals(scene), PATIENCE, "the redelivery is refused")[0]
    assert refused.key == slot_of(scene)
    line = beat.wait_for_log("is abandoned", PATIENCE)
    assert line.level == "ERROR"
    assert "on_crash is skip" in line.text
    if not scene.rabbit:
        nothing_left(scene, next(worker for worker in workers if worker is not dead))
    assert len(scene.runs()) == 1
    assert scene.runs("end") == []


#: A task that rejects its message into the queue at its first run, whether it is told that the broker has delivered it again
#: or not.
BACK_ONCE = """
import os, sys, time

from celery.exceptions import Reject

from celery_leaderbeat import FencedTask

note = sys.modules["tests.support.project"].note


@app.task(name="project.back_once", bind=True, base=FencedTask, acks_late=True, reject_on_worker_lost=True)
def back_once(self, seconds):
    note(self, "start")
    try:
        os.close(os.open(os.environ["LB_LOG"] + ".back", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        note(self, "end")
    else:
        time.sleep(seconds)
        note(self, "requeue")
        raise Reject("not now", requeue=True)
"""


@pytest.mark.matrix("valkey")
@pytest.mark.conf(broker_transport_options=IMPATIENT)
@pytest.mark.schedule(job("back_once", "skip", kwargs={"seconds": 5}))
def test_a_run_that_was_only_frozen_may_put_its_message_back_which_redis_has_given_to_another(
    scene: Scene,
) -> None:
    """And nobody leads who could decide that it has died."""
    due_since(scene)
    env = plugin(scene, run_lease(LEASE), NOTES_REFUSALS, BACK_ONCE)
    frozen = scene.start_worker(env=env)
    beat = start_beat(scene)
    first_run(scene)
    beat.terminate()
    beat.wait()
    frozen.freeze()
    key = slot_of(scene)
    over = wait_for(
        lambda: float(scene.slot(key).get("run_until", 0)) / 1000, PATIENCE, "the run has a lease"
    )
    other = scene.start_worker(env=env)
    other.wait_for_log("put off for", PATIENCE)
    wait_for(lambda: time.time() > over, PATIENCE, "its lease is over")
    seen = len(other.find("put off for"))
    wait_for(lambda: len(other.find("put off for")) > seen, PATIENCE, "the copy goes on waiting")
    frozen.thaw()
    has_ended(scene)
    assert refusals(scene) == []
    assert len(scene.runs("requeue")) == len(ends(scene, key)) == 1


# A visibility timeout shorter than the run


@pytest.mark.matrix("valkey")
@pytest.mark.conf(broker_transport_options=IMPATIENT)
@pytest.mark.parametrize("on_crash", ["auto", "rerun"])
def test_a_run_longer_than_redis_visibility_timeout_has_one_effect(scene: Scene, on_crash: str) -> None:
    scene.schedule = job("acks_late", on_crash, kwargs={"seconds": 5})
    due_since(scene)
    # Redis gives out again to whoever asks: the worker on its own, and others.
    workers = [
        scene.start_worker(pool="prefork", concurrency=2, env=worker_env(scene), wait=False) for _ in "ab"
    ]
    beat = start_beat(scene)
    first_run(scene)
    wait_for(
        lambda: any(worker.find("put off for") or worker.find("refused: ") for worker in workers),
        PATIENCE,
        "the message is delivered again while it runs",
    )
    has_ended(scene)
    client = scene.ledger.client(scene.BROKER_DB)
    wait_for(
        lambda: wait_until_steady(lambda: client.llen("celery") + client.hlen("unacked"), 1.0, PATIENCE) == 0,
        PATIENCE,
        "no copy is left",
    )
    assert len(scene.runs()) == len(scene.runs("end")) == 1
    assert state(scene, slot_of(scene)) == "done"
    assert not beat.find("died")


# What can't work is refused at the start


@pytest.mark.matrix("valkey")
@pytest.mark.schedule(
    {
        "good": once("fenced", policy={"on_crash": "rerun", "overlap": "queue"}),
        "rerun": once("record", policy={"on_crash": "rerun"}),
        "skip": once("record", policy={"overlap": "skip"}),
        "queue": once("record", policy={"overlap": "queue"}),
        "typo": once("fenced", policy={"on_crsh": "rerun"}),
        "attempts": once("fenced", policy={"max_attempts": 2}),
        "plain": once("record", policy={"on_crash": "skip"}),
        "elsewhere": {**once("fenced", policy={"on_crash": "rerun"}), "task": "other.project.task"},
    }
)
def test_a_policy_that_cannot_work_is_refused_with_one_error_and_the_others_run(scene: Scene) -> None:
    due_since(scene)
    beat = start_beat(scene)
    wait_for(lambda: len(scene.beat_publishes()) >= 3, PATIENCE, "the others are sent")
    wait_until_steady(lambda: len(scene.beat_publishes()), 0.7)
    assert sorted(sent.key.partition("@")[0] for sent in scene.beat_publishes()) == [
        "elsewhere",
        "good",
        "plain",
    ]
    for entry, key, value in (
        ("rerun", "on_crash", "rerun"),
        ("skip", "overlap", "skip"),
        ("queue", "overlap", "queue"),
    ):
        (line,) = (line for line in beat.find(f"Entry {entry!r}") if line.level != "INFO")
        assert line.level == "ERROR"
        assert f"has {key} {value!r}, and its task project.record isn't a FencedTask" in line.text
        assert "would never be marked as done" in line.text
    errors = {line.text for line in beat.lines() if line.level == "ERROR"}
    assert len(errors) == 5, errors
    (typo,) = [text for text in errors if "'typo'" in text]
    assert "unknown key 'on_crsh'" in typo
    assert "on_crash" in typo.replace("on_crsh", "")
    assert any("'attempts'" in text and "max_attempts" in text for text in errors)


@pytest.mark.matrix("valkey")
@pytest.mark.schedule(job("recursive"))
def test_a_body_that_calls_its_own_task_as_a_function_goes_on_within_its_run(scene: Scene) -> None:
    due_since(scene)
    some_workers(scene)
    start_beat(scene)
    first_run(scene)
    has_ended(scene)
    key = slot_of(scene)
    assert (state(scene, key), len(starts(scene, key))) == ("done", 1)
