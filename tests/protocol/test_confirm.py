"""confirm and give_back: what a leader knows of its own claims counts, also when it no longer leads."""

from __future__ import annotations

import pytest

from tests.protocol.ground import Ground

BEGUN = ["running", "retrying", "done", "failed"]


def _begun(ground: Ground, epoch: int, state: str) -> None:
    ground.start(1, epoch)
    if state != "running":
        ground.finish(1, state=state)


@pytest.mark.parametrize("outcome", ["sent", "unconfirmed"])
def test_a_claim_becomes_what_its_leader_knows_of_the_broker(ground: Ground, outcome: str) -> None:
    term = ground.elect()
    ground.claim(term, 1)
    assert ground.confirm(term.epoch, 1, outcome) == outcome
    assert ground.state(1) == outcome
    assert ground.unfinished() == set()
    assert ground.ledger.counts()[outcome] == 1


def test_a_batch_is_confirmed_slot_by_slot(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1, 2)
    outcomes = {ground.key(1): "unconfirmed", ground.key(2): "sent", ground.key(3): "sent"}
    assert ground.ledger.confirm(term.epoch, "batch", outcomes) == ["unconfirmed", "sent", "superseded"]


def test_a_leader_that_has_lost_its_lease_still_says_what_it_sent(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1)
    ground.next_term()
    assert ground.confirm(term.epoch, 1) == "sent"


def test_a_leader_that_thaws_after_the_grace_still_says_that_it_sent_the_slot(ground: Ground) -> None:
    old = ground.elect()
    ground.claim(old, 1)
    ground.doubt(ground.next_term(), 1)
    assert ground.confirm(old.epoch, 1) == "sent"
    assert ground.record(1).reason == ""


@pytest.mark.parametrize("outcome", ["sent", "unconfirmed"])
def test_a_claim_that_a_newer_epoch_holds_is_not_confirmed_by_the_older(ground: Ground, outcome: str) -> None:
    old = ground.elect()
    ground.claim(old, 1, prefer="duplicate")
    ground.claim(ground.next_term(), 1, batch="next", prefer="duplicate")
    before = ground.everything()
    assert ground.confirm(old.epoch, 1, outcome) == "superseded"
    assert ground.everything() == before


@pytest.mark.parametrize("outcome", ["sent", "unconfirmed"])
def test_a_claim_of_another_batch_of_the_same_term_is_neither_confirmed_nor_given_back(
    ground: Ground, outcome: str
) -> None:
    term = ground.elect()
    ground.claim(term, 1, batch="a")
    ground.give_back(term.epoch, 1)
    ground.claim(term, 1, batch="b")
    before = ground.everything()
    assert ground.confirm(term.epoch, 1, outcome, batch="a") == "superseded"
    assert ground.give_back(term.epoch, 1, batch="a") == "superseded"
    assert ground.everything() == before


def test_a_slot_that_is_confirmed_twice_is_counted_as_sent_once(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1)
    ground.confirm(term.epoch, 1)
    sent_at = ground.record(1).sent_at
    ground.confirm(term.epoch, 1)
    assert ground.ledger.counts()["sent"] == 1
    assert ground.record(1).sent_at == sent_at


def test_a_slot_without_a_record_is_not_confirmed(ground: Ground) -> None:
    assert ground.confirm(7, 1) == "superseded"
    assert ground.state(1) == ""


@pytest.mark.parametrize("state", BEGUN)
@pytest.mark.parametrize("outcome", ["sent", "unconfirmed"])
def test_a_slot_that_a_worker_has_begun_keeps_its_state_when_it_is_confirmed(
    ground: Ground, state: str, outcome: str
) -> None:
    term = ground.elect()
    ground.claim(term, 1)
    _begun(ground, term.epoch, state)
    assert ground.confirm(term.epoch, 1, outcome) == state
    assert ground.state(1) == state
    assert ground.unfinished() == ({ground.key(1)} if state == "running" else set())
    assert (ground.record(1).sent_at is not None) == (outcome == "sent")


def test_what_was_sent_does_not_become_unconfirmed(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1)
    ground.confirm(term.epoch, 1)
    assert ground.confirm(term.epoch, 1, "unconfirmed") == "sent"
    assert ground.state(1) == "sent"


def test_a_confirmation_that_is_asked_again_changes_no_state(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1)
    assert [ground.confirm(term.epoch, 1) for _ in range(2)] == ["sent", "sent"]


def test_a_claim_that_is_known_to_be_unsent_is_given_back(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1, ttl=90)
    assert ground.give_back(term.epoch, 1, "no connection") == "returned"
    record = ground.record(1)
    assert (record.state, record.reason) == ("returned", "no connection")
    assert ground.unfinished() == {ground.key(1)}
    assert ground.is_kept_long(1)


def test_a_leader_that_has_lost_its_lease_still_gives_back_what_it_did_not_send(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1)
    ground.next_term()
    assert ground.give_back(term.epoch, 1) == "returned"


def test_what_was_doubted_is_given_back_when_its_leader_thaws_and_knows_better(ground: Ground) -> None:
    old = ground.elect()
    ground.claim(old, 1)
    term = ground.next_term()
    ground.doubt(term, 1)
    assert ground.unfinished() == set()
    assert ground.give_back(old.epoch, 1) == "returned"
    assert ground.unfinished() == {ground.key(1)}
    assert ground.ask(term, 1, batch="next") == ["claimed"]


def test_a_claim_that_a_newer_epoch_holds_is_not_given_back_by_the_older(ground: Ground) -> None:
    old = ground.elect()
    ground.claim(old, 1, prefer="duplicate")
    ground.claim(ground.next_term(), 1, batch="next", prefer="duplicate")
    before = ground.everything()
    assert ground.give_back(old.epoch, 1) == "superseded"
    assert ground.everything() == before


@pytest.mark.parametrize("state", ["sent", "missed", "skipped", "abandoned", "refused", *BEGUN])
def test_a_slot_that_is_past_its_claim_is_not_given_back(ground: Ground, state: str) -> None:
    term = ground.elect()
    ground.claim(term, 1)
    if state in BEGUN:
        _begun(ground, term.epoch, state)
    else:
        ground.write(1, state=state)
    before = ground.everything()
    assert ground.give_back(term.epoch, 1) == state
    assert ground.everything() == before


def test_giving_back_again_changes_no_state(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1)
    ground.give_back(term.epoch, 1)
    assert ground.give_back(term.epoch, 1) == "returned"
    assert ground.ledger.entries()["nightly"].count == 1


def test_what_was_given_back_in_doubt_and_turns_out_to_be_sent_is_sent_and_not_claimed_again(
    ground: Ground,
) -> None:
    term = ground.elect()
    ground.claim(term, 1, prefer="duplicate", ttl=90)
    ground.give_back(term.epoch, 1, "no answer")
    ground.write(1, waits="1")
    assert ground.confirm(term.epoch, 1) == "sent"
    record = ground.record(1)
    assert (record.state, record.reason, record.waits) == ("sent", "", False)
    assert record.sent_at is not None
    assert ground.unfinished() == set()
    assert not ground.is_kept_long(1)
    assert ground.ask(term, 1, batch="next", prefer="duplicate") == ["sent"]


def test_what_was_given_back_stays_so_when_nobody_knows_whether_it_was_sent(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1)
    ground.give_back(term.epoch, 1)
    assert ground.confirm(term.epoch, 1, "unconfirmed") == "returned"
    assert ground.unfinished() == {ground.key(1)}
    assert ground.is_kept_long(1)


def test_giving_back_a_slot_without_a_record_makes_none(ground: Ground) -> None:
    assert ground.give_back(7, 1) == "superseded"
    assert ground.client.keys() == []


@pytest.mark.parametrize("state", ["sent", "missed"])
def test_a_record_is_written_under_its_own_epoch_and_no_other(ground: Ground, state: str) -> None:
    term = ground.elect()
    ground.claim(term, 1)
    before = ground.everything()
    for epoch in (term.epoch - 1, term.epoch + 1):
        assert ground.confirm(epoch, 1) == "superseded"
        assert ground.give_back(epoch, 1) == "superseded"
    assert ground.everything() == before
