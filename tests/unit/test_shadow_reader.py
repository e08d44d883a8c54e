"""What a standby takes from what it reads, above all as Redis loses its data between two answers."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_leaderbeat.clock import Clock, FleetClock
from celery_leaderbeat.keys import Keys
from celery_leaderbeat.shadow import Shadow
from celery_leaderbeat.shadow_reader import ShadowReader
from celery_leaderbeat.store import Look
from celery_leaderbeat.tick import slot_to_us, tick_key

NOW = datetime.now(timezone.utc)
ENTRIES = {"job": json.dumps({"slot": str(slot_to_us(NOW)), "fingerprint": "f"})}


class _Store:
    """What Redis holds, until it holds nothing; after so many questions."""

    def __init__(self) -> None:
        self.keys = Keys("unit")
        self.claimed = ["job@1", "job@2"]
        self.entries = dict(ENTRIES)
        self.lost_after: int | None = None
        self.asked = 0

    def _ask(self) -> bool:
        self.asked += 1
        return self.lost_after is None or self.asked <= self.lost_after

    def due_members(self, key: str, at: float | None = None) -> list[str]:
        return list(self.claimed) if self._ask() else []

    def scan_table(self, key: str) -> dict[str, str]:
        return dict(self.entries) if self._ask() else {}

    def size(self, key: str) -> int:
        return len(self.entries) if self._ask() else 0


def _look(holder: str = "other", **counts: int) -> Look:
    value = json.dumps({"holder": holder, "epoch": 1}) if holder else None
    return Look(value, 1000, NOW.timestamp(), None, {name: str(count) for name, count in counts.items()}, {})


@pytest.fixture
def reader() -> tuple[ShadowReader, Shadow, _Store]:
    store, shadow = _Store(), Shadow()
    made: Any = store
    return ShadowReader(made, shadow, FleetClock(Clock()), "me"), shadow, store


Reader = tuple[ShadowReader, Shadow, _Store]


def test_what_is_no_longer_claimed_is_settled(reader: Reader) -> None:
    reads, shadow, store = reader
    reads.look(_look(claimed=2))
    assert shadow.open_claims.keys() == {"job@1", "job@2"}
    store.claimed = ["job@2"]
    reads.look(_look(claimed=2, sent=1))
    assert shadow.open_claims.keys() == {"job@2"}


def test_what_this_replica_left_to_others_is_settled_once_the_ledger_is_seen_to_know_it(
    reader: Reader,
) -> None:
    """Also where that was decided, and counted, before it left them."""
    reads, shadow, store = reader
    reads.look(_look(claimed=2, sent=1))
    shadow.leaves(["job@0", "job@2"])
    assert shadow.open_claims.keys() == {"job@0", "job@1", "job@2"}
    reads.look(_look(claimed=2, sent=1))
    assert shadow.open_claims.keys() == {"job@1", "job@2"}
    asked = store.asked
    reads.look(_look(claimed=2, sent=1))
    assert store.asked == asked, "nothing is read as long as nothing changes"


def test_what_this_replica_left_to_others_stays_in_doubt_while_the_ledger_knows_less_than_it(
    reader: Reader,
) -> None:
    reads, shadow, store = reader
    reads.look(_look(claimed=2))
    shadow.decided("job", NOW + timedelta(seconds=1), "f")
    store.claimed = []
    reads.begin()
    reads.look(_look(claimed=0))
    assert shadow.lacks
    shadow.leaves(["job@3"])
    reads.look(_look(claimed=0))
    assert "job@3" in shadow.open_claims


@pytest.mark.parametrize("lost_after", [0, 1, 2])
@pytest.mark.parametrize("counts", [{"claimed": 3}, {"claimed": 2, "sent": 1}], ids=["decided", "confirmed"])
def test_what_is_lost_right_after_the_look_is_not_settled_by_that(
    reader: Reader, lost_after: int, counts: dict[str, int]
) -> None:
    """The look still saw a leader; the claims, or the entries that are read after them, are gone."""
    reads, shadow, store = reader
    reads.look(_look(claimed=2))
    reads.begin()
    store.asked, store.lost_after = 0, lost_after
    reads.look(_look(**counts))
    assert shadow.open_claims.keys() == {"job@1", "job@2"}


def test_what_is_claimed_between_two_answers_is_in_doubt_if_the_entries_say_that_it_is_decided(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is claimed after they were read isn't decided, as far as this replica knows."""
    reads, shadow, store = reader
    scan, claimed = store.scan_table, [tick_key("job", NOW), tick_key("job", NOW + timedelta(seconds=1))]

    def claims(key: str) -> dict[str, str]:
        store.claimed = [*store.claimed, *claimed]
        return scan(key)

    monkeypatch.setattr(store, "scan_table", claims)
    reads.look(_look(claimed=2))
    assert shadow.open_claims.keys() == {"job@1", "job@2", claimed[0]}


def test_a_leader_that_was_seen_ends_what_this_replica_knew_as_one(reader: Reader) -> None:
    reads, shadow, _ = reader
    shadow.leads(NOW)
    reads.look(_look("me"))
    reads.look(_look(""))
    assert shadow.led_last
    reads.look(_look("other"))
    assert not shadow.led_last


def test_the_entries_are_read_before_an_election_however_lately_they_were_read(reader: Reader) -> None:
    reads, shadow, store = reader
    reads.look(_look(claimed=2))
    reads._not_before = float("inf")
    store.lost_after = 0
    reads.look(_look("other", claimed=3))
    assert not shadow.lacks, "it isn't read again so soon"
    reads.look(_look(""))
    assert shadow.lacks


def test_where_nobody_leads_it_is_seen_that_what_was_put_back_after_the_last_look_is_lost_again(
    reader: Reader,
) -> None:
    """The lease and the totals look the same: another was elected, put all back, and lost all, in between."""
    reads, shadow, store = reader
    reads.look(_look(claimed=2))
    reads.look(_look(""))
    assert not shadow.lacks, "it was put back before it was read"
    store.entries = {}
    reads.look(_look(""))
    assert shadow.lacks
