"""What the sweep makes of slots that it finds in the ledger, where a real server would take too long to get there."""

from __future__ import annotations

import logging
from collections.abc import Collection
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_leaderbeat.plan import Plan
from celery_leaderbeat.policy import Policy
from celery_leaderbeat.records import SlotRecord
from celery_leaderbeat.reports import Reports
from celery_leaderbeat.sweep import Sweep
from celery_leaderbeat.term import Term
from celery_leaderbeat.tick import slot_to_us, tick_key


class FakeLedger:
    """Has slots to look after, and remembers what was written off."""

    def __init__(self, *unfinished: Any) -> None:
        self._unfinished = unfinished
        self.written_off: list[tuple[Any, ...]] = []
        self.given_back: list[str] = []
        self.confirmed: list[tuple[str, dict[str, str]]] = []
        self.asked: list[tuple[list[str], set[str]]] = []
        self.states: dict[str, str] = {}

    def unfinished(self) -> list[Any]:
        return list(self._unfinished)

    def write_off(self, term: Term, state: str, *rest: Any) -> int:
        self.written_off.append((state, *rest))
        return 1

    def give_back(self, epoch: int, batch: str, keys: list[str], reason: str) -> None:
        self.given_back.append(batch)

    def confirm(self, epoch: int, batch: str, outcomes: dict[str, str]) -> None:
        self.confirmed.append((batch, outcomes))

    def doubt(self, term: Term, keys: list[str], until: float, following: Collection[str] = ()) -> list[str]:
        self.asked.append((keys, set(following)))
        return [self.states.get(key, "") for key in keys]


def test_a_slot_whose_record_is_lost_is_missed_aloud(caplog: pytest.LogCaptureFixture) -> None:
    ledger = FakeLedger("bill@2026-10-02T03:00:00Z", "no tick key")
    term = Term("v", "me", 9)
    sweep = Sweep(None, ledger, term, {}, Reports(None), 0.0, lambda plan: None)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO):
        assert not sweep.run()
    ((state, entry, *_, keys),) = ledger.written_off
    assert (state, entry, keys) == ("missed", "bill", ["bill@2026-10-02T03:00:00Z"])
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "'bill'" in record.getMessage()
    assert "2026-10-02T03:00:00Z is missed: Redis has lost its record" in record.getMessage()


@pytest.mark.parametrize(("prefer", "level"), [("missed", "WARNING"), ("duplicate", "INFO")])
def test_a_lost_record_raises_an_alarm_only_where_a_gap_does(
    prefer: str, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = FakeLedger("bill@2026-10-02T03:00:00Z")
    plans = {"bill": Plan("bill", None, 60, "f", Policy(prefer=prefer))}
    sweep = Sweep(None, ledger, Term("v", "me", 9), plans, Reports(None), 0.0, lambda plan: None)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO):
        sweep.run()
    assert [record.levelname for record in caplog.records] == [level]


def _left(entry: str, minute: int, epoch: int = 8) -> SlotRecord:
    """A claim of a leader that is gone."""
    slot = datetime(2026, 10, 2, 3, tzinfo=timezone.utc) + timedelta(minutes=minute)
    fields = {"state": "claimed", "entry": entry, "slot": str(slot_to_us(slot)), "epoch": str(epoch)}
    return SlotRecord.read(tick_key(entry, slot), fields)


def test_neighbours_that_one_leader_left_unconfirmed_are_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    left = [_left("bill", minute) for minute in (4, 2, 3, 6, 8, 7)]
    left += [_left("bill", 9, 7), _left("mail", 5), _left("gone", 1), _left("gone", 2)]
    ledger = FakeLedger(*left)
    ledger.states = {claim.key: "unconfirmed" for claim in left}
    ledger.states[left[4].key] = "wait"
    plans = {name: Plan(name, None, 60, "f", Policy()) for name in ("bill", "mail")}
    sweep = Sweep(None, ledger, Term("v", "me", 9), plans, Reports(None), 0.0, lambda plan: None)  # type: ignore[arg-type]
    assert sweep.run(), "one is still in doubt"
    it, them = (f"claimed {each} and was gone before it confirmed {each}." for each in ("it", "them"))
    assert [record.getMessage() for record in caplog.records] == [
        *(
            f"Entry 'bill': {count} slots from 2026-10-02T03:0{first}:00Z to 2026-10-02T03:0{last}:00Z are missed: "
            f"unconfirmed: epoch 8 {them}"
            for count, first, last in ((3, 2, 4), (2, 6, 7))
        ),
        *(
            f"Entry {entry!r}: the slot 2026-10-02T03:0{minute}:00Z is missed: unconfirmed: epoch {epoch} {it}"
            for entry, minute, epoch in (("bill", 9, 7), ("gone", 1, 8), ("gone", 2, 8), ("mail", 5, 8))
        ),
    ]
    ((_, following),) = ledger.asked
    assert {key[-9:] for key in following} == {"03:03:00Z", "03:04:00Z", "03:07:00Z", "03:08:00Z"}
    caplog.clear()
    ledger.states[left[4].key] = "unconfirmed"
    ledger._unfinished = ()
    assert not sweep.run()
    (record,) = caplog.records
    assert "the slot 2026-10-02T03:08:00Z is missed" in record.getMessage(), "once its time has come"


def _claimed(epoch: int) -> SlotRecord:
    slot = {"state": "claimed", "entry": "bill", "slot": "0", "epoch": str(epoch), "batch": f"of {epoch}"}
    return SlotRecord.read("bill@1970-01-01T00:00:00Z", slot)


@pytest.mark.parametrize(("epoch", "given_back"), [(9, ["of 9"]), (10, [])])
def test_a_leader_that_is_superseded_leaves_its_successors_claims_alone(
    epoch: int, given_back: list[str]
) -> None:
    ledger = FakeLedger(_claimed(epoch))
    sweep = Sweep(None, ledger, Term("v", "me", 9), {}, Reports(None), 0.0, lambda plan: None)  # type: ignore[arg-type]
    assert not sweep.run()
    assert ledger.given_back == given_back


@pytest.mark.parametrize("state", ["claimed", "returned"])
def test_what_a_leader_that_is_gone_had_claimed_may_have_been_sent(state: str) -> None:
    slot = {"state": state, "entry": "bill", "slot": "0", "epoch": "8", "batch": "b", "prefer": "duplicate"}
    plan = Plan("bill", None, 60, "f", Policy(prefer="duplicate", overlap="queue"))
    plan.start(datetime(2026, 10, 2, tzinfo=timezone.utc))
    ledger = FakeLedger(SlotRecord.read("bill@1970-01-01T00:00:00Z", slot))
    term, taken_up = Term("v", "me", 9), []
    Sweep(None, ledger, term, {"bill": plan}, Reports(None), 0.0, taken_up.append).run()  # type: ignore[arg-type]
    assert taken_up == [plan]
    assert [back.maybe_sent for back in plan.returned.values()] == [state == "claimed"]


@pytest.mark.parametrize("end", ["sent", "unconfirmed"])
def test_an_own_claim_whose_end_is_known_is_confirmed_and_not_given_back(end: str) -> None:
    """Redis has gone back to a time before that; who leads next would send again what is given back."""
    ledger, claim = FakeLedger(_claimed(9)), _claimed(9)
    term, reports = Term("v", "me", 9), Reports(None)
    Sweep(None, ledger, term, {}, reports, 0.0, lambda plan: None, lambda _: end).run()  # type: ignore[arg-type]
    assert ledger.confirmed == [(claim.batch, {claim.key: end})]
    assert not ledger.given_back
