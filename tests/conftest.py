"""Fixtures for all tests: servers, and what they are. `tests/unit` asks for none of them."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.support.order import spread
from tests.support.process import running, stop_all
from tests.support.servers import KINDS, REDIS_KINDS, RabbitServer, RedisServer, find, require


def pytest_report_header() -> list[str]:
    """Say what the tests run against."""
    packages = ("celery", "kombu", "redis", "pytest-celery")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    servers = ", ".join(str(find(kind)) for kind in KINDS)
    return [f"python {platform.python_version()}, {versions}", f"servers: {servers}"]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers, take the long tests first."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        items[:] = spread(items, workers, lambda item: item.nodeid.partition("::")[0])


_marks: dict[str, int] = {}


def pytest_runtest_logstart() -> None:
    """Note how far the logs of the session's servers are, so that a report shows this test's part."""
    _marks.clear()
    _marks.update((process.id, process.mark()) for process in running())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[pytest.TestReport]:
    """Add the processes' logs to the report of a failed test."""
    report = yield
    if report.failed:
        for process in running():
            tail = process.tail(60, since=_marks.get(process.id, 0))
            report.sections.append((f"{process.name} (pid {process.pid}, {process.status})", tail))
    return report


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Tell something at the end of the session: `tell(heading, line)`."""
    # A test's properties travel with its report, also from a worker of xdist.
    return lambda heading, line: request.node.user_properties.append(("told", (heading, line)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the tests have told; the guards only where there is room (`-v`)."""
    told: dict[str, list[str]] = {}
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        # The last report of a test has all that its fixtures told, too.
        for name, value in report.user_properties if getattr(report, "when", "") == "teardown" else ():
            if name == "told":
                told.setdefault(value[0], []).append(value[1])
    for heading, lines in told.items():
        if heading == "guards" and terminalreporter.verbosity < 1:
            continue
        terminalreporter.section(heading)
        for line in lines:
            terminalreporter.write_line(line)


def pytest_unconfigure() -> None:
    """Leave no process behind."""
    stop_all()


# Servers for the whole session


@pytest.fixture(scope="session")
def redis_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], RedisServer]]:
    """A function that returns the session's server of a kind (`valkey`, `redis`, `redis62`)."""
    started: dict[str, RedisServer] = {}

    def get(name: str) -> RedisServer:
        kind = require(name)
        if name not in started:
            started[name] = RedisServer(kind, tmp_path_factory.mktemp(name), name=name)
            started[name].start()
        return started[name]

    yield get
    for server in started.values():
        server.stop()


@pytest.fixture
def one_server(redis_servers: Callable[[str], RedisServer]) -> RedisServer:
    """A server of the first kind that is found, empty: for what would take too long on each of them."""
    found = [name for name in REDIS_KINDS if find(name).binary]
    server = redis_servers(found[0] if found else REDIS_KINDS[0])
    server.flush()
    return server


@pytest.fixture(scope="session")
def rabbitmq(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RabbitServer]:
    """The session's RabbitMQ. Take a `vhost()` of it for each test."""
    tests = sum("rabbitmq" in item.nodeid for item in request.session.items)
    # Each of xdist's workers has a node to itself, and about its share of the tests.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    server = RabbitServer(require("rabbitmq"), tmp_path_factory.mktemp("rabbitmq"), tests // workers + 8)
    server.start()
    yield server
    server.stop()


# A server for one test


@pytest.fixture(params=REDIS_KINDS)
def redis_server(request: pytest.FixtureRequest, redis_servers: Callable[[str], RedisServer]) -> RedisServer:
    """The session's server of each kind in turn, empty. A test that breaks its server takes `start_redis`."""
    server = redis_servers(request.param)
    server.flush()
    return server


@pytest.fixture
def redis_client(redis_server: RedisServer) -> redis.Redis:
    """A client of `redis_server`'s database 0 that decodes answers."""
    return redis_server.client()


@pytest.fixture
def start_redis(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """A function that starts a server of the test's own: `start_redis("valkey", "--maxmemory", "5mb")`."""
    started: list[RedisServer] = []

    def start(name: str = "valkey", *args: str, wait: bool = True, **more: Any) -> RedisServer:
        directory = tmp_path / f"{name}{len(started)}"
        server = RedisServer(require(name), directory, *args, name=directory.name, **more)
        started.append(server)
        server.start(wait=wait)
        return server

    yield start
    for server in started:
        server.stop()
