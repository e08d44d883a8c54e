"""Several Redis servers that belong together: a primary with its replica and Sentinels, a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.servers import Kind, RedisServer, free_port
from tests.support.waits import wait_for

__all__ = ["Cluster", "Sentinels", "start_cluster", "start_sentinels"]


@dataclass
class Sentinels:
    """A primary, its replica, and the Sentinels that watch over them."""

    service: str
    primary: RedisServer
    replica: RedisServer
    sentinels: list[RedisServer] = field(default_factory=list)

    def url(self, db: int = 0) -> str:
        """As Celery writes it; the service's name goes into `master_name` of the transport options."""
        return ";".join(f"sentinel://127.0.0.1:{sentinel.port}/{db}" for sentinel in self.sentinels)

    def primary_port(self) -> int:
        """The port of the server that the Sentinels take for the primary now."""
        answer = (
            self.sentinels[0].client().execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)
        )
        return int(answer[1])

    def stop(self) -> None:
        """Kill all of them."""
        for server in (*self.sentinels, self.replica, self.primary):
            server.stop()


def start_sentinels(
    kind: Kind, directory: Path, *, count: int = 1, service: str = "leaderbeat", down_after_ms: int = 500
) -> Sentinels:
    """Start a primary, a replica of it and `count` Sentinels, and wait until the Sentinels know both."""
    primary = RedisServer(kind, directory / "primary", name="primary")
    primary.start()
    replica = RedisServer(
        kind, directory / "replica", "--replicaof", "127.0.0.1", str(primary.port), name="replica"
    )
    replica.start()
    wait_for(
        lambda: replica.client().info("replication")["master_link_status"] == "up", 20, "the replica follows"
    )
    group = Sentinels(service, primary, replica)
    for number in range(count):
        home = directory / f"sentinel{number}"
        home.mkdir(parents=True)
        # A Sentinel rewrites its configuration file.
        (home / "sentinel.conf").write_text(
            f"sentinel monitor {service} 127.0.0.1 {primary.port} {count // 2 + 1}\n"
            f"sentinel down-after-milliseconds {service} {down_after_ms}\n"
            f"sentinel failover-timeout {service} 3000\n"
        )
        sentinel = RedisServer(
            kind, home, str(home / "sentinel.conf"), name=f"sentinel{number}", sentinel=True
        )
        sentinel.start()
        group.sentinels.append(sentinel)
    for sentinel in group.sentinels:
        wait_for(_knows(sentinel, service, count), 20, "each Sentinel knows the replica and the others")
    return group


def _knows(sentinel: RedisServer, service: str, count: int) -> Callable[[], bool]:
    def look() -> bool:
        state = sentinel.client().info("sentinel")["master0"]
        return state["name"] == service and state["slaves"] == 1 and state["sentinels"] == count

    return look


@dataclass
class Cluster:
    """The nodes of a cluster."""

    nodes: list[RedisServer]

    def url(self) -> str:
        """The URL of its first node."""
        return self.nodes[0].url()

    def stop(self) -> None:
        """Kill all nodes."""
        for node in self.nodes:
            node.stop()


def start_cluster(kind: Kind, directory: Path, *, count: int = 3) -> Cluster:
    """Start a cluster of primaries that share the slots, and wait until every node finds it sound."""
    ports = [free_port() for _ in range(count)]
    nodes = [
        RedisServer(
            kind,
            directory / f"node{number}",
            *("--cluster-enabled", "yes", "--cluster-node-timeout", "2000"),
            port=port,
            name=f"node{number}",
        )
        for number, port in enumerate(ports)
    ]
    for node in nodes:
        node.start()
    bounds = [16384 * number // count for number in range(count + 1)]
    for number, node in enumerate(nodes):
        client = node.client()
        # One by one: the range form is newer than 6.2.
        client.execute_command("CLUSTER", "ADDSLOTS", *range(bounds[number], bounds[number + 1]))
        client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
    for node in nodes[1:]:
        node.client().execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[0].port)
    for node in nodes:
        wait_for(_sound(node, count), 20, f"{node.name} finds the cluster sound")
    return Cluster(nodes)


def _sound(node: RedisServer, count: int) -> Callable[[], bool]:
    def look() -> bool:
        state = node.client().execute_command("CLUSTER INFO")
        if isinstance(state, dict):
            return state["cluster_state"] == "ok" and int(state["cluster_known_nodes"]) == count
        return "cluster_state:ok" in state and f"cluster_known_nodes:{count}" in state

    return look
