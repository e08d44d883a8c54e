"""Beats that aren't `celery beat` in the foreground: inside workers, in a thread, forked, detached."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_leaderbeat.ledger import Ledger
from tests.support.history import events
from tests.support.process import REPO
from tests.support.scene import PROJECT, SCHEDULER, Scene, Worker, leader
from tests.support.waits import wait_for

pytestmark = [
    pytest.mark.matrix("valkey"),
    pytest.mark.schedule({"tick": {"task": "project.fenced", "every": 1.0, "policy": {"catch_up": "all"}}}),
]

EMBEDDED = ("-B", "--scheduler", "leaderbeat")


def _sockets(pid: int) -> set[str]:
    """The sockets that a process has open, by their inodes; without its standard streams."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(descriptor)
            if target.startswith("socket:") and int(descriptor.name) > 2:
                found.add(target)
    return found


def _assert_nothing_twice(scene: Scene) -> None:
    for records in (scene.publishes(), scene.runs()):
        counts = Counter(record.key for record in records)
        assert counts
        assert max(counts.values()) == 1


def _python(scene: Scene, source: str, timeout: float = 40) -> Any:
    """What a program says as JSON; it has the project's `app` and the scheduler's name."""
    scene.directory.mkdir(exist_ok=True)
    head = f"from {PROJECT} import app\nSCHEDULER = {SCHEDULER!r}\n"
    env = {**os.environ, **{key: value for key, value in scene.env().items() if value is not None}}
    done = subprocess.run(
        [sys.executable, "-c", head + source],
        env=env,
        cwd=scene.directory,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks into /proc")
@pytest.mark.parametrize("pool", ["prefork", "solo", "threads"])
def test_a_beat_inside_a_worker_shares_no_connection_and_releases_its_lease_when_the_worker_stops(
    scene: Scene, ledger: Ledger, pool: str
) -> None:
    worker: Worker = scene.start_worker(pool=pool, args=EMBEDDED)
    first = wait_for(scene.lease, 10, "the embedded beat leads")
    wait_for(lambda: scene.runs("end"), 10, "a slot has run")
    assert first.pid != worker.pid, "it is a process of its own"
    assert len(_sockets(first.pid)) >= 3, "the elector, the listener and the publisher have theirs"
    assert not _sockets(first.pid) & _sockets(worker.pid)
    other = scene.start_beat()
    other.wait_for_log("Standing by for")
    worker.terminate()
    assert leader(scene) is other
    worker.wait(10)
    assert events(ledger, "elected")[-1]["why"] == "released"
    assert "Traceback" not in worker.text(0)
    _assert_nothing_twice(scene)


def test_a_beat_inside_a_worker_that_is_killed_is_replaced_by_one_in_another_worker(scene: Scene) -> None:
    workers = [scene.start_worker(pool=pool, args=EMBEDDED) for pool in ("prefork", "threads")]
    first = wait_for(scene.lease, 10, "an embedded beat leads")
    wait_for(lambda: len(scene.runs("end")) >= 2, 10, "slots have run")
    os.kill(first.pid, signal.SIGKILL)
    second = wait_for(
        lambda: (now := scene.lease()) and now.epoch > first.epoch and now, 10, "the other one leads"
    )
    assert second.pid != first.pid
    runs = len(scene.runs("end"))
    wait_for(lambda: len(scene.runs("end")) >= runs + 2, 10, "slots run again")
    assert all(worker.status == "running" for worker in workers)
    _assert_nothing_twice(scene)


def test_a_green_pool_refuses_a_beat_inside_and_says_what_to_do(scene: Scene) -> None:
    pytest.importorskip("gevent")
    worker = scene.start_worker(pool="gevent", args=EMBEDDED, wait=False)
    worker.wait(20)
    assert worker.exit_code != 0
    assert "-B option doesn't work with eventlet/gevent pools" in worker.text(0)
    assert scene.lease() is None


def test_a_beat_in_a_thread_leads_and_stops_in_order(scene: Scene) -> None:
    said = _python(
        scene,
        """
import json, threading, time
from celery.beat import EmbeddedService
from celery_leaderbeat.ledger import Ledger

service = EmbeddedService(app, thread=True, scheduler_cls=SCHEDULER)
service.start()
ledger = Ledger.for_app(app)
deadline = time.monotonic() + 20
while ledger.counts().get("sent", 0) < 2 and time.monotonic() < deadline:
    time.sleep(0.02)
leads, sent = ledger.leader() is not None, ledger.counts().get("sent", 0)
began = time.monotonic()
service.stop()
took = time.monotonic() - began
service.join(5)
left = ledger.leader()
service.service.scheduler.close()
deadline = time.monotonic() + 5
while (alive := [t.name for t in threading.enumerate() if t.name.startswith("leaderbeat")]) and time.monotonic() < deadline:
    time.sleep(0.02)
print(json.dumps([leads, sent >= 2, left is None, service.is_alive(), alive, took < 3]))
""",
    )
    assert said == [True, True, True, False, [], True]


def test_a_forked_child_of_a_leader_starts_anew_and_leaves_the_parents_lease_alone(scene: Scene) -> None:
    said = _python(
        scene,
        """
import json, os, sys, time, warnings
from celery_leaderbeat import Scheduler
from celery_leaderbeat.ledger import Ledger

def sockets():
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            pass
    return {link for link in links if link.startswith("socket:")}

def tick_until(condition):
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(min(scheduler.tick(), 0.05))

scheduler = Scheduler(app)
ledger = Ledger.for_app(app)
tick_until(lambda: ledger.counts().get("sent", 0) >= 1)
before, held = ledger.leader(), sockets()
assert before.pid == os.getpid()
# From Python 3.12 on, a fork of a process with threads is warned about; that is what is tried here.
warnings.simplefilter("ignore", DeprecationWarning)
child = os.fork()
if child == 0:
    try:
        own = Ledger.for_app(app)
        known = set(own.replicas())
        tick_until(lambda: set(own.replicas()) > known)
        fresh = sockets() - held
        assert len(set(own.replicas()) - known) == 1, own.replicas()
        assert len(fresh) >= 3, "the reader, the elector and the listener have their own"
        assert own.leader().value == before.value
        scheduler.close()
        assert own.leader().value == before.value
        os._exit(0)
    except BaseException as exc:
        sys.stderr.write(repr(exc))
    finally:
        os._exit(1)
status = None
while status is None:
    time.sleep(min(scheduler.tick(), 0.05))
    pid, code = os.waitpid(child, os.WNOHANG)
    status = os.waitstatus_to_exitcode(code) if pid else None
sent = ledger.counts()["sent"]
tick_until(lambda: ledger.counts()["sent"] > sent)
after = ledger.leader()
scheduler.close()
print(json.dumps([status, after.value == before.value, ledger.counts()["sent"] > sent, ledger.leader() is None]))
""",
    )
    assert said == [0, True, True, True]
    counts = Counter(record.key for record in scene.publishes())
    assert max(counts.values()) == 1


def _detach(scene: Scene, conf: dict[str, Any] | None = None) -> tuple[Path, Path]:
    """Start a detached beat: the files of its process id and its log."""
    directory = scene.directory
    directory.mkdir(exist_ok=True)
    pidfile, log = directory / "beat.pid", directory / "beat.log"
    env = {**os.environ, **{key: value for key, value in scene.env(conf=conf).items() if value is not None}}
    arguments = ["-S", SCHEDULER, "--detach", "--pidfile", str(pidfile), "--logfile", str(log), "-l", "INFO"]
    subprocess.run(
        [sys.executable, "-m", "celery", "-A", PROJECT, "beat", *arguments],
        env=env,
        cwd=REPO,
        check=True,
        timeout=20,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return pidfile, log


@contextlib.contextmanager
def _detached(scene: Scene) -> Iterator[tuple[int, Path, Path]]:
    """A detached beat: its process id, the file that holds it, and its log."""
    pidfile, log = _detach(scene)
    pid = int(wait_for(lambda: pidfile.exists() and pidfile.read_text().strip(), 10, "the pid file"))
    try:
        yield pid, pidfile, log
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_detached_beat_that_cant_start_says_so_in_its_log(scene: Scene) -> None:
    pidfile, log = _detach(scene, {"leaderbeat_lease_ttl": "long"})
    message = "This beat can't start: leaderbeat_lease_ttl is 'long': it must be a number of seconds above 0."
    wait_for(lambda: log.exists() and message in log.read_text(), 10, "the log says why")
    wait_for(lambda: not pidfile.exists(), 5, "the pid file is gone")
    assert "Traceback" not in log.read_text()


def test_a_detached_beat_leads_logs_to_its_file_and_stops_in_order(scene: Scene, ledger: Ledger) -> None:
    with _detached(scene) as (pid, pidfile, log):
        lease = wait_for(scene.lease, 10, "the detached beat leads")
        assert lease.pid == pid, "what ticks is the process that was left after the forks"
        wait_for(lambda: len(scene.publishes()) >= 2, 10, "it sends")
        began = time.monotonic()
        os.kill(pid, signal.SIGTERM)
        wait_for(lambda: not pidfile.exists(), 5, "the pid file is gone")
        assert time.monotonic() - began < 3
        assert scene.lease() is None
        assert [event["reason"] for event in events(ledger, "released")] == ["its replica stops"]
        text = log.read_text()
        assert re.search(r"Elected: this replica \(\S+\) leads under epoch \d+", text)
        assert "Traceback" not in text
