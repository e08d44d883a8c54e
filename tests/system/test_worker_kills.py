"""Many workers are killed at random moments of a task that is run to completion.

`LEADERBEAT_KILLS=200` kills so many, in place of the few that fit into every test run.
"""

from __future__ import annotations

import os
import random
import statistics
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

    def all_done() -> bool:
        open_keys.difference_update([key for key in open_keys if state(scene, key) == "done"])
        return not open_keys

    wait_for(
        all_done,
        PATIENCE + KILLS / 4,
        lambda: f"all is done: {[scene.slot(key) for key in open_keys]}",
        interval=0.2,
    )
    keys = {sent.key for sent in scene.beat_publishes() if sent.t <= last.timestamp()}

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
        assert set(audit.counts) == {"done"}

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
        f" {twice} bodies ended and were killed before they could say so, {len(falsely)} runs taken for dead",
    )
    assert max(delays) <= LEASE + SWEEP + MARGIN


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
