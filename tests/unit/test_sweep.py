"""What the sweep makes of slots that it finds in the ledger, where a real server would take too long to get there."""

from __future__ import annotations

import logging
from datetime import datetime, timezone
from typing import Any

import pytest

from celery_leaderbeat.plan import Plan
from celery_leaderbeat.policy import Policy
from celery_leaderbeat.records import SlotRecord
from celery_leaderbeat.reports import Reports
from celery_leaderbeat.sweep import Sweep
from celery_leaderbeat.term import Term


class FakeLedger:
    """Has slots to look after, and remembers what was written off."""

    def __init__(self, *unfinished: Any) -> None:
        self._unfinished = unfinished
        self.written_off: list[tuple[Any, ...]] = []
        self.given_back: list[str] = []

    def unfinished(self) -> list[Any]:
        return list(self._unfinished)

    def write_off(self, term: Term, state: str, *rest: Any) -> int:
        self.written_off.append((state, *rest))
        return 1

    def give_back(self, epoch: int, batch: str, keys: list[str], reason: str) -> None:
        self.given_back.append(batch)

    def doubt(self, term: Term, keys: list[str], until: float) -> list[str]:
        return [""] * len(keys)


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
