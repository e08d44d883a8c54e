"""Jobs outside Celery: processes fire the same slots, are killed and frozen, and each slot has one end."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Ignore, Retry

from celery_leaderbeat import SettingsError, StaleTick, StoreUnavailable, Tick, singleton
from celery_leaderbeat.ledger import Ledger
from celery_leaderbeat.singleton import Outcome, look_up, run_once, run_to_completion
from celery_leaderbeat.store import Store
from tests.support.process import REPO, Process
from tests.support.servers import RedisServer, free_port
from tests.support.waits import wait_for

SLOT = datetime(2026, 10, 2, 3, tzinfo=timezone.utc)
#: Seconds. Short, but longer than a pause of a busy machine.
LEASE = 1.5
BOTH = pytest.mark.parametrize("function", [run_once, run_to_completion])


@pytest.fixture
def server(redis_servers: Callable[[str], RedisServer]) -> RedisServer:
    """An empty server."""
    server = redis_servers("valkey")
    server.flush()
    return server


def _app(url: str) -> Celery:
    app = Celery("jobs", broker="memory://", set_as_current=False)
    app.conf.leaderbeat_redis_url = url
    app.conf.leaderbeat_key_prefix = "singleton"
    return app


@pytest.fixture
def app(server: RedisServer) -> Iterator[Celery]:
    """The app of the test process, which fires jobs as any other."""
    app = _app(server.url())
    yield app
    Ledger.for_app(app).close()


class Jobs:
    """Processes that fire jobs, in one directory, and what they have noted there."""

    def __init__(self, directory: Path, url: str) -> None:
        self.directory = directory
        self.url = url
        self.processes: list[Process] = []

    def start(self, how: str | list[str], *slots: int, begin: bool = True, **more: Any) -> Process:
        if begin:
            self.touch("start")
        what = {"url": self.url, "how": how, "slots": slots or [0], **more}
        process = Process(
            [sys.executable, "-m", "tests.support.singleton_job", json.dumps(what)],
            name=f"job{len(self.processes)}",
            directory=self.directory,
            env={"PYTHONPATH": str(REPO)},
        )
        self.processes.append(process)
        process.start()
        return process

    def touch(self, name: str) -> None:
        (self.directory / name).touch()

    def lines(self, event: str) -> list[dict[str, Any]]:
        path = self.directory / "lines"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in lines if line["event"] == event]

    def wait(self, event: str, count: int = 1) -> list[dict[str, Any]]:
        wait_for(
            lambda: len(self.lines(event)) >= count, 20, lambda: f"{count} lines {event}\n{self.tails()}"
        )
        return self.lines(event)

    def ended(self) -> None:
        """All processes end as they should."""
        for process in self.processes:
            process.wait(20)
            assert process.exit_code == 0, process.tail()

    def tails(self) -> str:
        return "\n".join(process.tail() for process in self.processes)


@pytest.fixture
def jobs(server: RedisServer, tmp_path: Path) -> Iterator[Jobs]:
    jobs = Jobs(tmp_path, server.url())
    yield jobs
    for process in jobs.processes:
        process.stop()


def _never() -> None:
    pytest.fail("it was run")


# Processes


def test_ten_slots_that_five_processes_fire_run_ten_times(jobs: Jobs, app: Celery) -> None:
    ways = ["run_once", "run_to_completion"]
    for _ in range(5):
        jobs.start(ways, *range(10), begin=False)
    jobs.wait("ready", 5)
    jobs.touch("start")
    jobs.ended()
    keys = {f"{how}@2026-10-02T03:{number:02}:00Z" for how in ways for number in range(10)}
    assert Counter(line["key"] for line in jobs.lines("effect")) == Counter(keys)
    outcomes = jobs.lines("outcome")
    assert len(outcomes) == 100
    ran = [line for line in outcomes if line["ran"]]
    assert Counter((line["how"], line["number"]) for line in ran) == Counter(
        (how, number) for how in ways for number in range(10)
    )
    assert {line["state"] for line in ran} == {"done"}
    assert {line["value"] for line in ran} <= {f"by {process.pid}" for process in jobs.processes}
    assert {line["state"] for line in outcomes if line["how"] == "run_once"} <= {"running", "done"}
    assert {line["state"] for line in outcomes if line["how"] == "run_to_completion"} == {"done"}
    workers = {(line["how"], line["number"]): line["worker"] for line in ran}
    assert all(line["worker"] == workers[line["how"], line["number"]] for line in outcomes)


def test_the_run_of_a_killed_process_is_completed_by_another_after_its_lease(jobs: Jobs, app: Celery) -> None:
    victim = jobs.start("run_to_completion", hold=True, options={"lease": LEASE})
    jobs.wait("effect")
    victim.kill()
    killed = time.monotonic()
    ticks: list[Tick] = []
    outcome = run_to_completion("run_to_completion", SLOT, ticks.append, app=app, lease=LEASE)
    assert LEASE / 3 < time.monotonic() - killed < LEASE + 5
    assert (outcome.ran, outcome.state, outcome.attempt) == (True, "done", 2)
    assert (ticks[0].key, ticks[0].slot, ticks[0].attempt, ticks[0].epoch) == (
        "run_to_completion@2026-10-02T03:00:00Z",
        SLOT,
        2,
        0,
    )
    record = look_up("run_to_completion", SLOT, app=app)
    assert record is not None
    assert (record.state, record.attempt, record.worker) == ("done", 2, outcome.worker)
    assert (record.started_at, record.finished_at) == (outcome.started_at, outcome.finished_at)
    assert not run_to_completion("run_to_completion", SLOT, _never, app=app).ran


def test_a_frozen_process_that_thaws_after_its_lease_is_stale_and_its_end_is_not_recorded(
    jobs: Jobs, app: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    ghost = jobs.start("run_to_completion", hold=True, options={"lease": LEASE})
    jobs.wait("effect")
    ghost.freeze()
    outcome = run_to_completion("run_to_completion", SLOT, lambda: "mine", app=app, lease=LEASE)
    assert (outcome.ran, outcome.value, outcome.attempt) == (True, "mine", 2)
    assert "is run again, as attempt 2" in caplog.text
    before = look_up("run_to_completion", SLOT, app=app)
    jobs.touch("go1")
    ghost.thaw()
    jobs.ended()
    assert [line["attempt"] for line in jobs.lines("stale")] == [1]
    (told,) = jobs.lines("outcome")
    assert (told["ran"], told["state"], told["attempt"], told["finished_at"]) == (True, "superseded", 1, None)
    assert ghost.find(
        "WARNING The slot run_to_completion@2026-10-02T03:00:00Z is done by a run that no longer"
    )
    assert look_up("run_to_completion", SLOT, app=app) == before


def test_a_slot_that_runs_once_is_not_run_again_when_its_process_is_killed(
    jobs: Jobs, app: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    victim = jobs.start("run_once", hold=True, options={"lease": LEASE})
    jobs.wait("effect")
    victim.kill()
    once = partial(run_once, "run_once", SLOT, _never, app=app, lease=LEASE)
    first = once()
    assert (first.ran, first.state, first.worker.rpartition(":")[2]) == (False, "running", str(victim.pid))
    assert wait_for(lambda: (seen := once()).state != "running" and seen, LEASE + 5).state == "abandoned"
    (error,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "is abandoned: its run on" in error.getMessage()
    assert run_to_completion("run_once", SLOT, _never, app=app).state == "abandoned"
    assert len(jobs.lines("effect")) == 1


def test_children_of_a_process_that_has_fired_fire_on_connections_of_their_own(jobs: Jobs) -> None:
    jobs.start("run_to_completion", *range(5), forked=3, options={"lease": LEASE})
    jobs.ended()
    assert len({line["pid"] for line in jobs.lines("outcome")}) == 3
    assert Counter(line["key"] for line in jobs.lines("effect")).total() == 5
    assert len({line["key"] for line in jobs.lines("effect")}) == 5
    assert all(line["worker"].endswith(f":{line['pid']}") for line in jobs.lines("outcome") if line["ran"])


def test_a_management_command_of_django_finds_the_current_app(server: RedisServer, tmp_path: Path) -> None:
    pytest.importorskip("django")
    files = {
        "site_of_test/__init__.py": "from site_of_test.celery import app\n",
        "site_of_test/celery.py": (
            "from celery import Celery\n"
            "app = Celery('site_of_test')\n"
            "app.config_from_object('django.conf:settings', namespace='CELERY')\n"
        ),
        "site_of_test/settings.py": (
            "SECRET_KEY = 'x'\nUSE_TZ = True\nINSTALLED_APPS = ['site_of_test']\n"
            f"CELERY_LEADERBEAT_REDIS_URL = {server.url()!r}\n"
        ),
        "site_of_test/management/commands/close.py": (
            "from datetime import datetime, timezone\n"
            "from django.core.management.base import BaseCommand\n"
            "from celery_leaderbeat.singleton import run_once\n"
            "class Command(BaseCommand):\n"
            "    def handle(self, **options):\n"
            "        slot = datetime(2026, 10, 2, tzinfo=timezone.utc)\n"
            "        outcome = run_once('close', slot, lambda: self.stdout.write('closing'))\n"
            "        self.stdout.write(f'{outcome.ran} {outcome.state}')\n"
        ),
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    said = []
    for number in range(2):
        command = Process(
            [sys.executable, "-m", "django", "close"],
            name=f"close{number}",
            directory=tmp_path,
            env={"PYTHONPATH": f"{tmp_path}:{REPO}", "DJANGO_SETTINGS_MODULE": "site_of_test.settings"},
        )
        command.start()
        try:
            command.wait(20)
            said.append(command.text().split())
        finally:
            command.stop()
    assert said == [["closing", "True", "done"], ["False", "done"]]
    assert server.client().exists("{leaderbeat:site_of_test}:slot:close@2026-10-02T00:00:00Z") == 1


# One process


@BOTH
def test_who_asks_later_gets_what_the_first_one_did(app: Celery, function: Any) -> None:
    first = function("job", SLOT, lambda: 42, app=app)
    assert (first.ran, first.state, first.value, first.attempt) == (True, "done", 42, 1)
    assert first.started_at <= first.finished_at
    record = look_up("job", SLOT, app=app)
    assert record is not None
    assert record.on_crash == ("skip" if function is run_once else "rerun")
    later = function("job", SLOT, _never, app=app)
    assert later == Outcome(False, "done", None, 1, first.worker, "", first.started_at, first.finished_at)
    assert function("job", SLOT + timedelta(minutes=1), lambda: 43, app=app).value == 43
    assert function("other", SLOT, lambda: 44, app=app).value == 44


@BOTH
def test_the_same_instant_in_another_zone_is_the_same_slot(app: Celery, function: Any) -> None:
    function("job", SLOT, lambda: None, app=app)
    assert not function("job", SLOT.astimezone(timezone(timedelta(hours=5))), _never, app=app).ran


@BOTH
def test_a_job_that_fails_raises_where_it_ran_and_is_not_run_again(app: Celery, function: Any) -> None:
    error = KeyError("no such account")

    def job() -> None:
        raise error

    with pytest.raises(KeyError) as raised:
        function("job", SLOT, job, app=app)
    assert raised.value is error
    outcome = function("job", SLOT, _never, app=app)
    assert (outcome.ran, outcome.state, outcome.reason) == (False, "failed", "KeyError('no such account')")
    assert outcome.finished_at is not None


@BOTH
@pytest.mark.parametrize("exc", [Retry("later"), Ignore()])
def test_what_celery_means_for_messages_is_a_failure_here(app: Celery, function: Any, exc: Any) -> None:
    def job() -> None:
        raise exc

    with pytest.raises(RuntimeError, match="what becomes of a message") as raised:
        function("job", SLOT, job, app=app)
    assert raised.value.__cause__ is exc
    assert function("job", SLOT, _never, app=app).state == "failed"


def test_a_process_that_is_going_down_leaves_the_slot_to_another(app: Celery) -> None:
    def job() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_to_completion("job", SLOT, job, app=app, lease=1)
    assert run_to_completion("job", SLOT, _never, app=app, wait=0).state == "running"
    outcome = run_to_completion("job", SLOT, lambda: "mine", app=app, lease=1)
    assert (outcome.ran, outcome.value, outcome.attempt) == (True, "mine", 2)


def test_after_so_many_attempts_the_slot_is_abandoned(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    def job() -> None:
        raise SystemExit

    call = partial(run_to_completion, "job", SLOT, app=app, lease=1, max_attempts=2)
    for _ in range(2):
        with pytest.raises(SystemExit):
            call(job)
    outcome = call(_never)
    assert (outcome.ran, outcome.state, outcome.attempt) == (False, "abandoned", 2)
    assert outcome.reason.endswith("died, as attempt 2 of 2")
    assert [record.levelname for record in caplog.records if "abandoned" in record.getMessage()] == ["ERROR"]


def test_of_two_threads_one_runs_the_slot_and_the_other_waits_until_it_has_ended(app: Celery) -> None:
    effects: list[Tick] = []
    barrier = threading.Barrier(2)
    # A busy machine may keep this process from renewing it for two thirds of it.
    lease = 3.0
    Ledger.for_app(app).store.text("nothing")

    def job(tick: Tick) -> str:
        effects.append(tick)
        # Longer than a lease: it is renewed.
        deadline = time.monotonic() + lease + 0.6
        while time.monotonic() < deadline:
            time.sleep(0.1)
            tick.check()
        return "value"

    def call() -> tuple[Outcome[str], float]:
        barrier.wait()
        outcome = run_to_completion("job", SLOT, job, app=app, lease=lease)
        return outcome, time.time()

    with ThreadPoolExecutor(2) as pool:
        both = sorted(pool.map(lambda _: call(), range(2)), key=lambda pair: pair[0].ran)
    (waited, woke), (ran, ended) = both
    assert len(effects) == 1
    assert (ran.ran, ran.state, ran.value, ran.attempt) == (True, "done", "value", 1)
    assert (waited.ran, waited.state, waited.value, waited.attempt) == (False, "done", None, 1)
    assert -0.1 < woke - ended < 1.5


def test_who_waits_does_so_for_no_longer_than_it_wants(app: Celery) -> None:
    begun, end = threading.Event(), threading.Event()

    def job() -> None:
        begun.set()
        end.wait(20)

    with ThreadPoolExecutor(1) as pool:
        runs = pool.submit(run_to_completion, "job", SLOT, job, app=app)
        assert begun.wait(10)
        began = time.monotonic()
        for wait in (0, 0.3):
            outcome = run_to_completion("job", SLOT, _never, app=app, wait=wait)
            assert (outcome.ran, outcome.state, outcome.finished_at) == (False, "running", None)
        assert 0.3 <= time.monotonic() - began < 5
        end.set()
        assert runs.result(10).state == "done"


def test_a_thread_without_a_current_app_is_told_so(server: RedisServer) -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(SettingsError, match="pass app="):
        pool.submit(run_once, "job", SLOT, _never).result(10)


# Redis


@BOTH
def test_nothing_is_run_while_redis_is_out_of_reach(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(singleton, "_PATIENCE", 0.2)
    app = _app(f"redis://127.0.0.1:{free_port()}/0")
    with pytest.raises(StoreUnavailable):
        function("job", SLOT, _never, app=app)
    with pytest.raises(StoreUnavailable):
        look_up("job", SLOT, app=app)


def _after_start(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> None:
    """After the nth call of the script `start` has run in Redis, and before its answer arrives, do that."""
    original, calls = Store.run, []

    def run(self: Store, script: str, keys: Any, args: Any = ()) -> Any:
        answer = original(self, script, keys, args)
        if script == "start":
            calls.append(script)
            act(len(calls))
        return answer

    monkeypatch.setattr(Store, "run", run)


@BOTH
def test_a_call_whose_answer_is_lost_asks_again_and_runs_once(
    app: Celery, function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(number: int) -> None:
        if number <= 2:
            raise StoreUnavailable("the answer is lost, as the test wants it")

    _after_start(monkeypatch, lose)
    outcome = function("job", SLOT, lambda: "value", app=app)
    assert (outcome.ran, outcome.value, outcome.attempt) == (True, "value", 1)
    assert Ledger.for_app(app).counts() == {"started": 1, "done": 1}


def test_a_call_that_waited_long_for_an_answer_asks_again_all_the_same(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(number: int) -> None:
        if number == 1:
            raise StoreUnavailable("the answer is lost, as the test wants it")

    monkeypatch.setattr(singleton, "_PATIENCE", 0.0)
    _after_start(monkeypatch, lose)
    assert run_once("job", SLOT, lambda: "value", app=app).value == "value"


@BOTH
def test_an_answer_that_took_as_long_as_the_lease_is_not_relied_on(
    app: Celery, function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def dawdle(number: int) -> None:
        asked.append(number)
        if number == 1:
            time.sleep(0.4)

    _after_start(monkeypatch, dawdle)
    assert function("job", SLOT, lambda: "value", app=app, lease=1).value == "value"
    assert asked[:2] == [1, 2]


def test_a_job_whose_record_is_gone_is_superseded(app: Celery, server: RedisServer) -> None:
    def job(tick: Tick) -> str:
        server.flush()
        with pytest.raises(StaleTick):
            tick.check()
        return "value"

    outcome = run_once("job", SLOT, job, app=app)
    assert (outcome.ran, outcome.state, outcome.value) == (True, "superseded", "value")


def test_a_slot_that_beat_has_left_behind_is_not_run(app: Celery, server: RedisServer) -> None:
    keys = Ledger.for_app(app).store.keys
    server.client().hset(keys.entries, "job", json.dumps({"slot": str(int(SLOT.timestamp()) * 1_000_000)}))
    for function in (run_once, run_to_completion):
        outcome = function("job", SLOT, _never, app=app)
        assert (outcome.ran, outcome.state, outcome.attempt) == (False, "decided", 0)
    assert run_once("job", SLOT + timedelta(minutes=1), lambda: 1, app=app).ran


def test_what_nobody_has_fired_has_no_record(app: Celery) -> None:
    assert look_up("job", SLOT, app=app) is None


# Arguments


def _wants_two(tick: Tick, more: int) -> None: ...


def _wants_a_keyword(*, more: int) -> None: ...


async def _coroutine() -> None: ...


def _generator() -> Iterator[int]:
    yield 1


@BOTH
@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"name": ""}, ValueError, "name = ''"),
        ({"name": " "}, ValueError, "name = ' '"),
        ({"name": 7}, ValueError, "name = 7"),
        ({"slot": SLOT.replace(tzinfo=None)}, ValueError, "is naive.*make_aware"),
        ({"slot": date(2026, 10, 2)}, TypeError, "must be a datetime"),
        ({"slot": "03:00"}, TypeError, "must be a datetime"),
        ({"lease": 0.5}, ValueError, "lease = 0.5.*from 1 to 86400"),
        ({"lease": float("nan")}, ValueError, "lease = nan"),
        ({"lease": True}, ValueError, "lease = True"),
        ({"lease": "30"}, ValueError, "lease = '30'"),
        ({"fn": None}, TypeError, "can't be called"),
        ({"fn": _coroutine}, TypeError, "asyncio.run"),
        ({"fn": _generator}, TypeError, "would run nothing"),
        ({"fn": _wants_two}, TypeError, "needs the arguments tick, more.*partial"),
        ({"fn": _wants_a_keyword}, TypeError, "needs the arguments more"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(
    function: Any, change: dict[str, Any], error: type[Exception], says: str
) -> None:
    arguments = {"name": "job", "slot": SLOT, "fn": _never, "app": _app("redis://127.0.0.1:1/0"), **change}
    with pytest.raises(error, match=says):
        function(**arguments)


@pytest.mark.parametrize(
    "change",
    [{"max_attempts": 0}, {"max_attempts": 1.0}, {"max_attempts": True}, {"wait": -1}, {"wait": "1"}],
)
def test_bounds_that_cannot_be_used_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        run_to_completion("job", SLOT, _never, app=_app("redis://127.0.0.1:1/0"), **change)


def _with_a_default(dry_run: bool = False) -> Any:
    return dry_run


@pytest.mark.parametrize(
    ("job", "gets"),
    [
        (lambda: "nothing", "nothing"),
        (lambda *args, **kwargs: (args, kwargs), ((), {})),
        (_with_a_default, False),
        (partial(lambda tick, more: (type(tick), more), more=1), (Tick, 1)),
        (lambda tick, /, more=1: (type(tick), more), (Tick, 1)),
        (dict, {}),
    ],
)
def test_a_job_gets_the_tick_if_it_has_one_parameter_without_a_default(
    app: Celery, job: Any, gets: Any
) -> None:
    assert run_once("job", SLOT, job, app=app).value == gets
