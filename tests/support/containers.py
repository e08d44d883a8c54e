"""pytest-celery's containers, nodes and clusters over local processes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import redis
from kombu import Connection
from pytest_celery import (
    RESULT_TIMEOUT,
    CeleryTestCluster,
    CeleryTestContainer,
    CeleryTestNode,
    CeleryTestSetup,
    CeleryTestWorker,
    CeleryWorkerContainer,
    RabbitMQContainer,
    RedisContainer,
)
from pytest_docker_tools.exceptions import TimeoutError as ContainerTimeoutError

from tests.support.process import Line, Process
from tests.support.proxy import Proxy
from tests.support.scene import Beat, Scene
from tests.support.servers import RabbitServer, RedisServer
from tests.support.waits import WaitTimeout

__all__ = [
    "BeatCluster",
    "BeatContainer",
    "BeatNode",
    "LeaderbeatSetup",
    "LocalRabbitMQContainer",
    "LocalRedisContainer",
    "LocalWorkerContainer",
    "WorkerNode",
]


class _LocalContainer(CeleryTestContainer):
    """A container whose raw object is a `Process`."""

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        self.process = process

    def logs(self) -> str:
        """The whole log, of all starts."""
        return self.process.text(0)

    def _wait_ready(self, timeout: int = 30) -> bool:
        # Only past the latest start: what an earlier one said doesn't count.
        if self.ready_prompt is not None:
            self.process.wait_for_log(self.ready_prompt, timeout)
        return True


class LocalRedisContainer(_LocalContainer, RedisContainer):
    """One database of a local Redis or Valkey."""

    def __init__(self, process: RedisServer, db: int) -> None:
        super().__init__(process)
        self.server = process
        self.db = db

    @property
    def client(self) -> redis.Redis:
        """The server's own client, which is closed with it."""
        return self.server.client(self.db)

    @property
    def hostname(self) -> str:
        """The loopback address: names cost a look-up."""
        return "127.0.0.1"

    @property
    def port(self) -> int:
        """The server's port."""
        return self.server.port

    @property
    def vhost(self) -> str:
        """The database."""
        return str(self.db)

    @property
    def url(self) -> str:
        """The same from the inside as from the outside."""
        return self.server.url(self.db)

    @property
    def host_url(self) -> str:
        """The same from the outside as from the inside."""
        return self.server.url(self.db)

    @property
    def ready_prompt(self) -> None:
        """None: its start has waited for an answer, and versions word the line differently."""
        return None


class LocalRabbitMQContainer(_LocalContainer, RabbitMQContainer):
    """One virtual host of a local RabbitMQ."""

    def __init__(self, process: RabbitServer, vhost: str) -> None:
        super().__init__(process)
        self.server = process
        self._vhost = vhost

    @property
    def client(self) -> Connection:
        """A connection, to be closed by the caller."""
        return Connection(self.url)

    @property
    def hostname(self) -> str:
        """The loopback address."""
        return "127.0.0.1"

    @property
    def port(self) -> int:
        """The node's port."""
        return self.server.port

    @property
    def vhost(self) -> str:
        """The virtual host."""
        return self._vhost

    @property
    def url(self) -> str:
        """The same from the inside as from the outside."""
        return self.server.url(self._vhost)

    @property
    def host_url(self) -> str:
        """The same from the outside as from the inside."""
        return self.server.url(self._vhost)


class LocalWorkerContainer(_LocalContainer, CeleryWorkerContainer):
    """A `celery worker` of the project under test."""

    @property
    def celeryconfig(self) -> dict[str, Any]:
        """A worker gives the others nothing."""
        return {}


class BeatContainer(_LocalContainer):
    """A `celery beat` of the project under test."""

    @property
    def ready_prompt(self) -> str:
        """What beat logs when it has been set up."""
        return Beat.ready_prompt

    @property
    def celeryconfig(self) -> dict[str, Any]:
        """A beat gives the others nothing."""
        return {}


class _LocalNode(CeleryTestNode):
    """What a node gains from running here."""

    @property
    def process(self) -> Any:
        """The process behind the container."""
        return self.container.process

    @property
    def pid(self) -> int:
        """The process's id."""
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """The process's exit status, or None."""
        return self.process.exit_code

    @property
    def status(self) -> str:
        """`created`, `running` (also under SIGSTOP) or `exited`."""
        return self.process.status

    def freeze(self) -> None:
        """SIGSTOP, and wait until it has stopped."""
        self.process.freeze()

    def thaw(self) -> None:
        """SIGCONT."""
        self.process.thaw()

    def terminate(self) -> None:
        """SIGTERM."""
        self.process.terminate()

    def wait(self, timeout: float = 10.0) -> int:
        """Wait until the process has ended, and return its exit status."""
        return self.process.wait(timeout)["StatusCode"]

    def mark(self) -> int:
        """The end of the log as it is now, for `since`."""
        return self.process.mark()

    def lines(self, since: int | None = None) -> list[Line]:
        """The log's lines with their times; by default since the latest start."""
        return self.process.lines(since)

    def find(self, pattern: str | re.Pattern[str], since: int | None = None) -> list[Line]:
        """The log's lines that hold the text or match the expression; by default since the latest start."""
        return self.process.find(pattern, since)

    def wait_for_log(
        self,
        log: str | re.Pattern[str],
        message: str = "",
        timeout: float = RESULT_TIMEOUT,
        since: int | None = 0,
    ) -> Line:
        """Wait for a line, looking every 20 ms, and return it. In the whole log, as pytest-celery does;
        `since=None` looks only past the latest start."""
        try:
            return self.process.wait_for_log(log, timeout, since)
        except WaitTimeout as exc:
            raise LogTimeout(f"{message}: {exc}" if message else str(exc)) from None


class LogTimeout(WaitTimeout, ContainerTimeoutError):
    """Caught by pytest-celery's log assertions, and an AssertionError elsewhere."""


class BeatNode(_LocalNode):
    """One replica."""

    @property
    def ledger_proxy(self) -> Proxy:
        """Its way to the ledger, where the test asked for a proxy."""
        assert self.process.ledger_proxy, "say proxied=('ledger',) to have one"
        return self.process.ledger_proxy

    @property
    def broker_proxy(self) -> Proxy:
        """Its way to the broker, where the test asked for a proxy."""
        assert self.process.broker_proxy, "say proxied=('broker',) to have one"
        return self.process.broker_proxy


class WorkerNode(_LocalNode, CeleryTestWorker):
    """One worker."""


class BeatCluster(CeleryTestCluster):
    """The replicas of a test."""

    def _set_nodes(
        self, *nodes: CeleryTestNode | CeleryTestContainer, node_cls: type[CeleryTestNode] = BeatNode
    ) -> tuple[CeleryTestNode, ...]:
        return super()._set_nodes(*nodes, node_cls=node_cls)

    def config(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """A beat gives the others nothing."""
        return {}


class LeaderbeatSetup(CeleryTestSetup):
    """A setup with beats. Made for one test by `celery_setup_cls`, which fills in the class attributes.

    What `Scene` knows (`runs`, `publishes`, `lease`, `redis`, …) can be asked here too.
    """

    scene: Scene
    beat_cluster: BeatCluster | None = None
    wait_for_start: bool = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._added_beats: list[BeatNode] = []
        self._added_workers: list[WorkerNode] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(type(self).scene, name)

    def __len__(self) -> int:
        return super().__len__() + len(self.beats)

    @property
    def beats(self) -> Sequence[BeatNode]:
        """The replicas, those added later at the end."""
        return [*(self.beat_cluster or ()), *self._added_beats]

    @property
    def workers(self) -> Sequence[WorkerNode]:
        """The workers, those added later at the end."""
        return [*(self.worker_cluster or ()), *self._added_workers]

    def add_beat(self, **options: Any) -> BeatNode:
        """Start one more replica; takes what `Scene.start_beat` takes."""
        node = BeatNode(BeatContainer(self.scene.start_beat(**options)), self.app)
        self._added_beats.append(node)
        return node

    def add_worker(self, **options: Any) -> WorkerNode:
        """Start one more worker; takes what `Scene.start_worker` takes."""
        node = WorkerNode(LocalWorkerContainer(self.scene.start_worker(**options)), self.app)
        self._added_workers.append(node)
        return node

    def lease(self) -> SimpleNamespace | None:
        """The lease as it is now (`holder`, `epoch`, `pid`, …), or None."""
        return self.scene.lease()

    def ready(self, ping: bool = False, control: bool = False, docker: bool = True) -> bool:
        """Wait for the beats and workers to start (unless the test said not to), then ask as usual."""
        if self.wait_for_start:
            for node in (*self.beats, *self.workers):
                node.process.wait_for_log(node.container.ready_prompt, 30)
        ready = super().ready(ping=ping, control=control, docker=docker)
        for node in self.beats:
            node._app = self.app
        return ready

    def _is_docker_ready(self, docker: bool) -> bool:
        return super()._is_docker_ready(docker) and (
            not docker or self.beat_cluster is None or self.beat_cluster.ready()
        )
