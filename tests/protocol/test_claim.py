"""claim: a slot belongs to one epoch before anything is published."""

from __future__ import annotations

import json

import pytest

from celery_leaderbeat.errors import StoreError
from celery_leaderbeat.ledger import NotLeading
from celery_leaderbeat.tick import slot_to_us, tick_key
from tests.protocol.ground import ENTRY, FINGERPRINT, Ground, slot


def _now_in(ground: Ground, state: str) -> int:
    """Bring slot 1 of epoch `e` into a state; returns the epoch."""
    term = ground.elect()
    ground.claim(term, 1)
    if state in ("sent", "unconfirmed"):
        ground.confirm(term.epoch, 1, state)
    elif state == "returned":
        ground.give_back(term.epoch, 1)
    elif state in ("running", "retrying", "done", "failed"):
        ground.start(1, term.epoch)
        if state != "running":
            ground.finish(1, state=state)
    elif state == "missed":
        ground.give_back(term.epoch, 1)
        ground.miss(term, 1, 1, [1])
    elif state in ("skipped", "abandoned", "refused"):
        ground.write(1, state=state)
    return term.epoch


def test_a_claim_writes_record_last_decided_slot_and_sweep_list_in_one_step(ground: Ground) -> None:
    term = ground.elect()
    assert ground.ask(term, 1, prefer="duplicate", ttl=90) == ["claimed"]
    record = ground.record(1)
    assert (record.state, record.epoch, record.attempt, record.prefer) == (
        "claimed",
        term.epoch,
        1,
        "duplicate",
    )
    assert record.claimed_at is not None
    assert abs(record.claimed_at * 1000 - ground.now_ms()) < 5_000
    assert ground.last_decided() == 1
    assert ground.unfinished() == {ground.key(1)}
    assert ground.ledger.counts()["claimed"] == 1
    assert ground.is_kept_long(1)
    ground.confirm(term.epoch, 1)
    assert 80_000 < ground.ttl(1) <= 90_000


def test_a_claim_that_is_asked_for_again_is_written_again_for_those_who_wait_for_replicas(
    ground: Ground,
) -> None:
    term = ground.elect()
    ground.claim(term, 1)
    ground.client.pexpire(ground.keys.slot(ground.key(1)), 60_000)
    assert ground.ask(term, 1) == ["claimed"]
    assert ground.is_kept_long(1), "what is written is replicated, with all that was written before"


@pytest.mark.parametrize("on_crash", ["auto", "skip", "rerun"])
def test_a_claim_keeps_what_a_crash_will_mean(ground: Ground, on_crash: str) -> None:
    ground.claim(ground.elect(), 1, on_crash=on_crash, max_attempts=7, attempt=2)
    assert ground.record(1).on_crash == on_crash
    assert {"attempt": "2", "max_attempts": "7"}.items() <= ground.fields(1).items()


def test_a_claim_of_a_slot_that_was_given_back_keeps_the_policy_of_its_own_time(ground: Ground) -> None:
    _now_in(ground, "returned")
    ground.claim(ground.next_term(), 1, batch="next", on_crash="rerun", max_attempts=5)
    assert ground.record(1).on_crash == "rerun"
    assert ground.fields(1)["max_attempts"] == "5"


@pytest.mark.parametrize("prefer", ["missed", "duplicate"])
@pytest.mark.parametrize("state", ["claimed", "returned", "sent", "running", "done"])
def test_an_attempt_that_is_superseded_is_not_claimed(ground: Ground, state: str, prefer: str) -> None:
    ground.claim(ground.elect(), 1, attempt=2, prefer=prefer)
    ground.write(1, state=state)
    before = ground.everything()
    term = ground.next_term()
    answer = ground.ask(term, 1, batch="next", attempt=1, prefer=prefer)
    assert answer == ["held" if state == "claimed" else state]
    assert ground.fields(1) == before[ground.record_key(1)]


def test_a_batch_is_answered_slot_by_slot(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 2)
    assert ground.ask(term, 1, 2, 3, batch="next") == ["decided", "held", "claimed"]
    assert ground.last_decided() == 3
    assert ground.ledger.counts()["claimed"] == 2


@pytest.mark.parametrize(
    "lease", ["gone", "of another replica", "of a newer term of the same replica", "not ours"]
)
def test_no_claim_succeeds_for_a_holder_whose_lease_is_gone(ground: Ground, lease: str) -> None:
    late = ground.elect("one")
    ground.lapse()
    if lease == "of another replica":
        ground.elect("two")
    elif lease == "of a newer term of the same replica":
        ground.elect("one")
    elif lease == "not ours":
        ground.client.set(ground.keys.lease, "somebody")
    before = ground.everything()
    with pytest.raises(NotLeading):
        ground.ask(late, 1)
    assert ground.everything() == before


def test_the_same_batch_asking_again_gets_the_same_answer_and_counts_once(ground: Ground) -> None:
    term = ground.elect()
    for _ in range(3):
        assert ground.ask(term, 1, 2, batch="lost answer") == ["claimed", "claimed"]
    assert ground.ledger.counts()["claimed"] == 2
    assert ground.ledger.entries()[ENTRY].count == 2


def test_another_batch_of_the_same_term_does_not_claim_what_is_claimed(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1, batch="a")
    assert ground.ask(term, 1, batch="b") == ["held"]


def test_a_batch_name_of_an_older_term_is_another_batch(ground: Ground) -> None:
    ground.claim(ground.elect("one"), 1, batch="a")
    assert ground.ask(ground.next_term("one"), 1, batch="a") == ["held"]


@pytest.mark.parametrize(
    "state",
    [
        "sent",
        "unconfirmed",
        "running",
        "retrying",
        "done",
        "failed",
        "missed",
        "skipped",
        "abandoned",
        "refused",
    ],
)
@pytest.mark.parametrize("prefer", ["missed", "duplicate"])
def test_a_slot_that_is_past_its_claim_is_never_claimed_again(
    ground: Ground, state: str, prefer: str
) -> None:
    _now_in(ground, state)
    ground.write(1, prefer=prefer)
    term = ground.next_term()
    before = ground.fields(1)
    assert ground.ask(term, 1, batch="next", prefer=prefer) == [state]
    assert ground.fields(1) == before


def test_a_slot_that_was_given_back_is_claimed_by_whoever_leads(ground: Ground) -> None:
    epoch = _now_in(ground, "returned")
    term = ground.next_term()
    assert ground.ask(term, 1, batch="next") == ["claimed"]
    record = ground.record(1)
    assert (record.state, record.epoch, record.reason) == ("claimed", term.epoch, "")
    assert term.epoch > epoch
    assert ground.unfinished() == {ground.key(1)}


def test_a_slot_that_was_given_back_can_be_claimed_again_by_the_same_term(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1, batch="a")
    ground.give_back(term.epoch, 1)
    assert ground.ask(term, 1, batch="b") == ["claimed"]


def test_an_older_claim_that_prefers_a_missed_slot_stands(ground: Ground) -> None:
    ground.claim(ground.elect(), 1, prefer="missed")
    assert ground.ask(ground.next_term(), 1, batch="next", prefer="missed") == ["held"]


def test_an_older_claim_that_prefers_a_duplicate_goes_to_the_newer_epoch(ground: Ground) -> None:
    ground.claim(ground.elect(), 1, prefer="duplicate")
    term = ground.next_term()
    assert ground.ask(term, 1, batch="next", prefer="duplicate") == ["claimed"]
    assert ground.record(1).epoch == term.epoch


def test_a_claim_of_the_own_term_that_prefers_a_duplicate_stands(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1, batch="a", prefer="duplicate")
    assert ground.ask(term, 1, batch="b", prefer="duplicate") == ["held"]


def test_what_an_older_claim_prefers_is_what_counts_and_not_what_the_asker_prefers(ground: Ground) -> None:
    ground.claim(ground.elect(), 1, prefer="missed")
    assert ground.ask(ground.next_term(), 1, batch="next", prefer="duplicate") == ["held"]


def test_a_slot_that_was_decided_without_a_record_is_not_claimed(ground: Ground) -> None:
    term = ground.elect()
    ground.miss(term, 3, 3)
    assert ground.ask(term, 3, 4) == ["decided", "claimed"]
    assert ground.state(3) == ""


def test_the_last_decided_slot_stays_when_an_earlier_slot_is_claimed_again(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1, 2, 3)
    ground.give_back(term.epoch, 1)
    assert ground.ask(term, 1, batch="next") == ["claimed"]
    assert ground.last_decided() == 3
    assert ground.ledger.entries()[ENTRY].count == 3


@pytest.mark.parametrize("state", ["claimed", "sent", "running", "done", "failed", "missed", "unconfirmed"])
def test_a_slot_that_was_decided_before_a_clock_was_set_back_moves_the_last_decided_slot_on_again(
    ground: Ground, state: str
) -> None:
    epoch = _now_in(ground, state)
    term = ground.next_term()
    before = ground.ledger.entries()[ENTRY]
    ground.client.hset(
        ground.keys.entries,
        ENTRY,
        json.dumps({"slot": str(slot_to_us(slot(0))), "fingerprint": FINGERPRINT, "count": before.count}),
    )
    held = "held" if state == "claimed" else state
    assert ground.ask(term, 1) == [held]
    after = ground.ledger.entries()[ENTRY]
    assert (ground.last_decided(), after.count) == (1, before.count)
    assert ground.record(1).epoch == epoch


def test_a_slot_that_has_to_wait_moves_no_last_decided_slot(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1, overlap="skip")
    ground.confirm(term.epoch, 1)
    assert ground.ask(term, 2, batch="other", overlap="skip", paced=True) == ["busy"]
    assert ground.last_decided() == 1


def test_the_slots_of_one_batch_move_the_last_decided_slot_to_the_newest(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1, 2, 3)
    assert ground.last_decided() == 3


def test_entries_do_not_share_a_last_decided_slot(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 5)
    assert ground.ask(term, 2, entry="hourly") == ["claimed"]
    assert (ground.last_decided(), ground.last_decided("hourly")) == (5, 2)


def test_a_claim_keeps_what_else_is_known_of_the_entry(ground: Ground) -> None:
    term = ground.elect()
    ground.miss(term, 2, 2)
    ground.claim(term, 3)
    entry = json.loads(ground.client.hget(ground.keys.entries, ENTRY))
    assert (entry["missed"], entry["count"], entry["fingerprint"]) == (2, 1, FINGERPRINT)


def test_after_a_flush_the_slot_at_hand_can_be_claimed(ground: Ground) -> None:
    ground.claim(ground.elect(), 1)
    ground.client.flushall()
    assert ground.ask(ground.elect("two"), 2) == ["claimed"]


def test_a_record_key_of_its_own_has_no_hold_over_a_record_that_was_evicted(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1)
    ground.client.delete(ground.record_key(1))
    assert ground.ask(term, 1, batch="next") == ["decided"]


def test_a_late_copy_of_a_request_can_claim_what_was_given_back_and_its_term_can_give_it_back_again(
    ground: Ground,
) -> None:
    """The copy's answer reaches nobody: a leader that finds such a claim of its own gives it back."""
    term = ground.elect()
    ground.claim(term, 1, batch="a")
    ground.give_back(term.epoch, 1)
    assert ground.ask(term, 1, batch="a") == ["claimed"]
    assert ground.ask(term, 1, batch="b") == ["held"]
    assert ground.unfinished() == {ground.key(1)}
    assert ground.give_back(term.epoch, 1) == "returned"
    assert ground.ask(term, 1, batch="b") == ["claimed"]


@pytest.mark.parametrize("refused", ["zadd", "hset", "hdel", "pexpire", "hincrby", "hget"])
def test_a_claim_that_the_server_breaks_off_leaves_nothing_that_nobody_looks_after(
    ground: Ground, refused: str
) -> None:
    """A server undoes nothing of a script that runs into a refused command, as with a rule that is missing."""
    term = ground.elect()
    ground.ledger.register(term, {ENTRY: FINGERPRINT}, slot(0))
    ground.client.execute_command("ACL", "SETUSER", "default", f"-{refused}")
    try:
        with pytest.raises(StoreError):
            ground.claim(term, 1)
    finally:
        ground.client.execute_command("ACL", "SETUSER", "default", "+@all")
    key = tick_key(ENTRY, slot(1))
    if ground.client.exists(ground.keys.slot(key)):
        assert ground.client.zscore(ground.keys.unfinished, key) is not None
