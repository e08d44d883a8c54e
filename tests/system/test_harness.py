"""The harness itself: real workers and beats behave under pytest-celery's nodes as its containers do."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import redis

from tests.support.containers import LeaderbeatSetup
from tests.support.process import REPO, Process
from tests.support.proxy import Proxy
from tests.support.scene import Scene
from tests.support.servers import RedisServer, require
from tests.support.topologies import start_cluster, start_sentinels
from tests.support.waits import WaitTimeout, wait_for

pytestmark = pytest.mark.beats(3, scheduler="celery.beat.Scheduler")

EVERY_SECOND = {"every-second": {"task": "project.record", "every": 1.0}}


@pytest.mark.matrix("valkey", "redis+rabbitmq", long=("redis", "valkey+rabbitmq"))
def test_the_worker_answers_pings_and_the_beats_run(celery_setup: LeaderbeatSetup) -> None:
    assert celery_setup.ready(ping=True, control=True)
    assert len(celery_setup.beats) == 3
    assert len(celery_setup) == 6
    for beat in celery_setup.beats:
        beat.assert_log_exists("beat: Starting...", timeout=1)
        assert beat.status == "running"


@pytest.mark.schedule(EVERY_SECOND)
@pytest.mark.beats(1, scheduler="celery.beat.Scheduler")
@pytest.mark.matrix("valkey", long=("redis+rabbitmq",))
def test_publishes_and_runs_are_counted_apart(celery_setup: LeaderbeatSetup) -> None:
    wait_for(celery_setup.runs, 5, "a run")
    # A worker may be quicker than the beat, which notes its publish when the broker has taken it.
    wait_for(celery_setup.beat_publishes, 5, "a publish")
    sent, run = celery_setup.beat_publishes()[0], celery_setup.runs()[0]
    assert sent.pid == celery_setup.beats[0].pid
    assert run.pid == celery_setup.workers[0].pid
    assert sent.id == run.id
    assert sent.task == run.task == "project.record"
    assert abs(run.t - time.time()) < 10


@pytest.mark.matrix("valkey")
@pytest.mark.workers(0)
def test_a_killed_beat_can_be_restarted(celery_setup: LeaderbeatSetup) -> None:
    beat = celery_setup.beats[0]
    first = beat.pid
    beat.kill()
    assert beat.status == "exited"
    assert beat.exit_code == -signal.SIGKILL
    began = time.monotonic()
    beat.restart()
    assert time.monotonic() - began < 5
    assert beat.pid != first
    assert beat.logs().count("beat: Starting...") == 2
    assert len(beat.find("beat: Starting...")) == 1, "find looks past the latest start"


@pytest.mark.schedule(EVERY_SECOND)
@pytest.mark.beats(1, scheduler="celery.beat.Scheduler")
@pytest.mark.workers(0)
@pytest.mark.matrix("redis")
def test_a_frozen_beat_sends_nothing_until_it_thaws(celery_setup: LeaderbeatSetup) -> None:
    beat = celery_setup.beats[0]
    wait_for(celery_setup.publishes, 5, "a publish")
    beat.kill("SIGSTOP")
    wait_for(lambda: psutil.Process(beat.pid).status() == psutil.STATUS_STOPPED, 2, "the beat stops")
    assert beat.status == "running"
    sent = len(celery_setup.publishes())
    time.sleep(1.5)
    assert len(celery_setup.publishes()) == sent
    beat.kill("SIGCONT")
    wait_for(lambda: len(celery_setup.publishes()) > sent, 5, "the beat goes on")


@pytest.mark.matrix("valkey")
@pytest.mark.workers(0)
def test_sigterm_ends_a_beat_cleanly(celery_setup: LeaderbeatSetup) -> None:
    beat = celery_setup.beats[1]
    beat.kill("SIGTERM")
    assert beat.wait(5) == 0
    assert "Traceback" not in beat.logs()
    assert [other.status for other in celery_setup.beats] == ["running", "exited", "running"]


@pytest.mark.matrix("valkey")
@pytest.mark.beats(0)
@pytest.mark.workers(1, pool="prefork", concurrency=2)
def test_sigkill_takes_a_workers_children_along(celery_setup: LeaderbeatSetup) -> None:
    worker = celery_setup.workers[0]
    assert celery_setup.ready(ping=True)
    children = psutil.Process(worker.pid).children(recursive=True)
    assert len(children) >= 2
    worker.kill()
    psutil.wait_procs(children, timeout=3)
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.matrix("valkey")
def test_log_lines_have_their_times_and_a_mark_hides_the_past(scene: Scene) -> None:
    beat = scene.start_beat(scheduler="celery.beat.Scheduler")
    line = beat.wait_for_log(beat.ready_prompt)
    assert line.t == pytest.approx(time.time(), abs=5)
    assert line.level == "INFO"
    with pytest.raises(WaitTimeout, match=r"beat0 didn't log 'beat: Starting\.\.\.' within 0\.1 s"):
        beat.wait_for_log(beat.ready_prompt, 0.1, since=beat.mark())
    beat.kill()
    with pytest.raises(WaitTimeout, match="ended with status -9 without logging 'never'"):
        beat.wait_for_log("never", 60)


@pytest.mark.matrix("valkey", "valkey+rabbitmq")
@pytest.mark.schedule(EVERY_SECOND)
@pytest.mark.workers(0)
@pytest.mark.beats(1, scheduler="celery.beat.Scheduler", proxied=("broker",))
def test_a_beat_behind_a_proxy_can_be_cut_off_from_its_broker(celery_setup: LeaderbeatSetup) -> None:
    beat = celery_setup.beats[0]
    wait_for(celery_setup.publishes, 5, "a publish")
    assert beat.broker_proxy.accepted >= 1
    beat.broker_proxy.cut()
    time.sleep(0.05)
    sent = len(celery_setup.publishes())
    time.sleep(1.5)
    assert len(celery_setup.publishes()) == sent
    beat.broker_proxy.resume()
    wait_for(lambda: len(celery_setup.publishes()) > sent, 15, "the beat goes on")


def test_the_proxy_delays_freezes_cuts_and_resumes(redis_server: RedisServer) -> None:
    with Proxy(redis_server.port) as proxy:
        client = redis.Redis(port=proxy.port, socket_timeout=10, retry=None)
        impatient = redis.Redis(port=proxy.port, socket_timeout=0.3, retry=None)
        assert client.ping()
        proxy.delay(0.05)
        took = []
        for _ in range(3):
            began = time.monotonic()
            assert client.ping()
            took.append(time.monotonic() - began)
        assert 0.1 <= min(took) < 0.3
        proxy.resume()
        wait_for(impatient.ping, what="it is connected", ignore=(redis.TimeoutError,))
        proxy.freeze("down")
        with pytest.raises(redis.TimeoutError):
            impatient.incr("asked")
        wait_for(
            lambda: redis_server.client().get("asked") == "1", what="the request arrived, the answer didn't"
        )
        proxy.resume()
        wait_for(impatient.ping, what="it is connected", ignore=(redis.TimeoutError,))
        proxy.freeze("up")
        with pytest.raises(redis.TimeoutError):
            impatient.incr("asked")
        assert redis_server.client().get("asked") == "1", "the request didn't arrive"
        # What it has given up is thrown away with its connection.
        impatient.close()
        proxy.resume()
        proxy.cut()
        with pytest.raises(redis.ConnectionError):
            client.ping()
        proxy.resume()
        assert client.ping()
        client.close()


def test_a_server_comes_back_empty_on_the_same_port(start_redis) -> None:
    server = start_redis("valkey")
    server.client().set("a", "1")
    server.restart()
    assert server.client().get("a") is None


def test_nothing_is_left_when_the_test_run_is_killed(tmp_path: Path) -> None:
    code = (
        "import pathlib, os, sys, time\n"
        "from tests.support.process import Process\n"
        "p = Process(['sleep', '300'], name='sleeper', directory=pathlib.Path(sys.argv[1]))\n"
        "p.start(); print(p.pid, flush=True); time.sleep(60)\n"
    )
    runner = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        text=True,
    )
    with runner:
        assert runner.stdout is not None
        pid = int(runner.stdout.readline())
        assert psutil.pid_exists(pid)
        runner.kill()
    wait_for(lambda: not _alive(pid), 15, "the sleeper is gone")


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_process_can_be_started_again_after_it_has_ended(tmp_path: Path) -> None:
    process = Process(["sh", "-c", "echo $MARK"], name="echo", directory=tmp_path, env={"MARK": "here"})
    process.start()
    assert process.wait()["StatusCode"] == 0
    process.start()
    process.wait_for_log("here")
    assert process.exec_run("sh -c 'echo $MARK'") == (0, b"here\n")
    assert process.wait()["StatusCode"] == 0
    assert process.logs() == b"here\nhere\n"
    process.stop()


@pytest.mark.parametrize("name", ["valkey"])
def test_a_cluster_and_sentinels_can_be_had(name: str, tmp_path: Path) -> None:
    cluster = start_cluster(require(name), tmp_path / "cluster")
    try:
        with redis.RedisCluster.from_url(cluster.url()) as client:
            assert client.set("a", "1")
            assert client.get("a") == b"1"
    finally:
        cluster.stop()
    group = start_sentinels(require(name), tmp_path / "sentinels")
    try:
        group.primary.kill()
        wait_for(lambda: group.primary_port() == group.replica.port, 15, "the replica takes over")
    finally:
        group.stop()


def _dial(port: int, stopped: threading.Event) -> None:
    """Connect again and again."""
    with contextlib.ExitStack() as dialled, contextlib.suppress(OSError):
        while not stopped.is_set():
            dialled.enter_context(socket.create_connection(("127.0.0.1", port), 1.0))


def test_a_proxy_that_stops_while_somebody_connects_leaves_no_socket_open() -> None:
    """What is left open fails a test by its warning, and as a rule another one's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        for _ in range(5):
            stopped = threading.Event()
            with Proxy(server.getsockname()[1]) as proxy:
                dialler = threading.Thread(target=_dial, args=(proxy.port, stopped))
                dialler.start()
                wait_for(lambda: proxy.accepted, what="it accepts")
            stopped.set()
            dialler.join()
    gc.collect()
