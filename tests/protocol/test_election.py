"""elect, renew, release: one leader, and epochs that only rise."""

from __future__ import annotations

import json

import pytest

from celery_leaderbeat.errors import StoreError
from celery_leaderbeat.term import Term
from tests.protocol.ground import Ground

FAR_ABOVE_THE_CLOCK = 5_000_000_000


def test_a_free_lease_goes_to_the_candidate_and_says_who_leads(ground: Ground) -> None:
    answer = ground.stand("one", host="alpha", pid=7, watched=True)
    term = Term.read(answer[1])
    assert answer[0] == "elected"
    assert (term.holder, term.host, term.pid, term.watched) == ("one", "alpha", 7, True)
    assert ground.client.get(ground.keys.lease) == term.value
    assert ground.client.get(ground.keys.epoch) == str(term.epoch)
    assert json.loads(term.value)["app"] == "proj"
    assert abs(term.since - (int(answer[2]) + int(answer[3]) / 1e6)) < 0.001


def test_a_lease_expires_by_itself_after_its_ttl(ground: Ground) -> None:
    ground.elect(ttl=12_345)
    assert 11_000 < ground.client.pttl(ground.keys.lease) <= 12_345


def test_a_lease_that_is_held_goes_to_nobody_else(ground: Ground) -> None:
    term = ground.elect("one", ttl=9_000)
    before = ground.everything()
    kind, value, remaining = ground.stand("two")
    assert (kind, value) == ("held", term.value)
    assert 8_000 < remaining <= 9_000
    assert ground.everything() == before


def test_a_holder_whose_answer_was_lost_finds_its_own_lease_and_no_second_term(ground: Ground) -> None:
    term = ground.elect("one")
    assert ground.stand("one")[:2] == ["held", term.value]


def test_each_election_has_a_higher_epoch_than_the_one_before(ground: Ground) -> None:
    epochs = []
    for holder in ("one", "two", "one", "three"):
        epochs.append(ground.elect(holder).epoch)
        ground.lapse()
    assert epochs == sorted(set(epochs))


def test_an_epoch_is_above_the_stored_one_even_when_the_clock_is_behind_it(ground: Ground) -> None:
    ground.client.set(ground.keys.epoch, FAR_ABOVE_THE_CLOCK)
    assert ground.elect().epoch == FAR_ABOVE_THE_CLOCK + 1
    ground.lapse()
    assert ground.elect().epoch == FAR_ABOVE_THE_CLOCK + 2


def test_after_a_flush_the_servers_clock_keeps_epochs_rising(ground: Ground) -> None:
    first = ground.elect()
    ground.client.flushall()
    second = ground.elect()
    # Both are at the clock here; what is proven is that the count doesn't begin anew.
    assert second.epoch >= first.epoch
    assert second.epoch >= int(ground.client.time()[0]) - 1


def test_after_a_flush_an_epoch_is_above_the_highest_that_the_candidate_has_seen(ground: Ground) -> None:
    ground.client.flushall()
    assert ground.elect(highest=FAR_ABOVE_THE_CLOCK).epoch == FAR_ABOVE_THE_CLOCK + 1


def test_a_server_that_lagged_behind_cannot_lead_epochs_back(ground: Ground) -> None:
    ground.client.set(ground.keys.epoch, FAR_ABOVE_THE_CLOCK)
    assert ground.elect(highest=FAR_ABOVE_THE_CLOCK + 5).epoch == FAR_ABOVE_THE_CLOCK + 6


def test_an_epoch_key_that_was_deleted_or_damaged_does_not_lead_epochs_back(ground: Ground) -> None:
    first = ground.elect().epoch
    for damage in (None, "", "not a number"):
        ground.lapse()
        if damage is None:
            ground.client.delete(ground.keys.epoch)
        else:
            ground.client.set(ground.keys.epoch, damage)
        second = ground.elect(highest=first).epoch
        assert second > first
        first = second


def test_a_lease_is_taken_over_by_naming_exactly_the_value_it_holds(ground: Ground) -> None:
    gone = ground.elect("one")
    term = ground.elect("two", takes_over=gone.value)
    assert term.epoch > gone.epoch
    assert ground.client.get(ground.keys.lease) == term.value


def test_a_takeover_that_names_an_earlier_term_takes_nothing(ground: Ground) -> None:
    gone = ground.elect("one")
    term = ground.next_term("one")
    before = ground.everything()
    assert ground.stand("two", takes_over=gone.value)[:2] == ["held", term.value]
    assert ground.everything() == before


def test_a_takeover_of_a_lease_that_has_lapsed_meanwhile_is_an_election(ground: Ground) -> None:
    gone = ground.elect("one")
    ground.lapse()
    assert ground.elect("two", takes_over=gone.value).epoch > gone.epoch


@pytest.mark.parametrize("value", ["somebody", "{}", "[1]", '{"holder": 5}', " "])
def test_a_lease_value_that_is_not_ours_is_held_by_somebody(ground: Ground, value: str) -> None:
    ground.client.set(ground.keys.lease, value)
    assert ground.stand() == ["held", value, -1]
    assert ground.client.get(ground.keys.lease) == value


def test_a_lease_key_of_another_type_is_an_error_and_stays_as_it_is(ground: Ground) -> None:
    ground.client.rpush(ground.keys.lease, "x")
    with pytest.raises(StoreError, match="WRONGTYPE"):
        ground.stand()
    assert ground.client.type(ground.keys.lease) == "list"


def test_another_applications_prefix_is_never_led(ground: Ground) -> None:
    ground.elect(app="proj")
    for lease_is_free in (False, True):
        if lease_is_free:
            ground.lapse()
        before = ground.everything()
        assert ground.stand("two", app="other") == ["foreign", "proj"]
        assert ground.everything() == before


def test_the_prefix_belongs_to_its_application_over_all_terms(ground: Ground) -> None:
    ground.elect(app="proj")
    ground.next_term()
    assert ground.client.get(ground.keys.app) == "proj"


def test_a_renewal_extends_the_lease_and_tells_the_servers_time(ground: Ground) -> None:
    term = ground.elect(ttl=2_000)
    ok, seconds, micros = ground.renew(term, 20_000)
    assert ok == 1
    assert 19_000 < ground.client.pttl(ground.keys.lease) <= 20_000
    assert abs(int(seconds) * 1000 + int(micros) // 1000 - ground.now_ms()) < 5_000
    assert ground.client.get(ground.keys.lease) == term.value


def test_a_renewal_of_a_lease_that_is_gone_brings_nothing_back(ground: Ground) -> None:
    term = ground.elect()
    ground.lapse()
    assert ground.renew(term) == [0, ""]
    assert not ground.client.exists(ground.keys.lease)


def test_a_late_renewal_does_not_extend_a_newer_term(ground: Ground) -> None:
    late = ground.elect("one", ttl=15_000)
    ground.lapse()
    term = ground.elect("two", ttl=3_000)
    assert ground.renew(late, 60_000) == [0, term.value]
    assert ground.client.pttl(ground.keys.lease) <= 3_000


def test_a_late_renewal_does_not_extend_a_newer_term_of_the_same_replica(ground: Ground) -> None:
    late = ground.elect("one")
    ground.lapse()
    term = ground.elect("one", ttl=3_000)
    assert ground.renew(late, 60_000) == [0, term.value]
    assert ground.client.pttl(ground.keys.lease) <= 3_000


@pytest.mark.parametrize("lost", [None, "17", "garbage"])
def test_an_epoch_that_is_lost_is_written_again_by_who_leads(ground: Ground, lost: str | None) -> None:
    term = ground.elect()
    if lost is None:
        ground.client.delete(ground.keys.epoch)
    else:
        ground.client.set(ground.keys.epoch, lost)
    assert ground.renew(term)[0] == 1
    assert ground.client.get(ground.keys.epoch) == str(term.epoch)


def test_a_renewal_does_not_take_the_epoch_back(ground: Ground) -> None:
    term = ground.elect()
    ground.client.set(ground.keys.epoch, term.epoch + 5)
    ground.renew(term)
    assert ground.client.get(ground.keys.epoch) == str(term.epoch + 5)


def test_a_late_renewal_writes_no_epoch(ground: Ground) -> None:
    late = ground.elect("one")
    ground.lapse()
    ground.client.delete(ground.keys.epoch)
    assert ground.renew(late) == [0, ""]
    assert not ground.client.exists(ground.keys.epoch)


def test_a_release_frees_the_lease_and_wakes_the_standbys(ground: Ground) -> None:
    term = ground.elect()
    waiting = ground.store.subscribe(ground.keys.wake)
    assert ground.release(term) == "released"
    # The first answers may be those to the subscription itself.
    heard = any(waiting.next(timeout=1) == ground.keys.wake for _ in range(5))
    waiting.close()
    assert heard
    assert not ground.client.exists(ground.keys.lease)
    assert ground.client.get(ground.keys.epoch) == str(term.epoch)


def test_a_release_that_is_asked_again_releases_nothing(ground: Ground) -> None:
    term = ground.elect()
    assert [ground.release(term), ground.release(term)] == ["released", "gone"]


@pytest.mark.parametrize("holder", ["one", "two"])
def test_a_late_release_does_not_touch_a_newer_term(ground: Ground, holder: str) -> None:
    late = ground.elect("one")
    term = ground.next_term(holder)
    assert ground.release(late) == "held"
    assert ground.client.get(ground.keys.lease) == term.value
