"""A world: replicas, workers, a broker and a real server in virtual time, all from one seed."""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import sys
import threading
import types
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal

import pytest

from celery_leaderbeat import dispatch, membership, plan, scheduler, standby
from celery_leaderbeat import store as store_module
from celery_leaderbeat.clock import Clock
from celery_leaderbeat.ledger import Ledger
from celery_leaderbeat.listener import Listener
from celery_leaderbeat.publisher import Publisher
from celery_leaderbeat.reports import Reports
from celery_leaderbeat.settings import Settings
from celery_leaderbeat.store import Store
from celery_leaderbeat.tick import Stamp
from tests.simulation.beats import Replica, sim_listener, sim_publisher
from tests.simulation.broker import Broker
from tests.simulation.faults import Faults
from tests.simulation.journal import Journal
from tests.simulation.link import sim_store
from tests.simulation.virtual import Hub, Process, Queue, Thread, VirtualClock
from tests.simulation.workers import TASKS, VirtualApp, Worker
from tests.support.faketime_server import FrozenServer

__all__ = ["BEGAN", "RUN_LEASE", "Work", "World"]

#: 2026-10-02 03:00:00 UTC: when every world begins.
BEGAN = 1_790_910_000_000_000
#: The default of `leaderbeat_run_lease`, in seconds.
RUN_LEASE = 30.0
#: Log records of these actions tell of a fault inside the package; no fault outside of it leads there.
_TROUBLE = ("tick_failed", "election_failed", "schedule_failed", "entry_refused", "elector_ended")

#: How often replicas look at what seldom changes: most of a story's time goes there.
_PACES = {
    "their own": (),
    "hurried": (
        (dispatch, "_LOOK_EVERY", 2.0),
        (standby, "_LOOK_INTERVAL", 1.0),
        (membership, "_LATE", 1.5),
        (plan, "_WAIT", timedelta(seconds=2)),
    ),
    "brisk": (
        (dispatch, "_SWEEP_EVERY", 4.0),
        (dispatch, "_LOOK_EVERY", 8.0),
        (dispatch, "_LONGEST_SLEEP", 2.0),
        (standby, "_LOOK_INTERVAL", 4.0),
        (membership, "_LATE", 4.5),
        (scheduler, "_STANDBY_TICK", 4.0),
        (plan, "_WAIT", timedelta(seconds=1)),
    ),
    "leisurely": (
        (dispatch, "_SWEEP_EVERY", 5.0),
        (dispatch, "_LOOK_EVERY", 30.0),
        (dispatch, "_LONGEST_SLEEP", 1.0),
        (standby, "_LOOK_INTERVAL", 4.0),
        (plan, "_WAIT", timedelta(seconds=1)),
    ),
}
#: Applications are dear: one for the replicas, and one for each worker, for all worlds.
_apps: list[VirtualApp] = []
#: The package's modules, and how many modules there were of all packages when they were looked for.
_modules: list[tuple[str, types.ModuleType]] = []
_seen = [0]


@dataclass(frozen=True)
class Work:
    """What a body does: the seconds between the points where it can be struck, and how it ends."""

    pieces: tuple[float, ...] = (1.0,)
    end: str = "done"
    countdown: float = 1.0


def _excludes(entry: Mapping[str, Any]) -> bool:
    """Whether no slot of the entry ever runs beside another one.

    What died in mid-run and is left to the broker (`auto`, with late acknowledgement) may run again at any time.
    """
    policy = entry["options"]["leaderbeat"]
    left_to_broker = policy.get("on_crash", "auto") == "auto" and TASKS[entry["task"]][1]
    return policy.get("overlap", "allow") != "allow" and not left_to_broker


def _replace(patch: pytest.MonkeyPatch, name: str, original: Any, instead: Any, where: Sequence[str]) -> None:
    """Put something in the place of what the package's modules (or some of them) call by that name."""
    if len(sys.modules) != _seen[0]:
        _seen[0] = len(sys.modules)
        _modules[:] = [
            (short, module)
            for path, module in sys.modules.items()
            for package, _, short in [path.partition(".")]
            if package == "celery_leaderbeat"
        ]
    replaced = set()
    for short, module in _modules:
        if (not where or short in where) and module.__dict__.get(name) is original:
            patch.setattr(module, name, instead)
            replaced.add(short)
    # What has moved would otherwise wait for real, for a time that never comes.
    assert replaced >= {*where}, (name, where)


@dataclass
class World:
    """Everything, and whoever it belongs to.

    Parameters:
        server: the real server; emptied.
        seed: whatever is random comes from it.
        schedule: `beat_schedule`.
        conf: more Celery settings.
        pace: how often replicas look at what seldom changes.
        work: what the body of a message does.
        make_faults: what goes wrong.
        restart_after: seconds after which a dead process is started again.
        redelivered_after: seconds after which, maybe, the broker delivers again what was with a dead worker.
    """

    server: FrozenServer
    seed: object
    schedule: Mapping[str, Any]
    beats: int = 2
    workers: int = 2
    concurrency: int = 1
    conf: Mapping[str, Any] = field(default_factory=dict)
    pace: Literal["their own", "hurried", "brisk", "leisurely"] = "hurried"
    work: Callable[[Stamp, Any], Work] = lambda stamp, task: Work()
    make_faults: Callable[[World], Faults] = lambda world: Faults()
    restart_after: Callable[[World], float] = lambda world: 5.0
    redelivered_after: Sequence[float] = (0.5, 5.0, 31.0, 34.0)

    def __post_init__(self) -> None:
        self.hub = Hub(BEGAN)
        self.rng = random.Random(repr(self.seed))
        self.journal = Journal(self.hub)
        self.journal.exclusive.update(name for name, entry in self.schedule.items() if _excludes(entry))
        self.broker = Broker(self)
        self.faults = self.make_faults(self)
        self.hub.on_point = self.faults.point
        self._ears: dict[str, tuple[Process, Callable[[], None]]] = {}
        while len(_apps) <= self.workers:
            _apps.append(VirtualApp())
        self.app = _apps[0]
        self.replicas = [
            Replica(self, f"beat-{n}", self.rng.uniform(-90, 90)) for n in range(1, self.beats + 1)
        ]
        self.crew = [
            Worker(self, f"worker-{n}", _apps[n], self.concurrency) for n in range(1, self.workers + 1)
        ]
        self.tended = True
        #: How far the server's clock is ahead of the world's, in seconds.
        self.server_ahead = 0.0
        #: When Redis lost everything the last time, in µs; 0 for never.
        self.emptied_at = 0

    @contextlib.contextmanager
    def living(self) -> Iterator[World]:
        """Put the package into this world; a failure inside shows the seed and the end of the story."""
        with pytest.MonkeyPatch.context() as patch, self._heard():
            self._settle(patch)
            try:
                yield self
            except Exception as exc:
                raise AssertionError(
                    f"{exc}\n\nseed {self.seed!r}; the story's end:\n{self.journal.tail()}"
                ) from exc
            finally:
                self.hub.end()

    def _settle(self, patch: pytest.MonkeyPatch) -> None:
        self.server.flush()
        self.sync()
        conf = {
            "beat_schedule": dict(self.schedule),
            "leaderbeat_redis_url": self.server.url(),
            "leaderbeat_key_prefix": "simulation",
            **self.conf,
        }
        for app in _apps:
            app.attach(self, conf)
        # All have the same settings; to read them takes longer than all else that a process does at its start.
        self.settings = settings = Settings.from_app(self.app, warn=False)
        patch.setattr(Settings, "from_app", classmethod(lambda cls, app, warn=True: settings))
        hub, client = self.hub, self.server.quick_client()
        patch.setattr(store_module, "make_client", lambda target, options, timeout, prefix: client)
        threads = types.SimpleNamespace(
            Thread=lambda target, name, daemon: Thread(hub, self._here(), target), Lock=threading.Lock
        )
        queues = types.SimpleNamespace(SimpleQueue=lambda: Queue(hub), Empty=queue.Empty)
        ids = types.SimpleNamespace(
            uuid4=lambda: uuid.UUID(int=self.rng.getrandbits(128)), uuid5=uuid.uuid5, UUID=uuid.UUID
        )
        stand_ins = {
            "Clock": (Clock, lambda: VirtualClock(hub), ("put_off", "runs")),
            "Listener": (Listener, sim_listener(self), ("election", "standby")),
            "Publisher": (Publisher, sim_publisher(self), ()),
            "Store": (Store, sim_store(self), ()),
            "queue": (queue, queues, ("desk", "election")),
            "random": (random, self.rng, ()),
            "threading": (threading, threads, ("election", "runs")),
            "uuid": (uuid, ids, ()),
        }
        for name, (original, instead, where) in stand_ins.items():
            _replace(patch, name, original, instead, where)
        self._hear_reports(patch)
        for module, name, wait in _PACES[self.pace]:
            assert hasattr(module, name), name
            patch.setattr(module, name, wait)

    def _hear_reports(self, patch: pytest.MonkeyPatch) -> None:
        journal, missed, skipped = self.journal, Reports.missed, Reports.skipped

        def missed_and_heard(
            reports: Reports,
            entry: str,
            first: datetime,
            last: datetime,
            count: int,
            reason: str,
            prefer: str = "missed",
        ) -> None:
            journal.reported("missed", entry, first, last, reason)
            missed(reports, entry, first, last, count, reason, prefer)

        def skipped_and_heard(
            reports: Reports, entry: str, first: datetime, last: datetime, count: int, reason: str
        ) -> None:
            journal.reported("skipped", entry, first, last, reason)
            skipped(reports, entry, first, last, count, reason)

        patch.setattr(Reports, "missed", missed_and_heard)
        patch.setattr(Reports, "skipped", skipped_and_heard)

    def _here(self) -> Process:
        process = self.hub.process
        assert process is not None
        return process

    @contextlib.contextmanager
    def _heard(self) -> Iterator[None]:
        """Take the package's logs, which would only cost time, and keep what tells of trouble."""
        journal = self.journal

        class Ear(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                if getattr(record, "action", "") in _TROUBLE:
                    journal.trouble(self.format(record))

        logger, ear = logging.getLogger("celery_leaderbeat"), Ear()
        before = logger.level, logger.propagate
        logger.setLevel(logging.ERROR)
        logger.propagate = False
        logger.addHandler(ear)
        try:
            yield
        finally:
            logger.removeHandler(ear)
            logger.propagate = before[1]
            logger.setLevel(before[0])

    def start(self) -> None:
        """Start everybody."""
        for somebody in (*self.crew, *self.replicas):
            somebody.start()

    def calm(self) -> None:
        """From now on, nothing fails any more."""
        self.note("all is quiet")
        self.faults.end()
        self.broker.away_until = 0
        for process in self.processes():
            self.hub.thaw(process)

    def run(self, seconds: float, enough: Callable[[], bool] | None = None) -> None:
        """Let time pass."""
        self.hub.run(self.hub.now + round(seconds * 1e6), enough)

    def run_and_look(self, seconds: float) -> None:
        """Let time pass, and look at the last-decided slots now and then."""
        while seconds > 0:
            self.run(min(seconds, 5.0))
            seconds -= 5.0
            self.journal.decided({name: entry.slot for name, entry in self.ledger().entries().items()})

    def run_until_settled(self, slot: datetime, longest: float) -> None:
        """Let time pass until all slots up to this one are decided, and nothing is left to do."""
        end = self.hub.now + round(longest * 1e6)
        while self.hub.now < end and not self._settled(slot):
            self.run(4.0)

    def _settled(self, slot: datetime) -> bool:
        if not (self.broker.empty and all(process.alive for process in self.processes())):
            return False
        if any(process.frozen_until > self.hub.now for process in self.processes()):
            return False
        ledger = self.ledger()
        if ledger.store.members(ledger.store.keys.unfinished) or ledger.store.table(
            ledger.store.keys.requests
        ):
            return False
        entries = ledger.entries()
        return all(name in entries and entries[name].slot >= slot for name in self.schedule)

    def note(self, what: str) -> None:
        """Add a line to the story."""
        self.journal.note(self.hub.process or "", what)

    def sync(self) -> None:
        """Set the server's clock."""
        self.server.set_time(self.hub.now + round(self.server_ahead * 1e6))

    def processes(self) -> list[Process]:
        """All processes."""
        return [somebody.process for somebody in (*self.replicas, *self.crew)]

    def kill(self, process: Process) -> None:
        """Kill a process; it is started again later, and what it held comes back to the broker."""
        if not process.alive:
            return
        self.hub.kill(process)
        self.broker.lost(process, self.rng.choice(self.redelivered_after))
        for somebody in (*self.replicas, *self.crew):
            if somebody.process is process and self.tended:
                self.hub.after(self.restart_after(self), somebody.start)

    def empty_redis(self) -> None:
        """Let the server lose everything, as after a restart without persistence.

        Not within the second of an election: epochs are the server's seconds where it knows nothing, and a server
        takes longer than that to come back empty. Nor while the latest epoch is ahead of these, after two elections in
        one second.
        """
        if max(self.journal.elected_at // 1_000_000, self.journal.epoch) >= self.hub.now // 1_000_000:
            self.hub.after(1.0, self.empty_redis)
            return
        self.note("Redis has lost everything")
        self.sync()
        self.server.flush()
        self.journal.emptied()
        self.emptied_at = self.hub.now

    def listens(self, process: Process, channel: str, wake: Callable[[], None]) -> None:
        """A replica has subscribed to its own channel, and to wake-ups."""
        self._ears[channel] = (process, wake)

    def subscribers(self, channel: str) -> int:
        """How many subscribe to a channel."""
        if channel in self._ears:
            ears = [self._ears[channel]]
        else:
            ears = list(self._ears.values()) if self.faults.counts_listeners else []
        return sum(process.alive and self.faults.subscription(process) > 0 for process, _ in ears)

    def answered(self, script: str, answer: Any) -> None:
        """A script has answered: a lease that is released, or found to be lost, wakes who listens."""
        if script == "wake" or (script == "release" and answer == "released"):
            for process, wake in list(self._ears.values()):
                if process.alive and self.faults.subscription(process) > 0:
                    wake()

    def tell(self, broken: Sequence[str]) -> str:
        """What is wrong, with what the story says about the slot that comes first."""
        key = broken[0].partition(" ")[0]
        listed = "\n  ".join(broken[:12])
        return f"{len(broken)} guarantees are broken:\n  {listed}\n\n{key}:\n{self.journal.about(key)}"

    def ledger(self) -> Ledger:
        """A look at the ledger from outside."""
        return Ledger(self.settings)
