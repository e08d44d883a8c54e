"""Many workers are killed at random moments of a task that is run to completion.

`LEADERBEAT_KILLS=200` kills so many, in place of the few that fit into every test run.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timezone

import pytest

from celery_leaderbeat.ledger import Ledger
from tests.support.history import events, intervals, plugin, run_lease, unexplained
from tests.support.scene import Scene, Worker, keys_of, leader
from tests.support.waits import wait_for
from tests.system.test_workers import PATIENCE, state

KILLS = int(os.environ.get("LEADERBEAT_KILLS", "12"))
SEED = 20261002
WORKERS = 5
#: Seconds: what a run takes, its lease, the leader's sweep, and what a busy machine adds.
BODY, LEASE, SWEEP, MARGIN = 1.0, 1.0, 2.0, 1.5

#: Seconds after which the broker has given back what a killed worker held, and it has been held and put off again.
_COMES_BACK = 12.0

RERUN = {"on_crash": "rerun", "max_attempts": 50, "catch_up": "all"}
SCHEDULE = {
    name: {"task": "project.acks_late", "every": 2.0, "kwargs": {"seconds": BODY}, "policy": RERUN}
    for name in ("first", "second")
}


class Killer:
    """Kills workers, and starts others in their place."""

    def __init__(self, scene: Scene, seed: int) -> None:
        self._scene = scene
        self._random = random.Random(seed)
        self._env = plugin(scene, run_lease(LEASE))
        self.alive: list[Worker] = [self._start() for _ in range(WORKERS)]
        self.killed: dict[int, float] = {}

    def _start(self) -> Worker:
        return self._scene.start_worker(env=self._env, wait=False)

    def kill(self) -> None:
        """One round: some workers, each at a moment of its own; most of them while they run something."""
        victims = {self._victim() for _ in range(self._random.choice((1, 1, 2, 3)))}
        for victim in victims:
            # The fault's own moment, not a wait for something to happen.
            time.sleep(self._random.uniform(0, BODY) / len(victims))
            self.killed[victim.pid] = time.time()
            victim.kill()
            self.alive[self.alive.index(victim)] = self._start()

    def _victim(self) -> Worker:
        def busy() -> list[Worker]:
            pids = {run.pid for run in intervals(self._scene) if run.end == float("inf")}
            return [worker for worker in self.alive if worker.pid in pids]

        running = wait_for(busy, PATIENCE, "a worker runs something", interval=0.1)
        return self._random.choice(running if self._random.random() < 0.85 else self.alive)


@pytest.mark.matrix("valkey", "redis+rabbitmq")
@pytest.mark.timeout(120 + 6 * KILLS)
@pytest.mark.conf(
    worker_prefetch_multiplier=1,
    # What a worker had taken and not begun comes back.
    broker_transport_options={"visibility_timeout": 3, "unacked_restore_interval": 1},
    leaderbeat_events=1_000_000,
)
@pytest.mark.schedule(SCHEDULE)
def test_workers_killed_at_random_moments_lose_nothing_and_each_slot_is_done_once(
    scene: Scene, ledger: Ledger, tell: Callable[[str, str], None]
) -> None:
    began = datetime.now(timezone.utc)
    killer = Killer(scene, SEED)
    scene.start_beat()
    leader(scene)
    while len(killer.killed) < KILLS:
        killer.kill()
    last = datetime.now(timezone.utc)
    open_keys = set(keys_of(scene.beat_publishes()))
    dropped: set[str] = set()

    def all_done() -> bool:
        open_keys.difference_update([key for key in open_keys if state(scene, key) == "done"])
        dropped.update(key for key in open_keys if is_dropped(scene, key, killer.killed))
        open_keys.difference_update(dropped)
        return not open_keys

    wait_for(
        all_done,
        PATIENCE + KILLS / 4,
        lambda: f"all is done: {[scene.slot(key) for key in open_keys]}",
        interval=0.2,
    )
    assert len(dropped) <= 1 + KILLS // 100
    keys = {sent.key for sent in scene.beat_publishes() if sent.t <= last.timestamp()} - dropped

    effects = {run.key for run in scene.runs("end")}
    assert keys <= effects, "nothing is lost"
    done = Counter(event["key"] for event in events(ledger, "done"))
    assert {done[key] for key in keys} == {1}, "one completion of each slot is accepted"
    started = Counter((event["key"], event["attempt"]) for event in events(ledger, "started"))
    assert max(started.values()) == 1, "each attempt begins once"
    assert events(ledger, "abandoned") == []
    for name in SCHEDULE:
        audit = ledger.audit(name, began, last)
        assert unexplained(audit) == []
        assert {slot.key for slot in audit.slots if slot.end != "done"} <= dropped

    delays = restart_delays(scene, ledger, killer.killed)
    assert delays, "none was killed in mid-run"
    falsely = [event for event in events(ledger, "died") if worker_pid(event["reason"]) not in killer.killed]
    twice = sum(count - 1 for count in Counter(run.key for run in scene.runs("end")).values())
    tell(
        "worker kills",
        f"{scene.broker_url.partition(':')[0]}: {len(killer.killed)} workers killed, {len(delays)} of them in mid-run;"
        f" sent again after {statistics.median(delays):.2f} s (median), {max(delays):.2f} s (longest),"
        f" run lease {LEASE:g} s + sweep {SWEEP:g} s; {len(keys)} slots, at most"
        f" {max(int(event['attempt']) for event in events(ledger, 'started'))} attempts,"
        f" {twice} bodies ended and were killed before they could say so, {len(falsely)} runs taken for dead,"
        f" {len(dropped)} messages dropped by the transport",
    )
    assert max(delays) <= LEASE + SWEEP + MARGIN


def is_dropped(scene: Scene, key: str, killed: dict[int, float]) -> bool:
    """Whether the transport lost the message of a slot: no list has it, and a worker was killed since it was sent.

    Kombu takes a message off the list of a Redis broker, and notes then that the worker holds it. Whoever is killed
    between the two takes it along.
    """
    record = scene.slot(key)
    sent_at = int(record.get("sent_at", 0)) / 1000
    if scene.rabbit or record.get("state") != "sent" or time.time() - sent_at < _COMES_BACK:
        return False
    broker = scene.ledger.client(db=scene.BROKER_DB)
    lists = [name for name in broker.scan_iter("celery*") if broker.type(name) == "list"]
    held = [text for name in lists for text in broker.lrange(name, 0, -1)] + broker.hvals("unacked")
    return not any(record["task_id"] in text for text in held) and max(killed.values()) > sent_at


@pytest.mark.matrix("valkey")
@pytest.mark.schedule({"job": {"task": "project.acks_late", "every": 0.5, "policy": RERUN}})
def test_a_message_that_a_worker_takes_off_the_list_as_it_is_killed_is_dropped_by_the_transport(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits in its list isn't. The worker stands still between the two steps: it has asked for a message."""
    monkeypatch.setattr(sys.modules[__name__], "_COMES_BACK", 0.0)
    worker = scene.start_worker()
    scene.start_beat()
    wait_for(lambda: scene.runs("end"), PATIENCE, "it takes messages")
    broker = scene.ledger.client(db=scene.BROKER_DB)
    wait_for(
        lambda: not broker.hlen("unacked") and [one for one in broker.client_list() if "b" in one["flags"]],
        PATIENCE,
        "it has asked for the next",
        interval=0.005,
    )
    worker.freeze()
    sent = len(scene.beat_publishes())
    wait_for(lambda: len(scene.beat_publishes()) >= sent + 3, PATIENCE, "more are sent")
    worker.kill()
    keys = keys_of(scene.beat_publishes())
    wait_for(lambda: state(scene, keys[-1]) == "sent", PATIENCE, "the last is confirmed")
    killed = {worker.pid: time.time()}
    assert len([key for key in keys if is_dropped(scene, key, killed)]) == 1
    assert not is_dropped(scene, keys[-1], killed)


def worker_pid(reason: str) -> int:
    """The process in `its run on <host>:<pid> died`."""
    return int(reason.removeprefix("its run on ").partition(" ")[0].rpartition(":")[2])


def restart_delays(scene: Scene, ledger: Ledger, killed: dict[int, float]) -> list[float]:
    """For each run that was killed: the seconds until its slot was sent again."""
    done = {(event["key"], event["attempt"]) for event in events(ledger, "done")}
    sent: dict[tuple[str, int], float] = {
        (message.key, int(message.attempt)): message.t for message in reversed(scene.beat_publishes())
    }
    delays = []
    for event in events(ledger, "started"):
        pid, attempt = int(event["worker"].rpartition(":")[2]), int(event["attempt"])
        # A worker that was thought dead before it was killed is no measure.
        if pid in killed and (event["key"], event["attempt"]) not in done:
            delay = sent[event["key"], attempt + 1] - killed[pid]
            delays += [delay] if delay >= 0 else []
    return delays
