"""The ledger's servers, and what can befall them: one server that keeps its data, or a primary that Sentinels watch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import redis

from tests.support.servers import RedisServer, require
from tests.support.topologies import Sentinels, start_sentinels
from tests.support.waits import wait_for

__all__ = ["Ledger", "Standalone", "Watched", "start_ledger"]

#: The database that holds our keys, and the one to which they go when they are lost.
_DB, _LOST = 0, 9


class Ledger(Protocol):
    """What a run needs of the ledger's servers."""

    @property
    def server(self) -> RedisServer:
        """The one that counts now."""
        ...

    @property
    def conf(self) -> Mapping[str, Any]:
        """Settings of ours that lead there, besides the URL."""
        ...

    def url(self) -> str:
        """Where our keys are."""
        ...

    def pause(self, seconds: float, wait: Callable[[float], None]) -> None:
        """Freeze the server for a while."""

    def restart(self, seconds: float, wait: Callable[[float], None]) -> None:
        """Kill the server, and start it again after a while."""

    def flush(self) -> None:
        """Lose our keys."""

    def lost_url(self) -> str:
        """Where those are that were lost last, for who wants to know what was lost."""
        ...

    def heal(self) -> None:
        """End whatever is left of a fault."""

    def stop(self) -> None:
        """Kill all servers."""


class Standalone:
    """One server. What it was told survives its restart: whether it does elsewhere is Redis' promise, not ours."""

    conf: Mapping[str, Any] = {}

    def __init__(self, kind: str, directory: Path) -> None:
        keeps = ("--appendonly", "yes", "--appendfsync", "everysec")
        self.server = RedisServer(require(kind), directory / "ledger", *keeps, name="ledger")
        self.server.start()

    def url(self) -> str:
        """Where our keys are."""
        return self.server.url(_DB)

    def pause(self, seconds: float, wait: Callable[[float], None]) -> None:
        """Freeze the server for a while."""
        self.server.freeze()
        wait(seconds)
        self.server.thaw()

    def restart(self, seconds: float, wait: Callable[[float], None]) -> None:
        """Kill the server, and start it again after a while."""
        self.server.kill()
        wait(seconds)
        self.server.start()

    def flush(self) -> None:
        """Lose our keys."""
        _lose(self.server)

    def lost_url(self) -> str:
        """Where those are that were lost last."""
        return self.server.url(_LOST)

    def heal(self) -> None:
        """End whatever is left of a fault."""
        self.server.thaw()
        if self.server.status != "running":
            self.server.start()

    def stop(self) -> None:
        """Kill the server."""
        self.server.stop()


class Watched:
    """A primary and its replica under Sentinels. Neither keeps anything on disk: what both forget is lost."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.group: Sentinels = start_sentinels(require(kind), directory / "ledger", count=3)
        self.conf = {
            "leaderbeat_redis_options": {"master_name": self.group.service},
            # What a failover must not lose is published only once the replica knows of it.
            "leaderbeat_min_replicas": 1,
        }

    @property
    def server(self) -> RedisServer:
        """The one that the Sentinels take for the primary."""
        port = self.group.primary_port()
        return next(server for server in (self.group.primary, self.group.replica) if server.port == port)

    def url(self) -> str:
        """Where our keys are."""
        return self.group.url(_DB)

    def pause(self, seconds: float, wait: Callable[[float], None]) -> None:
        """Freeze the primary for a while: longer than half a second, and the Sentinels replace it."""
        primary = self.server
        primary.freeze()
        wait(seconds)
        primary.thaw()
        self._settle()

    def restart(self, seconds: float, wait: Callable[[float], None]) -> None:
        """Kill the primary; the Sentinels replace it, and it comes back as a replica."""
        primary = self.server
        primary.kill()
        wait_for(lambda: self.server is not primary, 30, "the Sentinels replace the primary")
        wait(seconds)
        primary.start()
        self._settle()

    def flush(self) -> None:
        """Lose our keys."""
        _lose(self.server)

    def lost_url(self) -> str:
        """Where those are that were lost last."""
        return self.group.url(_LOST)

    def heal(self) -> None:
        """End whatever is left of a fault."""
        for server in (self.group.primary, self.group.replica):
            server.thaw()
            if server.status != "running":
                server.start()
        self._settle()

    def stop(self) -> None:
        """Kill all servers."""
        self.group.stop()

    def _settle(self) -> None:
        """Wait until one is the primary and the other its replica."""
        wait_for(self._one_follows, 60, "one server follows the other", interval=0.1)

    def _one_follows(self) -> bool:
        with contextlib.suppress(redis.RedisError):
            primary = self.server
            other = self.group.replica if primary is self.group.primary else self.group.primary
            state = other.client().info("replication")
            leads = primary.client().info("replication")["role"] == "master"
            return leads and state["role"] == "slave" and state["master_link_status"] == "up"
        return False


def _lose(server: RedisServer) -> None:
    """To its clients a database that changes places with an empty one is flushed."""
    server.client(_LOST).flushdb()
    server.client(_DB).swapdb(_DB, _LOST)


def start_ledger(topology: str, kind: str, directory: Path) -> Ledger:
    """Start the servers of a topology: `standalone` or `sentinel`."""
    return Watched(kind, directory) if topology == "sentinel" else Standalone(kind, directory)
