"""request, and what claim makes of what was asked for: a slot that isn't done is started again, by force any."""

from __future__ import annotations

from datetime import timedelta

import pytest

from celery_leaderbeat.ledger import NotLeading
from celery_leaderbeat.term import Term
from celery_leaderbeat.tick import parse_tick_key, slot_to_us
from tests.protocol.ground import ENTRY, Ground, slot

REPEATABLE = ["missed", "skipped", "failed", "refused", "abandoned", "unconfirmed"]
#: A slot that is done or under way.
OTHERS = ["claimed", "sent", "running", "retrying", "done"]


def _now_in(ground: Ground, state: str) -> Term:
    """Slot 1 is in a state, as attempt 2."""
    term = ground.elect()
    ground.claim(term, 1, batch="first", attempt=2, max_attempts=3, on_crash="rerun")
    if state in ("running", "retrying", "done", "failed", "abandoned"):
        ground.start(1, term.epoch, "r1", attempt=2)
        if state in ("retrying", "done", "failed"):
            ground.finish(1, "r1", state, "because")
    ground.write(1, state=state)
    return term


def _asked_for(ground: Ground, term: Term, *numbers: int, **options: object) -> list[str]:
    """The answers to a claim of what request `q` asked for."""
    return ground.ask(term, *numbers, **{"batch": "asked", "request": "q", "attempt": 3, **options})  # type: ignore[arg-type]


def test_a_slot_that_nobody_knows_is_claimed_and_names_the_request(ground: Ground) -> None:
    term = ground.elect()
    assert _asked_for(ground, term, 1, attempt=1) == ["claimed"]
    record = ground.record(1)
    assert (record.state, record.request, record.attempt) == ("claimed", "q", 1)
    assert ground.unfinished() == {ground.key(1)}
    assert ground.ledger.counts()["claimed"] == 1


@pytest.mark.parametrize("number", [1, 3, 5])
def test_the_last_decided_slot_does_not_move(ground: Ground, number: int) -> None:
    term = ground.elect()
    ground.miss(term, 3, 3)
    assert _asked_for(ground, term, number, attempt=1) == ["claimed"]
    assert ground.last_decided() == 3
    entry = ground.ledger.entries()[ENTRY]
    assert (entry.count, entry.missed) == (0, 3)
    assert ground.ask(term, 4, batch="next") == ["claimed"]


@pytest.mark.parametrize("number", [1, 3])
def test_a_slot_that_was_decided_without_a_record_is_claimed_when_it_is_asked_for(
    ground: Ground, number: int
) -> None:
    term = ground.elect()
    ground.miss(term, 3, 3)
    assert ground.ask(term, number) == ["decided"]
    assert _asked_for(ground, term, number, attempt=1) == ["claimed"]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("state", REPEATABLE)
def test_a_slot_that_was_not_done_is_started_again_as_a_new_attempt(
    ground: Ground, state: str, force: bool
) -> None:
    term = _now_in(ground, state)
    assert _asked_for(ground, term, 1, force=force) == ["claimed"]
    record = ground.record(1)
    assert (record.state, record.attempt, record.request, record.reason) == ("claimed", 3, "q", "")
    fields = ground.fields(1).keys()
    assert fields.isdisjoint({"run", "after", "run_until", "started_at", "finished_at", "sent_at", "worker"})
    assert ground.begin(1, term.epoch, "r2", attempt=3).kind == "run"


@pytest.mark.parametrize("state", OTHERS)
def test_a_slot_that_is_done_or_under_way_is_not_started_again_without_force(
    ground: Ground, state: str
) -> None:
    term = _now_in(ground, state)
    before = ground.fields(1)
    assert _asked_for(ground, term, 1) == ["held" if state == "claimed" else state]
    assert ground.fields(1) == before


@pytest.mark.parametrize("state", OTHERS)
def test_by_force_a_slot_is_started_again_whatever_it_is_and_what_runs_is_superseded(
    ground: Ground, state: str
) -> None:
    term = _now_in(ground, state)
    assert _asked_for(ground, term, 1, force=True) == ["claimed"]
    assert not ground.finish(1, "r1", "done")
    assert not ground.renew_run(1, "r1")
    assert ground.begin(1, term.epoch, "r9", attempt=2, redelivered=True).kind == "refuse"
    assert ground.begin(1, term.epoch, "r2", attempt=3).kind == "run"


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("attempt", [1, 2])
@pytest.mark.parametrize("state", [*REPEATABLE, *OTHERS])
def test_a_slot_is_not_started_again_under_an_attempt_that_it_has_had(
    ground: Ground, state: str, attempt: int, force: bool
) -> None:
    term = _now_in(ground, state)
    before = ground.fields(1)
    answer = _asked_for(ground, term, 1, attempt=attempt, force=force)
    assert answer == ["held" if state == "claimed" else state]
    assert ground.fields(1) == before


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("state", ["sent", "running", "done", "failed", "missed", "abandoned"])
def test_the_same_request_does_not_start_a_slot_twice(ground: Ground, state: str, force: bool) -> None:
    """As where its leader goes on after the next one has come to it."""
    term = ground.elect()
    _asked_for(ground, term, 1, attempt=1, force=force)
    ground.write(1, state=state)
    before = ground.fields(1)
    assert _asked_for(ground, ground.next_term(), 1, batch="next", attempt=2, force=force) == [state]
    assert ground.fields(1) == before


def test_another_request_starts_it_again(ground: Ground) -> None:
    term = ground.elect()
    _asked_for(ground, term, 1, attempt=1)
    ground.write(1, state="failed")
    assert _asked_for(ground, term, 1, batch="next", attempt=2, request="q2") == ["claimed"]
    assert ground.record(1).request == "q2"


def test_a_batch_whose_answer_was_lost_gets_the_same_answer(ground: Ground) -> None:
    term = _now_in(ground, "done")
    for _ in range(3):
        assert _asked_for(ground, term, 1, 2, force=True) == ["claimed", "claimed"]
    assert ground.ledger.counts()["claimed"] == 3


def test_what_was_asked_for_and_given_back_is_claimed_again_and_still_names_its_request(
    ground: Ground,
) -> None:
    term = ground.elect()
    _asked_for(ground, term, 1, attempt=1)
    ground.give_back(term.epoch, 1)
    assert _asked_for(ground, ground.next_term(), 1, batch="next", attempt=1) == ["claimed"]
    assert ground.record(1).request == "q"


def test_what_was_asked_for_and_died_is_run_again_for_the_same_request(ground: Ground) -> None:
    term = ground.elect()
    policy = {"on_crash": "rerun", "max_attempts": 3}
    _asked_for(ground, term, 1, attempt=1, **policy)
    ground.start(1, term.epoch)
    ground.let_run_lease_end(1)
    ground.crash(term, 1)
    assert ground.record(1).request == "q"
    assert _asked_for(ground, term, 1, batch="next", attempt=2, **policy) == ["claimed"]


def test_a_slot_of_the_schedule_that_was_run_before_its_turn_is_not_sent_again(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1)
    _asked_for(ground, term, 2, attempt=1)
    ground.confirm(term.epoch, 2)
    assert ground.ask(term, 2, 3, batch="next") == ["sent", "claimed"]


@pytest.mark.parametrize("force", [False, True])
def test_nothing_is_claimed_without_the_lease_whoever_asked(ground: Ground, force: bool) -> None:
    late = _now_in(ground, "missed")
    ground.next_term()
    before = ground.everything()
    with pytest.raises(NotLeading):
        _asked_for(ground, late, 1, force=force)
    assert ground.everything() == before


# The request itself


def test_a_run_now_is_for_a_slot_of_its_own_at_the_servers_time(ground: Ground) -> None:
    key = ground.orders.run_now(ENTRY)
    entry, at = parse_tick_key(key)
    _, (request,) = ground.orders.look()
    assert (entry, request.kind, request.entry) == (ENTRY, "run", ENTRY)
    assert (request.since, request.until, request.force, request.by) == (at, at, False, "ann")
    assert slot_to_us(at) % 1000 == 0
    assert abs(slot_to_us(at) / 1000 - ground.now_ms()) < 5_000


@pytest.mark.parametrize("force", [False, True])
def test_a_backfill_is_for_the_slots_of_a_time(ground: Ground, force: bool) -> None:
    ground.orders.backfill(ENTRY, slot(0), slot(5), force)
    _, (request,) = ground.orders.look()
    assert (request.kind, request.since, request.until) == ("backfill", slot(0), slot(5))
    assert request.force is force


@pytest.mark.parametrize("length", [0, -1])
def test_a_backfill_of_no_time_is_refused(ground: Ground, length: int) -> None:
    with pytest.raises(ValueError, match="until must be later than since"):
        ground.orders.backfill(ENTRY, slot(5), slot(5) + timedelta(seconds=length))
    assert ground.client.keys() == []


def test_requests_are_kept_apart_until_each_is_dealt_with(ground: Ground) -> None:
    ground.orders.backfill(ENTRY, slot(0), slot(5))
    ground.orders.backfill(ENTRY, slot(0), slot(2))
    first, second = ground.orders.look()[1]
    assert (first.until, second.until) == (slot(2), slot(5))
    ground.orders.done_with(first)
    assert ground.orders.look()[1] == [second]


def test_a_request_that_cannot_be_read_stays_where_it_is_and_is_said_to_be_so_once(
    ground: Ground, caplog: pytest.LogCaptureFixture
) -> None:
    ground.client.hset(ground.keys.requests, "bad", "not JSON")
    orders = ground.orders
    orders.run_now(ENTRY)
    for _ in range(2):
        assert len(orders.look()[1]) == 1
    assert ground.client.hexists(ground.keys.requests, "bad")
    assert caplog.text.count("The request bad can't be read") == 1
