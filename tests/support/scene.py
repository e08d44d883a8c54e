"""The stage of one test: a ledger server, a broker, and the beats and workers of the project under test.

`Scene` knows nothing of pytest-celery; `containers.py` makes its nodes and clusters out of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import redis

from tests.support.process import REPO, Process
from tests.support.proxy import Proxy
from tests.support.servers import RabbitServer, RedisServer
from tests.support.waits import wait_for

__all__ = [
    "LEADERBEAT",
    "MATRIX",
    "PROJECT",
    "SCHEDULER",
    "Beat",
    "Scene",
    "Worker",
    "keys_of",
    "leader",
    "standbys",
]

PROJECT = "tests.support.project"
SCHEDULER = "celery_leaderbeat.Scheduler"

#: Name -> (the ledger's kind, the broker's kind). The same kind twice is one server, with a database for each.
MATRIX = {
    "valkey": ("valkey", "valkey"),
    "redis": ("redis", "redis"),
    "valkey+rabbitmq": ("valkey", "rabbitmq"),
    "redis+rabbitmq": ("redis", "rabbitmq"),
}


class Beat(Process):
    """A `celery beat`, with its own proxies where the test asked for them."""

    ready_prompt = "beat: Starting..."
    ledger_proxy: Proxy | None = None
    broker_proxy: Proxy | None = None


class Worker(Process):
    """A `celery worker`."""

    ready_prompt = " ready."


class _HasPid(Protocol):
    @property
    def pid(self) -> int: ...


class _Stage(Protocol):
    """A `Scene`, or a `LeaderbeatSetup`, whose beats are nodes."""

    @property
    def beats(self) -> Sequence[Any]: ...

    def lease(self) -> SimpleNamespace | None: ...


class Scene:
    """The servers and files of one test, and the processes that use them.

    Parameters:
        directory: for the processes' logs and working directories.
        ledger: where the leases and slots are; its database 1 is the broker unless there is a RabbitMQ, and
            its database 2 keeps results.
        rabbit: the broker.
        schedule: what LB_SCHEDULE of the project takes.
        conf: Celery settings of the project.
    """

    LEDGER_DB, BROKER_DB, BACKEND_DB = 0, 1, 2

    def __init__(
        self,
        directory: Path,
        ledger: RedisServer,
        rabbit: RabbitServer | None = None,
        *,
        schedule: Mapping[str, Any] | None = None,
        conf: Mapping[str, Any] | None = None,
    ) -> None:
        self.directory = directory
        self.ledger = ledger
        self.rabbit = rabbit
        self.vhost = rabbit.vhost() if rabbit else ""
        self.schedule = dict(schedule or {})
        self.conf = dict(conf or {})
        self.log = directory / "runs.jsonl"
        self.publish_log = directory / "publishes.jsonl"
        self.beats: list[Beat] = []
        self.workers: list[Worker] = []
        self._proxies: list[Proxy] = []

    def close(self) -> None:
        """Kill the beats and workers, and stop the proxies."""
        for process in (*self.beats, *self.workers):
            process.stop()
        for proxy in self._proxies:
            proxy.stop()

    # Where things are

    @property
    def ledger_url(self) -> str:
        """The URL of the ledger's database."""
        return self.ledger.url(self.LEDGER_DB)

    @property
    def broker_url(self) -> str:
        """The URL of the broker."""
        return self.rabbit.url(self.vhost) if self.rabbit else self.ledger.url(self.BROKER_DB)

    @property
    def backend_url(self) -> str:
        """The URL of the result backend."""
        return self.ledger.url(self.BACKEND_DB)

    @property
    def redis(self) -> redis.Redis:
        """A client of the ledger's database."""
        return self.ledger.client(self.LEDGER_DB)

    def env(
        self,
        *,
        schedule: Mapping[str, Any] | None = None,
        conf: Mapping[str, Any] | None = None,
        ledger_url: str | None = None,
        broker_url: str | None = None,
    ) -> dict[str, str | None]:
        """The environment of a process: the scene's, with another schedule or more settings."""
        settings = {"leaderbeat_redis_url": ledger_url or self.ledger_url, **self.conf, **(conf or {})}
        return {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")])),
            "CELERY_BROKER_URL": broker_url or self.broker_url,
            "CELERY_RESULT_BACKEND": self.backend_url,
            "LB_SCHEDULE": json.dumps(self.schedule if schedule is None else schedule),
            "LB_CONF": json.dumps({key: value for key, value in settings.items() if value is not None}),
            "LB_LOG": str(self.log),
            "LB_PUBLISH_LOG": str(self.publish_log),
        }

    # Processes

    def proxy(self, port: int) -> Proxy:
        """A proxy to a server's port, stopped with the scene."""
        proxy = Proxy(port).start()
        self._proxies.append(proxy)
        return proxy

    def start_beat(
        self,
        *,
        schedule: Mapping[str, Any] | None = None,
        conf: Mapping[str, Any] | None = None,
        args: Sequence[str] = (),
        env: Mapping[str, str | None] | None = None,
        scheduler: str = SCHEDULER,
        proxied: Iterable[str] = (),
        cut: Iterable[str] = (),
        loglevel: str = "INFO",
        wait: bool = True,
    ) -> Beat:
        """Start one more beat.

        Parameters:
            schedule: instead of the scene's; conf: on top of the scene's.
            args: more arguments of `celery beat`; env: more variables.
            proxied: which servers it reaches through a proxy of its own: `"ledger"`, `"broker"`. Where both
                are one server, there are two proxies all the same.
            cut: which of them it can't reach from its start on, until that proxy is resumed.
            wait: whether to wait until it has started.
        """
        cut = set(cut)
        ways = {*proxied, *cut}
        ledger_proxy = self.proxy(self.ledger.port) if "ledger" in ways else None
        broker_port = self.rabbit.port if self.rabbit else self.ledger.port
        broker_proxy = self.proxy(broker_port) if "broker" in ways else None
        variables = self.env(
            schedule=schedule,
            conf=conf,
            ledger_url=ledger_proxy.redis_url(self.LEDGER_DB) if ledger_proxy else None,
            broker_url=self._through(broker_proxy),
        )
        name = f"beat{len(self.beats)}"
        beat = Beat(
            [*_celery("beat"), "-S", scheduler, "-l", loglevel, *args],
            name=name,
            directory=self.directory / name,
            env={**variables, **(env or {})},
        )
        beat.ledger_proxy, beat.broker_proxy = ledger_proxy, broker_proxy
        for way, proxy in (("ledger", ledger_proxy), ("broker", broker_proxy)):
            if proxy is not None and way in cut:
                proxy.cut()
        self.beats.append(beat)
        beat.start()
        if wait:
            beat.wait_for_log(beat.ready_prompt)
        return beat

    def _through(self, proxy: Proxy | None) -> str | None:
        if proxy is None:
            return None
        return proxy.amqp_url(self.vhost) if self.rabbit else proxy.redis_url(self.BROKER_DB)

    def start_worker(
        self,
        *,
        pool: str = "solo",
        concurrency: int = 1,
        conf: Mapping[str, Any] | None = None,
        args: Sequence[str] = (),
        env: Mapping[str, str | None] | None = None,
        loglevel: str = "INFO",
        wait: bool = True,
    ) -> Worker:
        """Start one more worker; see `start_beat`."""
        name = f"worker{len(self.workers)}"
        worker = Worker(
            [], name=name, directory=self.directory / name, env={**self.env(conf=conf), **(env or {})}
        )
        worker.args = [
            *_celery("worker"),
            *("-n", f"celery_test_worker@{worker.id[:12]}"),
            *("-P", pool, "-c", str(concurrency), "-l", loglevel),
            # Mingling waits a second for the others; the rest is traffic.
            *("--without-mingle", "--without-gossip", "--without-heartbeat"),
            *args,
        ]
        self.workers.append(worker)
        worker.start()
        if wait:
            worker.wait_for_log(worker.ready_prompt)
        return worker

    # What has happened

    def runs(self, event: str | None = "start") -> list[SimpleNamespace]:
        """What the project's tasks noted: `key, epoch, slot, attempt, event, task, id, retries, redelivered, pid, t`.

        Once for each run by default; with `event` None, also the ends, failures and retries.
        """
        return _records(self.log, event)

    def publishes(self, event: str | None = "after") -> list[SimpleNamespace]:
        """What was published, by beats and workers: `key, epoch, slot, attempt, event, task, id, retries,
        put_off, routing_key, exchange, pid, t`."""
        return _records(self.publish_log, event)

    def beat_publishes(self) -> list[SimpleNamespace]:
        """What was published by other processes than the workers (whose retries are publishes too).

        A message that is put off may be published by a child of a worker.
        """
        workers = {worker.pid for worker in self.workers}
        return [record for record in self.publishes() if record.pid not in workers and not record.put_off]

    @property
    def prefix(self) -> str:
        """The prefix of our keys in the ledger."""
        return self.conf.get("leaderbeat_key_prefix") or "leaderbeat:project"

    def key(self, name: str) -> str:
        """The full name of one of our keys: `lease`, `epoch`, `slot:<tick key>`, …"""
        return f"{{{self.prefix}}}:{name}"

    def lease(self) -> SimpleNamespace | None:
        """The lease as it is now (`holder`, `epoch`, `pid`, …), or None."""
        value = self.redis.get(self.key("lease"))
        return SimpleNamespace(**json.loads(value)) if value else None

    def slot(self, tick_key: str) -> dict[str, str]:
        """The record of a slot; empty when there is none."""
        return self.redis.hgetall(self.key(f"slot:{tick_key}"))


def _celery(command: str) -> list[str]:
    return [sys.executable, "-m", "celery", "-A", PROJECT, command]


#: `celery leaderbeat`, to be run in the environment of a beat or worker: `beat.exec_run([*LEADERBEAT, "status"])`.
LEADERBEAT = tuple(_celery("leaderbeat"))


def _records(path: Path, event: str | None) -> list[SimpleNamespace]:
    with contextlib.suppress(FileNotFoundError):
        # The last line may be on its way.
        lines = path.read_text().splitlines(keepends=True)
        records = [SimpleNamespace(**json.loads(line)) for line in lines if line.endswith("\n")]
        return [record for record in records if event is None or record.event == event]
    return []


def leader(stage: _Stage, timeout: float = 10.0, *, other_than: _HasPid | Iterable[_HasPid] = ()) -> Any:
    """Wait until one of the stage's beats holds the lease, and return it.

    `other_than` names beats that don't count: those that held it before.
    """
    others = list(other_than) if isinstance(other_than, Iterable) else [other_than]
    gone = {beat.pid for beat in others}

    def look() -> Any:
        lease = stage.lease()
        if lease is None or lease.pid in gone:
            return None
        return next((beat for beat in stage.beats if beat.pid == lease.pid), None)

    def what() -> str:
        beats = ", ".join(f"{beat.pid}" for beat in stage.beats)
        return f"a beat among {beats} leads, other than {sorted(gone)}; the lease is {stage.lease()}"

    return wait_for(look, timeout, what, interval=0.01, ignore=(redis.RedisError,))


def standbys(stage: _Stage, timeout: float = 10.0) -> list[Any]:
    """The beats that don't lead, once one does."""
    first = leader(stage, timeout)
    return [beat for beat in stage.beats if beat is not first]


def keys_of(records: Iterable[SimpleNamespace]) -> list[str]:
    """The tick keys of runs or publishes."""
    return [record.key for record in records]
