"""Run leases in real workers: renewed by one thread of each process, so that long runs aren't started twice.

`LEADERBEAT_LEASES=100` lets the runs last for so many leases, in place of the few that fit into every test run.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter

import pytest

from tests.support.history import due_since, once, plugin, run_lease
from tests.support.scene import Scene, keys_of
from tests.support.waits import wait_for
from tests.system.test_workers import PATIENCE, state

LEASES = int(os.environ.get("LEADERBEAT_LEASES", "3"))
#: Seconds: a run lease, of which a busy machine may keep a worker from renewing it for two thirds, and what a run takes.
LEASE = 3.0
LASTS = LEASES * LEASE
RUNS = 3

NOTES_RENEWALS = """
import json, os

from celery_leaderbeat.ledger import Ledger

_renew = Ledger.renew_runs


def _note(self, runs, run_lease):
    line = json.dumps({"pid": os.getpid(), "runs": len(runs)}) + "\\n"
    descriptor = os.open(os.environ["LB_RENEWALS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(descriptor, line.encode())
    os.close(descriptor)
    return _renew(self, runs, run_lease)


Ledger.renew_runs = _note
"""


@pytest.mark.matrix("valkey")
@pytest.mark.timeout(120 + 2 * LEASES)
@pytest.mark.schedule(
    {
        f"job-{number}": once("acks_late", policy={"on_crash": "rerun"}, kwargs={"seconds": LASTS})
        for number in range(RUNS)
    }
)
@pytest.mark.parametrize(("pool", "processes"), [("prefork", RUNS), ("threads", 1), ("gevent", 1)])
def test_runs_of_many_leases_are_not_started_twice_and_one_thread_of_each_process_renews_them(
    scene: Scene, pool: str, processes: int
) -> None:
    due_since(scene)
    notes = scene.directory / "renewals.jsonl"
    env = {**plugin(scene, run_lease(LEASE), NOTES_RENEWALS), "LB_RENEWALS": str(notes)}
    scene.start_worker(pool=pool, concurrency=RUNS + 1, env=env)
    beat = scene.start_beat()
    wait_for(lambda: len(scene.runs()) == RUNS, PATIENCE, "all run")
    began = time.time()
    wait_for(
        lambda: [state(scene, key) for key in keys_of(scene.runs())] == ["done"] * RUNS,
        LASTS + PATIENCE,
        lambda: f"all are done: {[scene.slot(key) for key in keys_of(scene.runs())]}",
    )
    assert len(scene.runs("end")) == len(scene.runs()) == len(scene.beat_publishes()) == RUNS
    assert all(
        end.t - start.t >= LASTS - 0.1
        for end in scene.runs("end")
        for start in scene.runs()
        if end.key == start.key
    )
    assert not beat.find("died")
    renewals = [json.loads(line) for line in notes.read_text().splitlines()]
    each = Counter(line["pid"] for line in renewals)
    assert len(each) == processes
    assert max(line["runs"] for line in renewals) == RUNS // processes, "all runs of the process at once"
    # A busy machine makes renewals late; two threads would make twice as many.
    assert max(each.values()) <= 3 * (time.time() - began) / LEASE + 3
    assert min(each.values()) >= LEASES
