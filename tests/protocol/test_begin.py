"""begin: a slot starts once at a time and never again after its end; legitimate work is never refused."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from tests.protocol.ground import Ground

NOT_BEGUN = ["claimed", "returned", "sent", "unconfirmed", "missed", "skipped"]
FINAL = ["done", "failed", "abandoned"]
MODES = ["slot", "current", "observed"]


def _sent(ground: Ground, number: int = 1) -> int:
    """A slot that was claimed, published and confirmed; its epoch."""
    term = ground.elect()
    ground.claim(term, number)
    ground.confirm(term.epoch, number)
    return term.epoch


def test_a_message_that_was_sent_begins_and_the_record_says_which_run_holds_it(ground: Ground) -> None:
    epoch = _sent(ground)
    assert ground.begin(1, epoch, "r1", run_lease=60).kind == "run"
    record = ground.record(1)
    assert (record.state, record.run, record.worker, record.epoch) == ("running", "r1", "host:1", epoch)
    assert record.started_at is not None
    left = int(ground.fields(1)["run_until"]) - ground.now_ms()
    assert 55_000 < left <= 60_000
    assert ground.ledger.counts()["started"] == 1


@pytest.mark.parametrize("state", NOT_BEGUN)
@pytest.mark.parametrize("redelivered", [False, True])
def test_a_message_of_the_epoch_that_holds_the_record_begins_in_every_state_before_the_first_run(
    ground: Ground, state: str, redelivered: bool
) -> None:
    epoch = _sent(ground)
    ground.write(1, state=state)
    assert ground.begin(1, epoch, redelivered=redelivered).kind == "run"
    assert ground.state(1) == "running"


def test_a_message_that_waits_in_the_queue_over_handovers_runs_and_so_does_its_retry(ground: Ground) -> None:
    epoch = _sent(ground)
    for holder in ("two", "three", "one"):
        ground.next_term(holder)
    ground.start(1, epoch, "r1")
    assert ground.finish(1, "r1", "retrying")
    ground.next_term("four")
    assert ground.begin(1, epoch, "r2", after="r1").kind == "run"
    assert ground.finish(1, "r2", "done")


def test_a_message_of_a_superseded_epoch_is_refused(ground: Ground) -> None:
    old = ground.elect()
    ground.claim(old, 1, prefer="duplicate")
    term = ground.next_term()
    ground.claim(term, 1, batch="next", prefer="duplicate")
    before = ground.fields(1)
    verdict = ground.begin(1, old.epoch)
    assert (verdict.kind, "newer epoch" in verdict.reason) == ("refuse", True)
    assert ground.fields(1) == before
    assert ground.ledger.counts()["refused"] == 1
    assert ground.begin(1, term.epoch).kind == "run"


@pytest.mark.parametrize("state", ["returned", "missed", "skipped"])
def test_an_older_epochs_message_runs_where_the_newer_epoch_sends_none(ground: Ground, state: str) -> None:
    old = ground.elect()
    ground.claim(old, 1, prefer="duplicate")
    term = ground.next_term()
    ground.claim(term, 1, batch="next", prefer="duplicate")
    ground.give_back(term.epoch, 1)
    if state != "returned":
        ground.miss(term, 1, 1, [1], state=state)
    assert ground.begin(1, old.epoch, "r1").kind == "run"
    assert ground.ask(term, 1, batch="last", prefer="duplicate") == ["running"]
    assert ground.begin(1, term.epoch, "r2").kind == "refuse"
    assert ground.finish(1, "r1", "done")


@pytest.mark.parametrize(
    "state", [*sorted(set(NOT_BEGUN) - {"returned", "missed", "skipped"}), "running", "retrying", *FINAL]
)
def test_a_superseded_epoch_is_refused_in_every_other_state_of_the_record(ground: Ground, state: str) -> None:
    epoch = _sent(ground)
    if state not in NOT_BEGUN:
        ground.start(1, epoch, "r1")
        ground.let_run_lease_end(1)
    ground.write(1, state=state)
    for redelivered in (False, True):
        assert ground.begin(1, epoch - 1, "r2", redelivered=redelivered).kind == "refuse"


def test_a_message_of_a_superseded_attempt_is_refused_and_the_newer_attempt_runs(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1, attempt=2)
    verdict = ground.begin(1, term.epoch, attempt=1)
    assert (verdict.kind, "newer attempt" in verdict.reason) == ("refuse", True)
    assert ground.begin(1, term.epoch, attempt=2).kind == "run"


def test_a_second_copy_is_refused_while_the_slot_runs_elsewhere(ground: Ground) -> None:
    epoch = _sent(ground)
    ground.start(1, epoch, "r1")
    before = ground.fields(1)
    verdict = ground.begin(1, epoch, "r2")
    assert (verdict.kind, verdict.reason) == ("refuse", "the slot is running elsewhere")
    assert ground.fields(1) == before


def test_a_redelivery_is_put_off_until_the_lease_of_the_run_is_over(ground: Ground) -> None:
    epoch = _sent(ground)
    ground.start(1, epoch, "r1", run_lease=60)
    before = ground.fields(1)
    verdict = ground.begin(1, epoch, "r2", redelivered=True)
    assert verdict.kind == "put_off"
    assert 55 < verdict.seconds <= 60
    assert ground.fields(1) == before


def test_a_redelivery_runs_once_its_worker_has_died(ground: Ground) -> None:
    epoch = _sent(ground)
    ground.start(1, epoch, "r1")
    ground.let_run_lease_end(1)
    assert ground.begin(1, epoch, "r2", redelivered=True).kind == "run"
    assert ground.record(1).run == "r2"
    assert ground.ledger.counts()["started"] == 1


@pytest.mark.parametrize(
    ("on_crash", "decided", "reason"),
    [
        ("skip", "abandoned", "the slot is abandoned"),
        ("rerun", "returned", "a newer attempt of the slot was sent"),
    ],
)
def test_where_the_leader_looks_after_dead_runs_a_redelivery_waits_for_its_decision_and_is_refused(
    ground: Ground, on_crash: str, decided: str, reason: str
) -> None:
    term = ground.elect()
    ground.claim(term, 1, on_crash=on_crash, max_attempts=3)
    ground.start(1, term.epoch, "r1")
    ground.let_run_lease_end(1)
    before = ground.everything()
    for run in ("r2", "r3"):
        verdict = ground.begin(1, term.epoch, run, redelivered=True, run_lease=20)
        assert (verdict.kind, verdict.seconds) == ("put_off", 20)
    assert ground.everything() == before
    assert ground.crash(term, 1) == [decided]
    verdict = ground.begin(1, term.epoch, "r4", redelivered=True)
    assert (verdict.kind, verdict.reason) == ("refuse", reason)


@pytest.mark.parametrize("on_crash", ["skip", "rerun"])
def test_a_run_that_was_only_frozen_may_reject_its_message_that_the_broker_has_no_longer(
    ground: Ground, on_crash: str
) -> None:
    """Nobody leads, and so nobody has taken it for dead, but for a redelivery."""
    term = ground.elect()
    ground.claim(term, 1, on_crash=on_crash, max_attempts=3)
    ground.start(1, term.epoch, "r1")
    ground.let_run_lease_end(1)
    assert ground.begin(1, term.epoch, "r2", redelivered=True).kind == "put_off"
    assert ground.finish(1, "r1", "requeued")
    assert ground.begin(1, term.epoch, "r3", redelivered=True).kind == "run"


@pytest.mark.parametrize("on_crash", ["skip", "rerun"])
def test_a_redelivery_that_waits_for_the_leader_sees_to_it_that_the_leader_knows_of_the_slot(
    ground: Ground, on_crash: str
) -> None:
    """As where the list of what is to be looked after was evicted: else it would wait for ever."""
    term = ground.elect()
    ground.claim(term, 1, on_crash=on_crash, max_attempts=3)
    ground.start(1, term.epoch, "r1")
    ground.let_run_lease_end(1)
    ground.client.delete(ground.keys.unfinished)
    assert ground.begin(1, term.epoch, "r2", redelivered=True).kind == "put_off"
    assert [record.key for record in ground.ledger.unfinished()] == [ground.key(1)]


@pytest.mark.parametrize("on_crash", ["auto", "skip", "rerun"])
def test_a_redelivery_waits_for_a_live_run_which_may_reject_its_message_that_the_broker_has_no_longer(
    ground: Ground, on_crash: str
) -> None:
    term = ground.elect()
    ground.claim(term, 1, on_crash=on_crash, max_attempts=3)
    ground.start(1, term.epoch, "r1")
    before = ground.fields(1)
    assert ground.begin(1, term.epoch, "r2", redelivered=True).kind == "put_off"
    assert ground.fields(1) == before
    assert ground.finish(1, "r1", "requeued")
    assert ground.begin(1, term.epoch, "r3", redelivered=True).kind == "run"


@pytest.mark.parametrize("on_crash", ["skip", "rerun"])
def test_the_policy_for_a_crash_stands_in_the_way_of_nothing_else(ground: Ground, on_crash: str) -> None:
    term = ground.elect()
    ground.claim(term, 1, on_crash=on_crash, max_attempts=3)
    assert ground.begin(1, term.epoch, "r1", redelivered=True).kind == "run"
    assert ground.begin(1, term.epoch, "r2", asked=["r1"]).kind == "run"
    assert ground.finish(1, "r2", "requeued")
    assert ground.begin(1, term.epoch, "r3", redelivered=True).kind == "run"
    assert ground.finish(1, "r3", "retrying")
    assert ground.begin(1, term.epoch, "r4", after="r3").kind == "run"
    assert ground.finish(1, "r4", "done")


def test_a_run_is_looked_after_from_the_end_of_its_lease_on(ground: Ground) -> None:
    epoch = _sent(ground)
    assert ground.unfinished() == set()
    ground.start(1, epoch, "r1", run_lease=60)
    assert ground.looked_at(1) == int(ground.fields(1)["run_until"])
    assert ground.ledger.unfinished() == []
    ground.client.zadd(ground.keys.unfinished, {ground.key(1): ground.now_ms() - 1})
    assert [record.key for record in ground.ledger.unfinished()] == [ground.key(1)]


def test_a_run_without_a_record_before_it_is_looked_after_too(ground: Ground) -> None:
    ground.start(1, ground.elect().epoch, "r1")
    assert ground.unfinished() == {ground.key(1)}


def test_a_second_copy_that_is_no_redelivery_does_not_run_because_a_worker_died(ground: Ground) -> None:
    epoch = _sent(ground)
    ground.start(1, epoch, "r1")
    ground.let_run_lease_end(1)
    verdict = ground.begin(1, epoch, "r2")
    assert (verdict.kind, verdict.reason) == ("refuse", "the slot was begun by a worker that died")


@pytest.mark.parametrize("state", FINAL)
@pytest.mark.parametrize("redelivered", [False, True])
def test_a_slot_that_has_ended_does_not_start_again(ground: Ground, state: str, redelivered: bool) -> None:
    epoch = _sent(ground)
    ground.start(1, epoch, "r1")
    ground.let_run_lease_end(1)
    ground.write(1, state=state)
    verdict = ground.begin(1, epoch, "r2", redelivered=redelivered)
    assert (verdict.kind, verdict.reason) == ("refuse", f"the slot is {state}")


def test_a_copy_of_a_newer_epoch_does_not_start_a_slot_that_runs_or_has_ended(ground: Ground) -> None:
    epoch = _sent(ground)
    ground.start(1, epoch, "r1")
    assert ground.begin(1, epoch + 1, "r2").kind == "refuse"
    ground.finish(1, "r1", "done")
    assert ground.begin(1, epoch + 1, "r2").kind == "refuse"
    assert ground.state(1) == "done"


def test_the_same_run_asking_again_gets_the_same_answer_and_counts_once(ground: Ground) -> None:
    epoch = _sent(ground)
    for _ in range(3):
        assert ground.begin(1, epoch, "r1").kind == "run"
    assert ground.ledger.counts() == {"claimed": 1, "sent": 1, "started": 1}


@pytest.mark.parametrize("redelivered", [False, True])
def test_a_message_that_never_saw_the_answer_begins_when_it_asks_again(
    ground: Ground, redelivered: bool
) -> None:
    epoch = _sent(ground)
    ground.start(1, epoch, "r1")
    assert ground.begin(1, epoch, "r2", asked=["r1"], redelivered=redelivered).kind == "run"
    assert ground.begin(1, epoch, "r3", asked=["r1", "r2"], redelivered=redelivered).kind == "run"
    assert ground.record(1).run == "r3"
    assert not ground.finish(1, "r1")
    assert ground.finish(1, "r3")
    assert ground.ledger.counts()["started"] == 1


def test_a_message_that_asks_again_does_not_begin_while_another_run_holds_the_slot(ground: Ground) -> None:
    epoch = _sent(ground)
    ground.start(1, epoch, "r1")
    assert ground.begin(1, epoch, "r2", asked=["r0", "r"]).kind == "refuse"
    assert ground.begin(1, epoch, "r2", asked=["r0", "r"], redelivered=True).kind == "put_off"


def test_the_answer_says_whether_there_was_a_record(ground: Ground) -> None:
    epoch = _sent(ground)
    assert [ground.begin(number, epoch).new for number in (1, 2)] == [False, True]


@pytest.mark.parametrize("state", ["running", "retrying"])
def test_the_retry_of_the_run_that_holds_the_slot_runs(ground: Ground, state: str) -> None:
    epoch = _sent(ground)
    ground.start(1, epoch, "r1")
    # Celery publishes the retry before the run that asked for it has ended.
    ground.write(1, state=state)
    assert ground.begin(1, epoch, "r2", after="r1").kind == "run"
    assert ground.record(1).run == "r2"
    assert not ground.finish(1, "r1", "retrying")
    assert ground.finish(1, "r2", "done")


def test_a_retry_of_a_retry_runs(ground: Ground) -> None:
    epoch = _sent(ground)
    ground.start(1, epoch, "r1")
    for number in range(2, 6):
        assert ground.finish(1, f"r{number - 1}", "retrying")
        assert ground.begin(1, epoch, f"r{number}", after=f"r{number - 1}").kind == "run"
    assert ground.ledger.counts()["started"] == 1


def test_the_message_that_the_leader_sent_does_not_run_while_the_slot_waits_for_its_retry(
    ground: Ground,
) -> None:
    epoch = _sent(ground)
    ground.start(1, epoch, "r1")
    ground.finish(1, "r1", "retrying")
    for redelivered in (False, True):
        verdict = ground.begin(1, epoch, "r2", redelivered=redelivered)
        assert (verdict.kind, verdict.reason) == ("refuse", "the slot waits for its retry")


def test_the_leaders_message_does_not_run_once_its_retry_does(ground: Ground) -> None:
    epoch = _sent(ground)
    ground.start(1, epoch, "r1")
    ground.finish(1, "r1", "retrying")
    ground.start(1, epoch, "r2", after="r1")
    for over in (False, True):
        if over:
            ground.let_run_lease_end(1)
        verdict = ground.begin(1, epoch, "r3", redelivered=True)
        assert (verdict.kind, "no longer holds" in verdict.reason) == ("refuse", True)


def test_the_retry_of_a_run_that_lost_the_slot_is_refused(ground: Ground) -> None:
    epoch = _sent(ground)
    ground.start(1, epoch, "r1")
    ground.let_run_lease_end(1)
    ground.start(1, epoch, "r2", redelivered=True)
    for redelivered in (False, True):
        assert ground.begin(1, epoch, "r3", after="r1", redelivered=redelivered).kind == "refuse"


def test_the_redelivery_of_a_retry_runs_once_its_worker_has_died(ground: Ground) -> None:
    epoch = _sent(ground)
    ground.start(1, epoch, "r1")
    ground.finish(1, "r1", "retrying")
    ground.start(1, epoch, "r2", after="r1")
    assert ground.begin(1, epoch, "r3", after="r1", redelivered=True).kind == "put_off"
    ground.let_run_lease_end(1)
    assert ground.begin(1, epoch, "r3", after="r1", redelivered=True).kind == "run"


@pytest.mark.parametrize("end", ["done", "failed"])
def test_a_retry_runs_also_when_the_run_that_asked_for_it_ended_otherwise(ground: Ground, end: str) -> None:
    """As with `self.retry(throw=False)`, or when the body caught `Retry`."""
    epoch = _sent(ground)
    ground.start(1, epoch, "r1")
    ground.finish(1, "r1", end)
    assert ground.begin(1, epoch, "r2", after="r1").kind == "run"
    assert ground.begin(1, epoch, "r3", after="r1").kind == "refuse"


@pytest.mark.parametrize("redelivered", [False, True])
def test_a_copy_of_a_retry_that_has_ended_is_refused(ground: Ground, redelivered: bool) -> None:
    epoch = _sent(ground)
    ground.start(1, epoch, "r1")
    ground.finish(1, "r1", "retrying")
    ground.start(1, epoch, "r2", after="r1")
    ground.finish(1, "r2", "done")
    assert ground.begin(1, epoch, "r3", after="r1", redelivered=redelivered).kind == "refuse"


@pytest.mark.parametrize("mode", MODES)
def test_a_message_without_a_record_runs_and_leaves_one_so_that_a_copy_is_refused(
    ground: Ground, mode: str
) -> None:
    epoch = ground.elect().epoch
    assert ground.begin(1, epoch, "r1", mode=mode).kind == "run"
    record = ground.record(1)
    assert (record.state, record.epoch, record.run) == ("running", epoch, "r1")
    assert ground.begin(1, epoch, "r2", mode=mode).kind == "refuse"
    assert ground.finish(1, "r1")
    assert ground.begin(1, epoch, "r2", mode=mode).kind == "refuse"


def test_a_retry_whose_record_was_lost_runs(ground: Ground) -> None:
    epoch = _sent(ground)
    ground.start(1, epoch, "r1")
    ground.finish(1, "r1", "retrying")
    ground.client.flushall()
    assert ground.begin(1, epoch, "r2", after="r1").kind == "run"


def test_a_record_outlives_the_run_lease_however_short_its_own_time_is(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1, ttl=1)
    ground.start(1, term.epoch, "r1", run_lease=30)
    assert ground.is_kept_long(1)
    ground.finish(1, "r1")
    assert 55_000 < ground.ttl(1) <= 60_000
    ground.start(2, term.epoch, "r1", run_lease=30)
    ground.finish(2, "r1")
    assert 3_500_000 < ground.ttl(2) <= 3_600_000


# The modes


def test_current_refuses_at_the_start_what_is_older_than_the_epoch_that_leads(ground: Ground) -> None:
    epoch = _sent(ground)
    leads = ground.next_term().epoch
    verdict = ground.begin(1, epoch, mode="current")
    assert (verdict.kind, verdict.reason) == ("refuse", f"epoch {leads} leads now")
    assert ground.state(1) == "refused"


def test_current_runs_what_the_epoch_that_leads_has_sent(ground: Ground) -> None:
    assert ground.begin(1, _sent(ground), mode="current").kind == "run"


def test_current_runs_a_message_when_the_epoch_key_was_lost(ground: Ground) -> None:
    epoch = _sent(ground)
    ground.client.delete(ground.keys.epoch)
    assert ground.begin(1, epoch, mode="current").kind == "run"


def test_observed_refuses_at_the_start_what_is_older_than_the_newest_epoch_that_the_task_has_seen(
    ground: Ground,
) -> None:
    epoch = _sent(ground)
    ground.start(2, epoch + 1, mode="observed")
    verdict = ground.begin(1, epoch, mode="observed")
    assert (verdict.kind, verdict.reason) == ("refuse", f"the task has seen epoch {epoch + 1}")
    assert ground.state(1) == "refused"


def test_observed_runs_an_old_message_as_long_as_the_task_has_seen_no_newer(ground: Ground) -> None:
    epoch = _sent(ground)
    ground.next_term()
    assert ground.begin(1, epoch, mode="observed").kind == "run"


def test_what_one_task_has_observed_is_no_matter_to_another(ground: Ground) -> None:
    epoch = _sent(ground)
    ground.start(2, epoch + 1, mode="observed", task="proj.other")
    assert ground.begin(1, epoch, mode="observed").kind == "run"


def test_the_observed_epoch_does_not_move_back(ground: Ground) -> None:
    epoch = _sent(ground)
    ground.start(2, epoch + 1, mode="observed")
    ground.begin(1, epoch, mode="observed")
    assert ground.client.hgetall(ground.keys.observed) == {"proj.task": str(epoch + 1)}


def test_slot_mode_observes_nothing_and_asks_no_epoch_but_the_records(ground: Ground) -> None:
    epoch = _sent(ground)
    ground.start(2, epoch + 1, mode="observed")
    ground.next_term()
    assert ground.begin(1, epoch, mode="slot").kind == "run"


@pytest.mark.parametrize("mode", ["current", "observed"])
def test_a_slot_that_was_refused_stays_refused(ground: Ground, mode: str) -> None:
    epoch = _sent(ground)
    if mode == "current":
        ground.next_term()
    else:
        ground.start(2, epoch + 1, mode="observed")
    ground.begin(1, epoch, mode=mode)
    assert ground.begin(1, epoch, mode="slot", redelivered=True).kind == "refuse"


@pytest.mark.parametrize("mode", ["current", "observed"])
@pytest.mark.parametrize("goes_on_as", ["its retry", "its redelivery", "the same run"])
def test_a_mode_is_not_asked_again_for_what_goes_on(ground: Ground, mode: str, goes_on_as: str) -> None:
    epoch = _sent(ground)
    ground.start(1, epoch, "r1", mode=mode)
    ground.next_term()
    ground.start(2, epoch + 1, mode="observed")
    if goes_on_as == "its retry":
        ground.finish(1, "r1", "retrying")
        verdict = ground.begin(1, epoch, "r2", after="r1", mode=mode)
    elif goes_on_as == "its redelivery":
        ground.let_run_lease_end(1)
        verdict = ground.begin(1, epoch, "r2", redelivered=True, mode=mode)
    else:
        verdict = ground.begin(1, epoch, "r1", mode=mode)
    assert verdict.kind == "run", verdict


# The whole table


@dataclass(frozen=True)
class _Case:
    state: str
    epoch: int  # of the message, as seen from the record's: -1 older, 0 the same, 1 newer
    attempt: int  # likewise
    belongs: str  # to what the message belongs, as seen from the record
    redelivered: bool
    lease_over: bool
    mode: str
    behind: bool  # whether the mode finds the message's epoch too old
    on_crash: str


_EPOCH, _ATTEMPT = 2_000_000_000, 5
_FAR_AHEAD = 9_999_999_999_999
_BEGUN = ("running", "retrying", *FINAL)


def _cases() -> list[_Case]:
    axes = itertools.product(
        ("", *NOT_BEGUN, "refused", *_BEGUN),
        (-1, 0, 1),
        (-1, 0, 1),
        ("leader's message", "retry of the run before", "retry of the run", "retry of a stranger"),
        (False, True),
        (False, True),
        MODES,
        (False, True),
        ("auto", "skip", "rerun"),
    )
    return [
        case
        for case in (_Case(*axis) for axis in axes)
        if not (case.mode == "slot" and case.behind)
        and not (case.state == "" and (case.epoch or case.attempt))
        and not (case.state != "running" and (case.lease_over or case.on_crash != "auto"))
        and not (case.on_crash != "auto" and (case.mode != "slot" or case.epoch or case.attempt))
    ]


def _expected(case: _Case) -> str:
    """What is to become of it, as it is looked at in turn: superseded, ended, under way, starting."""
    if case.state and case.epoch < 0 and case.state not in ("returned", "missed", "skipped"):
        return "refuse"
    if case.state and case.attempt < 0:
        return "refuse"
    if case.state == "refused":
        return "refuse"
    if case.state in _BEGUN:
        if case.belongs == "retry of the run":
            return "run"
        if case.state in FINAL:
            return "refuse"
        if case.state == "retrying" or case.belongs != "retry of the run before" or not case.redelivered:
            return "refuse"
        return "run" if case.lease_over and case.on_crash == "auto" else "put_off"
    return "refuse" if case.behind else "run"


def _message(case: _Case) -> dict[str, object]:
    after = {
        "leader's message": "",
        "retry of the run before": "r1",
        "retry of the run": "r2",
        "retry of a stranger": "r0",
    }
    return {
        "epoch": _EPOCH + case.epoch,
        "attempt": _ATTEMPT + case.attempt,
        "after": after[case.belongs],
        "redelivered": case.redelivered,
        "mode": case.mode,
    }


def test_every_message_meets_every_record_as_the_design_says(ground: Ground) -> None:
    """The record is of run `r2`, itself the retry of `r1`."""
    cases = _cases()
    with ground.client.pipeline(transaction=False) as pipe:
        for number, case in enumerate(cases):
            if not case.state:
                continue
            fields: dict[str, str | int] = {"state": case.state, "epoch": _EPOCH, "attempt": _ATTEMPT}
            fields |= {"ttl": 3_600_000, "on_crash": case.on_crash}
            if case.state in _BEGUN:
                until = 0 if case.lease_over else _FAR_AHEAD
                fields |= {"run": "r2", "after": "r1", "run_until": until}
            pipe.hset(ground.record_key(number), mapping=fields)
        pipe.execute()
    wrong = []
    for number, case in enumerate(cases):
        message = _message(case)
        mark = int(str(message["epoch"])) + (1 if case.behind else 0)
        if case.mode == "current":
            ground.client.set(ground.keys.epoch, mark)
        elif case.mode == "observed":
            ground.client.hset(ground.keys.observed, "proj.task", mark)
        verdict = ground.begin(number, run="r3", **message)  # type: ignore[arg-type]
        if verdict.kind != _expected(case):
            wrong.append((case, verdict))
    assert not wrong, (len(wrong), wrong[:5])
