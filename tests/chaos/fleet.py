"""The servers, beats and workers of a run, and the links between them, each of which can be broken alone."""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.ledgers import Ledger, start_ledger
from tests.chaos.schedule import CHANGING, entries, schedule_json
from tests.chaos.tap import Tap
from tests.support.faketime import WallClock
from tests.support.process import Process
from tests.support.proxy import Proxy
from tests.support.scene import SCHEDULER, Scene
from tests.support.servers import RabbitServer, RedisServer, require
from tests.support.waits import WaitTimeout, wait_for

__all__ = ["CONF", "Exit", "Fleet", "Life", "Setup"]

#: Short leases, so that faults of seconds outlast them. What a worker took and didn't begin comes back soon.
CONF: Mapping[str, Any] = {
    "leaderbeat_lease_ttl": 3.0,
    "leaderbeat_renew_interval": 1.0,
    "leaderbeat_publish_timeout": 1.0,
    "leaderbeat_run_lease": 4.0,
    "leaderbeat_events": 200_000,
    "task_ignore_result": True,
    "worker_prefetch_multiplier": 1,
    "broker_connection_retry": True,
    "broker_connection_max_retries": None,
}
#: For Redis as the broker.
_VISIBILITY = {"visibility_timeout": 8, "unacked_restore_interval": 2, "unacked_restore_throttle": 2}

_TASKS = Path(__file__).with_name("tasks.py")


@dataclass(frozen=True)
class Setup:
    """What a run consists of.

    Attributes:
        topology: `standalone` or `sentinel`, of the ledger.
        broker: `redis` (another database of the ledger; with Sentinel a server of its own) or `rabbitmq`.
        scheduler: the scheduler's import path.
        kind: of the Redis server: `valkey`, `redis`, `redis62`.
        stamped: whether its messages bear stamps. Where they don't, entries have a header with their name, and those
            that a deploy changes are left out.
        beat_args: more arguments of `celery beat`.
        clocks: whether the beats' wall clocks can be set (by libfaketime).
    """

    beats: int = 3
    workers: int = 3
    topology: str = "standalone"
    broker: str = "redis"
    scheduler: str = SCHEDULER
    kind: str = "valkey"
    clocks: bool = True
    stamped: bool = True
    beat_args: tuple[str, ...] = ()
    conf: Mapping[str, Any] = field(default_factory=dict)

    @property
    def links(self) -> tuple[str, ...]:
        """The links of each process that can be broken. Behind Sentinel clients find their own way to the ledger."""
        return ("broker",) if self.topology == "sentinel" else ("ledger", "broker")

    @property
    def beat_names(self) -> tuple[str, ...]:
        """`beat0`, `beat1`, …"""
        return tuple(f"beat{number}" for number in range(self.beats))

    @property
    def worker_names(self) -> tuple[str, ...]:
        """`worker0`, `worker1`, …"""
        return tuple(f"worker{number}" for number in range(self.workers))


@dataclass(frozen=True)
class Life:
    """That a process was started."""

    t: float
    name: str
    pid: int
    version: int


@dataclass(frozen=True)
class Exit:
    """That a process ended by itself, though nobody had killed or stopped it."""

    t: float
    name: str
    status: int | None


class Fleet:
    """All processes of a run.

    Parameters:
        setup: what it consists of.
        directory: for logs and journals.
        rabbit: the RabbitMQ to use; without one, and where one is wanted, the fleet has its own.
    """

    def __init__(self, setup: Setup, directory: Path, rabbit: RabbitServer | None = None) -> None:
        self.setup = setup
        self.directory = directory
        self.offset = time.time() - time.monotonic()
        self.effects = directory / "effects.sqlite"
        self.tap = Tap(self.offset, setup.stamped)
        self.lives: list[Life] = []
        self.version = 0
        self.exits: list[Exit] = []
        self.links: dict[str, Proxy] = {}
        self.clocks: dict[str, WallClock] = {}
        self.processes: dict[str, Process] = {}
        self._versions: dict[str, int] = {}
        self._lock = threading.Lock()
        #: Processes that are down on purpose: nobody but who took them down starts them again.
        self._down: set[str] = set()
        self._over = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self._own_rabbit: RabbitServer | None = None
        self._rabbit = rabbit
        self.broker: RedisServer | None = None
        self.ledger: Ledger | None = None
        self.scene: Scene | None = None

    def now(self) -> float:
        """Unix time by the clock that nothing steps."""
        return time.monotonic() + self.offset

    # Up and down

    def start(self) -> None:
        """Start everything, and wait until it is there."""
        _make_effects(self.effects)
        ledger = self.ledger = start_ledger(self.setup.topology, self.setup.kind, self.directory)
        rabbit = None
        if self.setup.broker == "rabbitmq":
            rabbit = self._rabbit or self._start_rabbit()
        elif self.setup.topology == "standalone":
            self.broker = ledger.server
        else:
            # A failover may lose messages, and then no scheduler could help.
            self.broker = RedisServer(require(self.setup.kind), self.directory / "broker", name="broker")
            self.broker.start()
        conf = {**CONF, **ledger.conf, **self.setup.conf}
        scene = self.scene = Scene(self.directory, ledger.server, rabbit, conf=conf)
        if self.setup.broker == "redis":
            scene.conf["broker_transport_options"] = _VISIBILITY
        else:
            # The broker never restarts here. For messages on disk it says only every 200 ms or so that it has them.
            scene.conf["task_default_delivery_mode"] = "transient"
        for name in (*self.setup.beat_names, *self.setup.worker_names):
            self._connect(name)
        for name in self.setup.worker_names:
            self.processes[name] = scene.start_worker(
                pool="threads", concurrency=4, env=self._env(name), wait=False, loglevel="INFO"
            )
        for name in self.setup.beat_names:
            self.processes[name] = scene.start_beat(
                scheduler=self.setup.scheduler, args=self.setup.beat_args, env=self._env(name), wait=False
            )
        for name, process in self.processes.items():
            self._lives(name)
            process.wait_for_log(process.ready_prompt, 60)  # type: ignore[attr-defined]
        self._supervisor.start()

    def stop(self) -> None:
        """Kill everything."""
        self._over.set()
        if self._supervisor.is_alive():
            self._supervisor.join(10)
        if self.scene is not None:
            self.scene.close()
        for server in (self.broker, self.ledger):
            if server is not None:
                server.stop()
        if self._own_rabbit is not None:
            self._own_rabbit.stop()

    def _start_rabbit(self) -> RabbitServer:
        self._own_rabbit = RabbitServer(require("rabbitmq"), self.directory / "rabbitmq")
        self._own_rabbit.start()
        return self._own_rabbit

    def _connect(self, name: str) -> None:
        assert self.scene is not None
        broker = self.scene.rabbit or self.broker
        assert broker is not None
        if "ledger" in self.setup.links:
            self.links[f"{name}:ledger"] = self.scene.proxy(self.scene.ledger.port)
        proxy = self.links[f"{name}:broker"] = self.scene.proxy(broker.port)
        if name in self.setup.beat_names:
            proxy.tap = lambda connection, data: self.tap.hear(name, connection, data)

    def _env(self, name: str) -> dict[str, str | None]:
        scene = self.scene
        assert scene is not None
        broker = self.links[f"{name}:broker"]
        is_beat = name in self.setup.beat_names
        assert self.ledger is not None
        link = self.links.get(f"{name}:ledger")
        ledger = link.redis_url(scene.LEDGER_DB) if link else self.ledger.url()
        env = {
            **scene.env(
                conf={"redbeat_redis_url": ledger} if "redbeat" in self.setup.scheduler else None,
                schedule=self._schedule() if is_beat else {},
                ledger_url=ledger,
                broker_url=broker.amqp_url(scene.vhost)
                if scene.rabbit
                else broker.redis_url(scene.BROKER_DB),
            ),
            "CELERY_RESULT_BACKEND": None,
            "LB_PUBLISH_LOG": None,
            "LB_PLUGIN": str(_TASKS),
            "CHAOS_JOURNAL": str(self.journal(name)),
            "CHAOS_EFFECTS": str(self.effects),
            "CHAOS_OFFSET": repr(self.offset),
        }
        if is_beat and self.setup.clocks:
            self.clocks[name] = WallClock(self.directory / f"{name}.clock")
            env |= self.clocks[name].env
        return env

    def _schedule(self) -> dict[str, Any]:
        if self.setup.stamped:
            return schedule_json(self.version)
        return {
            name: {
                **{key: value for key, value in entry.spec().items() if key != "policy"},
                "options": {"headers": {"chaos_entry": name}},
            }
            for name, entry in entries(self.version).items()
            if name not in CHANGING
        }

    def journal(self, name: str) -> Path:
        """Where a process writes what it does."""
        return self.directory / f"{name}.journal"

    def _lives(self, name: str) -> None:
        version = self._versions.setdefault(name, self.version)
        self.lives.append(Life(self.now(), name, self.processes[name].pid, version))

    # What can befall it

    def _supervise(self) -> None:
        """Start what has ended by itself again, as an init would, and note it."""
        while not self._over.wait(0.25):
            for name, process in self.processes.items():
                with self._lock:
                    if name not in self._down and process.status == "exited":
                        self.exits.append(Exit(self.now(), name, process.exit_code))
                        self._start(name)

    def _start(self, name: str) -> None:
        self.processes[name].start()
        self._lives(name)

    def kill(self, name: str) -> None:
        """Kill a process; it stays down until it is revived."""
        with self._lock:
            self._down.add(name)
        self.processes[name].kill()

    def revive(self, name: str) -> None:
        """Start a process that was killed again, with the version of the code that it had."""
        with self._lock:
            self._start(name)
            self._down.discard(name)

    def deploy(self) -> None:
        """Stop each beat and start it with the next version of the code, one after the other."""
        self.version += 1
        for name in self.setup.beat_names:
            beat = self.processes[name]
            with self._lock:
                self._down.add(name)
            beat.terminate()
            with contextlib.suppress(WaitTimeout):
                beat.wait(4)
            beat.kill()
            beat.env["LB_SCHEDULE"] = json.dumps(self._schedule())
            self._versions[name] = self.version
            self.revive(name)
            wait_for(lambda beat=beat: beat.find("beat: Starting...") or beat.status == "exited", 20)

    def step_clock(self, name: str, seconds: float) -> None:
        """Set a beat's wall clock so far ahead, or back."""
        self.clocks[name].set(seconds)

    def heal(self) -> None:
        """End whatever may still be broken, and revive whoever is dead."""
        for proxy in self.links.values():
            proxy.resume()
        assert self.ledger is not None
        self.ledger.heal()
        for name, process in self.processes.items():
            process.thaw()
            if name in self.clocks:
                self.step_clock(name, 0)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a process."""
        self.processes[name].kill(number)


def _make_effects(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute(
        "CREATE TABLE effects (t REAL, key TEXT, fence INTEGER, accepted INTEGER, run TEXT, pid INTEGER)"
    )
    connection.execute("CREATE INDEX by_key ON effects (key)")
    connection.commit()
    connection.close()


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a journal; the last one may be on its way, or have died with its process."""
    if not path.exists():
        return
    with path.open() as file:
        for line in file:
            if line.endswith("\n"):
                with contextlib.suppress(json.JSONDecodeError):
                    yield json.loads(line)
