"""The project that the tests' beats and workers run: `celery -A tests.support.project`.

It is set up by environment variables alone, so that every process of a test may get its own:

LB_SCHEDULE     JSON, name -> entry. An entry has `task` and a schedule: `every` (seconds) or `crontab` (its
                fields); and, as in `beat_schedule`, `args`, `kwargs`, `options`. `policy` becomes
                `options["leaderbeat"]`. An entry with `raw` is used as it stands there.
LB_CONF         JSON, Celery settings.
LB_APP_NAME     the app's name, `project` by default.
LB_LOG          a file; each run of a task adds a line (see `note`).
LB_PUBLISH_LOG  a file; each publish adds two, `before` and `after`.
LB_PLUGIN       a Python file that is run last, with `app` among its globals: the place for a fault.

Not to be imported in the test process: its tasks would join those of the test's own app.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from celery import Celery, Task
from celery.exceptions import Ignore, Reject
from celery.schedules import crontab
from celery.signals import after_task_publish, before_task_publish

from celery_leaderbeat import FencedTask

app = Celery(os.environ.get("LB_APP_NAME", "project"))
app.conf.update(
    broker_connection_retry_on_startup=True,
    task_ignore_result=False,
    worker_redirect_stdouts=False,
)
app.conf.update(json.loads(os.environ.get("LB_CONF", "{}")))


def _entry(spec: dict[str, Any]) -> Any:
    if "raw" in spec:
        return spec["raw"]
    entry = {key: value for key, value in spec.items() if key not in ("every", "crontab", "policy")}
    if "every" in spec:
        entry["schedule"] = spec["every"]
    if "crontab" in spec:
        entry["schedule"] = crontab(**spec["crontab"])
    if "policy" in spec:
        entry["options"] = {**entry.get("options", {}), "leaderbeat": spec["policy"]}
    return entry


if "LB_SCHEDULE" in os.environ:
    app.conf.beat_schedule = {
        name: _entry(spec) for name, spec in json.loads(os.environ["LB_SCHEDULE"]).items()
    }


def _append(variable: str, line: dict[str, Any]) -> None:
    path = os.environ.get(variable)
    if path:
        # One write to a file opened for appending: lines of different processes don't mix.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, (json.dumps(line) + "\n").encode())
        finally:
            os.close(descriptor)


_HEADERS = {
    "key": "leaderbeat_tick_key",
    "epoch": "leaderbeat_fencing_epoch",
    "slot": "leaderbeat_slot",
    "attempt": "leaderbeat_attempt",
}


def note(task: Task, event: str, **more: Any) -> None:
    """Add a line about a run: `start`, and then `end`, `fail` or `retry`."""
    request = task.request
    headers = request.headers or {}
    line = {short: getattr(request, name, None) or headers.get(name) for short, name in _HEADERS.items()}
    tick = getattr(task, "tick", None)
    if tick is not None:
        line |= {"key": tick.key, "epoch": tick.epoch, "attempt": tick.attempt, "slot": tick.slot.isoformat()}
    line |= {
        "event": event,
        "task": task.name,
        "id": request.id,
        "retries": request.retries,
        "redelivered": bool((request.delivery_info or {}).get("redelivered")),
        "pid": os.getpid(),
        "t": time.time(),
        **more,
    }
    _append("LB_LOG", line)


def _publish_line(event: str, sender: str, headers: dict[str, Any], routing_key: str, exchange: Any) -> None:
    line = {short: headers.get(name) for short, name in _HEADERS.items()}
    line |= {
        "event": event,
        "task": sender,
        "id": headers.get("id"),
        "retries": headers.get("retries"),
        "put_off": headers.get("leaderbeat_put_off", 0),
        "routing_key": routing_key,
        "exchange": str(exchange or ""),
        "pid": os.getpid(),
        "t": time.time(),
    }
    _append("LB_PUBLISH_LOG", line)


@before_task_publish.connect
def _before(
    sender: str, headers: dict[str, Any], routing_key: str = "", exchange: Any = "", **_: Any
) -> None:
    _publish_line("before", sender, headers, routing_key, exchange)


@after_task_publish.connect
def _after(sender: str, headers: dict[str, Any], routing_key: str = "", exchange: Any = "", **_: Any) -> None:
    _publish_line("after", sender, headers, routing_key, exchange)


def _run(
    task: Task,
    *,
    seconds: float = 0.0,
    fail: bool = False,
    times: int = 0,
    countdown: float = 0.1,
    check: bool = False,
    throw: bool = True,
    leave: str = "",
) -> str | None:
    """Sleep, check the tick, ask for `times` retries, fail: as the keyword arguments say.

    With `throw` False, a retry is asked for and the run ends as any other. `leave` ends it by Celery's
    `"ignore"`, by `"reject"`, or, the first time that the message comes, by `"requeue"`.
    """
    note(task, "start")
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(left, 0.05))
        if check:
            task.tick.check()
    if task.request.retries < times:
        note(task, "retry")
        # Raises unless it is told not to.
        task.retry(countdown=countdown, max_retries=times, throw=throw)
    if leave and not (leave == "requeue" and task.request.delivery_info.get("redelivered")):
        note(task, leave)
        raise Ignore(leave) if leave == "ignore" else Reject(leave, requeue=leave == "requeue")
    if fail:
        note(task, "fail")
        raise RuntimeError("as the test wants it")
    note(task, "end")
    tick = getattr(task, "tick", None)
    return tick.key if tick is not None else None


def _task(name: str, base: type[Task] = Task, **options: Any) -> Task:
    defaults = {key: options.pop(key) for key in ("seconds", "fail", "times") if key in options}

    def body(self: Task, **kwargs: Any) -> str | None:
        return _run(self, **{**defaults, **kwargs})

    return app.task(name=f"project.{name}", bind=True, base=base, **options)(body)


# Each takes the keyword arguments of `_run`; the name says what it does without any.
record = _task("record")
fenced = _task("fenced", FencedTask)
fenced_current = _task("fenced_current", FencedTask, fencing="current")
fenced_observed = _task("fenced_observed", FencedTask, fencing="observed")
stamped_only = _task("stamped_only", FencedTask, require_stamp=True)
slow = _task("slow", FencedTask, seconds=2.0)
failing = _task("failing", FencedTask, fail=True)
retrying = _task("retrying", FencedTask, times=2)
acks_late = _task("acks_late", FencedTask, acks_late=True, reject_on_worker_lost=True)
plain_acks_late = _task("plain_acks_late", acks_late=True, reject_on_worker_lost=True)
autoretrying = _task(
    "autoretrying",
    FencedTask,
    fail=True,
    autoretry_for=(RuntimeError,),
    max_retries=2,
    default_retry_delay=0.1,
)
dead_lettered = _task("dead_lettered", FencedTask, on_stale="reject", acks_late=True)
unverified_run = _task("unverified_run", FencedTask, when_unverifiable="run")
unverified_refuse = _task("unverified_refuse", FencedTask, when_unverifiable="refuse")
short_lived = _task("short_lived", expires=20)
soft_limited = _task("soft_limited", FencedTask, seconds=60.0, soft_time_limit=1)


def _hang(task: Task, *, until: int = 2, seconds: float = 60.0, then: float = 0.2, **more: Any) -> str | None:
    """As `_run`: attempts before the attempt `until` take `seconds`, the later ones `then`."""
    return _run(task, seconds=seconds if task.tick.attempt < until else then, **more)


@app.task(name="project.hanging", bind=True, base=FencedTask, acks_late=True, reject_on_worker_lost=True)
def hanging(self: Task, **kwargs: Any) -> str | None:
    """Hang until the worker is killed, at first."""
    return _hang(self, **kwargs)


@app.task(name="project.hanging_early", bind=True, base=FencedTask)
def hanging_early(self: Task, **kwargs: Any) -> str | None:
    """The same, acknowledged before it runs."""
    return _hang(self, **kwargs)


@app.task(name="project.recursive", bind=True, base=FencedTask)
def recursive(self: Task, depth: int = 2, **kwargs: Any) -> str | None:
    """Call itself as a function before it does its work."""
    if depth:
        recursive(depth - 1)
        self.tick.check()
        return None if depth < 2 else _run(self, **kwargs)
    return None


# Under the name that the `celery_setup` of pytest-celery sends; importing its module would double the start-up time.
@app.task(name="pytest_celery.vendors.worker.tasks.ping")
def ping() -> str:
    """Answer."""
    return "pong"


if "LB_PLUGIN" in os.environ:
    _plugin = Path(os.environ["LB_PLUGIN"])
    exec(compile(_plugin.read_text(), str(_plugin), "exec"), {"app": app, "__name__": "lb_plugin"})
