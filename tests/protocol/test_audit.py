"""Ledger.audit and Ledger.undone: every slot that an entry called for has one end, by what the ledger knows of it."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import schedules

from celery_leaderbeat.audit import Audit, Explanation
from celery_leaderbeat.definitions import Definition
from celery_leaderbeat.records import Claim
from celery_leaderbeat.tick import slot_to_us, tick_key
from celery_leaderbeat.timeline import fingerprint
from tests.protocol.ground import ENTRY, FINGERPRINT, FIRST, Ground, slot

MINUTE = timedelta(minutes=1)


class History:
    """An entry whose schedule has a slot each minute, and whose first slot was so many minutes ago."""

    def __init__(self, ground: Ground, minutes: int = 30) -> None:
        self.ground = ground
        # A slot that comes due during the test is no part of it.
        self.last = (ground.store.now() - FIRST) // MINUTE - 1
        self.first = self.last - minutes + 1
        self.term = ground.elect()
        self.register(self.first - 1, FINGERPRINT)

    def register(self, now: int, fingerprint_: str = "") -> None:
        entries = {ENTRY: fingerprint_} if fingerprint_ else {}
        self.ground.ledger.register(self.term, entries, slot(now))

    def __getitem__(self, index: int) -> int:
        """The number of a slot, from the first one on, or back from the last."""
        return (self.first if index >= 0 else self.last + 1) + index

    def claim(self, *numbers: int, **options: Any) -> None:
        self.ground.claim(self.term, *numbers, batch=f"batch {numbers}", **options)

    def miss(self, first: int, last: int, reason: str, state: str = "missed") -> None:
        self.ground.miss(self.term, last, last - first + 1, reason=reason, state=state)

    def audit(self, since: int | None = None, until: int | None = None, **options: Any) -> Audit:
        first = self.first - 1 if since is None else since
        last = self.last if until is None else until
        return self.ground.ledger.audit(ENTRY, slot(first), slot(last), **options)

    def end(self, number: int) -> tuple[str, str]:
        """The end of one slot, and its reason."""
        found = _by_slot(self.audit())[slot(number)]
        assert found.key == self.ground.key(number)
        assert found.called_for
        return found.end, found.reason


def _by_slot(audit: Audit) -> dict[datetime, Explanation]:
    return {found.slot: found for found in audit.slots}


def _ended(history: History, number: int, state: str) -> None:
    """Bring a slot into a state by what leaders and workers do."""
    ground, term = history.ground, history.term
    history.claim(number, on_crash="skip" if state == "abandoned" else "auto")
    if state in ("sent", "unconfirmed"):
        ground.confirm(term.epoch, number, state)
    elif state in ("returned", "missed", "skipped"):
        ground.give_back(term.epoch, number, "no connection")
        if state != "returned":
            ground.miss(term, number, 1, [number], reason="its deadline is over", state=state)
    elif state == "refused":
        ground.start(number + 1, term.epoch + 1, "other", mode="observed")
        ground.begin(number, term.epoch, mode="observed")
        ground.client.delete(ground.record_key(number + 1))
    elif state != "claimed":
        ground.start(number, term.epoch)
        if state == "abandoned":
            ground.let_run_lease_end(number)
            ground.crash(term, number)
        elif state != "running":
            ground.finish(number, state=state, reason="ValueError()" if state == "failed" else "")


@pytest.mark.parametrize(
    ("state", "end", "reason"),
    [
        ("claimed", "claimed", ""),
        ("returned", "returned", "no connection"),
        ("sent", "sent", ""),
        ("unconfirmed", "missed", "unconfirmed: the outcome of the publish is unknown"),
        ("running", "running", ""),
        ("retrying", "retrying", ""),
        ("done", "done", ""),
        ("failed", "failed", "ValueError()"),
        ("missed", "missed", "its deadline is over"),
        ("skipped", "skipped", "its deadline is over"),
        ("abandoned", "abandoned", "its run on host:1 died, and on_crash is skip"),
    ],
)
def test_a_slot_with_a_record_ends_as_its_record_says(
    ground: Ground, state: str, end: str, reason: str
) -> None:
    history = History(ground)
    _ended(history, history[5], state)
    assert history.end(history[5]) == (end, reason)


def test_a_slot_that_a_worker_refused_says_why(ground: Ground) -> None:
    history = History(ground)
    _ended(history, history[5], "refused")
    assert history.end(history[5]) == ("refused", f"the task has seen epoch {history.term.epoch + 1}")


@pytest.mark.parametrize("noted", [False, True])
def test_a_run_whose_lease_is_over_is_said_to_have_died(ground: Ground, noted: bool) -> None:
    history = History(ground)
    _ended(history, history[5], "running")
    ground.let_run_lease_end(history[5])
    if noted:
        ground.crash(history.term, history[5])
    assert history.end(history[5]) == ("running", "its run on host:1 died")


@pytest.mark.parametrize("state", ["missed", "skipped"])
def test_slots_without_records_end_as_their_range_says(ground: Ground, state: str) -> None:
    history = History(ground)
    history.miss(history[0], history[9], "nobody led", state)
    history.miss(history[10], history[11], "paused: why", "skipped")
    assert {history.end(history[i]) for i in range(10)} == {(state, "nobody led")}
    assert {history.end(history[i]) for i in (10, 11)} == {("skipped", "paused: why")}


def test_a_slot_with_a_record_inside_a_range_ends_as_its_record_says(ground: Ground) -> None:
    history = History(ground)
    history.claim(history[0])
    ground.give_back(history.term.epoch, history[0])
    ground.miss(history.term, history[2], 3, [history[0]])
    ground.write(history[0], state="done", reason="")
    assert [history.end(history[i])[0] for i in range(3)] == ["done", "missed", "missed"]


def test_slots_that_no_leader_has_come_to_are_overdue(ground: Ground) -> None:
    history = History(ground)
    history.miss(history[0], history[9], "nobody led")
    assert history.audit().counts == {"missed": 10, "overdue": 20}
    assert history.end(history[10]) == ("overdue", "no leader has decided about it yet")


def test_a_slot_that_was_skipped_for_an_overlap_says_which_one_it_would_have_overlapped(
    ground: Ground,
) -> None:
    history = History(ground)
    history.claim(history[0], overlap="skip")
    assert ground.ask(history.term, history[1], batch="next", overlap="skip") == ["overlapped"]
    assert history.end(history[1]) == ("skipped", f"overlap: {ground.key(history[0])} is unfinished")


def test_a_whole_history_has_an_end_for_each_slot_in_order(ground: Ground) -> None:
    history = History(ground)
    states = ["done", "failed", "sent", "abandoned", "running", "missed", "skipped", "retrying"]
    for i, state in enumerate(states):
        _ended(history, history[i], state)
    history.miss(history[8], history[12], "too late")
    audit = history.audit()
    assert [found.slot for found in audit.slots] == [slot(history[i]) for i in range(30)]
    assert [found.end for found in audit.slots] == [*states, *["missed"] * 5, *["overdue"] * 17]
    assert audit.counts["missed"] == 6
    assert [found.slot for found in audit.having("done")] == [slot(history[0])]
    assert (audit.entry, audit.known_since) == (ENTRY, slot(history.first - 1))
    assert audit.not_computed == ()


# Lost and forgotten


@pytest.mark.parametrize("index", [0, 5, 9])
def test_a_slot_whose_record_was_lost_is_unexplained(ground: Ground, index: int) -> None:
    history = History(ground, 30)
    for i in range(10):
        _ended(history, history[i], "done")
    ground.client.delete(ground.record_key(history[index]))
    audit = history.audit()
    assert [found.slot for found in audit.having("unexplained")] == [slot(history[index])]
    assert history.end(history[index]) == ("unexplained", "it was decided, and its record isn't there")


def test_a_slot_whose_range_was_lost_is_unexplained(ground: Ground) -> None:
    history = History(ground)
    history.miss(history[0], history[9], "nobody led")
    ground.client.delete(ground.keys.unsent(ENTRY))
    assert history.audit().counts == {"unexplained": 10, "overdue": 20}


def test_a_slot_whose_record_has_expired_by_itself_is_forgotten(ground: Ground) -> None:
    """Records are kept for an hour here."""
    history = History(ground, 100)
    for i in (0, 30, 50):
        _ended(history, history[i], "done")
        ground.client.delete(ground.record_key(history[i]))
    assert history.end(history[0]) == ("forgotten", "its record has expired")
    assert history.end(history[30]) == ("forgotten", "its record has expired")
    assert history.end(history[50])[0] == "unexplained"


def test_ranges_explain_for_longer_than_records(ground: Ground) -> None:
    history = History(ground, 200)
    history.miss(history[0], history[199], "nobody led")
    assert history.audit().counts == {"missed": 200}


def test_ranges_that_are_no_longer_kept_leave_their_slots_forgotten(ground: Ground) -> None:
    history = History(ground, 30)
    history.miss(history[0], history[9], "nobody led")
    _ended(history, history[10], "done")
    history.miss(history[11], history[11], "too late")
    key = ground.keys.unsent(ENTRY)
    ground.client.zpopmin(key)
    far = slot_to_us(slot(history.last + 100))
    fill = {
        json.dumps({"state": "missed", "first": str(us), "last": str(us), "count": 1, "reason": ""}): us
        for us in range(far, far + 9_999)
    }
    ground.client.zadd(key, fill)
    assert ground.client.zcard(key) == 10_000
    assert history.end(history[0]) == ("forgotten", "what was missed or skipped so long ago isn't kept")
    assert history.end(history[10])[0] == "done"
    assert history.end(history[11]) == ("missed", "too late")


# Definitions


def test_slots_are_those_of_the_schedule_that_was_in_force_at_the_time(ground: Ground) -> None:
    history = History(ground)
    change = history[10] + history[10] % 2
    history.miss(history[0], change, "nobody led")
    history.register(change, fingerprint(timedelta(minutes=2)))
    audit = history.audit()
    before = [slot(number) for number in range(history.first, change + 1)]
    after = [slot(number) for number in range(change + 2, history.last + 1, 2)]
    assert [found.slot for found in audit.slots] == before + after
    assert audit.counts == {"missed": len(before), "overdue": len(after)}


def test_slots_that_a_change_left_undecided_are_skipped_for_it(ground: Ground) -> None:
    history = History(ground)
    history.miss(history[0], history[4], "nobody led")
    history.register(history[9], fingerprint(timedelta(minutes=5)))
    ends = [history.end(history[i]) for i in range(10)]
    assert (
        ends == [("missed", "nobody led")] * 5 + [("skipped", "its schedule changed before it was sent")] * 5
    )


def test_slots_that_a_removal_left_undecided_are_skipped_for_it_and_there_are_none_after_it(
    ground: Ground,
) -> None:
    history = History(ground)
    history.miss(history[0], history[4], "nobody led")
    history.register(history[9])
    audit = history.audit()
    assert [found.end for found in audit.slots] == ["missed"] * 5 + ["skipped"] * 5
    assert history.end(history[9]) == ("skipped", "its entry was removed")


def test_an_entry_that_came_back_has_slots_for_the_time_in_between(ground: Ground) -> None:
    history = History(ground)
    history.miss(history[0], history[4], "nobody led")
    history.register(history[9])
    history.register(history[19], FINGERPRINT)
    assert history.audit().counts == {"missed": 5, "overdue": 25}


def test_an_entry_that_nobody_knows_has_no_slots(ground: Ground) -> None:
    audit = ground.ledger.audit("unknown", slot(0), slot(10))
    assert (audit.slots, audit.known_since, audit.counts) == ((), None, {})


def test_a_time_before_the_entry_was_known_has_no_slots(ground: Ground) -> None:
    history = History(ground)
    assert history.audit(history.first - 60, history.first - 1).slots == ()


def test_the_time_of_an_audit_excludes_its_begin_and_includes_its_end(ground: Ground) -> None:
    history = History(ground)
    audit = history.audit(history[3], history[6])
    assert [found.slot for found in audit.slots] == [slot(history[i]) for i in (4, 5, 6)]


def test_slots_that_are_to_come_are_no_part_of_an_audit(ground: Ground) -> None:
    history = History(ground)
    audit = history.audit(until=history.last + 1_000)
    assert audit.until <= ground.store.now()
    assert len(audit.slots) in (30, 31, 32)


class Own(schedules.crontab):
    """A schedule that can't be told from its fingerprint: every five minutes."""

    def __init__(self) -> None:
        super().__init__(minute="*/5")
        self.nowfun = lambda: datetime.now(timezone.utc)
        self.tz = timezone.utc

    def slots_after(self, after: datetime) -> Any:
        step = timedelta(minutes=5)
        at = FIRST + ((after - FIRST) // step + 1) * step
        while True:
            yield at
            at += step


def _own(history: History, since: int) -> list[int]:
    return [number for number in range(since + 1, history.last + 1) if number % 5 == 0]


def test_a_schedule_that_cannot_be_computed_is_named_and_what_left_a_trace_is_listed(ground: Ground) -> None:
    history = History(ground)
    mark = fingerprint(Own())
    history.register(history[0], mark)
    first, *others = _own(history, history[0])
    _ended(history, first, "done")
    audit = history.audit()
    assert audit.not_computed == (Definition(mark, slot(history[0])),)
    traced = _by_slot(audit)[slot(first)]
    assert (traced.end, traced.called_for) == ("done", False)
    assert not {slot(number) for number in others} & _by_slot(audit).keys()


def test_a_schedule_that_is_at_hand_is_computed(ground: Ground) -> None:
    history = History(ground)
    history.register(history[0], fingerprint(Own()))
    first, *others = _own(history, history[0])
    _ended(history, first, "done")
    audit = history.audit(since=history[0], current=Own())
    assert audit.not_computed == ()
    assert [found.slot for found in audit.slots] == [slot(number) for number in (first, *others)]
    assert audit.counts == {"done": 1, "overdue": len(others)}
    assert all(found.called_for for found in audit.slots)


def test_another_schedule_at_hand_is_no_help(ground: Ground) -> None:
    history = History(ground)
    history.register(history[0], fingerprint(Own()))
    assert history.audit(since=history[0], current=timedelta(minutes=5)).slots == ()


# Requests


def _run_now(history: History, at: datetime, state: str) -> None:
    """A slot off the schedule that was asked for, and brought to an end."""
    ground, key = history.ground, tick_key(ENTRY, at)
    claim = Claim(
        key=key,
        entry=ENTRY,
        slot=at,
        fingerprint=FINGERPRINT,
        task="proj.task",
        task_id="id",
        prefer="missed",
        ttl=3600,
        request="q",
    )
    assert ground.ledger.claim(history.term, f"batch {key}", [claim]) == ["claimed"]
    ground.client.hset(ground.keys.slot(key), "state", state)


def test_slots_that_were_asked_for_off_the_schedule_are_listed_with_the_others(ground: Ground) -> None:
    history = History(ground)
    history.miss(history[0], history[9], "nobody led")
    at = slot(history[4]) + timedelta(seconds=7, milliseconds=250)
    _run_now(history, at, "done")
    audit = history.audit()
    (asked_for,) = [found for found in audit.slots if not found.called_for]
    assert (asked_for.slot, asked_for.end, asked_for.key) == (at, "done", tick_key(ENTRY, at))
    assert asked_for.record is not None
    assert asked_for.record.request == "q"
    assert audit.slots.index(asked_for) == 5
    assert audit.counts == {"missed": 10, "done": 1, "overdue": 20}


def test_a_slot_of_the_schedule_that_was_asked_for_is_listed_once_and_ends_as_its_run(ground: Ground) -> None:
    history = History(ground)
    history.miss(history[0], history[9], "nobody led")
    _run_now(history, slot(history[4]), "done")
    assert history.end(history[4]) == ("done", "")
    assert len(history.audit().slots) == 30


def test_a_slot_off_the_schedule_that_a_worker_has_begun_is_listed_too(ground: Ground) -> None:
    """As one whose claim the ledger has lost, or one of a job outside Celery."""
    history = History(ground)
    number = history[4]
    history.register(history[5], fingerprint(Own()))
    off = next(n for n in range(history[6], history.last) if n % 5)
    ground.start(off, history.term.epoch)
    found = _by_slot(history.audit())
    assert (found[slot(off)].end, found[slot(off)].called_for) == ("running", False)
    assert found[slot(number)].called_for


def test_requests_of_other_entries_and_other_times_are_not_listed(ground: Ground) -> None:
    history = History(ground)
    _run_now(history, slot(history[4]) + timedelta(seconds=7), "done")
    assert all(found.called_for for found in history.audit(since=history[5]).slots)
    assert ground.ledger.audit("hourly", slot(history[0]), slot(history.last)).slots == ()


# What can't be read


@pytest.mark.parametrize("what", ["record", "range", "definition"])
def test_what_cannot_be_read_is_logged_and_no_reason_to_fail(
    ground: Ground, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    history = History(ground)
    _ended(history, history[0], "done")
    history.miss(history[1], history[1], "too late")
    if what == "record":
        ground.write(history[0], slot="no number")
    elif what == "range":
        ground.client.zadd(ground.keys.unsent(ENTRY), {"{}": 1})
    else:
        ground.client.hset(ground.keys.definitions, ENTRY, "{}")
    audit = history.audit()
    if what == "record":
        assert history.end(history[0])[0] == "unexplained"
    elif what == "range":
        assert history.end(history[1]) == ("missed", "too late")
    else:
        assert (audit.known_since, len(audit.slots)) == (None, 1)
    assert f"the {what}" in caplog.text


# undone


def test_slots_that_are_not_done_a_period_later_are_counted(ground: Ground) -> None:
    history = History(ground, 20)
    _ended(history, history[0], "done")
    for i, state in enumerate(["failed", "sent", "running", "missed", "skipped", "abandoned"], start=1):
        _ended(history, history[i], state)
    history.miss(history[7], history[8], "paused", "skipped")
    for number in range(history[9], history.last + 1):
        _ended(history, number, "done")
    assert ground.ledger.undone(ENTRY) == 5


def test_the_latest_slot_has_a_period_to_be_done(ground: Ground) -> None:
    history = History(ground, 20)
    for number in range(history[0], history.last + 1):
        _ended(history, number, "done")
    for number in (history.last + 1, history.last + 2):
        # Due now, or about to be.
        _ended(history, number, "sent")
    assert ground.ledger.undone(ENTRY) in (0, 1)


def test_a_hundred_slots_are_looked_at_at_most_and_forgotten_ones_do_not_count(ground: Ground) -> None:
    history = History(ground, 300)
    assert 58 <= ground.ledger.undone(ENTRY) <= 60
    history.miss(history[0], history.last, "nobody led")
    assert 58 <= ground.ledger.undone(ENTRY) <= 60
    ground.client.delete(ground.keys.unsent(ENTRY))
    assert 56 <= ground.ledger.undone(ENTRY) <= 60


def test_an_entry_that_nobody_knows_has_nothing_undone(ground: Ground) -> None:
    assert ground.ledger.undone("unknown") == 0


def test_a_schedule_that_cannot_be_computed_needs_to_be_at_hand_to_be_counted(ground: Ground) -> None:
    history = History(ground)
    history.register(history[0], fingerprint(Own()))
    first, *others = _own(history, history[0])
    _ended(history, first, "done")
    assert ground.ledger.undone(ENTRY) == 0
    before = ground.store.now()
    undone = ground.ledger.undone(ENTRY, Own())
    after = ground.store.now()
    least, most = (sum(slot(n) <= now - 5 * MINUTE for n in others) for now in (before, after))
    assert least <= undone <= most


def test_an_audit_needs_no_leader(ground: Ground) -> None:
    history = History(ground)
    _ended(history, history[0], "done")
    ground.lapse()
    assert history.end(history[0])[0] == "done"
