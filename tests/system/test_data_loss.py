"""Redis loses data: nothing is sent again while any replica lives, epochs rise, and what was ordered stays ordered."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_leaderbeat.ledger import Ledger
from celery_leaderbeat.orders import Orders
from celery_leaderbeat.recall import LOST
from tests.support.history import assert_gapless, unexplained
from tests.support.rest import at_rest
from tests.support.scene import Beat, Scene, keys_of, leader
from tests.support.servers import RedisServer
from tests.support.waits import wait_for

#: Something every half second, something that is paused, something that comes due tomorrow.
SCHEDULE: dict[str, Any] = {
    "tick": {"task": "project.record", "every": 0.5, "policy": {"catch_up": "all"}},
    "held": {"task": "project.record", "every": 0.5},
    "rare": {"task": "project.record", "every": 86_400.0},
}
SOON = 15.0


def now() -> datetime:
    return datetime.now(timezone.utc)


def sent(scene: Scene, entry: str = "tick") -> list[str]:
    return [key for key in keys_of(scene.beat_publishes()) if key.startswith(f"{entry}@")]


def more(scene: Scene, count: int, timeout: float = SOON, entry: str = "tick") -> None:
    """Wait until so many more slots are sent."""
    before = len(sent(scene, entry))
    wait_for(lambda: len(sent(scene, entry)) >= before + count, timeout, f"{count} more slots are sent")


def epochs(scene: Scene) -> list[int]:
    """Under which epochs was sent, in the order of sending."""
    return list(dict.fromkeys(record.epoch for record in scene.beat_publishes()))


class Before:
    """A fleet that runs, with an entry on hold, and what its ledger knows."""

    def __init__(self, scene: Scene, ledger: Ledger, beats: int = 3) -> None:
        self.scene, self.ledger = scene, ledger
        for _ in range(beats):
            scene.start_beat()
        self.leader: Beat = leader(scene)
        Orders(ledger, by="ann").pause("held", note="on hold")
        wait_for(lambda: ledger.entries().get("rare"), SOON, "the entries are registered")
        self.rare = ledger.entries()["rare"].slot
        more(scene, 4)
        self.held = len(sent(scene, "held"))
        self.epoch = scene.lease().epoch
        self.since = now()

    @property
    def standbys(self) -> list[Beat]:
        return [beat for beat in self.scene.beats if beat is not self.leader]

    def holds(self) -> None:
        """What must hold once things go on."""
        scene, ledger = self.scene, self.ledger
        twice = [key for key, count in Counter(keys_of(scene.beat_publishes())).items() if count > 1]
        assert twice == []
        assert epochs(scene) == sorted(epochs(scene))
        leader(scene, SOON)
        epoch, lease = scene.redis.mget(scene.key("epoch"), scene.key("lease"))
        assert int(epoch) == json.loads(lease)["epoch"] >= self.epoch
        assert ledger.entries()["rare"].slot == self.rare
        assert [pause.note for pause in Orders(ledger).look()[0]["held"]] == ["on hold"]
        assert len(sent(scene, "held")) == self.held
        # Each slot was sent, or is missed with the reason: those of this moment, too, once it is decided and confirmed.
        until = now()

        def open_ends() -> list[str]:
            slots = ledger.audit("tick", self.since, until).slots
            return [f"{slot}" for slot in slots if slot.end not in ("sent", "missed", "forgotten")]

        wait_for(lambda: not open_ends(), SOON, lambda: f"each slot has an end: {open_ends()}")
        audit = ledger.audit("tick", self.since, until)
        assert unexplained(audit) == []
        published = set(sent(scene))
        for slot in audit.slots:
            if slot.end == "forgotten" or slot.reason == LOST:
                # Whether it was sent is what Redis has lost.
                continue
            assert (slot.key in published) == (slot.end == "sent"), slot

    def went_on(self) -> None:
        """Every slot since then, as the clock has it, was sent or is said to be missed."""
        keys = sent(self.scene)
        slots = sorted(datetime.fromisoformat(key.split("@")[1].replace("Z", "+00:00")) for key in keys)
        missing = {
            slots[0] + step * timedelta(seconds=0.5)
            for step in range(int((slots[-1] - slots[0]).total_seconds() * 2) + 1)
        } - set(slots)
        said = {
            slot.slot for slot in self.ledger.audit("tick", slots[0], slots[-1]).slots if slot.end == "missed"
        }
        assert missing <= said


@pytest.mark.schedule(SCHEDULE)
@pytest.mark.matrix("valkey", "redis")
def test_a_flush_under_the_leader_sends_nothing_again_and_loses_nothing_unsaid(
    scene: Scene, ledger: Ledger
) -> None:
    before = Before(scene, ledger)
    scene.redis.flushdb()
    wait_for(lambda: scene.lease() and scene.lease().epoch > before.epoch, SOON, "somebody is elected")
    more(scene, 5)
    before.holds()
    before.went_on()
    (line,) = [line for beat in scene.beats for line in beat.find("Redis has lost data of")]
    assert line.level == "WARNING"
    assert [beat for beat in scene.beats if beat.find("Redis has lost pauses of 'held'")]


@pytest.mark.schedule(SCHEDULE)
@pytest.mark.matrix("valkey", "redis")
def test_a_flush_as_the_leader_dies_is_made_good_by_a_standby(scene: Scene, ledger: Ledger) -> None:
    before = Before(scene, ledger)
    with at_rest(scene, before.leader):
        before.leader.kill()
    scene.redis.flushdb()
    leader(scene, SOON, other_than=before.leader)
    more(scene, 4)
    before.holds()
    before.went_on()


@pytest.mark.schedule(SCHEDULE)
@pytest.mark.matrix("valkey")
def test_nor_does_flush_after_flush(scene: Scene, ledger: Ledger) -> None:
    before = Before(scene, ledger)
    for _ in range(3):
        epoch = scene.lease().epoch
        # Of elections within one second, only those know that have looked.
        wait_for(lambda: time.time() > epoch + 1, SOON, "its second is over")  # noqa: B023
        scene.redis.flushdb()
        wait_for(lambda: (now := scene.lease()) and now.epoch > epoch, SOON, "somebody leads")  # noqa: B023
        more(scene, 2)
    before.holds()
    before.went_on()


@pytest.mark.schedule(SCHEDULE)
@pytest.mark.matrix("valkey+rabbitmq")
@pytest.mark.parametrize("survivor", ["leader", "standby"])
def test_one_replica_that_lives_is_enough_when_redis_comes_back_empty(
    scene: Scene, ledger: Ledger, survivor: str
) -> None:
    before = Before(scene, ledger)
    scene.ledger.kill()
    lives = before.leader if survivor == "leader" else before.standbys[0]
    for beat in scene.beats:
        if beat is not lives:
            beat.kill()
    lives.wait_for_log("Redis gave no answer", timeout=SOON)
    scene.ledger.restart()
    more(scene, 4)
    before.holds()
    before.went_on()


@pytest.mark.schedule(SCHEDULE)
@pytest.mark.matrix("valkey+rabbitmq")
def test_where_all_replicas_come_back_to_an_empty_redis_all_that_came_due_is_caught_up(
    scene: Scene, ledger: Ledger
) -> None:
    """Nobody says that it has led, so nobody has."""
    before = Before(scene, ledger)
    scene.ledger.kill()
    for beat in scene.beats:
        beat.wait_for_log("Redis gave no answer", timeout=SOON)
    # Longer than it would take to replace the leader.
    time.sleep(1.5)
    scene.ledger.restart()
    more(scene, 4)
    before.holds()
    before.went_on()
    assert not [line for beat in scene.beats for line in beat.find(LOST)]


@pytest.mark.schedule(SCHEDULE)
@pytest.mark.matrix("valkey+rabbitmq")
@pytest.mark.conf(leaderbeat_lease_ttl=2, leaderbeat_publish_timeout=0.5)
def test_a_redis_that_comes_back_empty_long_after_every_trust_has_ended_is_restored(
    scene: Scene, ledger: Ledger
) -> None:
    before = Before(scene, ledger)
    scene.ledger.kill()
    for beat in scene.beats:
        beat.wait_for_log("No election: Redis gave no answer", timeout=SOON)
    scene.ledger.restart()
    more(scene, 4)
    before.holds()
    before.went_on()


KEYS = (
    *("lease", "epoch", "app", "entries", "definitions", "paused", "requests", "counts", "unfinished"),
    *("observed", "replicas", "events", "released", "slot", "unsent"),
)


@pytest.mark.schedule(SCHEDULE)
@pytest.mark.matrix("valkey")
def test_no_key_that_is_evicted_makes_anything_fire_that_should_not(scene: Scene, ledger: Ledger) -> None:
    before = Before(scene, ledger, beats=2)
    for name in KEYS:
        pattern = scene.key(f"{name}:*") if name in ("slot", "unsent") else scene.key(name)
        found = [pattern] if "*" not in pattern else list(scene.redis.scan_iter(pattern.replace("{", "[{]")))
        if found:
            scene.redis.delete(*found)
        more(scene, 1)
        # What isn't kept by the next claim or renewal is put back by the leader's look at what there is.
        wait_for(lambda: "rare" in ledger.entries(), SOON, f"the entries are there after {name}")
        wait_for(lambda: "held" in Orders(ledger).look()[0], SOON, f"the pauses are there after {name}")
    wait_for(lambda: scene.redis.get(scene.key("epoch")), SOON, "the epoch is there")
    assert ledger.entries()["rare"].slot == before.rare
    assert len(sent(scene, "held")) == before.held
    counts = Counter(keys_of(scene.beat_publishes()))
    assert max(counts.values()) == 1
    assert epochs(scene) == sorted(epochs(scene))
    assert all(beat.status == "running" for beat in scene.beats)


@pytest.mark.schedule(SCHEDULE)
@pytest.mark.matrix("valkey")
@pytest.mark.parametrize("key", ["entries", "paused", "epoch", "definitions"])
def test_a_key_that_was_evicted_before_the_leader_died_is_remembered(
    scene: Scene, ledger: Ledger, key: str
) -> None:
    before = Before(scene, ledger, beats=2)
    with at_rest(scene, before.leader):
        before.leader.kill()
    scene.redis.delete(scene.key(key))
    leader(scene, SOON, other_than=before.leader)
    more(scene, 3)
    before.holds()


def lagging(start_redis: Callable[..., RedisServer], primary: RedisServer) -> RedisServer:
    """A replica that follows the primary."""
    replica = start_redis("valkey", "--replicaof", "127.0.0.1", str(primary.port))
    wait_for(
        lambda: replica.client().info("replication")["master_link_status"] == "up",
        SOON,
        "the replica follows",
    )
    return replica


@pytest.mark.schedule(SCHEDULE)
@pytest.mark.matrix("valkey+rabbitmq")
@pytest.mark.parametrize("survivor", ["leader", "standby"])
def test_a_failover_to_a_replica_that_lags_sends_nothing_again(
    scene: Scene, start_redis: Callable[..., RedisServer], survivor: str
) -> None:
    replica = lagging(start_redis, scene.ledger)
    proxy = scene.proxy(scene.ledger.port)
    scene.conf["leaderbeat_redis_url"] = proxy.redis_url(scene.LEDGER_DB)
    ledger = ledger_at(scene, proxy.redis_url(scene.LEDGER_DB))
    before = Before(scene, ledger, beats=2)
    wait_for(
        lambda: replica.client().get(scene.key("epoch")) == str(before.epoch), SOON, "the replica has seen it"
    )
    replica.client().execute_command("REPLICAOF", "NO", "ONE")
    # For so long the replica lags.
    more(scene, 5)
    if survivor == "standby":
        before.leader.freeze()
    proxy.target = ("127.0.0.1", replica.port)
    proxy.reset()
    scene.ledger.kill()
    if survivor == "standby":
        before.leader.kill()
    scene.ledger = replica
    more(scene, 5, 20)
    before.holds()
    before.went_on()
    ledger.close()


def ledger_at(scene: Scene, url: str) -> Ledger:
    """The ledger behind a URL."""
    app = Celery("project", broker=scene.broker_url, set_as_current=False)
    app.conf.leaderbeat_redis_url = url
    return Ledger.for_app(app)


@pytest.mark.schedule(SCHEDULE)
@pytest.mark.matrix("valkey")
def test_an_old_replica_does_not_bring_back_what_newer_code_removed(scene: Scene, ledger: Ledger) -> None:
    old = scene.start_beat()
    leader(scene)
    more(scene, 2)
    newer = {name: spec for name, spec in SCHEDULE.items() if name != "held"}
    newer["tick"] = {**SCHEDULE["tick"], "every": 1.0}
    new = scene.start_beat(schedule=newer)
    old.terminate()
    leader(scene, SOON, other_than=old)
    standby = scene.start_beat()
    standby.wait_for_log("Standing by")
    more(scene, 3)
    removed = ledger.entries()["held"].removed
    assert removed is not None
    scene.redis.flushdb()
    more(scene, 3)
    if leader(scene) is new:
        assert ledger.entries()["held"].removed == removed
        assert ledger.entries()["tick"].fingerprint == "interval:1000000us"
    counts = Counter(keys_of(scene.beat_publishes()))
    assert max(counts.values()) == 1


@pytest.mark.schedule({"tick": {"task": "project.record", "every": 0.25}})
@pytest.mark.matrix("valkey+rabbitmq", "redis+rabbitmq")
def test_beats_fire_again_within_two_seconds_of_the_return_of_redis(
    scene: Scene, tell: Callable[[str, str], None]
) -> None:
    for _ in range(3):
        scene.start_beat()
    took = []
    for number in range(3):
        first = leader(scene)
        more(scene, 4)
        scene.ledger.kill()
        down = time.monotonic()
        wait_for(lambda: time.monotonic() - down >= 1.5, 5, "all have noticed")  # noqa: B023
        if number == 2:
            # Who led last doesn't come back.
            first.kill()
        scene.ledger.restart()
        back = time.time()
        record = wait_for(
            lambda: next((one for one in scene.beat_publishes() if one.t > back), None),  # noqa: B023
            SOON,
            "something is sent",
            interval=0.005,
        )
        took.append(record.t - back)
    tell("reconnecting", f"fired {', '.join(f'{seconds:.2f}' for seconds in took)} s after Redis was back")
    assert sorted(took)[1] < 2.0
    assert max(Counter(keys_of(scene.beat_publishes())).values()) == 1


FLUSHES = """
import redis

from celery_leaderbeat.ledger import Ledger

original, flushed = Ledger.claim, []


def claim(self, *args, **kwargs):
    if not flushed:
        flushed.append(redis.Redis.from_url(app.conf.leaderbeat_redis_url).flushdb())
    return original(self, *args, **kwargs)


Ledger.claim = claim
"""


@pytest.mark.schedule({"tick": SCHEDULE["tick"]})
@pytest.mark.matrix("valkey")
def test_a_new_leader_whose_ledger_is_lost_in_its_first_round_still_catches_up(
    scene: Scene, tmp_path: Path
) -> None:
    path = tmp_path / "flushes.py"
    path.write_text(FLUSHES)
    first = scene.start_beat()
    leader(scene)
    second = scene.start_beat(env={"LB_PLUGIN": str(path)})
    second.wait_for_log("Standing by", timeout=SOON)
    more(scene, 4)
    # What is in doubt as its leader dies, and lost then, is missed.
    with at_rest(scene, first):
        first.kill()
    second.wait_for_log("Redis has lost data of", timeout=SOON)
    more(scene, 6)
    assert not second.find(LOST)
    assert_gapless(sent(scene), period=0.5)


BOTH = {
    prefer: {
        "task": "project.record",
        "every": 0.5,
        "policy": {"catch_up": "all", "prefer": prefer},
    }
    for prefer in ("missed", "duplicate")
}


@pytest.mark.schedule(BOTH)
@pytest.mark.matrix("valkey+rabbitmq")
@pytest.mark.parametrize("beats", [1, 2])
def test_what_waits_to_be_sent_is_sent_after_a_flush_as_its_leader_lives(
    scene: Scene, ledger: Ledger, beats: int
) -> None:
    first = scene.start_beat(proxied=("broker",))
    leader(scene)
    if beats == 2:
        scene.start_beat().wait_for_log("Standing by", timeout=SOON)
    wait_for(lambda: len(keys_of(scene.beat_publishes())) >= 6, SOON, "slots are sent")
    # What was on its way is missed, where a missed slot is preferred.
    with at_rest(scene, first):
        first.broker_proxy.cut()
    first.wait_for_log("is not sent yet", timeout=SOON)
    wait_for(ledger.unfinished, SOON, "it is given back")
    scene.redis.flushdb()
    first.wait_for_log("Redis has lost the records of", timeout=SOON)
    wait_for(ledger.unfinished, SOON, "they are recorded again")
    first.broker_proxy.resume()
    for prefer in BOTH:
        more(scene, 6, entry=prefer)
        assert_gapless(sent(scene, prefer), period=0.5)
    assert not first.find(LOST)
