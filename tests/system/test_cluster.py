"""A ledger in a cluster: all its keys are with one node, which is found, and found again when it changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import KEY_PASSWORD, Certificates
from tests.support.scene import LEADERBEAT, Scene, keys_of
from tests.support.servers import RedisServer, require
from tests.support.topologies import Cluster, follows, start_cluster
from tests.support.waits import wait_for

pytestmark = pytest.mark.matrix("valkey")

#: The machine may be busy with others.
PATIENCE = 40.0
SCHEDULE = {"tick": {"task": "project.fenced", "every": 1.0}}
TAG = "leaderbeat:project"
PASSWORD = "s3cret-data"

StartCluster = Callable[..., Cluster]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartCluster]:
    """A function that starts a cluster: `start("valkey", replicas=True)`."""
    started: list[Cluster] = []

    def begin(name: str = "valkey", *args: str, **more: Any) -> Cluster:
        cluster = start_cluster(require(name), tmp_path / "cluster", *args, **more)
        started.append(cluster)
        return cluster

    yield begin
    for cluster in started:
        cluster.stop()


def url(cluster: Cluster, scheme: str = "redis+cluster") -> str:
    return f"{scheme}://" + ";".join(f"127.0.0.1:{node.port}" for node in cluster.nodes)


def lease(cluster: Cluster) -> Any:
    value = cluster.server_of(TAG).client().get(f"{{{TAG}}}:lease")
    return json.loads(value) if value else None


def listeners(server: RedisServer, asks: str) -> int:
    """How many are subscribed to the wake-ups, as `PUBSUB <asks>` has it."""
    return int(server.client().execute_command("PUBSUB", asks, f"{{{TAG}}}:wake")[1])


def check(scene: Scene, beats: list[Any]) -> None:
    """No slot twice, and rising epochs."""
    sent = scene.beat_publishes()
    assert len(set(keys_of(sent))) == len(sent), "no slot twice"
    epochs = [publish.epoch for publish in sent]
    assert epochs == sorted(epochs)
    for beat in beats:
        assert not beat.find("Traceback")


@pytest.mark.schedule(SCHEDULE)
@pytest.mark.parametrize("kind", ["valkey", "redis", "redis62"])
def test_in_a_cluster_a_killed_leader_is_replaced_before_its_lease_is_over_and_a_stopped_one_at_once(
    scene: Scene, start: StartCluster, kind: str
) -> None:
    cluster = start(kind)
    conf = {"leaderbeat_redis_url": url(cluster), "leaderbeat_lease_ttl": 30}
    scene.start_worker(conf=conf)
    first = scene.start_beat(conf=conf)
    wait_for(lambda: lease(cluster), PATIENCE, "a leader")
    second, third = (scene.start_beat(conf=conf) for _ in range(2))
    for beat in (second, third):
        beat.wait_for_log("Standing by", PATIENCE)
    wait_for(lambda: len(scene.runs("end")) >= 2, PATIENCE, "slots are sent and run")
    # One that has to wait for its subscription for long stands by before it has it.
    asks = "NUMSUB" if kind == "redis62" else "SHARDNUMSUB"
    wait_for(
        lambda: listeners(cluster.server_of(TAG), asks) == 3,
        PATIENCE,
        "the wake-ups are sharded where the server has that",
    )

    first.kill()
    by_death = wait_for(lambda: _led_by(cluster, second, third), 15, "another leads before 30 s are over")
    by_death.terminate()
    last = third if by_death is second else second
    wait_for(lambda: _led_by(cluster, last), 5, "a released lease is taken at once")
    sent = len(scene.beat_publishes())
    wait_for(lambda: len(scene.beat_publishes()) > sent, PATIENCE, "the sequence goes on")
    check(scene, [second, third])
    keys = [key for node in cluster.nodes for key in node.client().keys("*")]
    assert keys
    assert all(key.startswith(f"{{{TAG}}}:") for key in keys)
    assert [node for node in cluster.nodes if node.client().dbsize()] == [cluster.server_of(TAG)]


def _led_by(cluster: Cluster, *beats: Any) -> Any:
    found = lease(cluster)
    return next((beat for beat in beats if found and beat.pid == found["pid"]), None)


@pytest.mark.schedule(SCHEDULE)
def test_after_a_failover_in_the_cluster_the_sequence_goes_on(scene: Scene, start: StartCluster) -> None:
    cluster = start(replicas=True)
    conf = {"leaderbeat_redis_url": url(cluster)}
    beats = [scene.start_beat(conf=conf) for _ in range(2)]
    wait_for(lambda: len(scene.publishes()) >= 2, PATIENCE, "slots are sent")
    # One that was asked for: the old primary lives on, and sends everybody away.
    primary = cluster.server_of(TAG)
    replica = cluster.replica_of(primary)
    replica.client().execute_command("CLUSTER", "FAILOVER")
    wait_for(lambda: cluster.server_of(TAG) is replica, PATIENCE, "the replica serves the keys")
    sent = len(scene.publishes())
    wait_for(lambda: len(scene.publishes()) >= sent + 2, PATIENCE, "the sequence goes on")
    wait_for(follows(primary), PATIENCE, "the old primary follows")
    # And one by death.
    replica.kill()
    wait_for(lambda: cluster.server_of(TAG) is primary, PATIENCE, "the old primary serves them again")
    sent = len(scene.publishes())
    wait_for(lambda: len(scene.publishes()) >= sent + 2, PATIENCE, "the sequence goes on")
    check(scene, beats)


@pytest.mark.schedule(SCHEDULE)
def test_in_a_cluster_with_tls_a_killed_leader_is_replaced_a_failover_followed_and_no_password_shown(
    scene: Scene, start: StartCluster, certificates: Certificates
) -> None:
    login = ("--requirepass", PASSWORD, "--masterauth", PASSWORD)
    cluster = start(
        "redis", *login, replicas=True, certificates=certificates, client_options={"password": PASSWORD}
    )
    conf = {
        "leaderbeat_redis_url": url(cluster, "rediss+cluster").replace("://", f"://:{PASSWORD}@"),
        "leaderbeat_redis_options": certificates.driver_options(),
        "leaderbeat_lease_ttl": 30,
    }
    worker = scene.start_worker(conf=conf, loglevel="DEBUG", wait=False)
    first = scene.start_beat(conf=conf, loglevel="DEBUG")
    wait_for(lambda: lease(cluster), PATIENCE, "a leader")
    second = scene.start_beat(conf=conf, loglevel="DEBUG")
    second.wait_for_log("Standing by", PATIENCE)
    wait_for(lambda: len(scene.runs("end")) >= 2, PATIENCE, "slots are sent and run")
    server = cluster.server_of(TAG)
    wait_for(lambda: listeners(server, "SHARDNUMSUB") == 2, PATIENCE, "the wake-ups are sharded")

    first.kill()
    wait_for(lambda: _led_by(cluster, second), 15, "another leads before 30 s are over")
    cluster.replica_of(server).client().execute_command("CLUSTER", "FAILOVER")
    wait_for(lambda: cluster.server_of(TAG) is not server, PATIENCE, "the replica serves the keys")
    sent = len(scene.publishes())
    wait_for(lambda: len(scene.publishes()) >= sent + 2, PATIENCE, "the sequence goes on")
    wait_for(lambda: len(scene.runs("end")) >= sent + 2, PATIENCE, "and so do the workers")
    status, said = second.exec_run([*LEADERBEAT, "status"])
    assert status == 0
    check(scene, [first, second, worker])
    for text in (first.text(), second.text(), worker.text(), said.decode()):
        assert PASSWORD not in text
        assert KEY_PASSWORD not in text


@pytest.mark.schedule(SCHEDULE)
def test_the_plain_url_of_a_cluster_s_node_is_said_with_the_accepted_form(
    scene: Scene, start: StartCluster
) -> None:
    cluster = start()
    other = next(node for node in cluster.nodes if node is not cluster.server_of(TAG))
    beat = scene.start_beat(conf={"leaderbeat_redis_url": other.url()})
    line = beat.wait_for_log("is a node of a cluster", PATIENCE)
    assert "leaderbeat_redis_url = 'redis+cluster://" in line.text
    check(scene, [beat])


@pytest.mark.schedule(SCHEDULE)
@pytest.mark.parametrize("kind", ["valkey", "redis62"])
def test_in_a_cluster_a_newer_release_leads_long_before_the_next_renewal(
    scene: Scene, start: StartCluster, kind: str
) -> None:
    cluster = start(kind)
    conf = {"leaderbeat_redis_url": url(cluster), "leaderbeat_lease_ttl": 300}
    old = scene.start_beat(conf={**conf, "leaderbeat_release": 1})
    wait_for(lambda: _led_by(cluster, old), PATIENCE, "a leader")
    new = scene.start_beat(conf={**conf, "leaderbeat_release": 2})
    wait_for(lambda: _led_by(cluster, new), 30, "the newer release leads; the lease is renewed every 100 s")
    sent = len(scene.beat_publishes())
    wait_for(lambda: len(scene.beat_publishes()) > sent, PATIENCE, "the sequence goes on")
    check(scene, [old, new])
