"""doubt and miss: slots that nobody will send end in one explained state, and are counted once."""

from __future__ import annotations

import json

import pytest

from celery_leaderbeat.ledger import NotLeading
from celery_leaderbeat.tick import slot_to_us
from tests.protocol.ground import ENTRY, Ground, slot

LEASES = ["gone", "of another term", "not ours"]


def _lose(ground: Ground, lease: str) -> None:
    ground.lapse()
    if lease == "of another term":
        ground.elect("one")
    elif lease == "not ours":
        ground.client.set(ground.keys.lease, "somebody")


def test_an_older_claim_counts_as_missed_once_its_leader_can_publish_no_more(ground: Ground) -> None:
    ground.claim(ground.elect(), 1)
    term = ground.next_term()
    assert ground.doubt(term, 1, until=ground.now_ms() / 1000 - 1) == ["unconfirmed"]
    assert ground.state(1) == "unconfirmed"
    assert ground.record(1).reason
    assert ground.unfinished() == set()
    assert ground.ledger.counts()["unconfirmed"] == 1


def test_as_long_as_its_leader_may_publish_an_older_claim_stands_and_stays_on_the_sweep_list(
    ground: Ground,
) -> None:
    ground.claim(ground.elect(), 1)
    term = ground.next_term()
    before = ground.everything()
    assert ground.doubt(term, 1, until=ground.now_ms() / 1000 + 60) == ["wait"]
    assert ground.everything() == before


def test_the_own_terms_claims_are_not_doubted(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1)
    assert ground.doubt(term, 1) == ["claimed"]
    assert ground.state(1) == "claimed"
    assert ground.unfinished() == {ground.key(1)}


def test_an_older_claim_that_prefers_a_duplicate_is_not_doubted_but_left_to_be_claimed(
    ground: Ground,
) -> None:
    ground.claim(ground.elect(), 1, prefer="duplicate")
    term = ground.next_term()
    assert ground.doubt(term, 1) == ["claimed"]
    assert ground.unfinished() == {ground.key(1)}
    assert ground.ask(term, 1, batch="next", prefer="duplicate") == ["claimed"]


@pytest.mark.parametrize("state", ["sent", "unconfirmed", "running", "retrying", "done", "failed", "missed"])
def test_a_slot_that_is_past_its_claim_is_not_doubted_and_leaves_the_sweep_list(
    ground: Ground, state: str
) -> None:
    ground.claim(ground.elect(), 1)
    ground.write(1, state=state)
    assert ground.doubt(ground.next_term(), 1) == [state]
    assert ground.state(1) == state
    assert ground.unfinished() == set()


def test_a_slot_that_was_given_back_stays_on_the_sweep_list(ground: Ground) -> None:
    old = ground.elect()
    ground.claim(old, 1)
    ground.give_back(old.epoch, 1)
    assert ground.doubt(ground.next_term(), 1) == ["returned"]
    assert ground.unfinished() == {ground.key(1)}


def test_a_slot_whose_record_is_gone_leaves_the_sweep_list(ground: Ground) -> None:
    ground.claim(ground.elect(), 1)
    ground.client.delete(ground.record_key(1))
    assert ground.doubt(ground.next_term(), 1) == [""]
    assert ground.unfinished() == set()
    assert ground.state(1) == ""


def test_a_doubt_that_is_asked_again_counts_once(ground: Ground) -> None:
    ground.claim(ground.elect(), 1)
    term = ground.next_term()
    assert [ground.doubt(term, 1) for _ in range(2)] == [["unconfirmed"], ["unconfirmed"]]
    assert ground.ledger.counts()["unconfirmed"] == 1


@pytest.mark.parametrize("lease", LEASES)
def test_nothing_is_doubted_without_the_lease(ground: Ground, lease: str) -> None:
    ground.claim(ground.elect(), 1)
    late = ground.next_term("one")
    _lose(ground, lease)
    before = ground.everything()
    with pytest.raises(NotLeading):
        ground.doubt(late, 1)
    assert ground.everything() == before


def test_slots_without_records_are_missed_by_their_range(ground: Ground) -> None:
    term = ground.elect()
    assert ground.miss(term, 5, 5) == 5
    assert ground.last_decided() == 5
    assert ground.ledger.entries()[ENTRY].missed == 5
    assert ground.ledger.counts()["missed"] == 5


def test_the_latest_range_that_was_missed_is_noted_with_its_reason(ground: Ground) -> None:
    term = ground.elect()
    ground.miss(term, 2, 2, reason="nobody led")
    ground.miss(term, 5, 3, reason="too late")
    noted = json.loads(ground.client.hget(ground.keys.entries, ENTRY))["miss"]
    assert noted == {
        "first": str(slot_to_us(slot(3))),
        "last": str(slot_to_us(slot(5))),
        "count": 3,
        "reason": "too late",
    }


def test_a_miss_that_is_asked_again_counts_once(ground: Ground) -> None:
    term = ground.elect()
    assert [ground.miss(term, 5, 5) for _ in range(2)] == [5, 0]
    assert ground.ledger.entries()[ENTRY].missed == 5
    assert ground.ledger.counts()["missed"] == 5


def test_a_slot_that_was_given_back_is_missed_with_its_reason(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1)
    ground.give_back(term.epoch, 1)
    assert [ground.miss(term, 1, 1, [1], reason="its deadline is over") for _ in range(2)] == [1, 0]
    record = ground.record(1)
    assert (record.state, record.reason) == ("missed", "its deadline is over")
    assert ground.unfinished() == set()
    assert ground.ledger.entries()[ENTRY].missed == 1


def test_slots_with_and_without_records_are_counted_together(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1, 2)
    ground.give_back(term.epoch, 2)
    assert [ground.miss(term, 5, 4, [2]) for _ in range(2)] == [4, 0]
    assert ground.last_decided() == 5
    assert ground.ledger.entries()[ENTRY].missed == 4


def test_the_last_decided_slot_does_not_move_back_with_an_older_miss(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1, 2, 3)
    ground.give_back(term.epoch, 1)
    assert ground.miss(term, 1, 1, [1]) == 1
    assert ground.last_decided() == 3


def test_an_older_range_that_is_decided_already_counts_nothing(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 3)
    before = ground.everything()
    assert ground.miss(term, 2, 2) == 0
    assert ground.everything() == before


def test_an_older_epochs_claim_can_be_missed(ground: Ground) -> None:
    ground.claim(ground.elect(), 1)
    assert ground.miss(ground.next_term(), 1, 1, [1]) == 1
    assert ground.state(1) == "missed"


def test_the_own_terms_claim_is_not_missed(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1)
    assert ground.miss(term, 1, 1, [1]) == 0
    assert ground.state(1) == "claimed"


@pytest.mark.parametrize("state", ["sent", "unconfirmed", "running", "retrying", "done", "failed"])
def test_a_slot_that_may_have_been_sent_is_not_missed(ground: Ground, state: str) -> None:
    ground.claim(ground.elect(), 1)
    ground.write(1, state=state)
    assert ground.miss(ground.next_term(), 1, 1, [1]) == 0
    assert ground.state(1) == state


def test_a_slot_that_was_missed_is_not_claimed_later(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1)
    ground.give_back(term.epoch, 1)
    ground.miss(term, 1, 1, [1])
    assert ground.ask(ground.next_term(), 1, batch="next") == ["missed"]


@pytest.mark.parametrize("lease", LEASES)
def test_nothing_is_missed_without_the_lease(ground: Ground, lease: str) -> None:
    late = ground.elect("one")
    ground.claim(late, 1)
    ground.give_back(late.epoch, 1)
    _lose(ground, lease)
    before = ground.everything()
    with pytest.raises(NotLeading):
        ground.miss(late, 5, 5, [1])
    assert ground.everything() == before
