"""finish and renew_run: only the run that holds the record says how the slot goes on."""

from __future__ import annotations

import pytest

from tests.protocol.ground import Ground

ENDS = ["done", "failed", "retrying", "requeued"]


def _running(ground: Ground, run: str = "r1") -> int:
    term = ground.elect()
    ground.claim(term, 1, ttl=90)
    ground.confirm(term.epoch, 1)
    ground.start(1, term.epoch, run)
    return term.epoch


@pytest.mark.parametrize("state", ["done", "failed", "retrying"])
def test_the_run_that_holds_the_slot_says_how_it_ended(ground: Ground, state: str) -> None:
    _running(ground)
    assert ground.finish(1, "r1", state, "because")
    record = ground.record(1)
    assert (record.state, record.reason) == (state, "because")
    assert record.finished_at is not None
    assert abs(record.finished_at * 1000 - ground.now_ms()) < 5_000
    assert ground.ledger.counts()[state] == 1


@pytest.mark.parametrize("state", ENDS)
def test_a_run_that_lost_the_slot_says_nothing(ground: Ground, state: str) -> None:
    epoch = _running(ground)
    ground.let_run_lease_end(1)
    ground.start(1, epoch, "r2", redelivered=True)
    before = ground.everything()
    assert not ground.finish(1, "r1", state)
    assert ground.everything() == before


@pytest.mark.parametrize("state", ENDS)
def test_a_run_whose_record_is_gone_makes_none(ground: Ground, state: str) -> None:
    _running(ground)
    ground.client.delete(ground.record_key(1))
    assert not ground.finish(1, "r1", state)
    assert ground.state(1) == ""


@pytest.mark.parametrize("state", ["done", "failed", "retrying"])
def test_a_run_that_says_its_end_again_is_believed_and_counted_once(ground: Ground, state: str) -> None:
    _running(ground)
    assert [ground.finish(1, "r1", state) for _ in range(3)] == [True, True, True]
    assert ground.ledger.counts()[state] == 1


def test_a_run_that_has_ended_does_not_end_otherwise(ground: Ground) -> None:
    _running(ground)
    ground.finish(1, "r1", "done")
    ground.finish(1, "r1", "failed")
    assert ground.state(1) == "done"


def test_a_run_that_died_and_was_abandoned_says_nothing(ground: Ground) -> None:
    _running(ground)
    ground.write(1, state="abandoned")
    before = ground.everything()
    assert not ground.finish(1, "r1", "done")
    assert not ground.renew_run(1, "r1")
    assert ground.everything() == before


@pytest.mark.parametrize("state", ENDS)
def test_a_run_that_has_ended_is_on_no_sweep_list(ground: Ground, state: str) -> None:
    _running(ground)
    assert ground.unfinished() == {ground.key(1)}
    ground.finish(1, "r1", state)
    assert ground.unfinished() == set()


def test_the_retry_is_on_the_sweep_list_while_it_runs(ground: Ground) -> None:
    epoch = _running(ground)
    ground.finish(1, "r1", "retrying")
    ground.start(1, epoch, "r2", after="r1")
    assert ground.unfinished() == {ground.key(1)}
    ground.finish(1, "r2")
    assert ground.unfinished() == set()


@pytest.mark.parametrize("state", ["done", "failed"])
def test_only_a_slot_that_waits_for_its_retry_notes_until_when(ground: Ground, state: str) -> None:
    _running(ground)
    ground.finish(1, "r1", state, retry_in=60)
    assert "busy_until" not in ground.fields(1)


def test_a_slot_that_waits_for_its_retry_counts_as_unfinished_until_an_hour_after_it_is_due(
    ground: Ground,
) -> None:
    _running(ground)
    ground.finish(1, "r1", "retrying", retry_in=60)
    left = int(ground.fields(1)["busy_until"]) - ground.now_ms()
    assert 3_655_000 < left <= 3_660_000


def test_the_end_of_a_run_does_not_need_a_leader(ground: Ground) -> None:
    _running(ground)
    ground.lapse()
    assert ground.finish(1, "r1", "done")


def test_an_ended_slots_record_is_kept_for_its_own_time(ground: Ground) -> None:
    _running(ground)
    ground.client.pexpire(ground.record_key(1), 5_000)
    ground.finish(1, "r1", "done")
    assert 80_000 < ground.ttl(1) <= 90_000


def test_a_run_that_rejected_its_message_back_into_the_queue_leaves_the_slot_as_sent(ground: Ground) -> None:
    epoch = _running(ground)
    assert ground.finish(1, "r1", "requeued")
    assert ground.state(1) == "sent"
    assert ground.fields(1).keys().isdisjoint({"run", "after", "run_until", "finished_at"})
    assert ground.begin(1, epoch, "r2", redelivered=True).kind == "run"
    assert ground.finish(1, "r2", "done")


@pytest.mark.parametrize("mode", ["slot", "current"])
def test_a_retry_that_was_rejected_back_into_the_queue_is_still_the_retry_that_the_slot_waits_for(
    ground: Ground, mode: str
) -> None:
    epoch = _running(ground)
    ground.finish(1, "r1", "retrying")
    ground.start(1, epoch, "r2", after="r1")
    assert ground.finish(1, "r2", "requeued")
    if mode == "slot":
        # The leader's message once more, as by a broker's visibility timeout.
        assert ground.begin(1, epoch, "r3", redelivered=True).kind == "refuse"
    else:
        ground.next_term()
    assert ground.begin(1, epoch, "r4", after="r1", redelivered=True, mode=mode).kind == "run"


def test_a_slot_whose_message_went_back_into_the_queue_is_not_claimed_again(ground: Ground) -> None:
    _running(ground)
    ground.finish(1, "r1", "requeued")
    assert ground.ask(ground.next_term(), 1, batch="next") == ["sent"]


def test_the_run_lease_is_extended_for_the_run_that_holds_the_slot(ground: Ground) -> None:
    _running(ground)
    ground.client.pexpire(ground.record_key(1), 5_000)
    assert ground.renew_run(1, "r1", run_lease=300)
    assert 290_000 < int(ground.fields(1)["run_until"]) - ground.now_ms() <= 300_000
    assert 80_000 < ground.ttl(1) <= 90_000


def test_a_renewal_moves_the_time_at_which_the_run_is_looked_after(ground: Ground) -> None:
    _running(ground)
    assert ground.renew_run(1, "r1", run_lease=300)
    assert ground.looked_at(1) == int(ground.fields(1)["run_until"])


def test_a_renewal_puts_nothing_on_the_sweep_list_that_is_not_there(ground: Ground) -> None:
    """A run whose death was noted apart (see test_crash)."""
    _running(ground)
    ground.client.delete(ground.keys.unfinished)
    assert ground.renew_run(1, "r1")
    assert ground.unfinished() == set()


def test_a_run_whose_lease_was_over_goes_on_if_nobody_took_the_slot(ground: Ground) -> None:
    epoch = _running(ground)
    ground.let_run_lease_end(1)
    assert ground.renew_run(1, "r1")
    assert ground.begin(1, epoch, "r2", redelivered=True).kind == "put_off"


def test_the_run_lease_is_not_extended_for_a_run_that_lost_the_slot(ground: Ground) -> None:
    epoch = _running(ground)
    ground.let_run_lease_end(1)
    ground.start(1, epoch, "r2", redelivered=True)
    before = ground.everything()
    assert not ground.renew_run(1, "r1", run_lease=300)
    assert ground.everything() == before


@pytest.mark.parametrize("state", ENDS)
def test_the_run_lease_is_not_extended_after_the_run_has_ended(ground: Ground, state: str) -> None:
    _running(ground)
    ground.finish(1, "r1", state)
    before = ground.everything()
    assert not ground.renew_run(1, "r1")
    assert ground.everything() == before


def test_a_run_lease_without_a_record_makes_none(ground: Ground) -> None:
    assert not ground.renew_run(1, "r1")
    assert ground.client.keys() == []


def test_run_leases_are_answered_one_by_one(ground: Ground) -> None:
    epoch = _running(ground)
    ground.start(2, epoch, "r2")
    runs = {ground.key(1): "r1", ground.key(2): "another", ground.key(3): "r3"}
    assert list(ground.ledger.renew_runs(runs, 30).values()) == [True, False, False]


def test_a_slot_that_waits_for_its_retry_is_kept_until_that_is_due(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1, ttl=90)
    ground.start(1, term.epoch)
    assert ground.ledger.finish(ground.key(1), "run", "retrying", retry_in=7200)
    assert ground.ttl(1) > 7200 * 1000
