"""claim, where slots of an entry mustn't overlap: what counts as unfinished, who is skipped and who waits."""

from __future__ import annotations

import pytest

from celery_leaderbeat.term import Term
from tests.protocol.ground import Ground

POLICIES = ["skip", "queue"]
INSTEAD = {"skip": "overlapped", "queue": "waiting"}


def _ask(ground: Ground, term: Term, number: int, overlap: str, batch: str = "", **options: object) -> str:
    """The answer to a claim, each in a batch of its own."""
    batch = batch or f"batch {number}"
    return ground.ask(term, number, batch=batch, overlap=overlap, **options)[0]  # type: ignore[arg-type]


def _first(
    ground: Ground, overlap: str, state: str = "claimed", attempt: int = 1, on_crash: str = "rerun"
) -> Term:
    """Slot 1 is in a state; the term that leads."""
    term = ground.elect()
    claimed = _ask(ground, term, 1, overlap, attempt=attempt, on_crash=on_crash, max_attempts=3)
    assert claimed == "claimed"
    if state in ("sent", "unconfirmed"):
        ground.confirm(term.epoch, 1, state)
    elif state == "returned":
        ground.give_back(term.epoch, 1)
    elif state in ("missed", "skipped"):
        ground.give_back(term.epoch, 1)
        ground.miss(term, 1, 1, [1], state=state)
    elif state != "claimed":
        ground.start(1, term.epoch, attempt=attempt)
        if state in ("abandoned", "to be run again"):
            ground.let_run_lease_end(1)
            ground.crash(term, 1)
        elif state != "running":
            ground.finish(1, state=state)
    return term


@pytest.mark.parametrize("overlap", POLICIES)
@pytest.mark.parametrize(
    "state", ["claimed", "sent", "unconfirmed", "running", "retrying", "to be run again"]
)
def test_nothing_is_claimed_while_an_earlier_slot_is_unfinished(
    ground: Ground, overlap: str, state: str
) -> None:
    term = _first(ground, overlap, state)
    assert _ask(ground, term, 2, overlap) == INSTEAD[overlap]
    assert ground.last_decided() == 2


@pytest.mark.parametrize("overlap", POLICIES)
@pytest.mark.parametrize("state", ["done", "failed", "abandoned", "missed", "skipped"])
def test_a_slot_is_claimed_where_the_earlier_one_has_ended(ground: Ground, overlap: str, state: str) -> None:
    attempt = 3 if state == "abandoned" else 1
    term = _first(ground, overlap, state, attempt)
    assert ground.state(1) == state
    assert _ask(ground, term, 2, overlap) == "claimed"
    assert ground.open() == (ground.key(2),)


@pytest.mark.parametrize("overlap", POLICIES)
def test_a_slot_that_was_given_back_before_it_was_sent_is_not_unfinished(
    ground: Ground, overlap: str
) -> None:
    term = _first(ground, overlap, "returned")
    assert _ask(ground, term, 2, overlap) == "claimed"


def test_slots_that_may_overlap_are_claimed_together(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1, 2, 3)
    assert ground.open() == ()


@pytest.mark.parametrize("overlap", POLICIES)
@pytest.mark.parametrize("state", ["claimed", "sent"])
def test_a_slot_that_no_worker_begins_counts_as_unfinished_for_its_time_only(
    ground: Ground, overlap: str, state: str
) -> None:
    term = ground.elect()
    _ask(ground, term, 1, overlap, unstarted=60.0)
    if state == "sent":
        ground.confirm(term.epoch, 1)
    left = int(ground.fields(1)["busy_until"]) - ground.now_ms()
    assert 55_000 < left <= 60_000
    assert _ask(ground, term, 2, overlap) == INSTEAD[overlap]
    ground.write(1, busy_until=ground.now_ms() - 1)
    assert _ask(ground, term, 3, overlap) == ("claimed" if overlap == "skip" else "busy")


def test_a_slot_that_no_worker_begins_counts_as_unfinished_for_an_hour_at_most(ground: Ground) -> None:
    term = ground.elect()
    _ask(ground, term, 1, "skip", unstarted=86_400.0)
    assert int(ground.fields(1)["busy_until"]) - ground.now_ms() <= 3_600_000


@pytest.mark.parametrize("overlap", POLICIES)
def test_a_slot_that_waits_for_its_retry_is_unfinished_for_an_hour_beyond_it(
    ground: Ground, overlap: str
) -> None:
    term = _first(ground, overlap, "running")
    ground.finish(1, state="retrying", retry_in=120)
    left = int(ground.fields(1)["busy_until"]) - ground.now_ms()
    assert 3_715_000 < left <= 3_720_000
    assert _ask(ground, term, 2, overlap) == INSTEAD[overlap]
    ground.write(1, busy_until=ground.now_ms() - 1)
    assert _ask(ground, term, 3, overlap) == ("claimed" if overlap == "skip" else "busy")


@pytest.mark.parametrize("overlap", POLICIES)
@pytest.mark.parametrize(("on_crash", "unfinished"), [("auto", False), ("skip", False), ("rerun", True)])
def test_a_run_whose_lease_is_over_is_unfinished_only_if_it_will_be_run_again(
    ground: Ground, overlap: str, on_crash: str, unfinished: bool
) -> None:
    term = _first(ground, overlap, "running", on_crash=on_crash)
    ground.let_run_lease_end(1)
    assert _ask(ground, term, 2, overlap) == (INSTEAD[overlap] if unfinished else "claimed")


def test_a_slot_that_is_to_be_run_again_counts_as_unfinished_for_an_hour(ground: Ground) -> None:
    term = _first(ground, "skip", "to be run again")
    left = int(ground.fields(1)["busy_until"]) - ground.now_ms()
    assert 3_590_000 < left <= 3_600_000
    ground.write(1, busy_until=ground.now_ms() - 1)
    assert _ask(ground, term, 2, "skip") == "claimed"


# skip


def test_a_slot_that_is_skipped_leaves_a_range_with_the_reason_and_no_record(ground: Ground) -> None:
    term = _first(ground, "skip", "running")
    assert _ask(ground, term, 2, "skip") == "overlapped"
    assert ground.state(2) == ""
    assert ground.ranges() == [("skipped", 2, 2, 1, f"overlap: {ground.key(1)} is unfinished")]
    entry = ground.ledger.entries()["nightly"]
    assert (entry.count, entry.missed, entry.skipped) == (1, 0, 1)
    assert {"claimed": 1, "skipped": 1}.items() <= ground.ledger.counts().items()
    assert ground.open() == (ground.key(1),)


def test_slots_that_are_skipped_one_after_the_other_share_a_range(ground: Ground) -> None:
    term = _first(ground, "skip", "running")
    for number in (2, 3, 4):
        _ask(ground, term, number, "skip")
    assert ground.ranges() == [("skipped", 2, 4, 3, f"overlap: {ground.key(1)} is unfinished")]


def test_a_slot_that_was_skipped_stays_skipped_when_the_earlier_one_ends(ground: Ground) -> None:
    term = _first(ground, "skip", "running")
    _ask(ground, term, 2, "skip")
    ground.finish(1)
    assert _ask(ground, term, 2, "skip", batch="again") == "decided"
    assert _ask(ground, term, 3, "skip") == "claimed"


def test_a_slot_that_was_given_back_is_skipped_with_its_record(ground: Ground) -> None:
    term = _first(ground, "skip", "returned")
    _ask(ground, term, 2, "skip")
    assert _ask(ground, term, 1, "skip", batch="again") == "overlapped"
    record = ground.record(1)
    assert (record.state, record.reason) == ("skipped", f"overlap: {ground.key(2)} is unfinished")
    assert ground.unfinished() == {ground.key(2)}
    assert ground.ranges() == []
    assert ground.last_decided() == 2


# queue


def test_the_slot_that_waits_is_recorded_as_given_back(ground: Ground) -> None:
    term = _first(ground, "queue", "running")
    assert _ask(ground, term, 2, "queue", ttl=90) == "waiting"
    record = ground.record(2)
    assert (record.state, record.waits, record.attempt) == ("returned", True, 1)
    assert record.reason == "it waits for an earlier slot of its entry"
    assert ground.key(2) in ground.unfinished()
    assert ground.open() == (ground.key(1), ground.key(2))
    assert ground.ledger.entries()["nightly"].count == 2
    assert ground.ledger.counts()["claimed"] == 1


def test_one_slot_waits_and_the_next_ones_are_skipped(ground: Ground) -> None:
    term = _first(ground, "queue", "running")
    answers = [_ask(ground, term, number, "queue") for number in (2, 3, 4)]
    assert answers == ["waiting", "overlapped", "overlapped"]
    assert ground.ranges() == [("skipped", 3, 4, 2, f"overlap: {ground.key(2)} waits already")]
    assert ground.open() == (ground.key(1), ground.key(2))


def test_the_slot_that_waits_gets_its_turn_when_the_earlier_one_has_ended(ground: Ground) -> None:
    term = _first(ground, "queue", "running")
    _ask(ground, term, 2, "queue")
    ground.finish(1)
    assert _ask(ground, term, 2, "queue", batch="turn") == "claimed"
    record = ground.record(2)
    assert (record.state, record.waits, record.reason) == ("claimed", False, "")
    assert ground.open() == (ground.key(2),)
    assert ground.last_decided() == 2
    assert _ask(ground, term, 3, "queue") == "waiting"


def test_the_slot_that_waits_has_its_turn_before_a_newer_one(ground: Ground) -> None:
    term = _first(ground, "queue", "running")
    _ask(ground, term, 2, "queue")
    ground.finish(1)
    before = ground.everything()
    assert _ask(ground, term, 3, "queue") == "busy"
    assert ground.everything() == before


def test_a_slot_that_waits_and_is_asked_for_again_goes_on_waiting_and_nothing_is_written_twice(
    ground: Ground,
) -> None:
    term = _first(ground, "queue", "running")
    _ask(ground, term, 2, "queue", ttl=90)
    before = ground.everything()
    for batch in ("again", "and again"):
        assert _ask(ground, term, 2, "queue", batch=batch, ttl=90) == "waiting"
    assert ground.everything() == before
    assert ground.is_kept_long(2)


def test_a_slot_that_waits_keeps_its_place_when_it_is_asked_for_again(ground: Ground) -> None:
    term = _first(ground, "queue", "running")
    _ask(ground, term, 2, "queue")
    _ask(ground, term, 2, "queue", batch="again")
    assert _ask(ground, term, 3, "queue") == "overlapped"


def test_a_slot_that_waits_is_taken_over_by_the_next_leader(ground: Ground) -> None:
    term = _first(ground, "queue", "running")
    _ask(ground, term, 2, "queue")
    later = ground.next_term()
    assert [record.key for record in ground.ledger.unfinished() if not isinstance(record, str)] == [
        ground.key(2)
    ]
    assert _ask(ground, later, 2, "queue", batch="of the next one") == "waiting"
    ground.finish(1)
    assert _ask(ground, later, 2, "queue", batch="turn") == "claimed"


def test_a_slot_that_waited_and_was_written_off_stands_in_nobodys_way(ground: Ground) -> None:
    term = _first(ground, "queue", "running")
    _ask(ground, term, 2, "queue")
    ground.miss(term, 2, 1, [2], reason="paused", state="skipped")
    assert _ask(ground, term, 3, "queue") == "waiting"


def test_a_slot_of_a_backlog_that_queues_stays_undecided_until_its_turn(ground: Ground) -> None:
    term = _first(ground, "queue", "running")
    before = ground.everything()
    for number in (2, 3):
        assert _ask(ground, term, number, "queue", paced=True) == "busy"
    assert ground.everything() == before
    ground.finish(1)
    assert _ask(ground, term, 2, "queue", batch="turn", paced=True) == "claimed"
    assert _ask(ground, term, 3, "queue", batch="turn", paced=True) == "busy"


# What is owed asks again


@pytest.mark.parametrize("overlap", POLICIES)
@pytest.mark.parametrize("owed", ["a later attempt", "a request"])
def test_what_is_owed_is_neither_skipped_nor_waits_but_asks_again(
    ground: Ground, overlap: str, owed: str
) -> None:
    term = ground.elect()
    policy = {"on_crash": "rerun", "max_attempts": 3}
    if owed == "a later attempt":
        _ask(ground, term, 1, overlap, **policy)
        ground.start(1, term.epoch)
        ground.let_run_lease_end(1)
        ground.crash(term, 1)
        ground.write(1, busy_until=1)
        number, options = 1, {"attempt": 2, **policy}
    else:
        number, options = 9, {"request": "q", **policy}
    assert _ask(ground, term, 2, overlap, **policy) == "claimed"
    before = ground.everything()
    assert _ask(ground, term, number, overlap, batch="owed", **options) == "busy"
    assert ground.everything() == before
    ground.start(2, term.epoch, "r2")
    ground.finish(2, "r2")
    assert _ask(ground, term, number, overlap, batch="owed", **options) == "claimed"


@pytest.mark.parametrize("overlap", POLICIES)
def test_of_two_slots_that_are_owed_the_older_one_goes_first(ground: Ground, overlap: str) -> None:
    term = ground.elect()
    policy = {"on_crash": "rerun", "max_attempts": 3}
    _ask(ground, term, 2, overlap, **policy)
    ground.start(2, term.epoch)
    ground.let_run_lease_end(2)
    ground.crash(term, 2)
    older = {"request": "q", **policy}
    assert _ask(ground, term, 1, overlap, **older) == "claimed"
    assert _ask(ground, term, 2, overlap, batch="again", attempt=2, **policy) == "busy"
    ground.start(1, term.epoch, "r1")
    ground.finish(1, "r1")
    assert _ask(ground, term, 2, overlap, batch="again", attempt=2, **policy) == "claimed"


@pytest.mark.parametrize("held_by", ["busy", "paused"])
def test_the_record_of_what_is_to_be_run_again_does_not_expire_while_it_is_asked_for(
    ground: Ground, held_by: str
) -> None:
    term = _first(ground, "skip", "to be run again")
    ground.write(1, busy_until=1)
    if held_by == "busy":
        assert _ask(ground, term, 2, "skip") == "claimed"
    else:
        ground.orders.pause("nightly")
    assert _ask(ground, term, 1, "skip", batch="again", attempt=2, ttl=90) == held_by
    assert ground.is_kept_long(1)


def test_what_is_owed_does_not_wait_for_a_slot_that_waits_itself(ground: Ground) -> None:
    term = _first(ground, "queue", "running")
    _ask(ground, term, 2, "queue")
    ground.finish(1)
    assert _ask(ground, term, 1, "queue", batch="owed", attempt=2, request="q", force=True) == "claimed"


def test_the_slots_that_may_be_unfinished_are_forgotten_once_they_have_ended(ground: Ground) -> None:
    term = ground.elect()
    for number in (1, 2, 3):
        assert _ask(ground, term, number, "skip") == "claimed"
        assert ground.open() == (ground.key(number),)
        ground.start(number, term.epoch, f"r{number}")
        ground.finish(number, f"r{number}")


def test_a_slot_whose_record_has_expired_is_not_unfinished(ground: Ground) -> None:
    term = _first(ground, "skip", "running")
    ground.client.delete(ground.record_key(1))
    assert _ask(ground, term, 2, "skip") == "claimed"
    assert ground.open() == (ground.key(2),)


def test_a_batch_whose_answer_was_lost_is_not_in_its_own_way(ground: Ground) -> None:
    term = ground.elect()
    for _ in range(3):
        assert _ask(ground, term, 1, "skip", batch="lost answer") == "claimed"
    assert ground.open() == (ground.key(1),)


def test_entries_do_not_stand_in_each_others_way(ground: Ground) -> None:
    term = _first(ground, "skip", "running")
    assert _ask(ground, term, 2, "skip", entry="hourly") == "claimed"


def test_a_slot_that_whoever_asks_did_not_know_of_stays_for_the_next_one_to_look_at(ground: Ground) -> None:
    """A copy of a claim may arrive late, with an old list of what is unfinished."""
    term = _first(ground, "skip", "sent")
    assert _ask(ground, term, 2, "skip", earlier=()) == "claimed"
    assert ground.open() == (ground.key(1), ground.key(2))
    assert _ask(ground, term, 3, "skip") == "overlapped"


def test_a_slot_that_a_dead_leader_claimed_goes_before_the_one_that_waits_for_it(ground: Ground) -> None:
    _ask(ground, ground.elect(), 1, "queue", prefer="duplicate")
    term = ground.next_term()
    assert _ask(ground, term, 2, "queue", prefer="duplicate") == "waiting"
    assert _ask(ground, term, 1, "queue", batch="again", prefer="duplicate") == "claimed"
    assert _ask(ground, term, 2, "queue", batch="later", prefer="duplicate") == "waiting"


def test_nor_does_it_wait_for_an_earlier_slot_that_waits_for_it(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1, prefer="duplicate")
    ground.give_back(term.epoch, 1)
    assert _ask(ground, term, 2, "queue", prefer="duplicate") == "claimed"
    term = ground.next_term()
    assert _ask(ground, term, 1, "queue", batch="waits", prefer="duplicate") == "waiting"
    assert _ask(ground, term, 2, "queue", batch="again", prefer="duplicate") == "claimed"
    ground.start(2, term.epoch)
    ground.finish(2)
    assert _ask(ground, term, 1, "queue", batch="turn", prefer="duplicate") == "claimed"


def test_a_slot_whose_leader_died_before_it_said_anything_is_not_waited_for(ground: Ground) -> None:
    """As a rule it was never sent."""
    _ask(ground, ground.elect(), 1, "skip")
    term = ground.next_term()
    assert ground.doubt(term, 1) == ["unconfirmed"]
    assert _ask(ground, term, 2, "skip") == "claimed"


@pytest.mark.parametrize("state", ["sent", "running", "retrying"])
def test_by_force_a_slot_waits_for_its_own_run(ground: Ground, state: str) -> None:
    term = _first(ground, "skip", state)
    assert _ask(ground, term, 1, "skip", batch="by force", attempt=2, request="q", force=True) == "busy"
    ground.finish(1)
    ground.write(1, state="done")
    assert _ask(ground, term, 1, "skip", batch="by force", attempt=2, request="q", force=True) == "claimed"
