"""What a `FencedTask` runs, refuses and puts off: real workers, fed by a real leader and by hand."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from celery import Celery
from kombu import Connection, Exchange, Queue

from tests.support.rest import at_rest
from tests.support.scene import Beat, Scene, Worker, keys_of
from tests.support.waits import wait_for, wait_until_steady

#: Every second is also what a retry or a put-off message waits for; the machine may be busy with others.
PATIENCE = 40.0

#: Seconds that a run lease lasts, in place of the half minute that would make these tests long.
SHORT = 2.0
SHORT_LEASE = f"app.conf.leaderbeat_run_lease = {SHORT}\n"

#: What can't be verified comes back sooner than after a second or two.
SOON = """
import celery_leaderbeat.task

celery_leaderbeat.task._RETRY_AFTER = (0.2, 0.5)
"""

#: Redis gives out again what isn't acknowledged within a second, and looks every second.
IMPATIENT = {"visibility_timeout": 1, "unacked_restore_interval": 1, "unacked_restore_throttle": 1}

DIES_AFTER_A_PUBLISH = """
import os, signal

from celery.signals import after_task_publish


@after_task_publish.connect(weak=False)
def die(**_):
    os.kill(os.getpid(), signal.SIGKILL)
"""

NOTES_REFUSALS = """
import json, os

from celery_leaderbeat.signals import run_refused


@run_refused.connect(weak=False)
def note(sender, task_id, stamp, reason, **_):
    line = {"task": sender.name, "id": task_id, "key": stamp and stamp.key, "epoch": stamp and stamp.epoch}
    with open(os.environ["LB_REFUSED"], "a") as file:
        file.write(json.dumps({**line, "reason": reason}) + "\\n")
"""

DEAD_LETTERS = """
from kombu import Exchange, Queue

dead = Exchange("dead", type="fanout")
app.conf.task_queues = [
    Queue("work", Exchange("work"), "work", queue_arguments={"x-dead-letter-exchange": "dead"}),
]
"""


# Helpers


def plugin(scene: Scene, *sources: str) -> dict[str, str]:
    """The environment that runs these sources in a process, and says where refusals are noted."""
    path = scene.directory / f"plugin_{abs(hash(sources))}.py"
    path.write_text("\n".join(sources))
    return {"LB_PLUGIN": str(path), "LB_REFUSED": str(scene.directory / "refused.jsonl")}


def refusals(scene: Scene) -> list[SimpleNamespace]:
    """What `run_refused` has told."""
    with contextlib.suppress(FileNotFoundError):
        lines = (scene.directory / "refused.jsonl").read_text().splitlines(keepends=True)
        return [SimpleNamespace(**json.loads(line)) for line in lines if line.endswith("\n")]
    return []


def counts(scene: Scene) -> dict[str, int]:
    """The ledger's totals."""
    return {name: int(text) for name, text in scene.redis.hgetall(scene.key("counts")).items()}


def records(scene: Scene) -> dict[str, dict[str, str]]:
    """All slots' records, by their tick keys."""
    begin = scene.key("slot:")
    return {
        name.removeprefix(begin): scene.redis.hgetall(name)
        for name in scene.redis.scan_iter(count=1000)
        if name.startswith(begin)
    }


def state(scene: Scene, key: str) -> str:
    """The state of one slot."""
    return scene.slot(key).get("state", "")


def starts(scene: Scene, key: str) -> list[SimpleNamespace]:
    """The runs of one slot."""
    return [run for run in scene.runs() if run.key == key]


def ends(scene: Scene, key: str) -> list[SimpleNamespace]:
    """The runs of one slot that came to their end."""
    return [run for run in scene.runs("end") if run.key == key]


def nothing_left(scene: Scene, worker: Worker, queue: str = "celery") -> None:
    """Everything is acknowledged. Ends the worker where only that can tell."""
    if not scene.rabbit:
        client = scene.ledger.client(scene.BROKER_DB)
        wait_for(lambda: client.llen(queue) + client.hlen("unacked") == 0, PATIENCE, "all is acknowledged")
        return
    # RabbitMQ gives back what a worker held that has gone without acknowledging it. An orderly stop acknowledges
    # what has run, and what hasn't begun is no message of the test's.
    worker.terminate()
    worker.wait(PATIENCE)
    with Connection(scene.broker_url) as connection:
        channel = connection.default_channel

        def gone() -> bool:
            return channel.queue_declare(queue, passive=True).consumer_count == 0

        wait_for(gone, PATIENCE, "RabbitMQ notices that the worker is gone")
        assert channel.basic_get(queue, no_ack=True) is None


@pytest.fixture
def hand(scene: Scene) -> Iterator[Celery]:
    """An app that sends by hand."""
    app = Celery("hand", broker=scene.broker_url, backend=None, set_as_current=False)
    yield app
    app.close()


def send_copy(app: Celery, record: Any, task: str, **headers: Any) -> None:
    """Send a stamped message by hand, like that of a publish or a run that was noted."""
    stamp = {
        "leaderbeat_tick_key": record.key,
        "leaderbeat_fencing_epoch": record.epoch,
        "leaderbeat_slot": record.key.rpartition("@")[2],
        "leaderbeat_attempt": record.attempt,
    }
    stamp = {name: value for name, value in {**stamp, **headers}.items() if value is not None}
    app.send_task(task, task_id=record.id, headers=stamp)


def one_slot(scene: Scene, **options: Any) -> tuple[str, Beat]:
    """Have a new leader send slots until one is out, and stop it; the oldest of its tick keys, and the beat."""
    beat = scene.start_beat(**options)

    def sent() -> list[Any]:
        return [record for record in scene.beat_publishes() if record.pid == beat.pid]

    wait_for(sent, PATIENCE, "a slot is sent")
    beat.terminate()
    beat.wait()
    return sent()[0].key, beat


def sent_keys(scene: Scene) -> list[str]:
    """The tick keys of what beats have sent."""
    return keys_of(scene.beat_publishes())


def all_done(scene: Scene) -> bool:
    """Whether every sent slot is done."""
    return all(state(scene, key) == "done" for key in sent_keys(scene))


def every_second(task: str, **fields: Any) -> dict[str, Any]:
    """A schedule of one entry."""
    return {"tick": {"task": f"project.{task}", "every": 1.0, **fields}}


# Slots that simply run


def _each_slot_runs_once(scene: Scene, worker: Worker) -> None:
    beat = scene.start_beat()
    wait_for(lambda: len(scene.runs("end")) >= 3, PATIENCE, "three runs")
    # One that is stopped in between gives a slot back, and it isn't sent.
    with at_rest(scene, beat):
        beat.terminate()
    beat.wait()
    wait_for(lambda: all_done(scene), PATIENCE, lambda: f"all done: {records(scene)}")
    published = {record.key: record for record in scene.beat_publishes()}
    runs = scene.runs()
    assert Counter(keys_of(runs)) == Counter(list(published)), "each slot ran once"
    assert len(published) == len(scene.beat_publishes()), "each slot was sent once"
    for run in runs:
        sent, record = published[run.key], scene.slot(run.key)
        slot = datetime.fromisoformat(run.slot)
        assert slot.utcoffset() is not None
        assert slot == datetime.fromisoformat(sent.slot.replace("Z", "+00:00"))
        assert run.key == f"tick@{sent.slot}"
        assert slot.timestamp() <= run.t, "the nominal time, not the time of the run"
        assert (run.epoch, run.attempt, run.id) == (sent.epoch, 1, sent.id)
        moments = [int(record[f"{step}_at"]) for step in ("claimed", "started", "finished")]
        assert moments == sorted(moments)
        assert record["claimed_at"] <= record["sent_at"]
        assert record["task_id"] == run.id
    totals = counts(scene)
    assert {totals[name] for name in ("claimed", "sent", "started", "done")} == {len(runs)}
    assert "refused" not in totals
    assert not worker.find("Traceback")
    nothing_left(scene, worker)


@pytest.mark.matrix("valkey")
@pytest.mark.schedule(every_second("fenced"))
@pytest.mark.parametrize(("pool", "concurrency"), [("prefork", 2), ("threads", 2), ("gevent", 4)])
def test_each_slot_runs_once_in_every_pool(scene: Scene, pool: str, concurrency: int) -> None:
    _each_slot_runs_once(scene, scene.start_worker(pool=pool, concurrency=concurrency))


@pytest.mark.schedule(every_second("fenced"))
def test_each_slot_runs_once_on_every_broker(scene: Scene) -> None:
    _each_slot_runs_once(scene, scene.start_worker())


@pytest.mark.matrix("valkey")
@pytest.mark.schedule(every_second("fenced", kwargs={"seconds": 2.5}))
def test_the_record_of_a_slot_shows_each_of_its_states(scene: Scene) -> None:
    seen: dict[str, list[str]] = {}

    def has_been(wanted: str) -> bool:
        for key, record in records(scene).items():
            before = seen.setdefault(key, [])
            if not before or before[-1] != record["state"]:
                before.append(record["state"])
        return any(wanted in states for states in seen.values())

    # The message waits until it has been seen that it is claimed, and then until a worker takes it.
    slow = """
import os, time

from celery.signals import before_task_publish


@before_task_publish.connect(weak=False)
def wait(**_):
    while not os.path.exists(os.environ["LB_GO"]):
        time.sleep(0.01)
"""
    go = scene.directory / "go"
    beat = scene.start_beat(env={**plugin(scene, slow), "LB_GO": str(go)})
    wait_for(lambda: has_been("claimed"), PATIENCE, lambda: f"a slot is claimed: {seen}")
    go.touch()
    wait_for(lambda: has_been("sent"), PATIENCE, lambda: f"a slot is sent: {seen}")
    scene.start_worker()
    wait_for(lambda: has_been("done"), PATIENCE, lambda: f"a slot is done: {seen}")
    beat.kill()
    (steps,) = {tuple(states) for states in seen.values() if states[-1] == "done"}
    assert steps == ("claimed", "sent", "running", "done")


# Work that waits in the queue over a change of leaders


@pytest.mark.matrix("valkey")
@pytest.mark.schedule({f"{number}": {"task": "project.fenced", "every": 5.0} for number in range(1000)})
def test_a_thousand_messages_of_an_earlier_leader_all_run_once(scene: Scene) -> None:
    first = scene.start_beat()
    wait_for(lambda: len(set(sent_keys(scene))) >= 1000, PATIENCE, lambda: f"{len(sent_keys(scene))} sent")
    epoch = scene.lease().epoch
    first.terminate()
    first.wait()
    scene.start_beat(schedule={})
    assert wait_for(scene.lease, PATIENCE, "the next leader").epoch > epoch
    published = scene.beat_publishes()
    assert {record.epoch for record in published} == {epoch}
    workers = [
        scene.start_worker(pool="threads", concurrency=2, wait=False, loglevel="WARNING") for _ in "ab"
    ]
    wait_for(lambda: len(scene.runs("end")) >= len(published), 60, lambda: f"{len(scene.runs('end'))} ran")
    wait_for(
        lambda: counts(scene).get("done") == len(published), PATIENCE, lambda: f"all done: {counts(scene)}"
    )
    wait_until_steady(lambda: len(scene.runs()), 0.5)
    assert Counter(keys_of(scene.runs())) == Counter(keys_of(published))
    assert "refused" not in counts(scene)
    for worker in workers:
        assert not worker.find("refused")


@pytest.mark.matrix("valkey+rabbitmq")
@pytest.mark.parametrize("task", ["retrying", "autoretrying"])
def test_the_retries_of_a_run_go_on_after_a_handover(scene: Scene, task: str) -> None:
    fields = {"kwargs": {"times": 2, "countdown": 0.5}} if task == "retrying" else {}
    worker = scene.start_worker()
    key, _ = one_slot(scene, schedule=every_second(task, **fields))
    epoch = scene.beat_publishes()[0].epoch
    scene.start_beat(schedule={})
    wait_for(lambda: scene.lease() and scene.lease().epoch > epoch, PATIENCE, "the next leader")
    last = "done" if task == "retrying" else "failed"
    wait_for(lambda: state(scene, key) == last, PATIENCE, lambda: f"{last}: {scene.slot(key)}")
    assert [(run.retries, run.epoch, run.attempt) for run in starts(scene, key)] == [
        (0, epoch, 1),
        (1, epoch, 1),
        (2, epoch, 1),
    ]
    assert not worker.find("refused")
    if task == "autoretrying":
        assert "as the test wants it" in scene.slot(key)["reason"]


@pytest.mark.matrix("redis+rabbitmq")
def test_a_run_that_waits_for_its_retry_holds_its_slot(scene: Scene, hand: Celery) -> None:
    """Between the run and its retry by countdown, no copy of the message can start the slot."""
    worker = scene.start_worker(env=plugin(scene, NOTES_REFUSALS))
    key, _ = one_slot(scene, schedule=every_second("retrying", kwargs={"times": 1, "countdown": 6}))
    wait_for(lambda: state(scene, key) == "retrying", PATIENCE, lambda: f"retrying: {scene.slot(key)}")
    send_copy(hand, scene.beat_publishes()[0], "project.retrying")
    (refused,) = wait_for(lambda: refusals(scene), PATIENCE, "the copy is refused")
    assert (refused.key, refused.reason) == (key, "the slot waits for its retry")
    wait_for(lambda: state(scene, key) == "done", PATIENCE, lambda: f"done: {scene.slot(key)}")
    first, second = starts(scene, key)
    assert (first.retries, second.retries) == (0, 1)
    assert second.t - first.t >= 6
    assert counts(scene)["started"] == len(set(sent_keys(scene)))
    assert worker.status == "running"


@pytest.mark.matrix("valkey")
def test_a_retry_that_is_asked_for_without_raising_runs(scene: Scene) -> None:
    worker = scene.start_worker()
    key, _ = one_slot(
        scene, schedule=every_second("retrying", kwargs={"times": 1, "throw": False, "countdown": 0.5})
    )
    wait_for(lambda: len(ends(scene, key)) == 2, PATIENCE, lambda: f"both runs end: {scene.slot(key)}")
    wait_for(lambda: state(scene, key) == "done", PATIENCE, lambda: f"done: {scene.slot(key)}")
    assert [run.retries for run in starts(scene, key)] == [0, 1]
    assert not worker.find("refused")


# What is refused


@pytest.mark.schedule(every_second("fenced", policy={"prefer": "duplicate", "catch_up": "all"}))
@pytest.mark.matrix("valkey", "redis+rabbitmq", long=("redis", "valkey+rabbitmq"))
def test_the_message_of_an_older_epoch_is_refused_once_a_newer_one_claimed_its_slot(scene: Scene) -> None:
    """The first leader dies with its message at the broker and the slot unconfirmed; the next sends it again."""
    scene.start_beat(env=plugin(scene, DIES_AFTER_A_PUBLISH)).wait(PATIENCE)
    (old,) = scene.beat_publishes()
    second = scene.start_beat()
    wait_for(
        lambda: sent_keys(scene).count(old.key) == 2, PATIENCE, lambda: f"sent again: {scene.slot(old.key)}"
    )
    second.terminate()
    second.wait()
    new = next(
        record for record in scene.beat_publishes() if record.key == old.key and record.pid == second.pid
    )
    assert new.epoch > old.epoch
    assert new.id == old.id
    worker = scene.start_worker(env=plugin(scene, NOTES_REFUSALS))
    wait_for(lambda: all_done(scene) and refusals(scene), PATIENCE, lambda: f"all done: {records(scene)}")
    assert [run.epoch for run in starts(scene, old.key)] == [new.epoch]
    (refused,) = refusals(scene)
    assert (refused.key, refused.epoch, refused.id) == (old.key, old.epoch, old.id)
    assert refused.reason == "a newer epoch claimed the slot"
    (line,) = worker.find("refused")
    assert line.level == "WARNING"
    assert old.key in line.text
    assert f"epoch {old.epoch}" in line.text
    assert counts(scene)["refused"] == 1
    nothing_left(scene, worker)


@pytest.mark.matrix("redis+rabbitmq")
def test_copies_of_a_running_and_of_a_done_slot_are_refused(scene: Scene, hand: Celery) -> None:
    worker = scene.start_worker(pool="threads", concurrency=4, env=plugin(scene, NOTES_REFUSALS))
    key, _ = one_slot(scene, schedule=every_second("fenced", kwargs={"seconds": 6}))
    sent = scene.beat_publishes()[0]
    wait_for(lambda: state(scene, key) == "running", PATIENCE, lambda: f"running: {scene.slot(key)}")
    send_copy(hand, sent, "project.fenced")
    wait_for(lambda: len(refusals(scene)) == 1, PATIENCE, "the first copy is refused")
    wait_for(lambda: all_done(scene), PATIENCE, lambda: f"done: {scene.slot(key)}")
    send_copy(hand, sent, "project.fenced")
    wait_for(lambda: len(refusals(scene)) == 2, PATIENCE, "the second copy is refused")
    assert [refused.reason for refused in refusals(scene)] == [
        "the slot is running elsewhere",
        "the slot is done",
    ]
    assert len(starts(scene, key)) == 1
    assert len(worker.find("refused")) == counts(scene)["refused"] == 2
    nothing_left(scene, worker)


@pytest.mark.matrix("valkey")
def test_a_malformed_stamp_is_refused_with_its_reason(scene: Scene, hand: Celery) -> None:
    worker = scene.start_worker(env=plugin(scene, NOTES_REFUSALS))
    good = SimpleNamespace(key="tick@2026-10-02T03:00:00Z", epoch=7, attempt=1, id="good")
    for headers, reason in (
        ({"leaderbeat_tick_key": "tick"}, "'tick' is no tick key"),
        ({"leaderbeat_tick_key": 5}, "5 is no tick key"),
        ({"leaderbeat_slot": "2026-10-02T04:00:00Z"}, "header leaderbeat_slot is '2026-10-02T04:00:00Z'"),
        ({"leaderbeat_fencing_epoch": None}, "header leaderbeat_fencing_epoch is missing"),
        ({"leaderbeat_fencing_epoch": "7"}, "header leaderbeat_fencing_epoch is '7'"),
        ({"leaderbeat_attempt": 0}, "header leaderbeat_attempt is 0"),
    ):
        before = len(refusals(scene))
        send_copy(hand, good, "project.fenced", **headers)
        wait_for(lambda: len(refusals(scene)) > before, PATIENCE, f"{headers} is refused")  # noqa: B023
        refused = refusals(scene)[-1]
        assert reason in refused.reason
        assert refused.key is None
        assert reason in worker.find("refused")[-1].text
    assert scene.runs() == []
    send_copy(hand, good, "project.fenced")
    (run,) = wait_for(scene.runs, PATIENCE, "a good one runs, and records itself")
    assert (run.key, run.epoch) == (good.key, good.epoch)
    wait_for(lambda: state(scene, good.key) == "done", PATIENCE, lambda: f"done: {scene.slot(good.key)}")
    nothing_left(scene, worker)


@pytest.mark.matrix("valkey+rabbitmq")
def test_a_refused_message_goes_to_the_dead_letter_exchange_where_the_task_says_so(
    scene: Scene, hand: Celery
) -> None:
    with Connection(scene.broker_url) as connection:
        dead = Queue("dead", Exchange("dead", type="fanout"))(connection.default_channel)
        dead.declare()
        worker = scene.start_worker(env=plugin(scene, NOTES_REFUSALS, DEAD_LETTERS))
        key, _ = one_slot(
            scene,
            schedule=every_second("dead_lettered", options={"queue": "work"}),
            env=plugin(scene, DEAD_LETTERS),
        )
        wait_for(lambda: all_done(scene), PATIENCE, lambda: f"done: {scene.slot(key)}")
        copy = scene.beat_publishes()[0]
        stamp = {
            "leaderbeat_tick_key": key,
            "leaderbeat_fencing_epoch": copy.epoch,
            "leaderbeat_slot": copy.slot,
            "leaderbeat_attempt": 1,
        }
        hand.send_task(
            "project.dead_lettered", task_id=copy.id, headers=stamp, exchange="work", routing_key="work"
        )
        message = wait_for(dead.get, PATIENCE, "the copy is dead-lettered")
        message.ack()
        assert message.headers["leaderbeat_tick_key"] == key
        assert message.headers["x-death"][0]["reason"] == "rejected"
        assert dead.get() is None
    assert [refused.reason for refused in refusals(scene)] == ["the slot is done"]
    assert len(starts(scene, key)) == 1
    nothing_left(scene, worker, "work")


@pytest.mark.matrix("valkey")
def test_current_fencing_refuses_a_message_of_an_earlier_leader(scene: Scene) -> None:
    key, _ = one_slot(scene, schedule=every_second("fenced_current"))
    epoch = scene.beat_publishes()[0].epoch
    second = scene.start_beat(schedule={"other": {"task": "project.fenced_current", "every": 1.0}})
    wait_for(lambda: len(scene.beat_publishes()) > 2, PATIENCE, "the next leader sends")
    newer = scene.lease().epoch
    worker = scene.start_worker(env=plugin(scene, NOTES_REFUSALS))
    wait_for(lambda: scene.runs("end"), PATIENCE, "what the leader sent runs")
    second.terminate()
    assert {run.epoch for run in scene.runs()} == {newer}
    assert newer > epoch
    refused = refusals(scene)[0]
    assert (refused.key, refused.reason) == (key, f"epoch {newer} leads now")
    assert scene.slot(key)["state"] == "refused"
    assert scene.slot(key)["reason"] == refused.reason
    assert worker.find("refused")


@pytest.mark.matrix("valkey")
def test_observed_fencing_refuses_what_is_older_than_the_task_has_seen(scene: Scene) -> None:
    """Three leaders send a slot each; the worker gets the third before the second."""
    keys = {}
    for entry, queue in (("first", "early"), ("second", "early"), ("third", "late")):
        schedule = {entry: {"task": "project.fenced_observed", "every": 1.0, "options": {"queue": queue}}}
        keys[entry], _ = one_slot(scene, schedule=schedule)
    first, second, third = keys.values()
    assert len({sent.epoch for sent in scene.beat_publishes()}) == 3
    # Nothing newer was seen yet.
    worker = scene.start_worker(args=("-Q", "late"), env=plugin(scene, NOTES_REFUSALS))
    wait_for(lambda: ends(scene, third), PATIENCE, "the third runs")
    scene.start_worker(args=("-Q", "early"), env=plugin(scene, NOTES_REFUSALS))
    wait_for(
        lambda: {first, second} <= {refused.key for refused in refusals(scene)},
        PATIENCE,
        lambda: f"both are refused: {records(scene)}",
    )
    seen = starts(scene, third)[0].epoch
    assert state(scene, second) == "refused"
    assert {refused.reason for refused in refusals(scene)} == {f"the task has seen epoch {seen}"}
    assert {run.epoch for run in scene.runs()} == {seen}
    assert not worker.find("refused")


# Messages without a stamp, and runs without a broker


@pytest.mark.matrix("valkey", "redis+rabbitmq")
def test_a_manual_delay_runs_unless_the_task_wants_a_stamp(scene: Scene, hand: Celery) -> None:
    worker = scene.start_worker(env=plugin(scene, NOTES_REFUSALS))
    refused = hand.send_task("project.stamped_only")
    ran = hand.send_task("project.fenced", kwargs={"times": 1, "countdown": 0})
    wait_for(lambda: len(scene.runs("end")) == 1, PATIENCE, "the manual one runs")
    wait_for(lambda: refusals(scene), PATIENCE, "the other is refused")
    assert [(run.id, run.key, run.epoch, run.retries) for run in scene.runs()] == [
        (ran.id, None, None, 0),
        (ran.id, None, None, 1),
    ]
    (refusal,) = refusals(scene)
    assert (refusal.id, refusal.task, refusal.key) == (refused.id, "project.stamped_only", None)
    assert refusal.reason == "it carries no stamp, and the task requires one"
    assert refusal.reason in worker.find("refused")[0].text
    assert records(scene) == {}
    nothing_left(scene, worker)


@pytest.mark.matrix("valkey")
@pytest.mark.conf(task_always_eager=True)
@pytest.mark.schedule(
    {
        "tick": {"task": "project.fenced", "every": 1.0},
        "again": {"task": "project.retrying", "every": 1.0, "kwargs": {"countdown": 0}},
        "bad": {"task": "project.failing", "every": 1.0},
    }
)
def test_eager_tasks_run_in_beat_with_their_tick(scene: Scene) -> None:
    beat = scene.start_beat()

    def ended(entry: str) -> list[str]:
        return [
            key for key, record in records(scene).items() if key.startswith(entry) and "finished_at" in record
        ]

    wait_for(lambda: min(map(len, map(ended, ("tick@", "again@", "bad@")))) >= 2, PATIENCE, "two slots each")
    beat.terminate()
    beat.wait()
    for key in ended("tick@"):
        (run,) = starts(scene, key)
        assert (run.pid, run.attempt, state(scene, key)) == (beat.pid, 1, "done")
    for key in ended("again@"):
        assert [run.retries for run in starts(scene, key)] == [0, 1, 2]
        assert state(scene, key) == "done"
    for key in ended("bad@"):
        assert len(starts(scene, key)) == 1
        assert state(scene, key) == "failed"
    assert "unconfirmed" not in counts(scene)
    assert scene.beat_publishes() == []


@pytest.mark.matrix("valkey")
def test_eager_and_direct_calls_by_hand_run(scene: Scene) -> None:
    calls = """
tasks = app.tasks
print("delayed", tasks["project.fenced"].delay().get(), flush=True)
print("applied", tasks["project.fenced"].apply().get(), flush=True)
print("called", tasks["project.fenced"](), flush=True)
print("refused", tasks["project.stamped_only"].apply().state, flush=True)
"""
    worker = scene.start_worker(conf={"task_always_eager": True}, env=plugin(scene, calls), wait=False)
    worker.wait_for_log("refused IGNORED", PATIENCE)
    for call in ("delayed", "applied", "called"):
        assert worker.find(f"{call} None")
    assert len(scene.runs("end")) == 3


# Workers that die, freeze, or are thought dead


@pytest.mark.matrix("valkey+rabbitmq")
def test_the_redelivery_of_a_killed_workers_message_runs_once_the_run_lease_is_over(scene: Scene) -> None:
    env = plugin(scene, SHORT_LEASE, NOTES_REFUSALS)
    workers = [scene.start_worker(env=env, wait=False) for _ in "ab"]
    for worker in workers:
        worker.wait_for_log(worker.ready_prompt, PATIENCE)
    # Longer than a beat takes to stop.
    key, _ = one_slot(scene, schedule=every_second("acks_late", kwargs={"seconds": 4}))
    pid = wait_for(lambda: starts(scene, key), PATIENCE, "the run begins")[0].pid
    first, second = sorted(workers, key=lambda worker: worker.pid != pid)
    first.kill()
    assert state(scene, key) == "running"
    second.wait_for_log("put off for", PATIENCE)
    wait_for(lambda: all_done(scene), PATIENCE, lambda: f"done: {records(scene)}")
    dead, run = starts(scene, key)
    assert run.t - dead.t >= SHORT - 0.1, "not before the run lease is over"
    assert (run.pid, run.attempt, run.retries, run.id) == (second.pid, 1, 0, dead.id)
    assert len(ends(scene, key)) == 1
    assert refusals(scene) == []
    assert counts(scene)["started"] == len(set(sent_keys(scene))), "a redelivery is no second start"
    nothing_left(scene, second)


@pytest.mark.matrix("valkey")
def test_the_message_of_a_killed_child_runs_once_the_run_lease_is_over(scene: Scene) -> None:
    # The worker takes some seconds to notice that a child has gone.
    env = plugin(scene, SHORT_LEASE.replace(str(SHORT), "8.0"), NOTES_REFUSALS)
    worker = scene.start_worker(pool="prefork", concurrency=2, env=env)
    key, _ = one_slot(scene, schedule=every_second("acks_late", kwargs={"seconds": 4}))
    child = wait_for(lambda: starts(scene, key), PATIENCE, "the run begins")[0].pid
    psutil.Process(child).kill()
    worker.wait_for_log("put off for", PATIENCE)
    wait_for(lambda: all_done(scene), PATIENCE, lambda: f"done: {records(scene)}")
    dead, run = starts(scene, key)
    assert run.t - dead.t >= 7.9
    assert run.pid != dead.pid
    assert (run.attempt, run.retries, run.id) == (1, 0, dead.id)
    assert len(ends(scene, key)) == 1
    assert refusals(scene) == []
    nothing_left(scene, worker)


@pytest.mark.matrix("valkey")
@pytest.mark.conf(broker_transport_options=IMPATIENT)
def test_a_redelivery_of_a_run_that_is_alive_has_no_effect(scene: Scene) -> None:
    """Redis gives the message out again while it is being worked on, and does the same to what is put off."""
    # Longer than a busy machine keeps the run from renewing its lease.
    env = plugin(scene, SHORT_LEASE.replace(str(SHORT), "4.0"), NOTES_REFUSALS)
    workers = [scene.start_worker(pool="prefork", concurrency=2, env=env) for _ in "ab"]
    key, _ = one_slot(scene, schedule=every_second("acks_late", kwargs={"seconds": 9}))
    wait_for(
        lambda: any(worker.find("put off for") for worker in workers), PATIENCE, "a redelivery is put off"
    )
    wait_for(lambda: all_done(scene), PATIENCE, lambda: f"done: {records(scene)}")
    client = scene.ledger.client(scene.BROKER_DB)

    def left() -> int:
        return client.llen("celery") + client.hlen("unacked")

    # A message that is being given out again is in no place for a moment.
    wait_for(
        lambda: refusals(scene) and wait_until_steady(left, 1.0, PATIENCE) == 0,
        PATIENCE,
        lambda: f"no copy is left, but {left()} are",
    )
    assert len(starts(scene, key)) == 1
    refused = refusals(scene)
    assert {each.reason for each in refused} == {"the slot is done"}
    # Redis gave the message out about nine times. What is put off for longer than Redis waits multiplies.
    slots = len(set(sent_keys(scene)))
    assert len(refused) <= 12 * slots, "copies don't multiply"


@pytest.mark.matrix("valkey+rabbitmq")
@pytest.mark.conf(task_default_queue_type="quorum", task_default_exchange_type="topic")
def test_what_is_put_off_again_and_again_comes_back_each_time_from_quorum_queues(scene: Scene) -> None:
    """RabbitMQ delays it itself, in queues that drop a message which comes to them twice."""
    env = plugin(scene, SHORT_LEASE, NOTES_REFUSALS)
    way = scene.proxy(scene.rabbit.port)
    scene.start_worker(env={**env, "CELERY_BROKER_URL": way.amqp_url(scene.vhost)})
    # Longer than another worker takes to start, and two leases.
    key, _ = one_slot(scene, schedule=every_second("acks_late", kwargs={"seconds": 10}))
    wait_for(lambda: starts(scene, key), PATIENCE, "the run begins")
    scene.start_worker(pool="threads", concurrency=4, env=env)
    way.cut()
    wait_for(lambda: state(scene, key) == "done", PATIENCE, lambda: f"done: {scene.slot(key)}")

    def refused() -> set[str]:
        return {each.reason for each in refusals(scene) if each.key == key}

    wait_for(lambda: refused() == {"the slot is done"}, PATIENCE, "its copy comes once more, and is refused")
    assert len(starts(scene, key)) == 1
    assert max(record.put_off for record in scene.publishes() if record.key == key) >= 2


@pytest.mark.matrix("valkey")
@pytest.mark.conf(broker_transport_options=IMPATIENT)
def test_check_stops_a_frozen_run_whose_slot_went_to_another_worker(scene: Scene) -> None:
    env = plugin(scene, SHORT_LEASE)
    first = scene.start_worker(env=env)
    key, _ = one_slot(scene, schedule=every_second("acks_late", kwargs={"seconds": 5, "check": True}))
    wait_for(lambda: starts(scene, key), PATIENCE, "the run begins")
    first.freeze()
    second = scene.start_worker(env=env)
    wait_for(lambda: len(starts(scene, key)) == 2, PATIENCE, "the other worker runs it")
    first.thaw()
    line = first.wait_for_log("StaleTick", PATIENCE)
    assert key in first.find("no longer holds the slot")[0].text, line
    wait_for(lambda: state(scene, key) == "done", PATIENCE, lambda: f"done: {scene.slot(key)}")
    assert [run.pid for run in ends(scene, key)] == [second.pid]
    assert f":{second.pid}" in scene.slot(key)["worker"]


@pytest.mark.matrix("valkey")
def test_check_stops_a_run_whose_record_was_removed(scene: Scene) -> None:
    worker = scene.start_worker()
    key, _ = one_slot(scene, schedule=every_second("fenced", kwargs={"seconds": 30, "check": True}))
    wait_for(lambda: starts(scene, key), PATIENCE, "the run begins")
    scene.redis.delete(scene.key(f"slot:{key}"))
    worker.wait_for_log("StaleTick", PATIENCE)
    assert ends(scene, key) == []


# Redis out of reach


def _behind_a_proxy(scene: Scene, **options: Any) -> tuple[Worker, Any]:
    way = scene.proxy(scene.ledger.port)
    conf = {"leaderbeat_redis_url": way.redis_url(scene.LEDGER_DB), **options.pop("conf", {})}
    return scene.start_worker(conf=conf, **options), way


@pytest.mark.matrix("valkey", "redis+rabbitmq")
@pytest.mark.parametrize("fault", ["cut", "freeze"])
def test_an_unverifiable_message_comes_back_until_it_runs_once(scene: Scene, fault: str) -> None:
    worker, way = _behind_a_proxy(
        scene, conf={"leaderbeat_redis_options": {"socket_timeout": 0.5}}, env=plugin(scene, SOON)
    )
    getattr(way, fault)()
    key, _ = one_slot(scene, schedule=every_second("retrying", kwargs={"times": 2}))
    worker.wait_for_log("put off for", PATIENCE)
    wait_for(lambda: len(worker.find("put off for")) >= 3, PATIENCE, "it is put off again")
    (warning,) = worker.find("The ledger is out of reach, and messages of slots wait until it answers: ")
    assert warning.level == "WARNING"
    assert scene.runs() == []
    assert state(scene, key) == "sent"
    way.resume()
    wait_for(lambda: all_done(scene), PATIENCE, lambda: f"done: {records(scene)}")
    assert [(run.retries, run.attempt) for run in starts(scene, key)] == [(0, 1), (1, 1), (2, 1)], (
        "its own retries"
    )
    assert "refused" not in counts(scene)
    nothing_left(scene, worker)


@pytest.mark.matrix("valkey")
def test_what_runs_unverified_runs_at_once_and_says_so(scene: Scene) -> None:
    worker, way = _behind_a_proxy(scene)
    way.cut()
    key, _ = one_slot(scene, schedule=every_second("unverified_run"))
    wait_for(lambda: ends(scene, key), PATIENCE, "it runs")
    (run,) = starts(scene, key)
    assert (run.key, run.attempt) == (key, 1), "the tick is known without Redis"
    assert "runs unverified for the slot" in worker.find(key)[0].text
    assert state(scene, key) == "sent"


@pytest.mark.matrix("valkey")
def test_what_refuses_the_unverified_is_refused_with_the_reason(scene: Scene) -> None:
    worker, way = _behind_a_proxy(scene, env=plugin(scene, NOTES_REFUSALS))
    way.cut()
    key, _ = one_slot(scene, schedule=every_second("unverified_refuse"))
    refused = wait_for(lambda: refusals(scene), PATIENCE, "it is refused")[0]
    assert refused.key == key
    assert refused.reason.startswith("it can't be verified: ")
    assert scene.runs() == []
    nothing_left(scene, worker)


@pytest.mark.matrix("valkey", "redis+rabbitmq")
@pytest.mark.conf(broker_transport_options=IMPATIENT)
@pytest.mark.parametrize("task", ["fenced", "acks_late"])
def test_nothing_is_lost_while_the_ledger_and_the_broker_are_gone_together(scene: Scene, task: str) -> None:
    ledger_way = scene.proxy(scene.ledger.port)
    broker_way = scene.proxy(scene.rabbit.port if scene.rabbit else scene.ledger.port)
    broker = broker_way.amqp_url(scene.vhost) if scene.rabbit else broker_way.redis_url(scene.BROKER_DB)
    # In the moment between its arrival and the question to the ledger, everything goes.
    pause = """
import os, time

from celery.signals import task_prerun


@task_prerun.connect(weak=False)
def wait(**_):
    open(os.environ["LB_TAKEN"], "a").close()
    while not os.path.exists(os.environ["LB_GO"]):
        time.sleep(0.01)
"""
    taken, go = scene.directory / "taken", scene.directory / "go"
    worker = scene.start_worker(
        conf={"leaderbeat_redis_url": ledger_way.redis_url(scene.LEDGER_DB), "broker_connection_retry": True},
        env={
            **plugin(scene, pause, SOON),
            "CELERY_BROKER_URL": broker,
            "LB_TAKEN": str(taken),
            "LB_GO": str(go),
        },
    )
    key, _ = one_slot(scene, schedule=every_second(task))
    wait_for(taken.exists, PATIENCE, "the worker has the message")
    ledger_way.cut()
    broker_way.cut()
    go.touch()
    worker.wait_for_log("put off for", PATIENCE)
    wait_for(
        lambda: worker.find("can't be put off") or worker.find("Reject"), PATIENCE, "the broker is gone too"
    )
    assert scene.runs() == []
    ledger_way.resume()
    broker_way.resume()
    wait_for(lambda: all_done(scene), 60, lambda: f"done: {records(scene)}")
    assert len(starts(scene, key)) == 1


@pytest.mark.matrix("valkey")
def test_a_run_that_ends_while_redis_is_gone_is_recorded_afterwards(scene: Scene) -> None:
    worker, way = _behind_a_proxy(scene)
    key, _ = one_slot(scene, schedule=every_second("fenced", kwargs={"seconds": 4}))
    wait_for(lambda: starts(scene, key), PATIENCE, "the run begins")
    way.cut()
    wait_for(lambda: ends(scene, key), PATIENCE, "the body ends")
    assert state(scene, key) == "running"
    way.resume()
    wait_for(lambda: state(scene, key) == "done", PATIENCE, lambda: f"done: {scene.slot(key)}")
    assert len(starts(scene, key)) == 1
    assert worker.status == "running"


# How runs end


@pytest.mark.matrix("valkey")
def test_a_failing_run_is_recorded_with_its_reason(scene: Scene) -> None:
    scene.start_worker()
    key, _ = one_slot(scene, schedule=every_second("failing"))
    wait_for(lambda: state(scene, key) == "failed", PATIENCE, lambda: f"failed: {scene.slot(key)}")
    assert scene.slot(key)["reason"] == "RuntimeError('as the test wants it')"
    assert "finished_at" in scene.slot(key)
    assert len(starts(scene, key)) == 1
    assert counts(scene)["failed"] == len(scene.runs("fail"))


@pytest.mark.matrix("valkey")
def test_a_soft_time_limit_is_a_failure(scene: Scene) -> None:
    scene.start_worker(pool="prefork", concurrency=1)
    key, _ = one_slot(scene, schedule=every_second("soft_limited"))
    wait_for(lambda: state(scene, key) == "failed", PATIENCE, lambda: f"failed: {scene.slot(key)}")
    assert "SoftTimeLimitExceeded" in scene.slot(key)["reason"]


@pytest.mark.matrix("valkey+rabbitmq")
@pytest.mark.parametrize(("leave", "final"), [("ignore", "done"), ("reject", "failed")])
def test_a_body_that_ignores_or_rejects_its_message_has_run(scene: Scene, leave: str, final: str) -> None:
    worker = scene.start_worker()
    key, _ = one_slot(scene, schedule=every_second("acks_late", kwargs={"leave": leave}))
    wait_for(lambda: state(scene, key) == final, PATIENCE, lambda: f"{final}: {scene.slot(key)}")
    assert len(starts(scene, key)) == 1
    nothing_left(scene, worker)


@pytest.mark.matrix("valkey", "valkey+rabbitmq")
def test_a_body_that_puts_its_message_back_runs_again_at_once(scene: Scene) -> None:
    worker = scene.start_worker(env=plugin(scene, NOTES_REFUSALS))
    key, _ = one_slot(scene, schedule=every_second("acks_late", kwargs={"leave": "requeue"}))
    wait_for(lambda: state(scene, key) == "done", PATIENCE, lambda: f"done: {scene.slot(key)}")
    back, again = starts(scene, key)
    assert (back.redelivered, again.redelivered) == (False, True)
    assert again.t - back.t < 10, "no run lease is waited for"
    assert refusals(scene) == []
    nothing_left(scene, worker)
