"""`leaderbeat_min_replicas`: nothing is sent whose claim a failover might lose."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from celery_leaderbeat.errors import sentence
from celery_leaderbeat.tick import parse_tick_key, slot_to_us
from tests.support.scene import Beat, Scene, keys_of
from tests.support.servers import RedisServer, require
from tests.support.topologies import follows, start_sentinels
from tests.support.waits import wait_for

pytestmark = pytest.mark.matrix("valkey")

#: The machine may be busy with others.
PATIENCE = 40.0
SCHEDULE = {
    "tick": {"task": "project.fenced", "every": 1.0, "policy": {"catch_up": "all"}},
    "soon": {"task": "project.fenced", "every": 1.0, "policy": {"catch_up": "all", "deadline": 2}},
}
HELD = "Nothing is sent: 0 of 1 Redis replicas had a claim within"


@pytest.fixture
def replica(scene: Scene, start_redis: Callable[..., RedisServer]) -> Iterator[RedisServer]:
    """A replica of the scene's ledger."""
    scene.ledger.client().config_set("repl-diskless-sync-delay", 0)
    server = start_redis("valkey", "--replicaof", "127.0.0.1", str(scene.ledger.port))
    wait_for(follows(server), 20, "the replica follows")
    yield server
    server.thaw()


def sent_by(scene: Scene, entry: str) -> list[str]:
    return [key for key in keys_of(scene.publishes()) if key.startswith(f"{entry}@")]


@pytest.mark.schedule(SCHEDULE)
@pytest.mark.conf(leaderbeat_min_replicas=1)
def test_while_no_replica_has_the_claims_nothing_is_sent_and_afterwards_each_slot_once(
    scene: Scene, replica: RedisServer
) -> None:
    beat = scene.start_beat()
    assert beat.find("leaderbeat min replicas -> 1 (leaderbeat_min_replicas)")
    wait_for(lambda: sent_by(scene, "tick") and sent_by(scene, "soon"), PATIENCE, "slots are sent")
    assert not beat.find("WARNING")
    epoch = scene.lease().epoch

    replica.freeze()
    beat.wait_for_log(HELD, PATIENCE)
    before = keys_of(scene.publishes())
    # Entries' own rules go on to hold.
    missed = beat.wait_for_log("Entry 'soon': ", PATIENCE)
    assert re.search("missed: .*deadline", missed.text)
    waiting = wait_for(lambda: returned(scene), PATIENCE, "what was claimed is given back")
    assert keys_of(scene.publishes()) == before, "nothing is sent"
    assert scene.lease().epoch == epoch, "nobody steps down for it"

    replica.thaw()
    beat.wait_for_log("Enough Redis replicas answer again", PATIENCE)
    wait_for(lambda: len(sent_by(scene, "tick")) >= len(before) + 2, PATIENCE, "the sequence goes on")
    keys = keys_of(scene.publishes())
    assert len(set(keys)) == len(keys), "no slot twice"
    seconds = [int(slot_to_us(parse_tick_key(key)[1]) / 1e6) for key in sent_by(scene, "tick")]
    assert seconds == list(range(seconds[0], seconds[0] + len(seconds))), "and none left out"
    assert {key for key in waiting if key.startswith("tick@")} <= set(keys), "what was given back is sent"
    assert len(beat.find(HELD)) == 1, "said once"
    assert not beat.find("Traceback")


def returned(scene: Scene) -> list[str]:
    """The tick keys of slots that are given back."""
    keys = scene.redis.zrange(scene.key("unfinished"), 0, -1)
    return [key for key in keys if scene.slot(key).get("state") == "returned"]


@pytest.mark.schedule(SCHEDULE)
@pytest.mark.conf(leaderbeat_min_replicas=2)
def test_more_replicas_than_there_are_keep_the_leader_from_sending_from_the_first_slot_on(
    scene: Scene, replica: RedisServer
) -> None:
    beat = scene.start_beat()
    line = beat.wait_for_log("Nothing is sent: 1 of 2 Redis replicas had a claim within", PATIENCE)
    assert sentence(line.text).endswith("are the Redis replicas up, and connected?")
    beat.wait_for_log("Entry 'soon': ", PATIENCE)
    assert scene.publishes() == []
    beat.terminate()
    assert beat.wait(PATIENCE)["StatusCode"] == 0
    assert scene.publishes() == []
    assert [key for key in scene.redis.keys(scene.key("slot:*")) if _state(scene, key) == "claimed"] == []


def _state(scene: Scene, key: str) -> str:
    return scene.redis.hget(key, "state")


@pytest.mark.schedule(SCHEDULE)
@pytest.mark.conf(leaderbeat_min_replicas=1)
def test_a_server_that_refuses_to_wait_for_replicas_is_said_and_nothing_is_sent(scene: Scene) -> None:
    scene.redis.execute_command("ACL", "SETUSER", "default", "-wait")
    beat = scene.start_beat()
    line = beat.wait_for_log("Nothing is sent: Redis refuses to wait for replicas", PATIENCE)
    assert re.search("permissions? to run the 'wait' command", line.text)
    wait_for(lambda: returned(scene), PATIENCE, "what was claimed is given back")
    assert scene.publishes() == []


@pytest.mark.schedule({"tick": {"task": "project.fenced", "every": 1.0}})
def test_a_failover_to_a_replica_that_lagged_doubles_no_slot(scene: Scene, tmp_path: Path) -> None:
    group = start_sentinels(require("valkey"), tmp_path / "group")
    try:
        conf = {
            "leaderbeat_redis_url": group.url(),
            "leaderbeat_redis_options": {"master_name": group.service},
            "leaderbeat_min_replicas": 1,
        }
        beats = [scene.start_beat(conf=conf) for _ in range(2)]
        wait_for(lambda: len(scene.publishes()) >= 2, PATIENCE, "slots are sent")
        group.cut_off_replica()
        wait_for(lambda: any(beat.find(HELD) for beat in beats), PATIENCE, "nothing is sent")
        group.fail_over()
        # The Sentinels make a replica of it.
        group.primary.start()
        wait_for(follows(group.primary), PATIENCE, "the old primary follows the new one")
        sent = len(scene.publishes())
        wait_for(lambda: len(scene.publishes()) >= sent + 3, PATIENCE, lambda: tails(beats))
        keys, epochs = keys_of(scene.publishes()), [publish.epoch for publish in scene.publishes()]
        assert len(set(keys)) == len(keys), "no slot twice"
        assert epochs == sorted(epochs)
        lease = json.loads(group.replica.client().get(scene.key("lease")))
        assert lease["pid"] in [beat.pid for beat in beats]
    finally:
        group.stop()


def tails(beats: list[Beat]) -> str:
    return "\n".join(beat.tail() for beat in beats)
