"""Slots whose records Redis has lost, and which are to be sent: they are recorded again, as given back."""

from __future__ import annotations

import pytest

from celery_leaderbeat.ledger import NotLeading
from celery_leaderbeat.records import Claim
from celery_leaderbeat.term import Term
from tests.protocol.ground import ENTRY, FINGERPRINT, Ground, slot


def _lost(number: int, **options: object) -> Claim:
    claim = {"prefer": "missed", "ttl": 3600.0, "attempt": 1, **options}
    key = Ground.key(number)
    return Claim(key, ENTRY, slot(number), FINGERPRINT, "proj.task", f"id-{number}", **claim)  # type: ignore[arg-type]


def _recall(ground: Ground, term: Term, *numbers: int, **options: object) -> int:
    return ground.ledger.recall_slots(term, [_lost(number, **options) for number in numbers], "it is lost")


def test_a_slot_that_is_recorded_again_is_given_back_and_looked_after(ground: Ground) -> None:
    term = ground.elect()
    assert _recall(ground, term, 1, 2, prefer="duplicate", attempt=2) == 2
    record = ground.record(1)
    assert (record.state, record.reason, record.entry, record.slot) == (
        "returned",
        "it is lost",
        ENTRY,
        slot(1),
    )
    assert (record.attempt, record.prefer, record.task_id, record.epoch) == (
        2,
        "duplicate",
        "id-1",
        term.epoch,
    )
    assert [found.key for found in ground.ledger.unfinished()] == [ground.key(1), ground.key(2)]  # type: ignore[union-attr]
    assert ground.told()[-2:] == ["returned", "returned"]


def test_it_is_claimed_as_one_that_was_given_back_though_later_slots_are_decided(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 3)
    _recall(ground, term, 1)
    assert ground.ask(term, 1, batch="again") == ["claimed"]


def test_the_next_leader_finds_it(ground: Ground) -> None:
    _recall(ground, ground.elect(), 1)
    assert ground.ask(ground.next_term(), 1) == ["claimed"]


def test_its_record_is_kept_until_somebody_has_looked_after_it(ground: Ground) -> None:
    _recall(ground, ground.elect(), 1, ttl=1.0)
    assert ground.client.ttl(ground.record_key(1)) > 86_400


@pytest.mark.parametrize("state", ["sent", "running", "done"])
def test_a_record_that_is_there_says_more_than_what_is_remembered(ground: Ground, state: str) -> None:
    term = ground.elect()
    ground.claim(term, 1)
    ground.confirm(term.epoch, 1)
    if state != "sent":
        ground.start(1, term.epoch)
    if state == "done":
        ground.finish(1)
    before = ground.everything()
    assert _recall(ground, term, 1) == 0
    assert ground.everything() == before


def test_nothing_is_recorded_without_the_lease(ground: Ground) -> None:
    late = ground.elect()
    ground.lapse()
    before = ground.everything()
    with pytest.raises(NotLeading):
        _recall(ground, late, 1)
    assert ground.everything() == before


def test_what_is_claimed_between_a_look_and_the_reading_of_what_is_unfinished_is_read(ground: Ground) -> None:
    looked_at = ground.store.now().timestamp() - 0.5
    term = ground.elect()
    ground.claim(term, 1, 2)
    unfinished = ground.keys.unfinished
    assert ground.store.due_members(unfinished, looked_at) == [ground.key(1), ground.key(2)]
    ground.start(2, term.epoch, run_lease=5.0)
    assert ground.store.due_members(unfinished, looked_at) == [ground.key(1)], (
        "the other runs, and is looked after"
    )
