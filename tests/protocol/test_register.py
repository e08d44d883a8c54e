"""register: from which slot an entry goes on."""

from __future__ import annotations

from datetime import timedelta

import pytest

from celery_leaderbeat.ledger import NotLeading
from tests.protocol.ground import ENTRY, Ground, slot

NOW = slot(10)


def test_a_new_entry_counts_from_now(ground: Ground) -> None:
    term = ground.elect()
    assert ground.ledger.register(term, {ENTRY: "f"}, NOW) == {ENTRY: ("new", NOW)}
    assert ground.ledger.entries()[ENTRY].slot == NOW
    assert ground.ledger.entries()[ENTRY].fingerprint == "f"


def test_an_entry_that_has_not_changed_goes_on_where_it_was(ground: Ground) -> None:
    term = ground.elect()
    ground.ledger.register(term, {ENTRY: "f"}, slot(1))
    assert ground.ledger.register(term, {ENTRY: "f"}, NOW) == {ENTRY: ("kept", slot(1))}


def test_an_entry_whose_schedule_has_changed_counts_from_now_and_never_fires_at_once(ground: Ground) -> None:
    term = ground.elect()
    ground.ledger.register(term, {ENTRY: "f"}, slot(1))
    assert ground.ledger.register(term, {ENTRY: "g"}, NOW) == {ENTRY: ("changed", NOW)}
    assert ground.ledger.register(term, {ENTRY: "g"}, slot(11)) == {ENTRY: ("kept", NOW)}


def test_a_changed_schedule_does_not_move_the_last_decided_slot_back(ground: Ground) -> None:
    term = ground.elect()
    ground.ledger.register(term, {ENTRY: "f"}, NOW)
    ahead = NOW + timedelta(seconds=30)
    ground.ledger.register(term, {ENTRY: "f"}, NOW)
    ground.claim(term, 11)
    assert ground.ledger.register(term, {ENTRY: "g"}, ahead) == {ENTRY: ("changed", slot(11))}


def test_a_slot_that_a_jumping_clock_had_put_far_ahead_is_reset_to_now(ground: Ground) -> None:
    term = ground.elect()
    ground.ledger.register(term, {ENTRY: "f"}, slot(10_000))
    assert ground.ledger.register(term, {ENTRY: "f"}, NOW) == {ENTRY: ("reset", NOW)}
    assert ground.ledger.entries()[ENTRY].slot == NOW


def test_a_slot_that_is_a_little_ahead_is_no_jump(ground: Ground) -> None:
    term = ground.elect()
    ground.ledger.register(term, {ENTRY: "f"}, NOW + timedelta(minutes=4))
    assert ground.ledger.register(term, {ENTRY: "f"}, NOW)[ENTRY][0] == "kept"


def test_an_entry_that_comes_back_within_a_week_goes_on_where_it_was(ground: Ground) -> None:
    term = ground.elect()
    ground.ledger.register(term, {ENTRY: "f"}, NOW)
    assert ground.ledger.register(term, {}, NOW)[ENTRY][0] == "removed"
    assert ground.ledger.entries()[ENTRY].removed
    back = ground.ledger.register(term, {ENTRY: "f"}, NOW + timedelta(days=6))
    assert back == {ENTRY: ("kept", NOW)}
    assert not ground.ledger.entries()[ENTRY].removed


def test_an_entry_that_stays_away_is_forgotten_and_is_new_when_it_comes_back(ground: Ground) -> None:
    term = ground.elect()
    ground.ledger.register(term, {ENTRY: "f"}, NOW)
    ground.ledger.register(term, {}, NOW)
    later = NOW + timedelta(days=8)
    assert ground.ledger.register(term, {}, later)[ENTRY][0] == "forgotten"
    assert ground.ledger.entries() == {}
    assert ground.ledger.register(term, {ENTRY: "f"}, later) == {ENTRY: ("new", later)}


def test_the_time_of_removal_is_that_of_the_first_look(ground: Ground) -> None:
    term = ground.elect()
    ground.ledger.register(term, {ENTRY: "f"}, NOW)
    for day in (0, 3, 6):
        ground.ledger.register(term, {}, NOW + timedelta(days=day))
    assert ground.ledger.register(term, {}, NOW + timedelta(days=8))[ENTRY][0] == "forgotten"


def test_totals_outlive_a_changed_schedule(ground: Ground) -> None:
    term = ground.elect()
    ground.ledger.register(term, {ENTRY: "every minute"}, slot(0))
    ground.claim(term, 1)
    ground.miss(term, 3, 2)
    ground.ledger.register(term, {ENTRY: "g"}, NOW)
    entry = ground.ledger.entries()[ENTRY]
    assert (entry.count, entry.missed) == (1, 2)


@pytest.mark.parametrize("lease", ["gone", "of another term", "not ours"])
def test_nothing_is_registered_without_the_lease(ground: Ground, lease: str) -> None:
    late = ground.elect()
    ground.lapse()
    if lease == "of another term":
        ground.elect("one")
    elif lease == "not ours":
        ground.client.set(ground.keys.lease, "somebody")
    before = ground.everything()
    with pytest.raises(NotLeading):
        ground.ledger.register(late, {ENTRY: "f"}, NOW)
    assert ground.everything() == before
