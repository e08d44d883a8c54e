"""Several Redis servers that belong together: a primary with its replica and Sentinels, a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis.crc import key_slot

from tests.support.certificates import Certificates
from tests.support.servers import Kind, RedisServer, free_port
from tests.support.waits import wait_for

__all__ = ["Cluster", "Sentinels", "follows", "start_cluster", "start_sentinels"]


@dataclass
class Sentinels:
    """A primary, its replica, and the Sentinels that watch over them."""

    service: str
    primary: RedisServer
    replica: RedisServer
    sentinels: list[RedisServer] = field(default_factory=list)
    password: str = ""

    def url(self, db: int = 0, scheme: str = "sentinel") -> str:
        """As Celery writes it; the service's name goes into `master_name` of the transport options."""
        user = f":{self.password}@" if self.password else ""
        return ";".join(f"{scheme}://{user}127.0.0.1:{sentinel.port}/{db}" for sentinel in self.sentinels)

    def primary_port(self) -> int:
        """The port of the server that the Sentinels take for the primary now."""
        answer = (
            self.sentinels[0].client().execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)
        )
        return int(answer[1])

    def cut_off_replica(self) -> None:
        """Freeze the replica and end its link: what is written from now on, it doesn't have."""
        self.replica.freeze()
        self.primary.client().client_kill_filter(_type="replica")

    def fail_over(self, by_death: bool = True) -> None:
        """Kill the primary, or tell a Sentinel to; wait until the Sentinels have made the replica the primary."""
        if by_death:
            self.primary.kill()
        else:
            self.sentinels[0].client().execute_command("SENTINEL", "FAILOVER", self.service)
        self.replica.thaw()
        # A Sentinel that the machine has kept from the processor does nothing for half a minute: it distrusts its clock.
        wait_for(lambda: self.primary_port() == self.replica.port, 60, "the Sentinels name the replica")
        wait_for(
            lambda: self.replica.client().info("replication")["role"] == "master",
            20,
            "the replica takes over",
        )

    def stop(self) -> None:
        """Kill all of them."""
        for server in (*self.sentinels, self.replica, self.primary):
            server.stop()


def start_sentinels(
    kind: Kind,
    directory: Path,
    *,
    count: int = 1,
    service: str = "leaderbeat",
    down_after_ms: int = 2000,
    password: str = "",
    sentinel_password: str = "",
    certificates: Certificates | None = None,
    plain_sentinels: bool = False,
    named: bool = False,
) -> Sentinels:
    """Start a primary, a replica of it and `count` Sentinels, and wait until the Sentinels know both.

    `password` is the servers', `sentinel_password` that of the Sentinels. On a busy machine, a server that is silent
    for much less than `down_after_ms` isn't down.

    With `certificates`, all of them speak TLS and nothing else, and only with clients that have a certificate; with
    `plain_sentinels`, a Sentinel's clients talk to it without TLS, though it talks to everybody with TLS;
    with `named`, their certificates are for `localhost`, and so the Sentinels call the servers.
    """
    # Without the delay in which a primary waits for more replicas to copy itself to.
    own = ("--repl-diskless-sync-delay", "0")
    own += ("--requirepass", password, "--masterauth", password) if password else ()
    host = "localhost" if named else "127.0.0.1"
    own += ("--replica-announce-ip", host) if named else ()
    tls = certificates.client_options() if certificates else {}

    def server(name: str, *args: str) -> RedisServer:
        port = free_port()
        speaks = certificates.server_args(port, clients=True, named=named) if certificates else ()
        options = {"password": password or None, **tls}
        started = RedisServer(
            kind, directory / name, *args, *own, *speaks, port=port, name=name, client_options=options
        )
        started.start()
        return started

    primary = server("primary")
    replica = server("replica", "--replicaof", host, str(primary.port))
    wait_for(
        lambda: replica.client().info("replication")["master_link_status"] == "up", 20, "the replica follows"
    )
    group = Sentinels(service, primary, replica, password=password)
    for number in range(count):
        home = directory / f"sentinel{number}"
        home.mkdir(parents=True)
        # A Sentinel rewrites its configuration file.
        lines = [
            *(("sentinel resolve-hostnames yes", "sentinel announce-hostnames yes") if named else ()),
            f"sentinel monitor {service} {host} {primary.port} {count // 2 + 1}",
            f"sentinel down-after-milliseconds {service} {down_after_ms}",
            f"sentinel failover-timeout {service} 3000",
            *([f"sentinel auth-pass {service} {password}"] if password else ()),
            *([f"requirepass {sentinel_password}"] if sentinel_password else ()),
            *([f"sentinel sentinel-pass {sentinel_password}"] if sentinel_password else ()),
        ]
        (home / "sentinel.conf").write_text("\n".join(lines) + "\n")
        port, speaks = free_port(), ()
        if certificates and plain_sentinels:
            speaks = certificates.server_args(free_port(), clients=True, plain_port=port)
        elif certificates:
            speaks = certificates.server_args(port, clients=True, named=named)
        sentinel = RedisServer(
            kind,
            home,
            str(home / "sentinel.conf"),
            *speaks,
            port=port,
            name=f"sentinel{number}",
            sentinel=True,
            client_options={"password": sentinel_password or None, **({} if plain_sentinels else tls)},
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
    """The primaries of a cluster, and the replica of each where it has replicas."""

    nodes: list[RedisServer]
    replicas: list[RedisServer] = field(default_factory=list)

    def url(self) -> str:
        """The URL of its first node."""
        return self.nodes[0].url()

    def server_of(self, tag: str) -> RedisServer:
        """The server that serves the keys with a hash tag now."""
        slot = key_slot(f"{{{tag}}}".encode())
        for server in (*self.nodes, *self.replicas):
            if server.status != "running":
                continue
            for first, last, (_, port, *_), *_ in server.client().execute_command("CLUSTER", "SLOTS"):
                if first <= slot <= last:
                    return next(one for one in (*self.nodes, *self.replicas) if one.port == port)
        raise AssertionError("nobody serves it")

    def replica_of(self, node: RedisServer) -> RedisServer:
        """The replica that a primary was given."""
        return self.replicas[self.nodes.index(node)]

    def stop(self) -> None:
        """Kill all nodes."""
        for node in (*self.replicas, *self.nodes):
            node.stop()


def start_cluster(
    kind: Kind,
    directory: Path,
    *args: str,
    count: int = 3,
    replicas: bool = False,
    certificates: Certificates | None = None,
    named: bool = False,
    **more: Any,
) -> Cluster:
    """Start a cluster of primaries that share the slots, and wait until every node finds it sound.

    With `replicas`, each primary has one. `args` and `more` are for the servers.

    With `certificates`, the nodes speak TLS and nothing else, and only with clients that have a certificate; with
    `named`, their own certificates are for `localhost`, and so they call themselves (Redis 7.0 and newer).
    """
    if certificates:
        more["client_options"] = certificates.client_options() | more.get("client_options", {})
    if named:
        args += ("--cluster-announce-hostname", "localhost", "--cluster-preferred-endpoint-type", "hostname")
    total = count * 2 if replicas else count
    ports = [free_port() for _ in range(total)]
    nodes = [
        RedisServer(
            kind,
            directory / f"node{number}",
            *(
                "--cluster-enabled",
                "yes",
                # On a busy machine, a node that is silent for much less than that isn't down.
                "--cluster-node-timeout",
                "3000",
                "--repl-diskless-sync-delay",
                "0",
                *args,
                *(certificates.server_args(port, clients=True, named=named) if certificates else ()),
            ),
            port=port,
            name=f"node{number}",
            **more,
        )
        for number, port in enumerate(ports)
    ]
    for node in nodes:
        node.start()
    bounds = [16384 * number // count for number in range(count + 1)]
    for number, node in enumerate(nodes):
        client = node.client()
        if number < count:
            # One by one: the range form is newer than 6.2.
            client.execute_command("CLUSTER", "ADDSLOTS", *range(bounds[number], bounds[number + 1]))
        client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
    for node in nodes[1:]:
        node.client().execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[0].port)
    for node in nodes:
        wait_for(_sound(node, total), 20, f"{node.name} finds the cluster sound")
    for primary, replica in zip(nodes[:count], nodes[count:], strict=False):
        replica.client().execute_command(
            "CLUSTER", "REPLICATE", primary.client().execute_command("CLUSTER", "MYID")
        )
    for replica in nodes[count:]:
        wait_for(follows(replica), 20, f"{replica.name} follows its primary")
    return Cluster(nodes[:count], nodes[count:])


def follows(replica: RedisServer) -> Callable[[], bool]:
    """Whether a server is a replica with a link to its primary, to be waited for."""

    def look() -> bool:
        state = replica.client().info("replication")
        return state["role"] == "slave" and state["master_link_status"] == "up"

    return look


def _sound(node: RedisServer, count: int) -> Callable[[], bool]:
    def look() -> bool:
        state = node.client().execute_command("CLUSTER INFO")
        if isinstance(state, dict):
            return state["cluster_state"] == "ok" and int(state["cluster_known_nodes"]) == count
        return "cluster_state:ok" in state and f"cluster_known_nodes:{count}" in state

    return look
