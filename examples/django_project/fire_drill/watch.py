"""What the ledger and the database say while the drill goes on, read by a thread of its own."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import redis
from celery.schedules import maybe_schedule

from fire_drill.stage import Stage

__all__ = ["Cell", "ServerClock", "Term", "Watch", "entry_schedules"]

#: States of a slot's record after which nothing more happens to it here.
SETTLED = frozenset({"done", "failed", "missed", "skipped", "abandoned", "unconfirmed"})


class ServerClock:
    """The time of the Redis server, carried forward by the monotonic clock."""

    def __init__(self, client: redis.Redis) -> None:
        best = 1e9
        for _ in range(50):
            sent = time.monotonic()
            seconds, micros = client.time()
            received = time.monotonic()
            if received - sent < best:
                best = received - sent
                self._offset = seconds + micros / 1e6 - (sent + received) / 2

    def now(self) -> float:
        """Unix seconds."""
        return time.monotonic() + self._offset

    def sleep_until(self, moment: float) -> None:
        """Return at `moment`, or at once if it is over; exact to far less than a millisecond."""
        while (left := moment - self.now()) > 0:
            if left > 0.002:
                time.sleep(left - 0.002)

    def next(self, period: int, offset: float, at_least: float = 0.0) -> float:
        """The next moment that is `offset` seconds past a multiple of `period`, `at_least` seconds away."""
        earliest = self.now() + at_least
        return earliest + (offset - earliest) % period


def entry_schedules(app: Any) -> dict[str, Any]:
    """The schedules of all entries, those included that are added in code."""
    app.finalize()
    return {
        name: maybe_schedule(entry["schedule"], app=app) for name, entry in app.conf.beat_schedule.items()
    }


@dataclass(frozen=True)
class Term:
    """One leadership, as the lease told it."""

    epoch: int
    pid: int
    since: float
    leader: str


@dataclass
class Cell:
    """One slot, as far as it has got."""

    entry: str
    slot: datetime
    key: str
    state: str = ""
    epoch: int = 0


@dataclass
class Watch:
    """A picture of the fleet, refreshed several times a second until `stop`."""

    stage: Stage
    app: Any
    terms: list[Term] = field(default_factory=list)
    lease_left: float = 0.0
    cells: dict[str, list[Cell]] = field(default_factory=dict)
    runs: Counter[str] = field(default_factory=Counter)
    refusals: list[tuple[str, int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        from celery_leaderbeat.ledger import Ledger

        self.client = redis.Redis.from_url(self.stage.ledger_url)
        self.clock = ServerClock(self.client)
        self.schedules = entry_schedules(self.app)
        self.cells = {name: [] for name in self.schedules}
        self.started = self.clock.now()
        self.ledger = Ledger.for_app(self.app)
        self._open: list[Cell] = []
        self._last_run = 0
        self._last_refusal = 0
        self._error: Exception | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Take a last look and end the thread."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(10)

    def healthy(self) -> None:
        """Raise what has ended the thread, if anything has."""
        if self._error is not None:
            raise RuntimeError("the watch has ended") from self._error

    @property
    def elapsed(self) -> float:
        return self.clock.now() - self.started

    def lease_left_now(self) -> float:
        """Seconds until the lease lapses, 0 without one."""
        return max(self.client.pttl(self.ledger.store.keys.lease), 0) / 1000

    def _run(self) -> None:
        from django.db import connection

        try:
            while not self._stopping.wait(0.1):
                self._look()
            self._look()
        except Exception as error:  # noqa: BLE001 - `healthy` raises it where somebody sees it
            self._error = error
        finally:
            connection.close()

    def _look(self) -> None:
        self._look_at_the_lease()
        if self.terms:
            self._look_at_the_slots()
        self._look_at_the_journals()

    def _look_at_the_lease(self) -> None:
        self.lease_left = self.lease_left_now()
        leader = self.ledger.leader()
        if leader is None or leader.epoch in {term.epoch for term in self.terms}:
            return
        names = {replica.pid: replica.name for replica in self.stage.replicas}
        self.terms.append(Term(leader.epoch, leader.pid, leader.since, names.get(leader.pid, "?")))

    def _look_at_the_slots(self) -> None:
        from celery_leaderbeat.tick import tick_key
        from celery_leaderbeat.timeline import slots_between

        decided = self.ledger.entries()
        now = datetime.fromtimestamp(self.clock.now(), tz=timezone.utc)
        for name, schedule in self.schedules.items():
            cells = self.cells[name]
            after = cells[-1].slot if cells else datetime.fromtimestamp(self.terms[0].since, tz=timezone.utc)
            for slot in slots_between(schedule, after, now):
                cell = Cell(name, slot, tick_key(name, slot))
                cells.append(cell)
                self._open.append(cell)
        for cell in list(self._open):
            record = self.ledger.slot(cell.key)
            if record is not None:
                cell.state, cell.epoch = record.state, record.epoch
            elif cell.entry in decided and decided[cell.entry].slot >= cell.slot:
                cell.state = "missed"
            if cell.state in SETTLED:
                self._open.remove(cell)

    def _look_at_the_journals(self) -> None:
        from invoices.models import Execution, Refusal

        for run in Execution.objects.filter(pk__gt=self._last_run).order_by("pk"):
            self._last_run = run.pk
            self.runs[run.tick_key] += 1
        for refusal in Refusal.objects.filter(pk__gt=self._last_refusal).order_by("pk"):
            self._last_refusal = refusal.pk
            self.refusals.append((refusal.tick_key, refusal.epoch, refusal.reason))
