"""Who leads, and what a replica does that doesn't: the cases that people met, on real processes."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from celery_leaderbeat.ledger import Ledger
from celery_leaderbeat.tick import parse_tick_key
from tests.support.containers import LeaderbeatSetup
from tests.support.history import events
from tests.support.rest import at_rest, in_doubt
from tests.support.scene import Scene, keys_of, leader, standbys
from tests.support.waits import wait_for, wait_until_steady

EVERY_SECOND = {"tick": {"task": "project.record", "every": 1.0}}
EVERY_SECOND_ALL = {"tick": {"task": "project.record", "every": 1.0, "policy": {"catch_up": "all"}}}
FENCED_ALL = {"tick": {"task": "project.fenced", "every": 1.0, "policy": {"catch_up": "all"}}}

ELECTED = re.compile(r"leads under epoch (\d+)\.")


def wait_for_publishes(stage: Any, count: int, timeout: float = 10) -> None:
    sent = len(stage.beat_publishes())
    wait_for(lambda: len(stage.beat_publishes()) >= sent + count, timeout, f"{count} more publishes")


def assert_each_slot_once(stage: Any) -> None:
    counts = Counter(keys_of(stage.beat_publishes()))
    assert counts, "something was sent"
    assert not [key for key, count in counts.items() if count > 1]


def assert_clean_exit(beat: Any, within: float = 3.0) -> None:
    began = time.monotonic()
    assert beat.wait(within + 2) == 0
    assert time.monotonic() - began < within
    assert "Traceback" not in beat.logs()


def replaced_after_a_release(stage: Any, ledger: Ledger, first: Any) -> Any:
    """Wait for the leader that follows one which has stopped: it was elected as that one released the lease."""
    second = leader(stage, other_than=first)
    wait_for(
        lambda: [event["why"] for event in events(ledger, "elected")] == ["free", "released"],
        what=lambda: f"elected twice: {events(ledger, 'elected')}",
    )
    return second


# Case 1


@pytest.mark.schedule(EVERY_SECOND_ALL)
@pytest.mark.workers(0)
@pytest.mark.matrix("valkey", "redis+rabbitmq")
def test_three_replicas_send_each_slot_once_under_one_epoch(celery_setup: LeaderbeatSetup) -> None:
    first = leader(celery_setup)
    wait_for_publishes(celery_setup, 10, 15)
    records = celery_setup.beat_publishes()
    assert_each_slot_once(celery_setup)
    slots = sorted(datetime.fromisoformat(record.slot.replace("Z", "+00:00")) for record in records)
    assert (slots[-1] - slots[0]).total_seconds() == len(slots) - 1
    assert {record.pid for record in records} == {first.pid}
    assert len({record.epoch for record in records}) == 1
    for record in records:
        slot = datetime.fromisoformat(record.slot.replace("Z", "+00:00")).timestamp()
        assert record.t >= slot, "never early"
    holder = celery_setup.lease().holder
    for beat in standbys(celery_setup):
        (line,) = beat.find("Standing by for")
        assert re.search(
            rf"Standing by for {re.escape(holder)}.*epoch {records[0].epoch}.* has \d+\.\d s left", line.text
        )


# Cases 3 and 4


@pytest.mark.schedule(EVERY_SECOND)
@pytest.mark.workers(0)
@pytest.mark.matrix("valkey")
def test_a_stopped_leader_exits_cleanly_and_leaves_no_lease(celery_setup: LeaderbeatSetup) -> None:
    for beat in standbys(celery_setup):
        beat.terminate()
        assert_clean_exit(beat)
    last = leader(celery_setup)
    wait_for_publishes(celery_setup, 1)
    last.terminate()
    assert_clean_exit(last)
    assert celery_setup.lease() is None
    assert last.find("Handed over: released the lease")
    assert celery_setup.redis.zcard(celery_setup.key("replicas")) == 0


@pytest.mark.schedule(EVERY_SECOND)
@pytest.mark.workers(0)
@pytest.mark.matrix("valkey")
def test_a_leader_that_is_told_twice_to_stop_exits_cleanly(
    celery_setup: LeaderbeatSetup, ledger: Ledger
) -> None:
    first = leader(celery_setup)
    wait_for_publishes(celery_setup, 1)
    first.terminate()
    first.terminate()
    assert_clean_exit(first)
    replaced_after_a_release(celery_setup, ledger, first)
    wait_for_publishes(celery_setup, 2)
    assert_each_slot_once(celery_setup)


@pytest.mark.schedule(EVERY_SECOND)
@pytest.mark.workers(0)
@pytest.mark.matrix("valkey")
@pytest.mark.beats(2, proxied=("ledger",))
@pytest.mark.parametrize("way", ["cut", "freeze"])
def test_a_leader_without_redis_exits_cleanly(celery_setup: LeaderbeatSetup, way: str) -> None:
    first = leader(celery_setup)
    wait_for_publishes(celery_setup, 1)
    getattr(first.ledger_proxy, way)()
    first.terminate()
    assert_clean_exit(first)


@pytest.mark.schedule(EVERY_SECOND_ALL)
@pytest.mark.workers(0)
@pytest.mark.beats(2, proxied=("broker",))
@pytest.mark.matrix("valkey", "redis+rabbitmq")
def test_a_leader_that_is_stopped_during_a_publish_exits_cleanly_and_nothing_is_sent_twice(
    celery_setup: LeaderbeatSetup, ledger: Ledger
) -> None:
    first = leader(celery_setup)
    wait_for_publishes(celery_setup, 2)
    with at_rest(celery_setup, first):
        first.broker_proxy.freeze("both")
    wait_for(lambda: in_doubt(celery_setup), 10, "a slot is claimed and can't be published")
    first.terminate()
    assert_clean_exit(first)
    second = replaced_after_a_release(celery_setup, ledger, first)
    wait_for_publishes(celery_setup, 8, 20)
    assert second.status == "running"
    assert_each_slot_once(celery_setup)


# Case 5


@pytest.mark.schedule(EVERY_SECOND)
@pytest.mark.workers(0)
@pytest.mark.matrix("valkey", long=("redis",))
@pytest.mark.parametrize("alone", [True, False])
def test_a_leader_whose_lease_is_deleted_is_superseded_and_goes_on(
    celery_setup: LeaderbeatSetup, alone: bool
) -> None:
    first = leader(celery_setup)
    if alone:
        for beat in standbys(celery_setup):
            beat.kill()
    wait_for_publishes(celery_setup, 1)
    old = celery_setup.lease().epoch
    celery_setup.redis.delete(celery_setup.key("lease"))
    lease = wait_for(celery_setup.lease, 10, "somebody leads again")
    assert lease.epoch > old
    wait_for_publishes(celery_setup, 2)
    assert first.status == "running"
    later = celery_setup.beat_publishes()[-2:]
    assert {record.epoch for record in later} == {lease.epoch}
    assert_each_slot_once(celery_setup)


@pytest.mark.schedule(EVERY_SECOND)
@pytest.mark.workers(0)
@pytest.mark.matrix("valkey", long=("redis",))
def test_a_lease_that_is_given_to_somebody_else_is_respected_until_it_lapses(
    celery_setup: LeaderbeatSetup,
) -> None:
    first = leader(celery_setup)
    wait_for_publishes(celery_setup, 1)
    old = celery_setup.lease().epoch
    seconds, microseconds = celery_setup.redis.time()
    celery_setup.redis.set(celery_setup.key("lease"), "somebody", px=15_000)
    wait_for(
        lambda: (
            [beat for beat in celery_setup.beats if beat.find("Standing by for somebody")]
            == list(celery_setup.beats)
        ),
        10,
        "all stand by for somebody",
    )
    given = time.monotonic()
    celery_setup.redis.pexpire(celery_setup.key("lease"), 3000)
    value = wait_for(
        lambda: (
            (value := celery_setup.redis.get(celery_setup.key("lease"))) and value != "somebody" and value
        ),
        20,
        "one of ours leads again",
    )
    assert time.monotonic() - given >= 2.9
    assert json.loads(value)["epoch"] > old
    wait_for_publishes(celery_setup, 2)
    # What had come due before may have been on its way.
    late = [
        record
        for record in celery_setup.beat_publishes()
        if record.epoch == old and parse_tick_key(record.key)[1].timestamp() > seconds + microseconds / 1e6
    ]
    assert not late, "nothing was sent under a lease of somebody else"
    assert first.status == "running"
    assert_each_slot_once(celery_setup)


@pytest.mark.schedule(FENCED_ALL)
@pytest.mark.matrix("valkey", "redis+rabbitmq")
@pytest.mark.conf(leaderbeat_lease_ttl=3)
def test_a_leader_that_was_frozen_stands_by_and_sends_nothing_under_its_old_epoch(
    celery_setup: LeaderbeatSetup,
) -> None:
    first = leader(celery_setup)
    wait_for_publishes(celery_setup, 2)
    old = celery_setup.lease().epoch
    # One that is frozen in the middle of a publish may get that message out when it thaws.
    with at_rest(celery_setup, first):
        frozen = time.time()
        leader(celery_setup, 15, other_than=first)
        wait_for_publishes(celery_setup, 2)
        thawed = time.time()
    first.wait_for_log("Standing by", timeout=15, since=None)
    wait_for_publishes(celery_setup, 2)
    late = [record for record in celery_setup.beat_publishes() if record.epoch == old and record.t > frozen]
    assert not late, f"sent after {thawed} under the old epoch"
    assert_each_slot_once(celery_setup)
    wait_for(lambda: len(celery_setup.runs()) >= len(celery_setup.beat_publishes()), 20, "all are run")
    assert max(Counter(keys_of(celery_setup.runs())).values()) == 1


# Case 6


@pytest.mark.schedule(EVERY_SECOND)
@pytest.mark.workers(0)
@pytest.mark.matrix("valkey+rabbitmq", "redis+rabbitmq")
def test_a_redis_that_comes_back_empty_makes_nobody_send_remembered_slots(
    celery_setup: LeaderbeatSetup,
) -> None:
    leader(celery_setup)
    wait_for_publishes(celery_setup, 3)
    epochs = {record.epoch for record in celery_setup.beat_publishes()}
    celery_setup.ledger.kill()
    down = time.monotonic()
    for beat in celery_setup.beats:
        beat.wait_for_log("Redis gave no answer", timeout=15)
    wait_for(lambda: time.monotonic() - down >= 4, 5, "four seconds have passed")
    celery_setup.ledger.restart()
    back = time.time()
    leader(celery_setup, 3)
    wait_for_publishes(celery_setup, 3)
    first_after = next(record for record in celery_setup.beat_publishes() if record.t > back)
    assert first_after.t - back < 3.0, "fires again within two seconds of Redis's return, and its next slot"
    assert first_after.epoch > max(epochs)
    assert_each_slot_once(celery_setup)
    assert all(beat.status == "running" for beat in celery_setup.beats)


@pytest.mark.schedule(EVERY_SECOND_ALL)
@pytest.mark.workers(0)
@pytest.mark.matrix("valkey", "redis")
def test_killed_connections_and_a_pause_of_redis_cost_no_slot(celery_setup: LeaderbeatSetup) -> None:
    leader(celery_setup)
    wait_for_publishes(celery_setup, 2)
    for kind in ("normal", "pubsub"):
        # A message that is on its way to the broker, which is this server, would be in doubt.
        with at_rest(celery_setup, leader(celery_setup)):
            celery_setup.redis.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
        wait_for_publishes(celery_setup, 2)
    celery_setup.redis.execute_command("CLIENT", "PAUSE", "3000", "ALL")
    wait_for_publishes(celery_setup, 5, 20)
    assert_each_slot_once(celery_setup)
    slots = sorted(keys_of(celery_setup.beat_publishes()))
    seconds = [datetime.fromisoformat(key.split("@")[1].replace("Z", "+00:00")) for key in slots]
    assert (seconds[-1] - seconds[0]).total_seconds() == len(seconds) - 1


@pytest.mark.schedule(EVERY_SECOND)
@pytest.mark.matrix("valkey+rabbitmq")
def test_a_beat_waits_for_a_redis_that_is_not_there_yet(scene: Scene) -> None:
    scene.ledger.kill()
    beat = scene.start_beat()
    beat.wait_for_log("No election: Redis gave no answer")
    assert not scene.beat_publishes()
    scene.ledger.restart()
    leader(scene)
    wait_for_publishes(scene, 2)
    assert beat.status == "running"


# Case 9


@pytest.mark.schedule(EVERY_SECOND)
@pytest.mark.matrix("valkey")
@pytest.mark.conf(
    leaderbeat_lease_ttl=6,
    leaderbeat_renew_interval=1,
    leaderbeat_stall_timeout=2,
    leaderbeat_publish_timeout=0.5,
)
def test_a_leader_whose_tick_loop_hangs_is_replaced_and_stands_by_when_it_comes_back(
    scene: Scene, tmp_path: Path
) -> None:
    plugin, comes_back = tmp_path / "hang.py", tmp_path / "go"
    plugin.write_text(
        "import os, time\n"
        "from celery.beat import BeatLazyFunc\n"
        "def hang():\n"
        f"    while not os.path.exists({str(comes_back)!r}):\n"
        "        time.sleep(0.02)\n"
        "app.conf.beat_schedule['hang'] = {\n"
        "    'task': 'project.record', 'schedule': 2.0, 'kwargs': {'seconds': BeatLazyFunc(hang)}\n"
        "}\n"
    )
    hung = scene.start_beat(env={"LB_PLUGIN": str(plugin)})
    leader(scene)
    epoch = scene.lease().epoch
    other = scene.start_beat()
    hung.wait_for_log("the tick loop hasn't come round", timeout=15)
    assert leader(scene, 15, other_than=hung) is other
    wait_for_publishes(scene, 2)
    comes_back.touch()
    hung.wait_for_log("Standing by for")
    wait_for_publishes(scene, 2)
    assert_each_slot_once(scene)
    since = float(scene.lease().since)
    assert not [r.key for r in scene.publishes() if r.epoch == epoch and r.t > since]
    assert scene.lease().holder.split(":")[-2] == str(other.pid)
    assert hung.status == "running"
    other.terminate()
    assert leader(scene, 10, other_than=other) is hung
    assert scene.lease().epoch > epoch


# Case 10


@pytest.mark.schedule(EVERY_SECOND)
@pytest.mark.workers(0)
@pytest.mark.matrix("valkey")
@pytest.mark.parametrize(
    ("conf", "args"),
    [
        ({"beat_max_loop_interval": 300}, ()),
        ({"beat_max_loop_interval": 0}, ()),
        ({}, ("--max-interval", "10")),
    ],
)
def test_the_lease_is_renewed_whatever_the_loops_interval_is(
    scene: Scene, conf: dict[str, Any], args: tuple[str, ...]
) -> None:
    # A loop that doesn't come round for longer than the stall timeout isn't renewed for.
    conf = conf | {
        "leaderbeat_lease_ttl": 5,
        "leaderbeat_renew_interval": 0.5,
        "leaderbeat_publish_timeout": 1,
        "leaderbeat_stall_timeout": 2.5,
    }
    beat = scene.start_beat(
        schedule={"rare": {"task": "project.record", "every": 3600.0}}, conf=conf, args=args
    )
    leader(scene)
    epoch = scene.lease().epoch
    other = scene.start_beat(conf=conf, args=args)
    other.wait_for_log("Standing by")
    renewed = 0
    deadline = time.monotonic() + 15
    last = scene.redis.pttl(scene.key("lease"))
    while time.monotonic() < deadline and renewed < 11:
        left = scene.redis.pttl(scene.key("lease"))
        assert left > 0
        renewed += left > last
        last = left
        time.sleep(0.01)
    assert renewed == 11, "for longer than a lease lasts"
    assert scene.lease().epoch == epoch
    assert not other.find(ELECTED)
    assert beat.status == "running"


# Case 12


@pytest.mark.schedule(FENCED_ALL)
@pytest.mark.matrix("valkey", "redis+rabbitmq")
def test_embedded_beats_of_three_workers_give_the_same_guarantees(scene: Scene) -> None:
    workers = [
        scene.start_worker(
            pool=pool, concurrency=2 if pool != "solo" else 1, args=("-B", "--scheduler", "leaderbeat")
        )
        for pool in ("prefork", "solo", "threads")
    ]
    lease = wait_for(scene.lease, 10, "an embedded beat leads")
    wait_for(lambda: len(scene.runs("end")) >= 3, 15, "three runs")
    owner = next(
        worker for worker in workers if worker.find(re.compile(rf"leads under epoch {lease.epoch}\."))
    )
    owner.terminate()
    wait_for(lambda: (now := scene.lease()) and now.epoch > lease.epoch, 10, "another embedded beat leads")
    runs = len(scene.runs("end"))
    wait_for(lambda: len(scene.runs("end")) >= runs + 3, 15, "three more runs")
    counts = Counter(keys_of(scene.runs()))
    assert max(counts.values()) == 1
    sent = Counter(record.key for record in scene.publishes())
    assert max(sent.values()) == 1
    slots = sorted(datetime.fromisoformat(key.split("@")[1].replace("Z", "+00:00")) for key in sent)
    assert (slots[-1] - slots[0]).total_seconds() == len(slots) - 1


# Case 13

NAMES = [
    "with spaces",
    "with:colons:and@signs",
    "{braces}",
    "}{",
    "*",
    "日本語 ünïcode",
    "x" * 300,
    "tick",
    "tick2",
    "a'quote\"s\\",
]


@pytest.mark.schedule({name: {"task": "project.fenced", "every": 1.0} for name in NAMES})
@pytest.mark.matrix("valkey", long=("redis+rabbitmq",))
def test_entries_of_any_name_keep_apart(celery_setup: LeaderbeatSetup) -> None:
    leader(celery_setup)
    wait_for(lambda: len(celery_setup.runs("end")) >= 2 * len(NAMES), 15, "all have run twice")
    counts = Counter(keys_of(celery_setup.runs()))
    assert max(counts.values()) == 1
    by_entry = Counter(key.rsplit("@", 1)[0] for key in counts)
    assert set(by_entry) == set(NAMES)
    assert max(by_entry.values()) - min(by_entry.values()) <= 1
    assert set(NAMES) <= set(celery_setup.redis.hkeys(celery_setup.key("entries")))


@pytest.mark.schedule(EVERY_SECOND)
@pytest.mark.matrix("valkey")
def test_two_applications_on_one_redis_do_not_touch_each_other(scene: Scene) -> None:
    for name in ("app", "app1"):
        scene.start_beat(env={"LB_APP_NAME": name})
    prefixes = ["{leaderbeat:app}", "{leaderbeat:app1}"]
    leases = wait_for(
        lambda: (
            all(scene.redis.exists(f"{prefix}:lease") for prefix in prefixes)
            and [json.loads(scene.redis.get(f"{prefix}:lease")) for prefix in prefixes]
        ),
        10,
        "both lead",
    )
    assert {lease["pid"] for lease in leases} == {beat.pid for beat in scene.beats}
    wait_for(lambda: len(scene.beat_publishes()) >= 6, 10, "both send")
    per_beat = Counter(record.pid for record in scene.beat_publishes())
    assert set(per_beat) == {beat.pid for beat in scene.beats}
    ids = [record.id for record in scene.beat_publishes()]
    assert len(ids) == len(set(ids)), "the same slot of two applications has two task ids"


@pytest.mark.schedule(EVERY_SECOND)
@pytest.mark.matrix("valkey", long=("redis",))
@pytest.mark.conf(leaderbeat_key_prefix="shared")
def test_another_applications_prefix_is_an_error_and_is_left_alone(scene: Scene) -> None:
    first = scene.start_beat(env={"LB_APP_NAME": "first"})
    leader(scene)
    wait_for_publishes(scene, 1)
    second = scene.start_beat(env={"LB_APP_NAME": "second"})
    second.wait_for_log("Standing by")
    first.terminate()
    line = second.wait_for_log("belongs to the application 'first'")
    assert line.level == "ERROR"
    assert "'second'" in line.text
    assert "leaderbeat_key_prefix" in line.text
    first.wait(5)
    steady = wait_until_steady(lambda: (len(scene.beat_publishes()), scene.lease()), 2.5, 10)
    assert steady[1] is None
    assert second.status == "running"
    assert {record.pid for record in scene.beat_publishes()} == {first.pid}


# Settings and probes


@pytest.mark.schedule(EVERY_SECOND_ALL)
@pytest.mark.workers(0)
@pytest.mark.matrix("valkey")
@pytest.mark.conf(leaderbeat_lease_ttl=3, leaderbeat_fast_failover=False)
def test_without_fast_failover_a_killed_leader_is_replaced_when_its_lease_lapses(
    celery_setup: LeaderbeatSetup, ledger: Ledger
) -> None:
    first = leader(celery_setup)
    wait_for_publishes(celery_setup, 1)
    left = celery_setup.redis.pttl(celery_setup.key("lease")) / 1000
    killed = time.time()
    first.kill()
    leader(celery_setup, 15, other_than=first)
    (_, why) = [event["why"] for event in events(ledger, "elected")]
    assert why == "expired"
    assert left - 0.3 < float(celery_setup.lease().since) - killed < 4
    wait_for_publishes(celery_setup, 2)
    assert_each_slot_once(celery_setup)


@pytest.mark.schedule(EVERY_SECOND)
@pytest.mark.workers(0)
@pytest.mark.beats(0)
@pytest.mark.matrix("valkey", long=("redis+rabbitmq",))
@pytest.mark.conf(beat_enable_remote_control=True, beat_remote_control_max_tick_age=3)
def test_a_leader_and_a_standby_answer_pings(celery_setup: LeaderbeatSetup) -> None:
    control = pytest.importorskip("celery.beat")
    if not hasattr(control, "BeatPidbox"):
        pytest.skip("this Celery's beat answers no pings")
    for name in ("one", "two"):
        celery_setup.add_beat(args=("-n", f"{name}@%h"))
    leader(celery_setup)
    for beat in celery_setup.beats:
        beat.wait_for_log("beat pidbox: Connected")
    for _ in range(3):
        answers = wait_for(
            lambda: (found := celery_setup.app.control.ping(timeout=2)) and len(found) == 2 and found,
            10,
            "both beats answer",
        )
        assert {next(iter(answer)).split("@")[0] for answer in answers} == {"one", "two"}


# Invariant 7


@pytest.mark.schedule(EVERY_SECOND)
@pytest.mark.workers(0)
@pytest.mark.matrix("valkey")
def test_a_standby_writes_nothing_but_its_membership(celery_setup: LeaderbeatSetup) -> None:
    first = leader(celery_setup)
    first.freeze()
    redis = celery_setup.redis
    try:
        redis.persist(celery_setup.key("lease"))
        for beat in standbys(celery_setup):
            beat.wait_for_log("Standing by")

        def picture() -> dict[str, str]:
            return {
                key: repr(redis.dump(key))
                for key in redis.keys("{leaderbeat:project}:*")
                if "replicas" not in key
            }

        before = picture()
        seen = redis.zrange(celery_setup.key("replicas"), 0, -1, withscores=True)
        wait_for(
            lambda: (
                sum(
                    now > then
                    for (_, then), (_, now) in zip(
                        seen, redis.zrange(celery_setup.key("replicas"), 0, -1, withscores=True), strict=False
                    )
                )
                >= 1
            ),
            12,
            "a standby has announced itself again",
        )
        assert picture() == before
    finally:
        first.thaw()


def test_constructing_the_scheduler_opens_no_connection_and_writes_nothing() -> None:
    from celery import Celery

    from celery_leaderbeat import Scheduler

    app = Celery("nowhere", broker="redis://127.0.0.1:1/0", set_as_current=False)
    app.conf.beat_schedule = {"tick": {"task": "nowhere.tick", "schedule": 1.0}}
    lazy = Scheduler(app, lazy=True)
    assert "127.0.0.1:1" in lazy.info
    assert lazy.schedule == {}
    eager = Scheduler(app)
    assert "tick" in eager.schedule
    eager.close()
    eager.close()
    lazy.close()
    app.close()
