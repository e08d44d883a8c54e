"""Redis hangs, refuses, closes connections, or has its clock stepped: beats wait, say so, and go on."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support.faketime import WallClock
from tests.support.scene import Scene, keys_of, leader
from tests.support.servers import RedisServer, free_port, require
from tests.support.waits import wait_for

EVERY: dict[str, Any] = {
    "tick": {"task": "project.record", "every": 0.5, "policy": {"catch_up": "all"}},
    "rare": {"task": "project.record", "every": 3.0, "policy": {"catch_up": "all"}},
}
SOON = 15.0
#: A leader that a busy machine keeps from the processor for two seconds is the leader still.
QUICK = {"leaderbeat_lease_ttl": 5, "leaderbeat_renew_interval": 1}


def slots_of(scene: Scene, entry: str = "tick") -> list[datetime]:
    keys = [key for key in keys_of(scene.beat_publishes()) if key.startswith(f"{entry}@")]
    return sorted(datetime.fromisoformat(key.split("@")[1].replace("Z", "+00:00")) for key in keys)


def more(scene: Scene, count: int, timeout: float = SOON) -> None:
    before = len(slots_of(scene))
    wait_for(lambda: len(slots_of(scene)) >= before + count, timeout, f"{count} more slots are sent")


def assert_all_once(scene: Scene, period: float = 0.5, entry: str = "tick") -> None:
    slots = slots_of(scene, entry)
    assert max(Counter(slots).values()) == 1
    assert slots[-1] - slots[0] == timedelta(seconds=period) * (len(slots) - 1), "none is left out"


@pytest.mark.schedule(EVERY)
@pytest.mark.matrix("valkey+rabbitmq", "redis+rabbitmq")
def test_connections_that_redis_closes_when_idle_cost_neither_slot_nor_lease(scene: Scene) -> None:
    # The server looks for idle clients once a second or more seldom.
    scene.redis.config_set("timeout", 1)
    scene.start_beat()
    first = leader(scene)
    scene.start_beat().wait_for_log("Standing by")
    epoch = scene.lease().epoch
    more(scene, 18, 30)
    assert scene.lease().epoch == epoch
    assert leader(scene) is first
    assert_all_once(scene)
    assert_all_once(scene, 3.0, "rare")
    assert not [beat for beat in scene.beats if "Traceback" in beat.text(0)]


@pytest.mark.schedule(EVERY)
@pytest.mark.matrix("valkey+rabbitmq", "redis+rabbitmq")
def test_while_redis_is_a_read_only_replica_nothing_is_sent_and_then_everything(scene: Scene) -> None:
    scene.start_beat()
    scene.start_beat()
    first = leader(scene)
    more(scene, 2)
    scene.redis.execute_command("REPLICAOF", "127.0.0.1", str(free_port()))
    first.wait_for_log("The ledger is out of reach", timeout=SOON)
    quiet = len(slots_of(scene))
    line = first.find("The ledger is out of reach")[0]
    assert "read-only replica" in line.text
    waited = scene.redis.time()[0]
    wait_for(lambda: scene.redis.time()[0] >= waited + 2, 5, "two seconds have passed")
    assert len(slots_of(scene)) == quiet
    scene.redis.execute_command("REPLICAOF", "NO", "ONE")
    more(scene, 6)
    assert_all_once(scene)
    assert [beat.status for beat in scene.beats] == ["running", "running"]


@pytest.mark.schedule(EVERY)
@pytest.mark.conf(leaderbeat_lease_ttl=3, leaderbeat_publish_timeout=0.5)
@pytest.mark.matrix("valkey+rabbitmq")
def test_a_pause_of_redis_that_outlasts_the_lease_costs_no_slot(scene: Scene) -> None:
    for _ in range(2):
        scene.start_beat()
    leader(scene)
    more(scene, 2)
    scene.redis.execute_command("CLIENT", "PAUSE", "4500", "ALL")
    more(scene, 12, 30)
    assert_all_once(scene)


# The server's clock, by which leases lapse and slots come due


@pytest.fixture
def clock(tmp_path: Path) -> WallClock:
    """The wall clock of the server of `stepped`."""
    return WallClock(tmp_path / "clock")


@pytest.fixture
def stepped(tmp_path: Path, clock: WallClock) -> Iterator[Scene]:
    """A scene whose server's clock can be stepped."""
    server = RedisServer(require("valkey"), tmp_path / "stepped", name="stepped-valkey")
    server.env |= clock.env
    server.start()
    scene = Scene(tmp_path, server, schedule=EVERY, conf=QUICK)
    yield scene
    scene.close()
    server.stop()


def epochs(scene: Scene) -> list[int]:
    return list(dict.fromkeys(record.epoch for record in scene.beat_publishes()))


def test_a_server_clock_that_is_set_forward_ends_the_lease_and_sends_nothing_twice(
    stepped: Scene, clock: WallClock
) -> None:
    for _ in range(2):
        stepped.start_beat()
    leader(stepped)
    more(stepped, 3)
    before = slots_of(stepped)[-1]
    epoch = stepped.lease().epoch
    clock.set(3600)
    wait_for(lambda: (now := stepped.lease()) and now.epoch > epoch, SOON, "somebody is elected")
    # A hundred of them are caught up, the oldest first.
    then = before + timedelta(hours=1)
    wait_for(lambda: slots_of(stepped)[-1] > then, 30, "the slots of the new time are sent")
    assert max(Counter(keys_of(stepped.beat_publishes())).values()) == 1
    assert epochs(stepped) == sorted(epochs(stepped))
    assert all(beat.status == "running" for beat in stepped.beats)


def test_a_server_clock_that_is_set_back_stops_nobody_and_sends_nothing_twice(
    stepped: Scene, clock: WallClock
) -> None:
    for _ in range(2):
        stepped.start_beat()
    first = leader(stepped)
    more(stepped, 3)
    epoch = stepped.lease().epoch
    clock.set(-3600)
    wait_for(
        lambda: [beat for beat in stepped.beats if beat.find("is due went back by")],
        SOON,
        "the leader has noticed",
    )
    more(stepped, 4, 30)
    assert max(Counter(keys_of(stepped.beat_publishes())).values()) == 1
    assert first.find("lay in the future")
    assert stepped.lease().epoch >= epoch
    # As long as somebody renews it, the lease is as long as ever.
    assert stepped.redis.pttl(stepped.key("lease")) <= 5000
    clock.set(0)
    more(stepped, 4, 30)
    assert max(Counter(keys_of(stepped.beat_publishes())).values()) == 1
    assert epochs(stepped) == sorted(epochs(stepped))


def test_a_lease_that_a_clock_set_back_has_stretched_does_not_outlive_its_frozen_leader(
    stepped: Scene, clock: WallClock
) -> None:
    for _ in range(2):
        stepped.start_beat()
    first = leader(stepped)
    more(stepped, 2)
    first.freeze()
    clock.set(-3600)
    wait_for(lambda: stepped.redis.pttl(stepped.key("lease")) > 3_000_000, 5, "the lease is stretched")
    second = leader(stepped, SOON, other_than=first)
    sent = len(slots_of(stepped))
    first.thaw()
    wait_for(lambda: len(slots_of(stepped)) > sent + 3, 30, "the other one sends")
    assert max(Counter(keys_of(stepped.beat_publishes())).values()) == 1
    assert epochs(stepped) == sorted(epochs(stepped))
    assert leader(stepped) is second
    assert os.path.exists(f"/proc/{first.pid}")
