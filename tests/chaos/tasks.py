"""What runs inside the beats and workers: their tasks, and the journal of what they say and do.

Executed by the project under test (`LB_PLUGIN`), with `app` among its globals. Everything is written outside Redis:
lines to the process's own journal, and effects to a SQLite file, guarded by the fence as the example project guards
its invoices. Times are of the monotonic clock, which all processes of a machine share and no fault steps.

CHAOS_JOURNAL   the process's journal, lines of JSON.
CHAOS_EFFECTS   the SQLite file.
CHAOS_OFFSET    what is added to the monotonic clock for Unix time.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import time
from typing import Any

from celery import Celery, Task
from celery.signals import task_revoked

from celery_leaderbeat import FencedTask, signals

app: Celery = globals()["app"]  # from whoever executes this file

_OFFSET = float(os.environ["CHAOS_OFFSET"])


def _now() -> float:
    return time.monotonic() + _OFFSET


def note(event: str, **fields: Any) -> None:
    """Add a line to the journal, in one write."""
    line = json.dumps({"event": event, "t": _now(), "pid": os.getpid(), **fields}, default=str) + "\n"
    descriptor = os.open(os.environ["CHAOS_JOURNAL"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


class _Journal(logging.Handler):
    """Keeps what the package logs with an action."""

    FIELDS = ("entry", "count", "reason", "epoch", "holder", "tick_key")

    def emit(self, record: logging.LogRecord) -> None:
        action = getattr(record, "action", None)
        if action is not None:
            more = {name: getattr(record, name) for name in self.FIELDS if hasattr(record, name)}
            note("said", action=action, level=record.levelname, text=record.getMessage(), **more)


logging.getLogger("celery_leaderbeat").addHandler(_Journal())


def _skipped(sender: Any, entry: str, first: Any, last: Any, count: int, reason: str, **_: Any) -> None:
    note("skipped", entry=entry, first=first.timestamp(), last=last.timestamp(), count=count, reason=reason)


signals.slots_skipped.connect(_skipped, weak=False)


def _revoked(sender: Any, request: Any, expired: bool, **_: Any) -> None:
    if expired:
        note("expired", key=request.headers.get("leaderbeat_tick_key"), expires=str(request.expires))


task_revoked.connect(_revoked, weak=False)


# The effect


def _effects() -> sqlite3.Connection:
    connection = sqlite3.connect(os.environ["CHAOS_EFFECTS"], timeout=30, isolation_level=None)
    connection.execute("PRAGMA synchronous = OFF")
    return connection


def write(key: str, fence: int, run: str) -> bool:
    """The guarded write: it counts only under a higher fence than every write for the slot before it."""
    connection = _effects()
    try:
        connection.execute("BEGIN IMMEDIATE")
        (highest,) = connection.execute(
            "SELECT coalesce(max(fence), -1) FROM effects WHERE key = ? AND accepted", (key,)
        ).fetchone()
        accepted = fence > highest
        connection.execute(
            "INSERT INTO effects VALUES (?, ?, ?, ?, ?, ?)",
            (_now(), key, fence, accepted, run, os.getpid()),
        )
        connection.execute("COMMIT")
        return accepted
    finally:
        connection.close()


def _line(task: Task, event: str, **more: Any) -> None:
    request = task.request
    headers = request.headers or {}
    note(
        event,
        key=headers.get("leaderbeat_tick_key"),
        epoch=headers.get("leaderbeat_fencing_epoch"),
        attempt=headers.get("leaderbeat_attempt"),
        entry=headers.get("celery_beat_task") or (request.periodic_task_name or ""),
        id=request.id,
        retries=request.retries,
        redelivered=bool((request.delivery_info or {}).get("redelivered")),
        put_off=headers.get("leaderbeat_put_off", 0),
        **more,
    )


def _run(task: Task, seconds: float) -> None:
    _line(task, "start")
    time.sleep(seconds)
    tick = getattr(task, "tick", None)
    if tick is not None:
        written = write(tick.key, tick.fence, task.request.headers.get("leaderbeat_run", ""))
        _line(task, "end", written=written)
    else:
        _line(task, "end")


@app.task(name="chaos.early", bind=True, base=FencedTask)
def early(self: Task, seconds: float) -> None:
    """Acknowledged before it runs."""
    _run(self, seconds)


@app.task(name="chaos.late", bind=True, base=FencedTask, acks_late=True, reject_on_worker_lost=True)
def late(self: Task, seconds: float) -> None:
    """Acknowledged after it has run."""
    _run(self, seconds)


@app.task(name="chaos.flaky", bind=True, base=FencedTask)
def flaky(self: Task, seconds: float) -> None:
    """Fails at first and asks for a retry."""
    if self.request.retries == 0:
        _line(self, "start")
        raise self.retry(countdown=0.3, max_retries=5)
    _run(self, seconds)


@app.task(name="chaos.plain", bind=True)
def plain(self: Task, seconds: float) -> None:
    """No FencedTask."""
    _run(self, seconds)
