"""crash: what becomes of a run whose lease is over, and what its ghost may still say."""

from __future__ import annotations

import pytest

from celery_leaderbeat.ledger import NotLeading
from celery_leaderbeat.term import Term
from tests.protocol.ground import Ground

POLICIES = ["auto", "skip", "rerun"]


def _running(ground: Ground, on_crash: str, max_attempts: int = 3, run: str = "r1") -> Term:
    """Slot 1 was sent and begun."""
    term = ground.elect()
    ground.claim(term, 1, on_crash=on_crash, max_attempts=max_attempts, ttl=90)
    ground.confirm(term.epoch, 1)
    ground.start(1, term.epoch, run)
    return term


def _dead(ground: Ground, on_crash: str, max_attempts: int = 3) -> Term:
    """Slot 1 was begun, and the lease of its run is over."""
    term = _running(ground, on_crash, max_attempts)
    ground.let_run_lease_end(1)
    return term


def _again(ground: Ground, term: Term, attempt: int, run: str) -> None:
    """Slot 1 is sent and begun as a later attempt."""
    ground.claim(term, 1, batch=f"of {run}", attempt=attempt, on_crash="rerun", max_attempts=3, ttl=90)
    ground.confirm(term.epoch, 1)
    ground.start(1, term.epoch, run, attempt=attempt)


def test_a_slot_whose_run_died_is_given_back_as_its_next_attempt(ground: Ground) -> None:
    term = _dead(ground, "rerun")
    ground.client.pexpire(ground.record_key(1), 5_000)
    assert ground.crash(term, 1) == ["returned"]
    record = ground.record(1)
    assert (record.state, record.attempt, record.reason) == ("returned", 2, "its run on host:1 died")
    assert ground.fields(1).keys().isdisjoint({"run", "after", "run_until", "worker", "batch", "died_at"})
    assert [found.key for found in ground.ledger.unfinished()] == [ground.key(1)]
    assert ground.ledger.counts()["rerun"] == 1
    assert ground.is_kept_long(1)


def test_the_next_attempt_is_claimed_sent_and_run_like_the_first(ground: Ground) -> None:
    term = _dead(ground, "rerun")
    ground.crash(term, 1)
    later = ground.next_term()
    _again(ground, later, 2, "r2")
    record = ground.record(1)
    assert (record.state, record.attempt, record.epoch, record.run) == ("running", 2, later.epoch, "r2")
    assert ground.finish(1, "r2")
    assert ground.ledger.counts()["started"] == 2
    assert ground.unfinished() == set()


def test_a_slot_that_dies_as_its_last_attempt_is_abandoned(ground: Ground) -> None:
    term = _running(ground, "rerun")
    for attempt in (2, 3):
        ground.let_run_lease_end(1)
        assert ground.crash(term, 1) == ["returned"]
        _again(ground, term, attempt, f"r{attempt}")
    ground.let_run_lease_end(1)
    assert ground.crash(term, 1) == ["abandoned"]
    record = ground.record(1)
    assert (record.state, record.attempt) == ("abandoned", 3)
    assert record.reason == "its run on host:1 died, as attempt 3 of 3"
    assert record.finished_at is not None
    assert ground.unfinished() == set()
    assert {"rerun": 2, "abandoned": 1}.items() <= ground.ledger.counts().items()


def test_a_slot_of_which_one_attempt_is_allowed_is_abandoned_at_once(ground: Ground) -> None:
    assert ground.crash(_dead(ground, "rerun", max_attempts=1), 1) == ["abandoned"]
    assert ground.record(1).attempt == 1


def test_a_slot_whose_crash_is_to_be_skipped_is_abandoned(ground: Ground) -> None:
    term = _dead(ground, "skip", max_attempts=1)
    assert ground.crash(term, 1) == ["abandoned"]
    record = ground.record(1)
    assert (record.state, record.attempt) == ("abandoned", 1)
    assert record.reason == "its run on host:1 died, and on_crash is skip"
    assert ground.unfinished() == set()
    assert ground.begin(1, term.epoch, "r2", redelivered=True).kind == "refuse"
    assert ground.ask(ground.next_term(), 1, batch="next") == ["abandoned"]


def test_a_death_that_is_left_to_the_broker_is_noted_once(ground: Ground) -> None:
    term = _dead(ground, "auto")
    assert ground.crash(term, 1) == ["died"]
    record = ground.record(1)
    assert (record.state, record.run, record.reason) == ("running", "r1", "its run on host:1 died")
    assert record.died_at is not None
    assert ground.unfinished() == set()
    before = ground.everything()
    assert ground.crash(term, 1) == ["died"]
    assert ground.everything() == before
    assert ground.ledger.counts()["died"] == 1


def test_a_slot_that_waits_for_its_next_attempt_is_kept_from_expiring(ground: Ground) -> None:
    """A pause may hold it back for longer than its record would live."""
    term = _dead(ground, "rerun")
    assert ground.is_kept_long(1), "also while it runs: nobody may lead for a while"
    assert ground.crash(term, 1) == ["returned"]
    assert ground.is_kept_long(1)
    assert ground.unfinished() == {ground.key(1)}


def test_the_redelivery_runs_after_the_death_was_noted_and_is_looked_after_in_turn(ground: Ground) -> None:
    term = _dead(ground, "auto")
    ground.crash(term, 1)
    ground.start(1, term.epoch, "r2", redelivered=True)
    assert (ground.record(1).died_at, ground.record(1).reason) == (None, "")
    assert ground.unfinished() == {ground.key(1)}
    ground.let_run_lease_end(1)
    assert ground.crash(term, 1) == ["died"]


@pytest.mark.parametrize("on_crash", POLICIES)
def test_a_run_whose_lease_goes_on_is_looked_at_again_when_it_ends(ground: Ground, on_crash: str) -> None:
    term = _running(ground, on_crash)
    ground.client.zadd(ground.keys.unfinished, {ground.key(1): 1})
    before = ground.fields(1)
    assert ground.crash(term, 1) == ["running"]
    assert ground.fields(1) == before
    assert ground.looked_at(1) == int(before["run_until"])
    assert ground.told()[-1] == "started"


@pytest.mark.parametrize("on_crash", POLICIES)
def test_a_run_that_renews_its_lease_does_not_die(ground: Ground, on_crash: str) -> None:
    term = _dead(ground, on_crash)
    assert ground.renew_run(1, "r1", run_lease=60)
    assert ground.looked_at(1) == int(ground.fields(1)["run_until"])
    assert ground.crash(term, 1) == ["running"]
    assert ground.finish(1, "r1")


@pytest.mark.parametrize("on_crash", POLICIES)
@pytest.mark.parametrize("lease", ["gone", "of another term", "not ours"])
def test_no_run_is_dead_for_a_term_that_has_lost_the_lease(ground: Ground, on_crash: str, lease: str) -> None:
    late = _dead(ground, on_crash)
    ground.lapse()
    if lease == "of another term":
        ground.elect("one")
    elif lease == "not ours":
        ground.client.set(ground.keys.lease, "somebody")
    before = ground.everything()
    with pytest.raises(NotLeading):
        ground.crash(late, 1)
    assert ground.everything() == before


@pytest.mark.parametrize(
    ("state", "stays"),
    [
        ("claimed", True),
        ("returned", True),
        ("sent", False),
        ("unconfirmed", False),
        ("retrying", False),
        ("done", False),
        ("failed", False),
        ("abandoned", False),
        ("missed", False),
        ("skipped", False),
        ("refused", False),
    ],
)
def test_a_slot_that_does_not_run_is_not_touched_and_stays_on_the_sweep_list_only_if_it_is_unsent(
    ground: Ground, state: str, stays: bool
) -> None:
    term = _dead(ground, "rerun")
    ground.write(1, state=state)
    before = ground.fields(1)
    assert ground.crash(term, 1) == [state]
    assert ground.fields(1) == before
    assert ground.unfinished() == ({ground.key(1)} if stays else set())


@pytest.mark.parametrize("end", ["done", "failed", "retrying", "requeued"])
@pytest.mark.parametrize("on_crash", POLICIES)
def test_a_run_that_has_ended_is_looked_after_by_nobody(ground: Ground, on_crash: str, end: str) -> None:
    _running(ground, on_crash)
    assert ground.finish(1, "r1", end)
    assert ground.unfinished() == set()


def test_a_slot_whose_record_is_gone_leaves_the_sweep_list(ground: Ground) -> None:
    term = _dead(ground, "rerun")
    ground.client.delete(ground.record_key(1))
    assert ground.crash(term, 1) == [""]
    assert ground.unfinished() == set()
    assert ground.state(1) == ""


def test_runs_are_answered_one_by_one(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1, 2, on_crash="rerun", max_attempts=2)
    ground.claim(term, 3, batch="next", on_crash="skip")
    for number in (1, 2, 3):
        ground.start(number, term.epoch, f"r{number}")
    ground.let_run_lease_end(1)
    ground.let_run_lease_end(3)
    assert ground.crash(term, 1, 2, 3, 4) == ["returned", "running", "abandoned", ""]


def test_a_crash_that_is_asked_again_makes_one_attempt_more_and_not_two(ground: Ground) -> None:
    term = _dead(ground, "rerun")
    assert [ground.crash(term, 1) for _ in range(2)] == [["returned"], ["returned"]]
    assert ground.record(1).attempt == 2
    assert ground.ledger.counts()["rerun"] == 1


@pytest.mark.parametrize("term_is", ["the same", "the next one"])
def test_the_attempt_that_died_cannot_be_claimed_again(ground: Ground, term_is: str) -> None:
    term = _dead(ground, "rerun")
    ground.crash(term, 1)
    if term_is == "the next one":
        term = ground.next_term()
    assert ground.ask(term, 1, batch="stale", attempt=1) == ["returned"]
    assert ground.state(1) == "returned"


def test_a_claim_of_a_later_attempt_is_no_answer_to_a_request_for_an_earlier_one(ground: Ground) -> None:
    term = _dead(ground, "rerun")
    ground.crash(term, 1)
    ground.claim(term, 1, batch="next", attempt=2, on_crash="rerun", max_attempts=3)
    before = ground.fields(1)
    assert ground.ask(term, 1, batch="batch", attempt=1, on_crash="rerun", max_attempts=3) == ["held"]
    assert ground.fields(1) == before


# The ghost: a run that was taken for dead and isn't


@pytest.mark.parametrize("stage", ["returned", "claimed", "sent", "running", "done", "abandoned"])
@pytest.mark.parametrize("says", ["done", "failed", "retrying", "requeued", "that it lives"])
def test_the_ghost_of_a_superseded_attempt_is_not_believed(ground: Ground, stage: str, says: str) -> None:
    term = _dead(ground, "rerun", max_attempts=1 if stage == "abandoned" else 3)
    ground.crash(term, 1)
    if stage == "running":
        _again(ground, term, 2, "r2")
    elif stage == "done":
        _again(ground, term, 2, "r2")
        ground.finish(1, "r2")
    elif stage in ("claimed", "sent"):
        ground.claim(term, 1, batch="next", attempt=2, on_crash="rerun", max_attempts=3)
        if stage == "sent":
            ground.confirm(term.epoch, 1)
    assert ground.state(1) == stage
    before = ground.everything()
    held = ground.renew_run(1, "r1") if says == "that it lives" else ground.finish(1, "r1", says)
    assert not held
    assert ground.everything() == before


@pytest.mark.parametrize("stage", ["returned", "claimed", "running"])
@pytest.mark.parametrize("after", ["", "r1"])
def test_neither_message_nor_retry_of_a_superseded_attempt_runs(
    ground: Ground, stage: str, after: str
) -> None:
    term = _dead(ground, "rerun")
    ground.crash(term, 1)
    if stage == "running":
        _again(ground, term, 2, "r2")
    elif stage == "claimed":
        ground.claim(term, 1, batch="next", attempt=2)
    before = ground.fields(1)
    verdict = ground.begin(1, term.epoch, "r3", after=after, redelivered=True)
    assert (verdict.kind, verdict.reason) == ("refuse", "a newer attempt of the slot was sent")
    assert ground.fields(1) == before


@pytest.mark.parametrize("outcome", ["sent", "unconfirmed", "given back"])
def test_what_is_still_said_of_the_message_that_died_does_not_touch_the_next_attempt(
    ground: Ground, outcome: str
) -> None:
    """As by a leader that Redis couldn't be reached from for longer than a run lease."""
    term = ground.elect()
    ground.claim(term, 1, batch="first", on_crash="rerun", max_attempts=3)
    ground.start(1, term.epoch)
    ground.let_run_lease_end(1)
    ground.crash(term, 1)
    before = ground.everything()
    if outcome == "given back":
        assert ground.give_back(term.epoch, 1, batch="first") == "superseded"
    else:
        assert ground.confirm(term.epoch, 1, outcome, batch="first") == "superseded"
    assert ground.everything() == before
    assert ground.unfinished() == {ground.key(1)}


def test_a_run_that_was_taken_for_dead_goes_on_where_nobody_took_the_slot(ground: Ground) -> None:
    term = _dead(ground, "auto")
    ground.crash(term, 1)
    assert ground.renew_run(1, "r1", run_lease=60)
    assert (ground.record(1).died_at, ground.record(1).reason) == (None, "")
    assert ground.looked_at(1) == int(ground.fields(1)["run_until"])
    assert ground.crash(term, 1) == ["running"]


def test_a_run_that_was_taken_for_dead_is_done_where_nobody_took_the_slot(ground: Ground) -> None:
    ground.crash(_dead(ground, "auto"), 1)
    assert ground.finish(1, "r1")
    record = ground.record(1)
    assert (record.state, record.died_at, record.reason) == ("done", None, "")


def test_a_death_that_was_never_noted_ends_with_the_next_run(ground: Ground) -> None:
    term = _dead(ground, "auto")
    ground.start(1, term.epoch, "r2", redelivered=True)
    assert not ground.renew_run(1, "r1")
    assert not ground.finish(1, "r1")
    assert ground.crash(term, 1) == ["running"]
