"""pause and resume, and what claim makes of them: nothing of a paused entry is sent but what was asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta

import pytest

from celery_leaderbeat.ledger import NotLeading
from celery_leaderbeat.orders import Orders
from celery_leaderbeat.pauses import Pause, Pauses, lacking_pauses, merged_pauses
from celery_leaderbeat.records import ALL
from celery_leaderbeat.term import Term
from celery_leaderbeat.tick import slot_to_us
from tests.protocol.ground import ENTRY, Ground, slot

SOON = timedelta(hours=1)


def _now_us(ground: Ground) -> int:
    seconds, microseconds = ground.client.time()
    return int(seconds * 1_000_000 + microseconds)


def _end_all(ground: Ground, entry: str) -> None:
    """The end that the pauses have comes about."""
    spans = json.loads(ground.client.hget(ground.keys.paused, entry))
    ended = [{**span, "until": str(_now_us(ground) - 1)} for span in spans]
    ground.client.hset(ground.keys.paused, entry, json.dumps(ended))


@pytest.mark.parametrize("paused", [ENTRY, ALL])
@pytest.mark.parametrize("ends", [False, True])
def test_nothing_of_a_paused_entry_is_claimed_and_nothing_is_written(
    ground: Ground, paused: str, ends: bool
) -> None:
    term = ground.elect()
    ground.orders.pause(paused, ground.store.now() + SOON if ends else None)
    before = ground.everything()
    assert ground.ask(term, 1, 2) == ["paused", "paused"]
    assert ground.everything() == before


@pytest.mark.parametrize("paused", [ENTRY, ALL])
@pytest.mark.parametrize("by", ["its end", "a resume"])
def test_a_pause_that_is_over_holds_nothing_back(ground: Ground, paused: str, by: str) -> None:
    term = ground.elect()
    ground.orders.pause(paused, ground.store.now() + SOON)
    if by == "its end":
        _end_all(ground, paused)
    else:
        assert ground.orders.resume(paused)
    assert ground.ask(term, 1) == ["claimed"]


def test_a_pause_that_has_not_begun_holds_nothing_back(ground: Ground) -> None:
    later, end = str(_now_us(ground) + 60_000_000), str(_now_us(ground) + 120_000_000)
    ground.client.hset(ground.keys.paused, ENTRY, json.dumps([{"since": later, "until": end}]))
    assert ground.ask(ground.elect(), 1) == ["claimed"]


def test_a_pause_without_an_end_holds_back_although_the_clock_was_set_back_before_its_begin(
    ground: Ground,
) -> None:
    later = str(_now_us(ground) + 60_000_000)
    ground.client.hset(ground.keys.paused, ENTRY, json.dumps([{"since": later}]))
    assert ground.ask(ground.elect(), 1) == ["paused"]


def test_a_pause_of_one_entry_holds_no_other_back(ground: Ground) -> None:
    term = ground.elect()
    ground.orders.pause(ENTRY)
    assert ground.ask(term, 1, entry="hourly") == ["claimed"]


def test_the_end_of_the_pause_for_all_leaves_the_entrys_own(ground: Ground) -> None:
    term = ground.elect()
    ground.orders.pause(ENTRY)
    ground.orders.pause(ALL)
    assert ground.orders.resume(ALL)
    assert ground.ask(term, 1) == ["paused"]


def test_the_end_of_an_entrys_own_pause_leaves_the_one_for_all(ground: Ground) -> None:
    term = ground.elect()
    ground.orders.pause(ENTRY)
    ground.orders.pause(ALL)
    assert ground.orders.resume(ENTRY)
    assert ground.ask(term, 1) == ["paused"]


def test_one_of_several_pauses_is_enough(ground: Ground) -> None:
    past = [{"since": "1", "until": "2"}, {"since": "3", "until": "4"}]
    ground.client.hset(ground.keys.paused, ENTRY, json.dumps([*past, {"since": "5"}]))
    assert ground.ask(ground.elect(), 1) == ["paused"]


@pytest.mark.parametrize("text", ["not JSON", "5", "null", '"text"', "[]", "{}"])
def test_pauses_that_cannot_be_read_hold_nothing_back(ground: Ground, text: str) -> None:
    ground.client.hset(ground.keys.paused, ENTRY, text)
    assert ground.ask(ground.elect(), 1) == ["claimed"]


@pytest.mark.parametrize(
    "span", [{}, {"until": "9"}, {"since": "x"}, {"since": None}, {"since": "5", "until": None}, 7, "x"]
)
def test_a_damaged_pause_is_no_error(ground: Ground, span: object) -> None:
    ground.client.hset(ground.keys.paused, ENTRY, json.dumps([span]))
    assert ground.ask(ground.elect(), 1)[0] in ("claimed", "paused")
    ground.orders.pause(ENTRY)
    assert ground.ask(ground.elect("two", takes_over=ground.client.get(ground.keys.lease)), 2) == ["paused"]


def test_what_was_asked_for_is_claimed_in_spite_of_a_pause(ground: Ground) -> None:
    term = ground.elect()
    ground.orders.pause(ENTRY)
    ground.orders.pause(ALL)
    assert ground.ask(term, 1, request="q") == ["claimed"]


def test_a_pause_holds_back_what_is_to_be_run_again(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1, on_crash="rerun", max_attempts=3)
    ground.start(1, term.epoch)
    ground.let_run_lease_end(1)
    ground.crash(term, 1)
    ground.orders.pause(ENTRY)
    before = ground.fields(1)
    assert ground.ask(term, 1, batch="next", attempt=2) == ["paused"]
    assert ground.fields(1) == before
    ground.orders.resume(ENTRY)
    assert ground.ask(term, 1, batch="next", attempt=2) == ["claimed"]


def test_a_pause_holds_back_what_was_given_back(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1)
    ground.give_back(term.epoch, 1)
    ground.orders.pause(ENTRY)
    assert ground.ask(term, 1, batch="next") == ["paused"]
    assert ground.unfinished() == {ground.key(1)}


def test_a_claim_that_was_granted_before_the_pause_stands(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1)
    ground.orders.pause(ENTRY)
    assert ground.ask(term, 1) == ["claimed"]


def test_what_is_decided_already_is_said_to_be_so_and_not_paused(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1)
    ground.confirm(term.epoch, 1)
    ground.miss(term, 2, 1)
    ground.orders.pause(ENTRY)
    assert ground.ask(term, 1, 2, batch="next") == ["sent", "decided"]


@pytest.mark.parametrize("overlap", ["skip", "queue"])
def test_a_pause_comes_before_an_overlap(ground: Ground, overlap: str) -> None:
    term = ground.elect()
    ground.claim(term, 1, overlap=overlap)
    ground.orders.pause(ENTRY)
    assert ground.ask(term, 2, batch="next", overlap=overlap) == ["paused"]
    assert ground.ranges() == []


# The pause itself


def test_a_pause_begins_now_and_keeps_who_and_why(ground: Ground) -> None:
    until = ground.store.now() + SOON
    since = ground.orders.pause(ENTRY, until, "the disk is full")
    assert abs(slot_to_us(since) - _now_us(ground)) < 5_000_000
    pauses, _ = ground.orders.look()
    (pause,) = pauses[ENTRY]
    assert (pause.since, pause.until) == (since, until)
    assert (pause.note, pause.by) == ("the disk is full", "ann")


def test_a_new_pause_takes_the_place_of_the_one_in_force(ground: Ground) -> None:
    first = ground.orders.pause(ENTRY, note="one")
    second = ground.orders.pause(ENTRY, ground.store.now() + SOON, "two")
    pauses = ground.orders.look()[0][ENTRY]
    assert [(pause.since, pause.note) for pause in pauses] == [(first, "one"), (second, "two")]
    assert pauses[0].until == second
    assert ground.orders.resume(ENTRY)
    assert ground.ask(ground.elect(), 1) == ["claimed"]


def test_a_pause_that_gave_way_stays_so_although_the_clock_was_set_back_before_its_begin(
    ground: Ground,
) -> None:
    later = _now_us(ground) + 60_000_000
    ground.client.hset(ground.keys.paused, ENTRY, json.dumps([{"since": str(later), "note": "one"}]))
    remembered = ground.orders.look()[0]
    since = ground.orders.pause(ENTRY, ground.store.now() + SOON, "two")
    stored = ground.orders.look()[0]
    assert lacking_pauses(merged_pauses(remembered, stored, since), stored) == {}
    pauses = Pauses(stored[ENTRY])
    assert [pause.note for pause in pauses if pause.until == pause.since] == ["one"]
    assert pauses.in_force(since + SOON + SOON) is None


def test_pauses_that_ended_a_month_ago_are_dropped_with_the_next_one(ground: Ground) -> None:
    day = 86_400_000_000
    now = _now_us(ground)
    spans = [
        {"since": str(now - 40 * day), "until": str(now - 31 * day)},
        {"since": str(now - 40 * day), "until": str(now - 29 * day)},
    ]
    ground.client.hset(ground.keys.paused, ENTRY, json.dumps(spans))
    ground.orders.pause(ENTRY)
    assert [slot_to_us(pause.since) for pause in ground.orders.look()[0][ENTRY]][:1] == [now - 40 * day]
    assert len(ground.orders.look()[0][ENTRY]) == 2


def test_a_resume_ends_the_pause_now_and_keeps_it(ground: Ground) -> None:
    since = ground.orders.pause(ENTRY, note="why")
    assert ground.orders.resume(ENTRY)
    (pause,) = ground.orders.look()[0][ENTRY]
    assert (pause.since, pause.note) == (since, "why")
    assert pause.until is not None
    assert abs(slot_to_us(pause.until) - _now_us(ground)) < 5_000_000


@pytest.mark.parametrize("before", ["nothing", "a pause that was lifted", "a pause that has ended"])
def test_there_is_nothing_to_resume_where_nothing_is_paused(ground: Ground, before: str) -> None:
    if before != "nothing":
        ground.orders.pause(ENTRY, ground.store.now() + SOON)
        if before == "a pause that was lifted":
            ground.orders.resume(ENTRY)
        else:
            _end_all(ground, ENTRY)
    kept = ground.everything()
    assert not ground.orders.resume(ENTRY, catch_up=True)
    assert ground.everything() == kept


def test_a_resume_that_catches_up_asks_for_the_time_of_the_pause(ground: Ground) -> None:
    since = ground.orders.pause(ENTRY)
    assert ground.orders.resume(ENTRY, catch_up=True)
    pauses, (request,) = ground.orders.look()
    assert (request.kind, request.entry, request.force, request.by) == ("catch_up", ENTRY, False, "ann")
    assert (request.since, request.until) == (since, pauses[ENTRY][0].until)


def test_a_resume_that_does_not_catch_up_asks_for_nothing(ground: Ground) -> None:
    ground.orders.pause(ENTRY)
    ground.orders.resume(ENTRY)
    assert ground.orders.look()[1] == []


def test_a_pause_replaces_pauses_that_cannot_be_read(ground: Ground) -> None:
    ground.client.hset(ground.keys.paused, ENTRY, "not JSON")
    assert not ground.orders.resume(ENTRY)
    ground.orders.pause(ENTRY)
    assert len(ground.orders.look()[0][ENTRY]) == 1


def test_catching_up_reaches_back_over_a_pause_that_gave_way_to_a_longer_one(ground: Ground) -> None:
    orders = Orders(ground.ledger, "ann")
    begin = orders.pause("nightly")
    orders.pause("nightly", note="longer")
    assert orders.resume("nightly", catch_up=True)
    (request,) = orders.look()[1]
    assert request.since == begin


def test_progress_of_a_request_moves_forward_only_and_brings_none_back(ground: Ground) -> None:
    orders = Orders(ground.ledger, "ann")
    orders.backfill("nightly", slot(1), slot(9))
    (request,) = orders.look()[1]
    orders.note_progress(request, slot(4))
    orders.note_progress(request, slot(2))
    assert orders.look()[1][0].since == slot(4)
    orders.done_with(request)
    orders.note_progress(request, slot(5))
    assert orders.look()[1] == []


def test_pauses_that_are_long_over_are_forgotten(ground: Ground) -> None:
    orders = Orders(ground.ledger, "ann")
    for entry in ("nightly", "daily"):
        orders.pause(entry)
    orders.resume("nightly")
    pauses, _ = orders.look()
    orders.forget_pauses(pauses, ground.store.now() - timedelta(days=30))
    assert set(orders.look()[0]) == {"nightly", "daily"}
    orders.forget_pauses(pauses, ground.store.now())
    assert set(orders.look()[0]) == {"daily"}


# Pauses that Redis has lost, and the leader remembers


def _put_back(ground: Ground, *pauses: Pause, entry: str = ENTRY) -> int:
    value = ground.client.get(ground.keys.lease)
    term = Term.read(value) if value else ground.elect()
    return ground.ledger.recall_pauses(term, {entry: pauses})


def test_a_pause_that_is_gone_is_put_back_with_its_note(ground: Ground) -> None:
    ground.orders.pause(ENTRY, note="a migration")
    before = ground.orders.look()[0][ENTRY]
    ground.client.delete(ground.keys.paused)
    assert _put_back(ground, *before) == 1
    assert ground.orders.look()[0] == {ENTRY: before}
    assert ground.told()[-1] == "pause_recalled"
    assert ground.ask(ground.next_term(), 1) == ["paused"]


def test_what_was_ordered_meanwhile_stays_beside_a_pause_that_is_put_back(ground: Ground) -> None:
    began = ground.orders.pause(ENTRY)
    earlier = Pause(began - timedelta(hours=2), began - timedelta(hours=1), "before", "bob")
    assert _put_back(ground, earlier) == 1
    assert [pause.since for pause in ground.orders.look()[0][ENTRY]] == [earlier.since, began]


def test_a_pause_that_was_lifted_stays_lifted(ground: Ground) -> None:
    ground.orders.pause(ENTRY)
    (pause,) = ground.orders.look()[0][ENTRY]
    ground.orders.resume(ENTRY)
    lifted = ground.orders.look()[0][ENTRY]
    assert _put_back(ground, pause) == 0
    assert ground.orders.look()[0][ENTRY] == lifted


def test_a_pause_that_is_remembered_as_lifted_is_lifted(ground: Ground) -> None:
    ground.orders.pause(ENTRY)
    (pause,) = ground.orders.look()[0][ENTRY]
    lifted = replace(pause, until=pause.since + timedelta(seconds=1))
    assert _put_back(ground, lifted) == 1
    assert _put_back(ground, replace(pause, until=pause.since + timedelta(hours=1))) == 0
    assert ground.orders.look()[0][ENTRY] == [lifted]


def test_no_pause_is_put_back_without_the_lease(ground: Ground) -> None:
    late = ground.elect()
    ground.lapse()
    before = ground.everything()
    with pytest.raises(NotLeading):
        ground.ledger.recall_pauses(late, {ENTRY: [Pause(slot(1))]})
    assert ground.everything() == before
