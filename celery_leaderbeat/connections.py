"""How the driver connects: to one server, to the primary that Sentinels name, to the node of a cluster with our keys.

All keys share one hash tag, so there is one server at any time that has them, and one connection to it will do. In
a group of servers a connection asks which one that is each time that it connects. When an answer shows that
the server isn't the right one any more (`READONLY`, `MOVED`), the store closes its connections, and the next one asks
again; so it is when the server can't be connected to, or doesn't take part in the handshake: who named it may not have
heard of a failover. Nothing here connects before it is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.retry import Retry

from celery_leaderbeat.redis_url import RedisTarget

__all__ = ["close_client", "leave_server", "make_client"]

_Address = tuple[str, int]

#: Shortest time for which one node is waited for while others may know more, in seconds; and where there is little time.
_SHORTEST_TRY, _HURRIED_TRY = 0.25, 0.05


class _Located:
    """Mixed into a connection of the driver: it asks for its address when it connects."""

    def __init__(self, *, locate: _Guides, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._locate = locate

    def _connect(self) -> Any:
        self.host, self.port = self._locate()
        with self._or_distrust():
            return super()._connect()  # type: ignore[misc]  # the driver's connection comes next

    def on_connect_check_health(self, check_health: bool = True) -> None:
        with self._or_distrust():
            super().on_connect_check_health(check_health)  # type: ignore[misc]  # as above

    @contextlib.contextmanager
    def _or_distrust(self) -> Iterator[None]:
        """Where the server that was named can't be spoken to, somebody else is asked first the next time."""
        try:
            yield
        except (redis.exceptions.RedisError, OSError):
            self._locate.distrust()
            raise


class _LocatedConnection(_Located, redis.Connection):
    pass


class _LocatedTLSConnection(_Located, redis.SSLConnection):
    pass


class _Guides:
    """Some servers that know where to go, asked one after the other; who has answered is asked first the next time.

    Parameters:
        target: whose `nodes` they are.
        timeout: longest that asking all of them may take, about, in seconds.
    """

    def __init__(self, target: RedisTarget, timeout: float) -> None:
        self.target = target
        self._timeout = timeout
        self._nodes = list(target.nodes)

    def __call__(self) -> _Address:
        said: list[str] = []
        for node in tuple(self._nodes):
            try:
                found = self._ask(node)
            except (redis.exceptions.RedisError, OSError) as exc:
                said.append(f"{_shown(node)} says: {exc}")
                continue
            if found is not None:
                self._nodes = [node, *(other for other in self._nodes if other != node)]
                return found
            said.append(f"{_shown(node)} {self.ignorance}")
        raise redis.exceptions.ConnectionError(f"{self.nobody}: {'; '.join(said)}")

    def distrust(self) -> None:
        """Where the first of them sent us was wrong: ask another one first."""
        self._nodes = [*self._nodes[1:], *self._nodes[:1]]

    def _question(self, node: _Address, *command: str | int) -> Any:
        shortest = min(_SHORTEST_TRY, max(self._timeout / 2, _HURRIED_TRY))
        each = max(self._timeout / len(self._nodes), shortest)
        kwargs = dict(self.kwargs)
        for name in ("socket_timeout", "socket_connect_timeout"):
            kwargs[name] = min(float(kwargs.get(name) or each), each)
        connection_class = redis.SSLConnection if self.tls else redis.Connection
        connection: Any = connection_class(
            host=node[0], port=node[1], decode_responses=True, retry=Retry(NoBackoff(), 0), **kwargs
        )
        try:
            connection.connect()
            connection.send_command(*command)
            return connection.read_response()
        finally:
            connection.disconnect()

    # What differs

    nobody = ""
    ignorance = ""
    kwargs: Mapping[str, Any]
    tls: bool

    def _ask(self, node: _Address) -> _Address | None:
        raise NotImplementedError


class _Sentinels(_Guides):
    """They know the primary."""

    def __init__(self, target: RedisTarget, timeout: float) -> None:
        super().__init__(target, timeout)
        self.nobody = f"no Sentinel knows the primary {target.master_name!r}"
        self.ignorance = "knows none of that name (master_name)"
        self.kwargs, self.tls = target.sentinel, target.sentinel_tls

    def _ask(self, node: _Address) -> _Address | None:
        found = self._question(node, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.target.master_name)
        return (str(found[0]), int(found[1])) if found else None


class _Nodes(_Guides):
    """Nodes of a cluster: each knows which one serves a key, and of all others.

    Those are asked that the URL names and the latest answer: nodes come and go, and each one that is gone costs time.
    """

    def __init__(self, target: RedisTarget, timeout: float, tag: str, options: Mapping[str, Any]) -> None:
        super().__init__(target, timeout)
        self.nobody = "no node of the cluster knows where the keys are"
        self.ignorance = "knows nobody who serves them"
        self.tls = target.tls
        left_out = ("db", "decode_responses", "max_connections", "retry")
        self.kwargs = {key: value for key, value in options.items() if key not in left_out}
        self._slot = key_slot(f"{{{tag}}}".encode())

    def _ask(self, node: _Address) -> _Address | None:
        found: _Address | None = None
        told: list[_Address] = []
        for first, last, *servers in self._question(node, "CLUSTER", "SLOTS"):
            # A node that doesn't know its own name, or hides it, is the one that was asked.
            known = [
                (str(host) if host and host != "?" else node[0], int(port)) for host, port, *_ in servers
            ]
            told += known
            if int(first) <= self._slot <= int(last):
                found = known[0]
        if found is not None:
            kept = [address for address in self._nodes if address in told or address in self.target.nodes]
            self._nodes = list(dict.fromkeys([*kept, *told]))
        return found


def _shown(node: _Address) -> str:
    return f"{node[0]}:{node[1]}"


def make_client(target: RedisTarget, options: Mapping[str, Any], timeout: float, prefix: str) -> Any:
    """A client, not connected yet.

    Parameters:
        options: `leaderbeat_redis_options`; they win over those of the URL.
        timeout: longest that connecting, or one answer, may take, in seconds.
        prefix: the hash tag of our keys.
    """
    # The health check is a PING on a connection that has been idle: it finds out that a subscription is dead.
    kwargs: dict[str, Any] = {"socket_timeout": timeout, "health_check_interval": 10}
    if not target.unix:
        kwargs |= {"socket_connect_timeout": timeout, "socket_keepalive": True}
    kwargs |= target.kwargs
    kwargs |= options
    kwargs |= {
        "decode_responses": True,
        "encoding": "utf-8",
        "encoding_errors": "backslashreplace",
        "retry": Retry(NoBackoff(), 0),
    }
    connection_class: Any
    if target.kind != "server":
        connection_class = _LocatedTLSConnection if target.tls else _LocatedConnection
        cluster = target.kind == "cluster"
        kwargs["locate"] = _Nodes(target, timeout, prefix, kwargs) if cluster else _Sentinels(target, timeout)
    elif target.unix:
        connection_class = redis.UnixDomainSocketConnection
    else:
        connection_class = redis.SSLConnection if target.tls else redis.Connection
    return redis.Redis(connection_pool=redis.ConnectionPool(connection_class=connection_class, **kwargs))


def leave_server(client: Any) -> None:
    """The client turned out to be connected to the wrong server: close its connections, so that the next asks again."""
    pool = client.connection_pool
    guides = pool.connection_kwargs.get("locate")
    if guides is not None:
        guides.distrust()
    pool.disconnect(inuse_connections=False)


def close_client(client: Any) -> None:
    """Close all connections of a client."""
    client.connection_pool.disconnect()
