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

from tests.support.scene import Beat, Scene, Worker, keys_of, leader
from tests.support.waits import wait_for, wait_until_steady

#: Every second is also what a retry or a put-off message waits for; the machine may be busy with others.
PATIENCE = 40.0

SHORT_LEASE = """
import celery_leaderbeat.task

celery_leaderbeat.task._RUN_LEASE = 2.0
"""

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
        lines = (scene.directory / "refused.jsonl").read_text().splitlines()
        return [SimpleNamespace(**json.loads(line)) for line in lines]
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


def waiting(scene: Scene, queue: str = "celery") -> int:
    """How many messages wait in a queue, with those that Redis holds for a worker."""
    if scene.rabbit:
        with Connection(scene.broker_url) as connection:
            return connection.default_channel.queue_declare(queue, passive=True).message_count
    client = scene.ledger.client(scene.BROKER_DB)
    return client.llen(queue) + client.hlen("unacked")


def nothing_left(scene: Scene, worker: Worker, queue: str = "celery") -> None:
    """Everything is acknowledged: stop the worker, and the queue is empty."""
    worker.terminate()
    worker.wait(20)
    assert waiting(scene, queue) == 0


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
    """Have a leader send slots until one is out, and stop it; the oldest tick key and the beat."""
    beat = scene.start_beat(**options)
    wait_for(scene.beat_publishes, PATIENCE, "a slot is sent")
    beat.terminate()
    beat.wait()
    return scene.beat_publishes()[0].key, beat


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
    beat.terminate()
    beat.wait()
    wait_for(lambda: all_done(scene), PATIENCE, lambda: f"all done: {records(scene)}")
    published = {record.key: record for record in scene.beat_publishes()}
    runs = scene.runs()
    assert Counter(keys_of(runs)) == Counter(published), "each slot ran once"
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
@pytest.mark.schedule(every_second("fenced", kwargs={"seconds": 0.7}))
def test_the_record_of_a_slot_shows_each_of_its_states(scene: Scene) -> None:
    seen: dict[str, list[str]] = {}

    def look() -> bool:
        for key, record in records(scene).items():
            before = seen.setdefault(key, [])
            if not before or before[-1] != record["state"]:
                before.append(record["state"])
        return any(steps[-1] == "done" for steps in seen.values())

    # The message waits for a moment before it is published, and another until a worker takes it.
    slow = "import time\nfrom celery.signals import before_task_publish\n"
    slow += "before_task_publish.connect(lambda **_: time.sleep(0.3), weak=False)\n"
    beat = scene.start_beat(env=plugin(scene, slow))
    wait_for(lambda: look() or "sent" in sum(seen.values(), []), PATIENCE, "a slot is sent")
    scene.start_worker()
    wait_for(look, PATIENCE, lambda: f"a slot is done: {seen}")
    beat.kill()
    assert next(steps for steps in seen.values() if steps[-1] == "done") == [
        "claimed",
        "sent",
        "running",
        "done",
    ]


# Work that waits in the queue over a change of leaders


@pytest.mark.matrix("valkey", "redis+rabbitmq")
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
    workers = [scene.start_worker(pool="threads", concurrency=2, wait=False, loglevel="WARNING") for _ in "ab"]
    wait_for(lambda: len(scene.runs("end")) >= len(published), 60, lambda: f"{len(scene.runs('end'))} ran")
    wait_for(lambda: counts(scene).get("done") == len(published), PATIENCE, lambda: f"all done: {counts(scene)}")
    wait_until_steady(lambda: len(scene.runs()), 0.5)
    assert Counter(keys_of(scene.runs())) == Counter(keys_of(published))
    assert "refused" not in counts(scene)
    for worker in workers:
        assert not worker.find("refused")


@pytest.mark.matrix("valkey", "valkey+rabbitmq")
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


@pytest.mark.matrix("valkey", "redis+rabbitmq")
def test_a_run_that_waits_for_its_retry_holds_its_slot(scene: Scene, hand: Celery) -> None:
    """Between the run and its retry by countdown, no copy of the message can start the slot."""
    worker = scene.start_worker(env=plugin(scene, NOTES_REFUSALS))
    key, _ = one_slot(scene, schedule=every_second("retrying", kwargs={"times": 1, "countdown": 3}))
    wait_for(lambda: state(scene, key) == "retrying", PATIENCE, lambda: f"retrying: {scene.slot(key)}")
    send_copy(hand, scene.beat_publishes()[0], "project.retrying")
    (refused,) = wait_for(lambda: refusals(scene), PATIENCE, "the copy is refused")
    assert (refused.key, refused.reason) == (key, "the slot waits for its retry")
    wait_for(lambda: state(scene, key) == "done", PATIENCE, lambda: f"done: {scene.slot(key)}")
    first, second = starts(scene, key)
    assert (first.retries, second.retries) == (0, 1)
    assert second.t - first.t >= 3
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


@pytest.mark.schedule(every_second("fenced", policy={"prefer": "duplicate"}))
def test_the_message_of_an_older_epoch_is_refused_once_a_newer_one_claimed_its_slot(scene: Scene) -> None:
    """The first leader dies with its message at the broker and the slot unconfirmed; the next sends it again."""
    scene.start_beat(env=plugin(scene, DIES_AFTER_A_PUBLISH)).wait(PATIENCE)
    (old,) = scene.beat_publishes()
    second = scene.start_beat()
    wait_for(lambda: sent_keys(scene).count(old.key) == 2, PATIENCE, lambda: f"sent again: {scene.slot(old.key)}")
    second.terminate()
    second.wait()
    new = next(record for record in scene.beat_publishes() if record.key == old.key and record.pid == second.pid)
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


@pytest.mark.matrix("valkey", "redis+rabbitmq")
def test_copies_of_a_running_and_of_a_done_slot_are_refused(scene: Scene, hand: Celery) -> None:
    worker = scene.start_worker(pool="threads", concurrency=4, env=plugin(scene, NOTES_REFUSALS))
    key, _ = one_slot(scene, schedule=every_second("fenced", kwargs={"seconds": 4}))
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
    key, _ = one_slot(scene, schedule=every_second("fenced_observed", options={"queue": "early"}))
    epoch = scene.beat_publishes()[0].epoch
    early = scene.start_worker(args=("-Q", "early"))
    wait_for(lambda: starts(scene, key), PATIENCE, "nothing newer was seen yet: it runs")
    early.terminate()
    early.wait(20)
    # Two more leaders send, and the worker gets the later one's message first.
    late, _ = one_slot(scene, schedule={"late": {**every_second("fenced_observed", options={"queue": "early"})["tick"]}})
    late = next(sent.key for sent in scene.beat_publishes() if sent.key.startswith("late@"))
    newest, _ = one_slot_of(scene, "newest", options={"queue": "second"})
    second = scene.start_worker(args=("-Q", "second"))
    wait_for(lambda: starts(scene, newest), PATIENCE, "the newest runs")
    first = scene.start_worker(args=("-Q", "early"), env=plugin(scene, NOTES_REFUSALS))
    refused = wait_for(lambda: refusals(scene), PATIENCE, "the older one is refused")[0]
    seen = starts(scene, newest)[0].epoch
    assert (refused.key, refused.reason) == (late, f"the task has seen epoch {seen}")
    assert epoch < refused.epoch < seen
    assert not starts(scene, late)
    assert second.status == first.status == "running"


def one_slot_of(scene: Scene, entry: str, **fields: Any) -> tuple[str, Beat]:
    """As `one_slot`, for an entry of the observed task under another name."""
    beat = scene.start_beat(schedule={entry: {"task": "project.fenced_observed", "every": 1.0, **fields}})

    def sent() -> list[str]:
        return [key for key in sent_keys(scene) if key.startswith(f"{entry}@")]

    wait_for(sent, PATIENCE, f"a slot of {entry} is sent")
    beat.terminate()
    beat.wait()
    return sent()[0], beat
