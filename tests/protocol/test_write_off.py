"""doubt and write_off: slots that nobody will send end in one explained state, and are counted once."""

from __future__ import annotations

import pytest

from celery_leaderbeat.ledger import NotLeading
from celery_leaderbeat.records import UnsentRange
from celery_leaderbeat.tick import slot_to_us
from tests.protocol.ground import ENTRY, FINGERPRINT, Ground, slot

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


@pytest.mark.parametrize("state", ["sent", "unconfirmed", "retrying", "done", "failed", "missed", "skipped"])
def test_a_slot_that_is_past_its_claim_is_not_doubted_and_leaves_the_sweep_list(
    ground: Ground, state: str
) -> None:
    ground.claim(ground.elect(), 1)
    ground.write(1, state=state)
    assert ground.doubt(ground.next_term(), 1) == [state]
    assert ground.state(1) == state
    assert ground.unfinished() == set()


def test_a_slot_that_runs_is_not_doubted_and_stays_on_the_sweep_list(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1)
    ground.start(1, term.epoch)
    assert ground.doubt(ground.next_term(), 1) == ["running"]
    assert ground.unfinished() == {ground.key(1)}


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


def test_neighbours_that_one_leader_left_unconfirmed_are_told_of_as_one_range(ground: Ground) -> None:
    first = ground.elect()
    ground.claim(first, 1, 2)
    second = ground.next_term()
    ground.claim(second, 3, 4, 5, 6)
    ground.confirm(second.epoch, 5)
    term = ground.next_term()
    states = ground.doubt(term, *range(1, 7), following=range(2, 7))
    assert states == [*["unconfirmed"] * 4, "sent", "unconfirmed"]
    told = [
        (int(event["epoch"]), event["from"], event["to"], event["count"]) for event in ground.events("missed")
    ]
    assert told == [
        (leader.epoch, str(slot_to_us(slot(a))), str(slot_to_us(slot(b))), str(b - a + 1))
        for leader, a, b in ((first, 1, 2), (second, 3, 4), (second, 6, 6))
    ]
    assert ground.ledger.counts()["unconfirmed"] == 5


def test_slots_that_are_no_neighbours_are_told_of_apart(ground: Ground) -> None:
    old = ground.elect()
    ground.claim(old, 1, 2, 9)
    ground.doubt(ground.next_term(), 1, 2, 9, following=[2])
    assert [event["count"] for event in ground.events("missed")] == ["2", "1"]


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


def test_the_ranges_that_were_never_sent_are_kept_with_their_reasons(ground: Ground) -> None:
    term = ground.elect()
    ground.miss(term, 2, 2, reason="nobody led")
    ground.miss(term, 5, 3, reason="too late")
    ground.miss(term, 6, 1, reason="too late", state="skipped")
    assert ground.ranges() == [
        ("missed", 1, 2, 2, "nobody led"),
        ("missed", 3, 5, 3, "too late"),
        ("skipped", 6, 6, 1, "too late"),
    ]


def test_a_range_that_goes_on_where_the_newest_one_ended_becomes_part_of_it(ground: Ground) -> None:
    term = ground.elect()
    for newest in (2, 3, 5):
        ground.miss(term, newest, 2 if newest == 5 else 1)
    assert ground.ranges() == [("missed", 2, 5, 4, "too late")]


def test_ranges_with_a_slot_between_them_that_was_claimed_stay_apart(ground: Ground) -> None:
    term = ground.elect()
    ground.miss(term, 1, 1)
    ground.claim(term, 2)
    ground.miss(term, 3, 1)
    assert ground.ranges() == [("missed", 1, 1, 1, "too late"), ("missed", 3, 3, 1, "too late")]


def test_an_end_that_is_asked_for_again_keeps_its_range_once(ground: Ground) -> None:
    term = ground.elect()
    assert [ground.miss(term, 5, 5) for _ in range(2)] == [5, 0]
    assert ground.ranges() == [("missed", 1, 5, 5, "too late")]


def test_ranges_are_kept_for_longer_than_any_record_and_ten_thousand_of_them(ground: Ground) -> None:
    key = ground.keys.unsent(ENTRY)
    ground.client.zadd(key, {f"range {number}": number for number in range(10_000)})
    term = ground.elect()
    ground.miss(term, 5, 5)
    assert ground.client.zcard(key) == 10_000
    assert ground.client.zscore(key, "range 0") is None
    assert ground.client.zscore(key, "range 1") == 1
    assert ground.client.pttl(key) > 399 * 86_400_000


@pytest.mark.parametrize("text", ["not JSON", "5", "null", '"text"', "{}"])
def test_a_newest_range_that_cannot_be_read_stays_as_it_is(ground: Ground, text: str) -> None:
    ground.client.zadd(ground.keys.unsent(ENTRY), {text: 1})
    ground.miss(ground.elect(), 5, 5)
    assert ground.client.zcard(ground.keys.unsent(ENTRY)) == 2


def test_skipped_slots_are_counted_apart_from_missed_ones(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1)
    ground.give_back(term.epoch, 1)
    assert [ground.miss(term, 3, 3, [1], reason="paused", state="skipped") for _ in range(2)] == [3, 0]
    entry = ground.ledger.entries()[ENTRY]
    assert (entry.missed, entry.skipped) == (0, 3)
    assert {"skipped": 3}.items() <= ground.ledger.counts().items()
    assert "missed" not in ground.ledger.counts()
    record = ground.record(1)
    assert (record.state, record.reason) == ("skipped", "paused")
    assert ground.unfinished() == set()


def test_an_end_of_slots_with_records_alone_outlives_them_and_decides_nothing_further(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1, 2)
    ground.give_back(term.epoch, 1)
    assert ground.miss(term, 1, 1, [1]) == 1
    assert ground.ranges() == [("missed", 1, 1, 1, "too late")]
    assert ground.last_decided() == 2


def test_the_range_of_fresh_slots_covers_none_that_was_decided_before_them(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1, 2)
    ground.give_back(term.epoch, 1)
    old = [ground.key(1)]
    ground.ledger.write_off(term, "missed", ENTRY, slot(1), slot(4), 3, "too late", FINGERPRINT, old)
    assert ground.ledger.entries()[ENTRY].missed == 3
    kept = [UnsentRange.read(text) for text in ground.client.zrange(ground.keys.unsent(ENTRY), 0, -1)]
    covered = [n for n in range(6) if any(found.first <= slot(n) <= found.last for found in kept)]
    assert covered == [1, 3, 4], "the second was sent"


def test_a_slot_that_was_asked_for_and_never_had_a_record_leaves_a_trace(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 3)
    assert ground.miss(term, 9, 1, [9], reason="it can't be built") == 1
    assert ground.ranges() == [("missed", 9, 9, 1, "it can't be built")]
    assert (ground.last_decided(), ground.ledger.counts()["missed"]) == (3, 1)


def test_a_slot_that_was_asked_for_and_is_written_off_moves_nothing_on(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 3)
    ground.claim(term, 9, batch="asked", request="q")
    ground.give_back(term.epoch, 9)
    assert ground.miss(term, 9, 1, [9], reason="its entry is gone") == 1
    assert (ground.state(9), ground.last_decided()) == ("missed", 3)


def test_a_slot_that_is_to_be_run_again_can_be_written_off(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1, on_crash="rerun", max_attempts=3)
    ground.start(1, term.epoch)
    ground.let_run_lease_end(1)
    ground.crash(term, 1)
    assert ground.miss(term, 1, 1, [1], reason="its entry is gone") == 1
    assert (ground.state(1), ground.record(1).attempt) == ("missed", 2)


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


def test_a_slot_that_was_skipped_is_not_claimed_later(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1)
    ground.give_back(term.epoch, 1)
    ground.miss(term, 2, 2, [1], state="skipped")
    assert ground.ask(ground.next_term(), 1, 2, batch="next") == ["skipped", "decided"]


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
