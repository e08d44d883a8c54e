"""What a replica remembers, and what it puts back: pure."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_leaderbeat.pauses import Pause, lacking_pauses, merged_pauses
from celery_leaderbeat.plan import Plan
from celery_leaderbeat.policy import Policy
from celery_leaderbeat.recall import recall
from celery_leaderbeat.records import EntryRecord, Recalled
from celery_leaderbeat.shadow import Shadow
from celery_leaderbeat.tick import slot_to_us
from celery_leaderbeat.timeline import fingerprint

BEGAN = datetime(2026, 10, 2, 3, tzinfo=timezone.utc)
MINUTE = timedelta(minutes=1)
F = fingerprint(MINUTE)


def at(minute: float) -> datetime:
    return BEGAN + minute * MINUTE


def text(minute: float, mark: str = F, **more: Any) -> str:
    return json.dumps({"slot": str(slot_to_us(at(minute))), "fingerprint": mark, "count": 3, **more})


def record(minute: float, mark: str = F) -> EntryRecord:
    return EntryRecord.read(text(minute, mark))


def plan(schedule: Any = MINUTE, **policy: Any) -> Plan:
    return Plan("job", None, schedule, fingerprint(schedule), Policy(**policy))


def slots(shadow: Shadow, now: float, **stored: float) -> dict[str, datetime]:
    """What is lacking where this is stored."""
    found = shadow.lacking({name: at(minute) for name, minute in stored.items()}, at(now))
    return {name: EntryRecord.read(json.dumps(known.record)).slot for name, known in found.items()}


def seen(*looks: tuple[float, dict[str, str]]) -> Shadow:
    shadow = Shadow()
    for minute, stored in looks:
        shadow.see(stored, at(minute), at(minute))
    return shadow


# What is remembered


def test_what_is_gone_from_the_ledger_is_remembered_as_it_was_seen_last() -> None:
    shadow = seen((5, {"job": text(4, missed=2), "other": text(1)}), (6, {"job": text(5, missed=2)}))
    found = shadow.lacking({}, at(7))
    assert json.loads(text(5, missed=2)) == found["job"].record
    assert set(found) == {"job", "other"}
    assert slots(shadow, 7, job=5, other=1) == {}
    assert slots(shadow, 7, job=4.5, other=2) == {"job": at(5)}


def test_a_last_decided_slot_never_moves_back_by_what_is_seen() -> None:
    shadow = seen((5, {"job": text(5)}), (6, {"job": text(3)}), (7, {}), (8, {"job": "{garbage"}))
    assert slots(shadow, 9) == {"job": at(5)}
    assert shadow.lacks


@pytest.mark.parametrize(
    "garbage", ["{garbage", "[]", "5", '{"slot": "-1", "fingerprint": "f"}', '{"slot": "7"}']
)
def test_what_cannot_be_read_is_not_remembered(garbage: str) -> None:
    shadow = seen((5, {"job": garbage}))
    assert len(shadow) == 0
    assert not shadow.lacks


def test_a_slot_of_the_far_future_gives_way_and_is_not_put_back() -> None:
    shadow = seen((5, {"job": text(600)}))
    assert slots(shadow, 6) == {}
    shadow.see({"job": text(6)}, at(7), at(7))
    assert not shadow.lacks
    assert slots(shadow, 8) == {"job": at(6)}


def test_an_entry_that_was_removed_long_ago_is_not_brought_back() -> None:
    week = 7 * 1440
    shadow = seen((5, {"job": text(4, removed=str(slot_to_us(at(5))))}))
    assert slots(shadow, week) == {"job": at(4)}
    assert shadow.lacking({}, at(week))["job"].record["removed"] == str(slot_to_us(at(5)))
    assert slots(shadow, week + 6) == {}
    shadow.see({}, at(week + 7), at(week + 7))
    assert len(shadow) == 0
    assert not shadow.lacks


def test_a_leader_remembers_when_it_removed_an_entry() -> None:
    shadow = seen((5, {"job": text(4)}))
    shadow.removed("job", at(4), at(6))
    (known,) = shadow.lacking({}, at(7)).values()
    assert EntryRecord.read(json.dumps(known.record)).removed == at(6)
    assert known.record["count"] == 3
    shadow.removed("job", at(4), None)
    (known,) = shadow.lacking({}, at(7)).values()
    assert EntryRecord.read(json.dumps(known.record)).removed == at(6)


def test_a_leader_remembers_what_others_decided_of_an_entry_before_it_was_removed() -> None:
    shadow = seen((5, {"job": text(4, removed=str(slot_to_us(at(3))))}))
    shadow.removed("job", at(6), at(7), "g")
    shadow.removed("unknown", at(5), at(7), "u")
    found = {
        name: EntryRecord.read(json.dumps(known.record)) for name, known in shadow.lacking({}, at(8)).items()
    }
    assert {name: (e.slot, e.removed, e.fingerprint) for name, e in found.items()} == {
        "job": (at(6), at(7), "g"),
        "unknown": (at(5), at(7), "u"),
    }
    assert slots(shadow, 8, job=6, unknown=5) == {}


def test_a_leader_remembers_each_slot_that_it_decides() -> None:
    shadow = seen((5, {"job": text(4, missed=2, removed="1")}))
    shadow.stands("job", at(4), "g")
    shadow.decided("job", at(6), "g")
    shadow.decided("job", at(5), "g")
    shadow.decided("new", at(6), "n")
    found = shadow.lacking({}, at(7))
    assert found["job"].record == {
        "slot": str(slot_to_us(at(6))),
        "fingerprint": "g",
        "count": 3,
        "missed": 2,
    }
    assert EntryRecord.read(json.dumps(found["new"].record)).slot == at(6)
    shadow.forget("new")
    assert set(shadow.lacking({}, at(7))) == {"job"}


def test_a_reset_by_the_leader_itself_counts() -> None:
    shadow = seen((5, {"job": text(9)}))
    shadow.stands("job", at(6), F)
    assert slots(shadow, 7, job=6) == {}


# The gap


def test_what_was_decided_between_the_last_look_and_the_loss_is_not_known() -> None:
    shadow = seen((5, {"job": text(4)}))
    shadow.unchanged(at(6))
    shadow.see({}, at(7), at(7.5))
    assert shadow.gap == (at(6), at(7.5))
    shadow.unchanged(at(7.51))
    assert slots(shadow, 7.52) == {"job": at(4)}
    assert shadow.gap == (at(6), at(7.5)), "later looks saw that nobody led"


@pytest.mark.parametrize("by", ["a look", "an election"])
def test_who_has_not_looked_for_a_while_does_not_know_whether_all_was_lost_once_more(by: str) -> None:
    """Another may have been elected meanwhile, and have sent, and its decisions be lost: the ledger is as empty as before."""
    shadow = seen((5, {"job": text(4)}), (6, {}))
    assert shadow.gap == (at(5), at(6))
    if by == "a look":
        shadow.see({}, at(7), at(7))
    else:
        slots(shadow, 7)
    assert shadow.gap == (at(5), at(7))


def test_a_loss_that_shows_only_to_the_new_leader_has_a_gap_up_to_then() -> None:
    shadow = seen((5, {"job": text(4)}))
    slots(shadow, 8)
    assert shadow.gap == (at(5), at(8))
    shadow.put_back()
    assert shadow.gap is None


def test_a_leader_has_no_gap_while_nobody_else_could_lead() -> None:
    shadow = Shadow()
    shadow.stands("job", at(4), F)
    shadow.leads(at(20))
    shadow.see({}, at(12), at(12))
    slots(shadow, 12)
    assert shadow.gap == (at(20), at(20))


def test_a_second_loss_widens_the_gap() -> None:
    shadow = seen((5, {"job": text(4), "other": text(4)}), (6, {"other": text(5)}))
    assert shadow.gap == (at(5), at(6))
    shadow.see({"other": text(5.9)}, at(6.01), at(6.01))
    assert shadow.gap == (at(5), at(6)), "the same loss"
    shadow.see({}, at(6.02), at(6.02))
    assert shadow.gap == (at(5), at(6.02))


def test_a_gap_is_over_when_all_that_was_lacking_is_there_again() -> None:
    shadow = seen((5, {"job": text(4)}), (6, {}), (7, {"job": text(7)}))
    assert shadow.gap is None
    assert not shadow.lacks


def test_a_clock_that_comes_back_makes_known_what_is_known_until() -> None:
    shadow = seen((600, {"job": text(4)}), (5, {"job": text(4)}))
    assert shadow.known_until == at(5)


# What a new leader puts back


def test_nothing_is_recalled_where_nothing_is_lacking() -> None:
    shadow = seen((5, {"job": text(4)}))
    assert recall(shadow, {"job": plan()}, {"job": record(4)}, at(9)) == {}


def test_slots_that_came_due_in_the_gap_may_have_been_sent() -> None:
    shadow = seen((5.5, {"job": text(5)}), (9.5, {}))
    found = recall(shadow, {"job": plan()}, {}, at(9.51))
    assert found == {"job": Recalled(text(5), at(6), at(9), 4)}


def test_an_entry_with_nothing_in_the_gap_keeps_all_its_slots() -> None:
    day = timedelta(days=1)
    shadow = seen((5.5, {"job": text(0, fingerprint(day))}), (9.5, {}))
    found = recall(shadow, {"job": plan(day)}, {}, at(9.51))
    assert found == {"job": Recalled(text(0, fingerprint(day)))}


def test_once_something_was_lost_the_gap_counts_for_all_entries() -> None:
    shadow = seen((5.5, {"job": text(5), "other": text(5)}))
    found = recall(shadow, {"job": plan()}, {"job": record(5), "other": record(4)}, at(7))
    assert found == {"job": Recalled("", at(6), at(7), 2), "other": Recalled(text(5), *found_of(found))}


def found_of(found: dict[str, Recalled]) -> tuple[Any, ...]:
    """What isn't in the schedule: all of the gap, uncounted."""
    other = found["other"]
    assert (other.first, other.last, other.count) == (at(5) + timedelta(microseconds=1), at(7), 0)
    return other.first, other.last, other.count


def test_a_leader_that_kept_its_trust_misses_nothing() -> None:
    shadow = Shadow()
    shadow.stands("job", at(4), F)
    shadow.leads(at(20))
    (known,) = recall(shadow, {"job": plan()}, {}, at(12)).values()
    assert (json.loads(known.record)["slot"], known.first) == (str(slot_to_us(at(4))), None)


def test_a_slot_that_is_to_be_sent_after_the_gap_is_not_missed() -> None:
    late = plan(jitter=59.0)
    shadow = seen((5.5, {"job": text(5)}), (6.0, {}))
    assert recall(shadow, {"job": late}, {}, at(6.01))["job"].first is None


def test_what_an_earlier_schedule_had_due_is_left_to_the_change() -> None:
    shadow = seen((5.5, {"job": text(5, "interval:1us")}), (9.5, {}))
    assert recall(shadow, {"job": plan()}, {}, at(9.51))["job"].first is None


def test_a_schedule_that_fails_misses_all_of_the_gap() -> None:
    class Failing:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    shadow = seen((5.5, {"job": text(5, "x")}), (9.5, {}))
    failing = Plan("job", None, Failing(), "x", Policy())
    known = recall(shadow, {"job": failing}, {}, at(9.51))["job"]
    assert (known.last, known.count) == (at(9.5), 0)


# Pauses


def test_a_pause_that_is_gone_is_remembered_and_one_that_was_lifted_is_not() -> None:
    known = {"job": [Pause(at(1), None, "why"), Pause(at(0), at(0.5))]}
    merged = merged_pauses(known, {}, at(5))
    assert lacking_pauses(merged, {}) == {"job": [Pause(at(0), at(0.5)), Pause(at(1), None, "why")]}
    lifted = {"job": [Pause(at(0), at(0.5)), Pause(at(1), at(4), "why")]}
    merged = merged_pauses(merged, lifted, at(5))
    assert merged == lifted
    assert lacking_pauses(merged, lifted) == {}
    # A replica of the server that lagged has it still open.
    assert lacking_pauses(merged, {"job": [Pause(at(1), None, "why"), Pause(at(0), at(0.5))]}) == {
        "job": [Pause(at(1), at(4), "why")]
    }


@pytest.mark.parametrize("order", [1, -1])
def test_states_of_pauses_are_merged_in_any_order(order: int) -> None:
    states = [
        {"job": [Pause(at(1))], "": [Pause(at(2), at(9))]},
        {"job": [Pause(at(1), at(3)), Pause(at(3))]},
        {"": [Pause(at(2), at(4))]},
    ][::order]
    merged: dict[str, list[Pause]] = {}
    for state in states:
        merged = merged_pauses(merged, state, at(5))
    assert merged == {"job": [Pause(at(1), at(3)), Pause(at(3))], "": [Pause(at(2), at(4))]}


def test_pauses_that_ended_a_month_ago_are_forgotten() -> None:
    assert merged_pauses({"job": [Pause(at(1), at(2))]}, {}, at(2) + timedelta(days=31)) == {}


# Claims that are open


def test_what_is_claimed_is_open_until_it_is_settled_or_looked_after() -> None:
    shadow = Shadow()
    shadow.see_claimed(["a", "b"], led=True)
    shadow.put_back()
    shadow.claimed("c", 2)
    shadow.settled("a")
    assert (shadow.open_claims, shadow.claims) == ({"b": None, "c": 2}, 1)
    shadow.swept(["b"])
    assert (shadow.open_claims, shadow.claims) == ({"b": None}, 1)
    shadow.swept([])
    assert (shadow.open_claims, shadow.claims) == ({}, 1)


def test_a_standby_knows_what_is_claimed_and_a_lease_that_is_lost_with_it_settles_nothing() -> None:
    shadow = Shadow()
    shadow.see_claimed(["a", "b"], led=True)
    shadow.see_claimed(["b", "c"], led=True)
    assert shadow.open_claims.keys() == {"b", "c"}
    shadow.see_claimed([], led=False)
    assert shadow.open_claims.keys() == {"b", "c"}
    shadow.see_claimed([], led=True)
    assert shadow.open_claims == {}


def test_a_leader_that_has_read_what_was_before_it_knows_all_for_as_long_as_its_lease_is_renewed() -> None:
    shadow = Shadow()
    shadow.begins()
    shadow.renewed(at(1))
    assert shadow.known_until is None, "it hasn't read yet what others have decided"
    shadow.leads(at(2))
    shadow.renewed(at(3))
    assert shadow.known_until == at(3)
    shadow.begins()
    shadow.renewed(at(4))
    assert shadow.known_until == at(3)


def test_a_replica_led_last_until_it_sees_another_lead() -> None:
    shadow = Shadow()
    assert not shadow.led_last
    shadow.leads(at(1))
    shadow.ended(at(1))
    shadow.unchanged(at(2))
    assert shadow.led_last
    shadow.another_leads()
    assert not shadow.led_last


# Until when it is known


def test_a_leader_that_another_was_seen_to_have_replaced_knows_nothing_since_it_saw_its_own_lease() -> None:
    """Whether or not it can read then what the other has decided."""
    shadow = seen((5, {"job": text(5)}))
    shadow.held(at(6))
    shadow.leads(at(18))
    shadow.another_leads()
    assert shadow.known_until == at(6)
    shadow.see({}, at(9), at(9))
    assert shadow.gap == (at(6), at(9))


@pytest.mark.parametrize("seen_first", [True, False])
def test_a_leader_that_was_cut_off_can_come_to_doubt_what_it_trusted(seen_first: bool) -> None:
    shadow = seen((5, {"job": text(5)}))
    shadow.leads(at(18))
    if seen_first:
        shadow.see({}, at(8), at(8))
        assert not shadow.gap_is_open
    shadow.doubts(at(6), at(9))
    shadow.see({}, at(9), at(9))
    assert shadow.gap == (at(6), at(9))


def test_whoever_led_knows_nothing_of_the_time_after_its_leadership_has_ended() -> None:
    shadow = seen((5, {"job": text(5)}))
    shadow.leads(at(18))
    shadow.ended(at(6))
    assert shadow.known_until == at(6)


@pytest.mark.parametrize(("led", "lost", "until"), [(True, False, 7), (False, False, 7), (False, True, 9)])
def test_where_another_leads_or_may_an_own_trust_that_reached_further_says_nothing(
    led: bool, lost: bool, until: int
) -> None:
    """Where nobody does and all was lost, the trust says that nobody has."""
    shadow = seen((5, {"job": text(5)}))
    shadow.leads(at(9))
    if lost:
        shadow.see({}, at(6.5), at(6.5))
    shadow.unchanged(at(7), led)
    assert shadow.known_until == at(until)
    if lost:
        return
    shadow.see({}, at(8), at(8.5), led)
    assert shadow.gap == (at(until), at(max(until, 8.5)))
