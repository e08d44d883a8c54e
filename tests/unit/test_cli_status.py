"""`celery leaderbeat status` says the same as lines and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from celery_leaderbeat._cli_status import EntryStatus, Status, status_json, status_lines
from celery_leaderbeat.pauses import Pause
from celery_leaderbeat.records import ALL, EntryRecord, Request
from celery_leaderbeat.term import Term

T0 = datetime(2026, 10, 2, 3, tzinfo=timezone.utc)
HOUR = timedelta(hours=1)
LEADER = Term("…", "host:1:a", 7, since=T0.timestamp() + 0.125, release="1.10", ttl=15.0)

EMPTY = Status(
    at=T0,
    url="redis://app:**@host:6379/0",
    key_prefix="leaderbeat:proj",
    leader=None,
    ttl_left=None,
    replicas={},
    pauses={},
    requests=[],
    entries={},
    totals={},
)
FULL = replace(
    EMPTY,
    leader=LEADER,
    ttl_left=12.345,
    replicas={"host:1:a": "1.10", "host:2:b": ""},
    pauses={
        "job": Pause(T0 - HOUR, T0 + HOUR, "new prices", "ann"),
        ALL: Pause(T0 - 2 * HOUR, None, "", "bob"),
    },
    requests=[
        Request("r1", "run", "job", T0, T0, False, "ann", T0),
        Request("r2", "backfill", "job", T0 - 2 * HOUR, T0 - HOUR, True, "", T0),
        Request("r3", "catch_up", ALL, T0 - 2 * HOUR, T0, False, "bob", T0),
    ],
    entries={
        "new": EntryStatus(EntryRecord(T0, "f", 0, 0, 0, None, ()), 0, True),
        "job": EntryStatus(EntryRecord(T0, "f", 5, 1, 2, None, ()), 1, True),
        "gone": EntryStatus(EntryRecord(T0, "f", 0, 0, 2, T0 + HOUR, ()), None, False),
        "late": EntryStatus(EntryRecord(T0, "f", 1, 0, 0, None, ()), 3, False),
    },
    totals={"sent": 5, "done": 4},
)


def test_nothing_has_happened_yet() -> None:
    assert list(status_lines(EMPTY)) == [
        "ledger    redis://app:**@host:6379/0, key prefix 'leaderbeat:proj'",
        "leader    none: the lease is free",
        "totals    none",
        "          (started, done, failed, retrying and refused count FencedTasks only)",
    ]
    assert status_json(EMPTY) == {
        "at": "2026-10-02T03:00:00Z",
        "ledger": {"url": "redis://app:**@host:6379/0", "key_prefix": "leaderbeat:proj"},
        "leader": None,
        "replicas": [],
        "paused": [],
        "requests": [],
        "entries": [],
        "totals": {},
    }


def test_each_thing_is_one_line() -> None:
    assert list(status_lines(FULL)) == [
        "ledger    redis://app:**@host:6379/0, key prefix 'leaderbeat:proj'",
        "leader    host:1:a, epoch 7, since 2026-10-02T03:00:00Z, release 1.10; its lease has 12.3 s left",
        "replica   host:1:a, release 1.10",
        "replica   host:2:b",
        "paused    all entries since 2026-10-02T01:00:00Z by bob, until it is resumed",
        "paused    entry 'job' since 2026-10-02T02:00:00Z by ann, until 2026-10-02T04:00:00Z: new prices",
        "request   run of entry 'job' for 2026-10-02T03:00:00Z, by ann",
        "request   backfill of entry 'job' after 2026-10-02T01:00:00Z up to 2026-10-02T02:00:00Z, by ?, by force",
        "request   catch up of all entries after 2026-10-02T01:00:00Z up to 2026-10-02T03:00:00Z, by bob",
        "entry     gone: last decided 2026-10-02T03:00:00Z, 0 claimed, 0 missed, 2 skipped, removed",
        "entry     job: last decided 2026-10-02T03:00:00Z, 5 claimed, 1 missed, 2 skipped; 1 slot without a done marker",
        "entry     late: last decided 2026-10-02T03:00:00Z, 1 claimed, 0 missed, 0 skipped; 3 slots without a done marker",
        "entry     new: no slot yet since 2026-10-02T03:00:00Z",
        "totals    done 4, sent 5",
        "          (started, done, failed, retrying and refused count FencedTasks only)",
    ]


def test_as_json_everything_is_data_and_not_a_sentence() -> None:
    found = status_json(FULL)
    assert json.loads(json.dumps(found)) == found
    assert found["leader"] == {
        "holder": "host:1:a",
        "epoch": 7,
        "since": "2026-10-02T03:00:00.125Z",
        "release": "1.10",
        "ttl": 15.0,
        "ttl_left": 12.345,
    }
    assert found["replicas"] == [
        {"holder": "host:1:a", "release": "1.10"},
        {"holder": "host:2:b", "release": ""},
    ]
    assert found["paused"] == [
        {"entry": "", "since": "2026-10-02T01:00:00Z", "until": None, "by": "bob", "note": ""},
        {
            "entry": "job",
            "since": "2026-10-02T02:00:00Z",
            "until": "2026-10-02T04:00:00Z",
            "by": "ann",
            "note": "new prices",
        },
    ]
    at = {"at": "2026-10-02T03:00:00Z"}
    assert found["requests"] == [
        {
            **at,
            "id": "r1",
            "kind": "run",
            "entry": "job",
            "slot": "2026-10-02T03:00:00Z",
            "since": None,
            "until": None,
            "force": False,
            "by": "ann",
        },
        {
            **at,
            "id": "r2",
            "kind": "backfill",
            "entry": "job",
            "slot": None,
            "since": "2026-10-02T01:00:00Z",
            "until": "2026-10-02T02:00:00Z",
            "force": True,
            "by": "",
        },
        {
            **at,
            "id": "r3",
            "kind": "catch_up",
            "entry": "",
            "slot": None,
            "since": "2026-10-02T01:00:00Z",
            "until": "2026-10-02T03:00:00Z",
            "force": False,
            "by": "bob",
        },
    ]
    decided = {"last_decided": "2026-10-02T03:00:00Z", "no_slot_since": None}
    assert found["entries"] == [
        {
            "entry": "gone",
            **decided,
            "claimed": 0,
            "missed": 0,
            "skipped": 2,
            "removed": "2026-10-02T04:00:00Z",
            "paused": False,
            "without_done_marker": None,
        },
        {
            "entry": "job",
            **decided,
            "claimed": 5,
            "missed": 1,
            "skipped": 2,
            "removed": None,
            "paused": True,
            "without_done_marker": 1,
        },
        {
            "entry": "late",
            **decided,
            "claimed": 1,
            "missed": 0,
            "skipped": 0,
            "removed": None,
            "paused": False,
            "without_done_marker": 3,
        },
        {
            "entry": "new",
            "last_decided": None,
            "no_slot_since": "2026-10-02T03:00:00Z",
            "claimed": 0,
            "missed": 0,
            "skipped": 0,
            "removed": None,
            "paused": True,
            "without_done_marker": 0,
        },
    ]
    assert found["totals"] == {"done": 4, "sent": 5}


@pytest.mark.parametrize(
    ("leader", "ttl_left", "line", "shown"),
    [
        (
            replace(LEADER, release=""),
            None,
            "leader    host:1:a, epoch 7, since 2026-10-02T03:00:00Z; its lease doesn't expire",
            {"since": "2026-10-02T03:00:00.125Z", "release": "", "ttl": 15.0, "ttl_left": None},
        ),
        (
            Term.read("somebody else's"),
            0.0,
            "leader    somebody else's, epoch 0; its lease has 0.0 s left",
            {"since": None, "release": "", "ttl": None, "ttl_left": 0.0},
        ),
    ],
)
def test_a_lease_that_doesnt_expire_or_isnt_ours_is_shown_as_such(
    leader: Term, ttl_left: float | None, line: str, shown: dict[str, object]
) -> None:
    status = replace(EMPTY, leader=leader, ttl_left=ttl_left)
    assert line in status_lines(status)
    assert status_json(status)["leader"] == {"holder": leader.holder, "epoch": leader.epoch, **shown}
