"""register: from which slot an entry goes on."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest

from celery_leaderbeat.definitions import Definition
from celery_leaderbeat.ledger import NotLeading
from celery_leaderbeat.records import Recalled, UnsentRange
from celery_leaderbeat.term import Term
from celery_leaderbeat.tick import slot_to_us
from tests.protocol.ground import ENTRY, FINGERPRINT, Ground, slot

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
    """It was taken out by mistake, or an older leader didn't know it: its policy says what is caught up."""
    term = ground.elect()
    ground.ledger.register(term, {ENTRY: FINGERPRINT}, slot(0))
    ground.claim(term, 1)
    assert ground.ledger.register(term, {}, slot(2))[ENTRY][0] == "removed"
    assert ground.ledger.entries()[ENTRY].removed
    later = slot(6 * 1440)
    assert ground.ledger.register(term, {ENTRY: FINGERPRINT}, later) == {ENTRY: ("restored", slot(1))}
    entry = ground.ledger.entries()[ENTRY]
    assert not entry.removed
    assert (entry.slot, entry.count) == (slot(1), 1)
    assert ground.ranges() == []
    assert ground.ledger.register(term, {ENTRY: FINGERPRINT}, later)[ENTRY] == ("kept", slot(1))


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
    ground.ledger.register(term, {ENTRY: FINGERPRINT}, slot(0))
    ground.claim(term, 1)
    ground.miss(term, 3, 2)
    ground.ledger.register(term, {ENTRY: "g"}, NOW)
    entry = ground.ledger.entries()[ENTRY]
    assert (entry.count, entry.missed) == (1, 2)


# The definitions: which schedule was in force when


def _register(ground: Ground, now: int, fingerprint: str = "") -> str:
    """Register the entry (or none) at a minute; what it was found to be."""
    entries = {ENTRY: fingerprint} if fingerprint else {}
    return ground.ledger.register(_leading(ground), entries, slot(now))[ENTRY][0]


def _leading(ground: Ground) -> Term:
    value = ground.client.get(ground.keys.lease)
    return Term.read(value) if value else ground.elect()


def test_a_new_entry_is_defined_from_now_on(ground: Ground) -> None:
    _register(ground, 10, "f")
    assert ground.ledger.definitions(ENTRY) == [Definition("f", slot(10))]


def test_an_entry_that_is_kept_keeps_its_definition(ground: Ground) -> None:
    for now in (10, 20, 30):
        _register(ground, now, "f")
    assert ground.ledger.definitions(ENTRY) == [Definition("f", slot(10))]


def test_a_request_that_comes_late_does_not_date_a_definition_back(ground: Ground) -> None:
    _register(ground, 10, "f")
    assert _register(ground, 9, "f") == "kept"
    assert ground.ledger.definitions(ENTRY) == [Definition("f", slot(10))]


def test_a_changed_schedule_ends_one_definition_and_begins_another(ground: Ground) -> None:
    for now, fingerprint in ((10, "f"), (20, "g"), (30, "f")):
        _register(ground, now, fingerprint)
    assert ground.ledger.definitions(ENTRY) == [
        Definition("f", slot(10), slot(20)),
        Definition("g", slot(20), slot(30)),
        Definition("f", slot(30)),
    ]


def test_what_a_changed_schedule_had_undecided_is_a_range_that_nobody_counted(ground: Ground) -> None:
    _register(ground, 1, "f")
    assert _register(ground, 10, "g") == "changed"
    (text,) = ground.ledger.store.members(ground.keys.unsent(ENTRY))
    found = UnsentRange.read(text)
    assert (found.state, found.count, found.reason) == (
        "skipped",
        0,
        "its schedule changed before it was sent",
    )
    assert (found.first, found.last) == (slot(1) + timedelta(microseconds=1), slot(10))


def test_a_change_that_finds_nothing_undecided_leaves_no_range(ground: Ground) -> None:
    _register(ground, 10, "f")
    assert _register(ground, 10, "g") == "changed"
    assert ground.ranges() == []


def test_a_removed_entry_ends_its_definition_with_the_first_look(ground: Ground) -> None:
    _register(ground, 10, "f")
    for now in (20, 30):
        _register(ground, now)
    assert ground.ledger.definitions(ENTRY) == [Definition("f", slot(10), slot(20))]


def test_an_entry_that_comes_back_was_defined_all_the_time(ground: Ground) -> None:
    """It goes on where it was: what came due meanwhile is caught up, or missed."""
    _register(ground, 10, "f")
    _register(ground, 20)
    assert _register(ground, 30, "f") == "restored"
    assert _register(ground, 40, "f") == "kept"
    assert ground.ledger.definitions(ENTRY) == [Definition("f", slot(10))]


def test_an_entry_that_comes_back_with_another_schedule_is_defined_from_then_on(ground: Ground) -> None:
    _register(ground, 10, "f")
    _register(ground, 20)
    assert _register(ground, 30, "g") == "changed"
    assert ground.ledger.definitions(ENTRY) == [
        Definition("f", slot(10), slot(20)),
        Definition("g", slot(30)),
    ]


def test_a_forgotten_entry_has_no_definitions(ground: Ground) -> None:
    _register(ground, 10, "f")
    _register(ground, 20)
    assert _register(ground, 20 + 8 * 1440) == "forgotten"
    assert ground.ledger.definitions(ENTRY) == []


def test_a_reset_entry_is_defined_from_now_on_and_has_no_ranges_of_the_time_to_come(ground: Ground) -> None:
    _register(ground, 1, "f")
    ground.miss(_leading(ground), 5, 4)
    ground.miss(_leading(ground), 10_000, 1, reason="a clock had jumped")
    _register(ground, 10_000, "f")
    ground.client.hset(
        ground.keys.entries,
        ENTRY,
        json.dumps({"slot": str(slot_to_us(slot(10_000))), "fingerprint": "f"}),
    )
    assert _register(ground, 10, "f") == "reset"
    assert ground.ledger.definitions(ENTRY) == [Definition("f", slot(1))]
    assert ground.ranges() == [("missed", 2, 5, 4, "too late")]


def test_what_a_jumped_clock_had_missed_before_now_stays_explained_after_the_reset(ground: Ground) -> None:
    _register(ground, 1, "f")
    term = _leading(ground)
    ground.miss(term, 5, 3, reason="too late")
    ground.miss(term, 10_000, 9_995, reason="a clock had jumped")
    assert _register(ground, 20, "f") == "reset"
    assert ground.ranges() == [("missed", 3, 5, 3, "too late"), ("missed", 6, 20, 0, "a clock had jumped")]
    ground.miss(term, 22, 2, reason="a clock had jumped")
    assert ground.ranges()[1:] == [("missed", 6, 22, 0, "a clock had jumped")]


def test_a_definition_from_the_time_to_come_begins_now_with_the_reset(ground: Ground) -> None:
    _register(ground, 10_000, "f")
    assert _register(ground, 10, "f") == "reset"
    assert ground.ledger.definitions(ENTRY) == [Definition("f", slot(10))]


@pytest.mark.parametrize("damage", ["gone", "not JSON", "5"])
def test_an_entry_without_definitions_gets_one_from_where_it_goes_on(ground: Ground, damage: str) -> None:
    _register(ground, 10, "f")
    if damage == "gone":
        ground.client.delete(ground.keys.definitions)
        assert _register(ground, 12, "f") == "kept"
        assert ground.ledger.definitions(ENTRY) == [Definition("f", slot(10))]
        return
    # What is there is looked into when the entry goes, comes back or changes.
    ground.client.hset(ground.keys.definitions, ENTRY, damage)
    _register(ground, 11)
    assert _register(ground, 12, "f") == "restored"
    assert ground.ledger.definitions(ENTRY) == [Definition("f", slot(10))]


def test_fifty_definitions_are_kept_of_an_entry(ground: Ground) -> None:
    for number in range(52):
        _register(ground, number, f"f{number}")
    kept = ground.ledger.definitions(ENTRY)
    assert (len(kept), kept[0].fingerprint, kept[-1].fingerprint) == (50, "f2", "f51")


def test_many_entries_are_registered_each_with_its_own_definition_and_range(ground: Ground) -> None:
    names = [f"entry {number}" for number in range(450)]
    term = ground.elect()
    ground.ledger.register(term, dict.fromkeys(names, "f"), slot(1))
    ground.ledger.register(term, dict.fromkeys(names, "g"), slot(5))
    for name in (names[0], names[199], names[200], names[449]):
        assert [found.fingerprint for found in ground.ledger.definitions(name)] == ["f", "g"]
        assert len(ground.ranges(name)) == 1


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


# What the ledger has lost, and the leader remembers

LOST = "Redis has lost it"


def _text(number: int, fingerprint: str = "f", **more: object) -> str:
    return json.dumps({"slot": str(slot_to_us(slot(number))), "fingerprint": fingerprint, **more})


def _recall(ground: Ground, now: int, recalled: Recalled, fingerprint: str = "f") -> tuple[str, int]:
    """Register the entry with what is remembered of it; what it was found to be, and its last decided slot."""
    entries = {ENTRY: fingerprint} if fingerprint else {}
    known = {ENTRY: recalled}
    kind, at = ground.ledger.register(_leading(ground), entries, slot(now), None, known, LOST)[ENTRY]
    assert ground.ledger.entries()[ENTRY].slot == at
    last = ground.last_decided()
    assert last is not None
    return kind, last


def test_an_entry_that_is_gone_goes_on_where_it_is_remembered(ground: Ground) -> None:
    record = _text(7, count=5, missed=2, skipped=1, open=["nightly@x"])
    assert _recall(ground, 10, Recalled(record)) == ("recalled", 7)
    entry = ground.ledger.entries()[ENTRY]
    assert (entry.count, entry.missed, entry.skipped, entry.open) == (5, 2, 1, ("nightly@x",))
    assert ground.ledger.definitions(ENTRY) == [Definition("f", slot(7))]
    assert ground.ranges() == []


def test_an_entry_that_fell_behind_goes_on_where_it_is_remembered(ground: Ground) -> None:
    _register(ground, 3, "f")
    assert _recall(ground, 10, Recalled(_text(7))) == ("recalled", 7)
    assert ground.ledger.definitions(ENTRY) == [Definition("f", slot(3))]
    # What was decided in between has lost its records, and is explained all the same.
    ends = {found.end for found in ground.ledger.audit(ENTRY, slot(3), slot(7), timedelta(minutes=1)).slots}
    assert [kept[:3] for kept in ground.ranges()] == [("forgotten", 3, 7)]
    assert ends <= {"forgotten"}


@pytest.mark.parametrize("stored", [7, 9])
def test_what_is_remembered_never_moves_the_last_decided_slot_back(ground: Ground, stored: int) -> None:
    _register(ground, stored, "f")
    assert _recall(ground, 10, Recalled(_text(7, count=99))) == ("kept", stored)
    assert ground.ledger.entries()[ENTRY].count == 0


def test_what_is_remembered_of_another_schedule_counts_from_now(ground: Ground) -> None:
    assert _recall(ground, 10, Recalled(_text(7, "g"))) == ("changed", 10)
    assert [kept[0] for kept in ground.ranges()] == ["skipped"]


def test_what_is_remembered_of_the_far_future_is_reset(ground: Ground) -> None:
    assert _recall(ground, 10, Recalled(_text(10_000))) == ("reset", 10)


def test_an_entry_that_the_schedule_does_not_have_comes_back_as_removed(ground: Ground) -> None:
    assert _recall(ground, 10, Recalled(_text(7)), "") == ("removed", 7)
    assert ground.ledger.entries()[ENTRY].removed == slot(10)


def test_the_time_of_a_removal_is_remembered(ground: Ground) -> None:
    removed = str(slot_to_us(slot(5)))
    assert _recall(ground, 10, Recalled(_text(4, removed=removed)), "") == ("recalled", 4)
    assert ground.ledger.entries()[ENTRY].removed == slot(5)


def test_slots_that_may_have_been_sent_are_missed_and_never_claimed_again(ground: Ground) -> None:
    known = Recalled(_text(3, missed=1), slot(4), slot(6), 3)
    assert _recall(ground, 10, known) == ("recalled", 6)
    assert ground.ranges() == [("missed", 4, 6, 3, LOST)]
    assert ground.ledger.entries()[ENTRY].missed == 4
    assert ground.ledger.counts() == {"missed": 3}
    assert ground.ledger.definitions(ENTRY) == [Definition("f", slot(3))]
    assert [event["count"] for event in ground.events("missed")] == ["3"]
    term = _leading(ground)
    assert ground.ask(term, 4, 5, 6, 7) == ["decided", "decided", "decided", "claimed"]


def test_slots_that_may_have_been_sent_are_missed_once(ground: Ground) -> None:
    known = Recalled(_text(3), slot(4), slot(6), 3)
    for _ in range(2):
        _recall(ground, 10, known)
    assert ground.ledger.counts() == {"missed": 3}
    assert ground.ranges() == [("missed", 4, 6, 3, LOST)]
    assert _recall(ground, 10, known) == ("kept", 6)


def test_slots_that_may_have_been_sent_are_missed_of_an_entry_that_was_not_lost(ground: Ground) -> None:
    _register(ground, 3, "f")
    assert _recall(ground, 10, Recalled("", slot(4), slot(6), 3)) == ("recalled", 6)
    assert ground.ranges() == [("missed", 4, 6, 3, LOST)]


def test_nothing_is_put_back_without_the_lease(ground: Ground) -> None:
    late = ground.elect()
    ground.lapse()
    before = ground.everything()
    with pytest.raises(NotLeading):
        ground.ledger.register(late, {ENTRY: "f"}, NOW, None, {ENTRY: Recalled(_text(7))}, LOST)
    assert ground.everything() == before
