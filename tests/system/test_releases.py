"""Deploys: old and new code side by side. With releases the new code leads at once; without, nothing fires twice."""

from __future__ import annotations

import time
from collections import Counter
from datetime import datetime, timezone
from typing import Any

import pytest

from celery_leaderbeat.ledger import Ledger
from celery_leaderbeat.tick import parse_tick_key
from tests.support.history import assert_gapless, events
from tests.support.rest import at_rest
from tests.support.scene import Beat, Scene, leader
from tests.support.waits import wait_for

pytestmark = pytest.mark.matrix("valkey")

_ALL = {"catch_up": "all"}


def _entry(every: float = 1.0) -> dict[str, Any]:
    return {"task": "project.record", "every": every, "policy": _ALL}


#: "tick" stays, "gone" is removed, "added" is added, "changed" gets another period.
OLD = {"tick": _entry(), "gone": _entry(), "changed": _entry()}
NEW = {"tick": _entry(), "added": _entry(), "changed": _entry(0.7)}
#: A leader that a busy machine keeps from the processor for two seconds is the leader still.
QUICK = {
    "leaderbeat_lease_ttl": 5,
    "leaderbeat_renew_interval": 1,
    "leaderbeat_publish_timeout": 1.5,
    "leaderbeat_stall_timeout": 4,
}


def _start(scene: Scene, new: bool, release: Any = None, **options: Any) -> Beat:
    conf = {**QUICK, "leaderbeat_release": release, **options.pop("conf", {})}
    return scene.start_beat(schedule=NEW if new else OLD, conf=conf, **options)


def _sent(scene: Scene, entry: str, since: float = 0.0) -> list[str]:
    return [r.key for r in scene.publishes() if r.key.startswith(f"{entry}@") and r.t >= since]


def _wait_for_sent(scene: Scene, entry: str, more: int = 2, timeout: float = 20) -> None:
    before = len(_sent(scene, entry))
    wait_for(lambda: len(_sent(scene, entry)) >= before + more, timeout, f"{more} more of {entry!r}")


def _assert_nothing_twice(scene: Scene) -> None:
    counts = Counter(record.key for record in scene.publishes())
    assert counts
    assert not {key: count for key, count in counts.items() if count > 1}


def _slots(keys: list[str]) -> list[float]:
    return [parse_tick_key(key)[1].timestamp() for key in keys]


def _definitions(scene: Scene) -> dict[str, str]:
    return scene.redis.hgetall(scene.key("definitions"))


def test_a_newer_release_leads_as_soon_as_it_is_up_and_an_old_one_changes_nothing(
    scene: Scene, ledger: Ledger
) -> None:
    old = _start(scene, False, "1.9")
    leader(scene)
    _wait_for_sent(scene, "tick")
    new = _start(scene, True, "1.10")
    began = time.monotonic()
    assert leader(scene, other_than=old) is new
    took = time.monotonic() - began
    _wait_for_sent(scene, "added")
    assert took < 5
    assert scene.lease().release == "1.10"
    (released,) = events(ledger, "released")
    assert released["reason"].startswith("released for a newer release (1.10, of ")
    assert [event["why"] for event in events(ledger, "elected")] == ["free", "released for a newer release"]
    line = old.wait_for_log("The schedule of the leader")
    assert (
        "(release 1.10) isn't this replica's (release 1.9): it has 'added', which this one has not; "
        in line.text
    )
    assert "; it has not 'gone'; it has another schedule for 'changed'." in line.text

    # One more old replica comes late: it stands by, and nothing that is stored changes.
    definitions, epoch = _definitions(scene), scene.lease().epoch
    late = _start(scene, False, "1.9")
    late.wait_for_log("The schedule of the leader")
    _wait_for_sent(scene, "tick", 3)
    assert _definitions(scene) == definitions
    assert scene.lease().epoch == epoch
    for beat in (old, late):
        assert len(beat.find("The schedule of the leader")) == 1

    # While a new one lives, no old one leads; when the last one goes, they may again.
    second = _start(scene, True, "1.10")
    second.wait_for_log("Standing by for")
    wait_for(lambda: len(ledger.releases()) == 4, 5, "all have said which release they are")
    with at_rest(scene, new):
        new.kill()
    assert leader(scene, 15, other_than=new) is second
    second.terminate()
    assert leader(scene, other_than=(new, second)) in (old, late)
    _wait_for_sent(scene, "gone")
    assert [event["release"] for event in events(ledger, "elected")] == ["1.9", "1.10", "1.10", "1.9"]
    _assert_nothing_twice(scene)
    assert_gapless(_sent(scene, "tick"))


UNORDERED = "no order between a number and a time is known"


def test_releases_without_an_order_are_said_once_by_the_replica_that_stands_by(scene: Scene) -> None:
    number = _start(scene, False, "v1.9")
    leader(scene)
    time_ = _start(scene, True, "2026-11-30")
    line = time_.wait_for_log(UNORDERED)
    assert line.level == "WARNING"
    for word in (
        "'v1.9'",
        "'2026-11-30'",
        "the lead isn't handed over",
        "Set leaderbeat_release to values of one kind",
    ):
        assert word in line.text
    equal, unset = _start(scene, False, "1.9.0"), _start(scene, False)
    for beat in (equal, unset):
        beat.wait_for_log("Standing by for")
    assert leader(scene) is number
    for beat in (equal, unset):
        beat.terminate()
        beat.wait(5)

    # The other way round, and again: each says it once, however often it stands by for the other.
    number.freeze()
    assert leader(scene, 15, other_than=number) is time_
    number.thaw()
    number.wait_for_log(UNORDERED)
    time_.freeze()
    assert leader(scene, 15, other_than=time_) is number
    time_.thaw()
    wait_for(lambda: len(time_.find("Standing by for")) == 2, 10, "it stands by again")
    assert leader(scene) is number
    assert [len(beat.find(UNORDERED)) for beat in (number, time_, equal, unset)] == [1, 1, 0, 0]


@pytest.mark.parametrize("release", [True, False], ids=["with releases", "without"])
def test_a_rolling_deploy_of_three_replicas_sends_nothing_twice_and_loses_no_slot_of_what_stays(
    scene: Scene, ledger: Ledger, release: bool
) -> None:
    olds = [_start(scene, False, 41 if release else None, wait=False) for _ in range(3)]
    leader(scene)
    _wait_for_sent(scene, "gone")
    news = []
    for old in olds:
        news.append(_start(scene, True, 42 if release else None))
        if release and len(news) == 1:
            leader(scene, other_than=olds)
        old.terminate()
        old.wait(5)
    leader(scene, 10, other_than=olds)
    _wait_for_sent(scene, "added")
    elected = events(ledger, "elected")
    if release:
        assert [event["release"] for event in elected] == ["41", "42"]
    (last_removed,) = [event for event in events(ledger, "defined") if event["kind"] == "removed"][-1:]
    assert last_removed["entry"] == "gone"
    assert ledger.entries()["gone"].removed
    since = time.time()
    _wait_for_sent(scene, "tick")
    assert not _sent(scene, "gone", since)
    _assert_nothing_twice(scene)
    assert_gapless(_sent(scene, "tick"))


def test_without_releases_an_old_leader_after_a_new_one_goes_on_with_its_entries_and_sends_nothing_twice(
    scene: Scene, ledger: Ledger
) -> None:
    old = _start(scene, False)
    leader(scene)
    _wait_for_sent(scene, "gone")
    new = _start(scene, True)
    old.terminate()
    assert leader(scene, 10, other_than=old) is new
    _wait_for_sent(scene, "added", 3)

    back = _start(scene, False)
    warning = back.wait_for_log("The schedule of the leader")
    assert warning.level == "WARNING"
    assert "it has 'added', which this one has not" in warning.text
    new.terminate()
    assert leader(scene, 10, other_than=(old, new)) is back
    _wait_for_sent(scene, "changed")
    _wait_for_sent(scene, "gone")
    since = float(scene.lease().since)
    kinds = {event["entry"]: event["kind"] for event in events(ledger, "defined")}
    assert kinds == {"gone": "restored", "changed": "changed", "added": "removed", "tick": "new"}
    by_back = [r.key for r in scene.publishes() if r.pid == back.pid and r.key.startswith("changed@")]
    assert by_back
    assert min(_slots(by_back)) > since, "it counts from then on"
    assert_gapless(_sent(scene, "gone"), "gone")
    audited = ledger.audit("gone", datetime.fromtimestamp(since - 60, timezone.utc), ledger.store.now())
    assert not audited.having("unexplained")
    _assert_nothing_twice(scene)
    assert_gapless(_sent(scene, "tick"))


def test_a_newer_release_that_cannot_publish_gives_the_lead_back_to_an_older_one(
    scene: Scene, ledger: Ledger
) -> None:
    old = _start(scene, False, 1)
    leader(scene)
    _wait_for_sent(scene, "tick")
    new = _start(scene, True, 2, cut=("broker",), wait=False)
    assert leader(scene, 15, other_than=old) is new
    assert leader(scene, 15, other_than=new) is old
    # Before the newer one tries again, which it does after a while.
    elected = events(ledger, "elected")
    assert [event["release"] for event in elected] == ["1", "2", "1"]
    new.wait_for_log("steps down")
    _wait_for_sent(scene, "tick", 2)
    _assert_nothing_twice(scene)
    assert_gapless(_sent(scene, "tick"))


def test_a_newer_release_that_is_frozen_is_waited_for_no_longer_than_its_lease(
    scene: Scene, ledger: Ledger
) -> None:
    old = _start(scene, False, 1)
    leader(scene)
    new = _start(scene, True, 2)
    assert leader(scene, other_than=old) is new
    new.freeze()
    assert leader(scene, 15, other_than=new) is old
    _wait_for_sent(scene, "gone", 1)
    new.thaw()
    assert leader(scene, 15, other_than=old) is new
    _wait_for_sent(scene, "added", 1)
    assert [event["release"] for event in events(ledger, "elected")] == ["1", "2", "1", "2"]
    _assert_nothing_twice(scene)


@pytest.mark.schedule({f"entry{n}": {"task": "project.record", "every": 0.5} for n in range(40)})
def test_a_leader_finishes_the_round_that_is_under_way_before_it_hands_over(
    scene: Scene, ledger: Ledger
) -> None:
    conf = {**QUICK, "leaderbeat_policy": _ALL}
    old = scene.start_beat(conf={**conf, "leaderbeat_release": 1})
    leader(scene)
    wait_for(lambda: len(scene.publishes()) >= 80, 20, "it is busy")
    new = scene.start_beat(conf={**conf, "leaderbeat_release": 2})
    assert leader(scene, 10, other_than=old) is new
    for n in (0, 20, 39):
        _wait_for_sent(scene, f"entry{n}", 2, 20)
        assert_gapless(_sent(scene, f"entry{n}"), f"entry{n}", 0.5)
    _assert_nothing_twice(scene)
    assert not events(ledger, "returned"), "nothing that was claimed had to be given back"
