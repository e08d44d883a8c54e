"""What a slot does while an earlier one of its entry is unfinished: `overlap`, with tasks longer than the period."""

from __future__ import annotations

import itertools
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_leaderbeat.ledger import Ledger
from celery_leaderbeat.policy import REASON_LOOKBACK
from celery_leaderbeat.tick import parse_tick_key
from tests.support.history import (
    NOTES_SIGNALS,
    due_since,
    events,
    intervals,
    most_at_once,
    once,
    plugin,
    run_lease,
    runner,
    signals,
    unexplained,
)
from tests.support.rest import at_rest
from tests.support.scene import Scene, keys_of, leader
from tests.support.waits import wait_for
from tests.system.test_gaps import killed_at
from tests.system.test_workers import PATIENCE, records, starts, state

#: Seconds that a run takes: longer than two periods.
BODY = 2.3
#: A slot that waits is tried again every half second; the machine may be busy with others.
SOON = 1.0 + 0.7


def job(overlap: str, **fields: Any) -> dict[str, Any]:
    """A schedule of one entry whose runs outlast its period."""
    policy = {"overlap": overlap, **fields.pop("policy", {})}
    return {
        "job": {
            "task": "project.fenced",
            "every": 1.0,
            "kwargs": {"seconds": BODY},
            "policy": policy,
            **fields,
        }
    }


def now() -> datetime:
    return datetime.now(timezone.utc)


def ended(scene: Scene) -> int:
    return len(scene.runs("end"))


def waiting(scene: Scene) -> list[str]:
    """The tick keys of slots that wait for an earlier one."""
    return [
        key
        for key, record in records(scene).items()
        if record.get("waits") == "1" and record["state"] == "returned"
    ]


def all_explained(scene: Scene, ledger: Ledger, since: datetime, until: datetime) -> None:
    """Every slot has an end that fits what ran."""
    audit = ledger.audit("job", since, until)
    assert unexplained(audit) == []
    ran = set(keys_of(scene.runs()))
    for slot in audit.slots:
        if slot.end == "skipped":
            assert slot.key not in ran
            assert slot.reason.startswith("overlap: "), slot
        elif slot.end == "missed":
            # A leader that was kept from the processor until the next slot was due, too.
            assert slot.key not in ran
            assert slot.reason == REASON_LOOKBACK, slot
        else:
            assert slot.end in ("done", "running", "sent", "returned", "overdue", "claimed"), slot
    assert {"done", "skipped"} <= set(audit.counts)
    kept = ledger.entries("job")["job"]
    skipped = ledger.audit("job", since, kept.slot).counts["skipped"]
    assert kept.skipped == ledger.counts()["skipped"] == skipped


@pytest.mark.matrix("valkey")
@pytest.mark.conf(leaderbeat_lease_ttl=3)
@pytest.mark.schedule(job("skip", policy={"catch_up": "all"}))
def test_skip_never_runs_two_slots_at_once_and_says_what_it_skipped(scene: Scene, ledger: Ledger) -> None:
    began = now()
    scene.start_worker(pool="threads", concurrency=4)
    beats = [scene.start_beat(env=plugin(scene, NOTES_SIGNALS), wait=False) for _ in "ab"]
    first = leader(scene)
    wait_for(scene.runs, PATIENCE, "the first run begins")
    wait_for(lambda: first.find("skipped"), PATIENCE, "a slot is skipped")
    with at_rest(
        scene, first, also=lambda: len(signals(scene, "slots_skipped")) == ledger.counts()["skipped"]
    ):
        first.kill()
    wait_for(lambda: ended(scene) >= 3, PATIENCE, "three runs")
    second = leader(scene)
    second.terminate()
    second.wait()
    runs = intervals(scene)
    assert most_at_once(runs) == 1
    for earlier, later in itertools.pairwise(runs):
        assert later.start >= earlier.end
    all_explained(scene, ledger, began, now())
    skipped = signals(scene, "slots_skipped")
    # The leader that was stopped may have decided about one that it couldn't tell of.
    assert ledger.counts()["skipped"] - len(skipped) in (0, 1)
    assert {told.entry for told in skipped} == {"job"}
    assert {told.count for told in skipped} == {"1"}
    lines = [line for beat in beats for line in beat.find("skipped: overlap: an earlier slot is unfinished")]
    assert {line.level for line in lines} == {"INFO"}
    assert len(events(ledger, "skipped", entry="job")) == ledger.counts()["skipped"]


@pytest.mark.bounded
@pytest.mark.matrix("valkey", "redis+rabbitmq")
@pytest.mark.schedule(job("queue"))
def test_queue_runs_one_after_the_other_and_the_one_that_waits_starts_soon(
    scene: Scene, ledger: Ledger
) -> None:
    began = now()
    scene.start_worker(pool="threads", concurrency=4)
    beat = scene.start_beat()
    most = 0

    def four_have_run() -> bool:
        nonlocal most
        most = max(most, len(waiting(scene)))
        return ended(scene) >= 4

    wait_for(four_have_run, PATIENCE, lambda: f"four runs: {records(scene)}", interval=0.05)
    with at_rest(scene, beat):
        beat.kill()
    assert most == 1, "at most one waits"
    runs = intervals(scene)
    assert most_at_once(runs) == 1
    pauses = []
    for earlier, later in itertools.pairwise(runs):
        assert later.start >= earlier.end
        pauses.append(later.start - earlier.end)
        assert parse_tick_key(later.key)[1] > parse_tick_key(earlier.key)[1], "in their order"
    assert max(pauses) <= SOON, pauses
    all_explained(scene, ledger, began, now())


@pytest.mark.matrix("valkey")
@pytest.mark.conf(leaderbeat_lease_ttl=3)
@pytest.mark.schedule(job("queue", kwargs={"seconds": 7.0}))
def test_the_slot_that_waits_keeps_its_place_over_a_change_of_leader(scene: Scene, ledger: Ledger) -> None:
    began = now()
    scene.start_worker(pool="threads", concurrency=4)
    for _ in "ab":
        scene.start_beat(wait=False)
    first = leader(scene)
    (key,) = wait_for(lambda: waiting(scene), PATIENCE, "one waits")
    assert len(scene.runs()) == 1
    first.kill()
    second = leader(scene, other_than=first)
    wait_for(lambda: starts(scene, key), PATIENCE, lambda: f"it runs: {records(scene)}")
    before, run = intervals(scene)[:2]
    assert run.key == key
    assert 0 <= run.start - before.end <= SOON, "no second run beside it, and soon after it"
    assert starts(scene, key)[0].epoch > scene.runs()[0].epoch
    wait_for(lambda: waiting(scene), PATIENCE, "the next one waits")
    second.kill()
    assert most_at_once(intervals(scene)) == 1
    assert unexplained(ledger.audit("job", began, now())) == []


@pytest.mark.matrix("valkey")
@pytest.mark.conf(leaderbeat_lease_ttl=3)
@pytest.mark.schedule(
    job("queue", kwargs={"seconds": 1.2}, policy={"catch_up": "all", "prefer": "duplicate"})
)
def test_a_queue_that_catches_up_all_runs_every_slot_one_after_the_other(
    scene: Scene, ledger: Ledger
) -> None:
    since = due_since(scene, timedelta(seconds=3.5))
    scene.start_worker(pool="threads", concurrency=4)
    for _ in "ab":
        scene.start_beat(wait=False)
    first = leader(scene)
    wait_for(lambda: ended(scene) >= 2, PATIENCE, "two runs")
    first.kill()
    wait_for(lambda: ended(scene) >= 5, PATIENCE, lambda: f"five runs: {records(scene)}")
    runs = intervals(scene)
    assert most_at_once(runs) == 1
    slots = [parse_tick_key(run.key)[1] for run in runs]
    assert slots[0] - since <= timedelta(seconds=1)
    assert all(b - a == timedelta(seconds=1) for a, b in itertools.pairwise(slots)), "none is left out"
    assert set(ledger.audit("job", since, slots[-2]).counts) == {"done"}


@pytest.mark.matrix("valkey")
@pytest.mark.conf(leaderbeat_lease_ttl=3, leaderbeat_publish_timeout=0.5)
@pytest.mark.parametrize("overlap", ["skip", "queue"])
@pytest.mark.parametrize("prefer", ["missed", "duplicate"])
def test_an_entry_goes_on_after_its_leader_died_between_claim_and_publish(
    scene: Scene, ledger: Ledger, overlap: str, prefer: str
) -> None:
    began = now()
    scene.schedule = job(overlap, kwargs={"seconds": 0.1}, policy={"prefer": prefer})
    scene.start_worker(pool="threads", concurrency=4)
    first = scene.start_beat(env=killed_at(scene, "after the claim", 1), wait=False)
    wait_for(lambda: first.status == "exited", PATIENCE, "the leader dies after its claim")
    assert scene.runs() == []
    scene.start_beat()
    wait_for(lambda: ended(scene) >= 3, PATIENCE, lambda: f"three runs: {records(scene)}")
    assert most_at_once(intervals(scene)) == 1
    (first_slot,) = [slot for slot in ledger.audit("job", began, now()).slots if slot.end != "overdue"][:1]
    assert first_slot.end == ("done" if prefer == "duplicate" else "missed")


@pytest.mark.matrix("valkey")
@pytest.mark.schedule(
    {
        "job": {
            "task": "project.hanging",
            "every": 1.0,
            "kwargs": {"then": 2.0},
            "policy": {"overlap": "queue", "on_crash": "rerun"},
        }
    }
)
def test_what_waits_for_a_run_that_died_waits_for_its_next_attempt(scene: Scene) -> None:
    # Longer than a busy machine keeps the second attempt from the processor.
    workers = [scene.start_worker(env=plugin(scene, run_lease(3.0))) for _ in "ab"]
    scene.start_beat()
    dead = wait_for(scene.runs, PATIENCE, "the first run begins")[0]
    wait_for(lambda: waiting(scene), PATIENCE, "one waits")
    runner(workers, dead).kill()
    wait_for(lambda: len(scene.runs()) >= 3, PATIENCE, lambda: f"three runs: {records(scene)}")
    first, again, following = intervals(scene)[:3]
    assert (again.key, again.attempt) == (first.key, 2)
    assert following.key != first.key
    assert 0 <= following.start - again.end <= SOON


@pytest.mark.bounded
@pytest.mark.matrix("valkey")
@pytest.mark.schedule(job("skip", options={"expires": 2.5}))
def test_a_slot_that_no_worker_takes_holds_up_the_others_until_it_expires(scene: Scene) -> None:
    scene.start_beat()
    wait_for(lambda: len(scene.beat_publishes()) >= 3, PATIENCE, "three are sent")
    claimed = [int(scene.slot(key)["claimed_at"]) / 1000 for key in keys_of(scene.beat_publishes())]
    pauses = [later - earlier for earlier, later in itertools.pairwise(claimed)]
    assert min(pauses) >= 2.5, "not before it expired"
    assert max(pauses) <= 2.5 + 1.0 + 0.7, "and with the next slot"


@pytest.mark.matrix("valkey")
@pytest.mark.schedule(
    {
        "skip": once("fenced", policy={"overlap": "skip"}),
        "queue": once("fenced", policy={"overlap": "queue"}),
    }
)
def test_an_entry_whose_slots_do_not_overlap_is_sent_as_any_other(scene: Scene) -> None:
    due_since(scene)
    scene.start_worker()
    scene.start_beat()
    wait_for(lambda: ended(scene) == 2, PATIENCE, "both run")
    wait_for(
        lambda: all(state(scene, key) == "done" for key in keys_of(scene.runs())), PATIENCE, "both are done"
    )
