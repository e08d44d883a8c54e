"""Looking after the slots that earlier leaders claimed and didn't confirm, or gave back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from celery_leaderbeat.ledger import Ledger, SlotRecord
from celery_leaderbeat.plan import Plan
from celery_leaderbeat.reports import report_missed
from celery_leaderbeat.term import Term

__all__ = ["Sweep"]

logger = logging.getLogger(__name__)

_REMOVED = "its entry isn't in the schedule any more"


class Sweep:
    """The sweep of one term.

    A slot that was given back, or that an older epoch claimed for an entry that prefers a duplicate, is taken
    up again. One that an older epoch claimed for an entry that prefers a missed slot counts as missed, once
    that epoch's leader can't publish it any more: its trust ended before this term began, and what it had
    under way then is over after the grace.

    Parameters:
        app: the sender of signals.
        ledger: where the records are.
        term: the term that sweeps.
        plans: the plans of all entries.
        grace: seconds after the begin of the term.
        taken_up: called with each plan that has got a slot back.
    """

    def __init__(
        self,
        app: Any,
        ledger: Ledger,
        term: Term,
        plans: Mapping[str, Plan],
        grace: float,
        taken_up: Callable[[Plan], None],
    ) -> None:
        self._app = app
        self._ledger = ledger
        self._term = term
        self._plans = plans
        self._until = term.since + grace
        self._taken_up = taken_up
        self._doubtful: dict[str, SlotRecord] = {}

    def run(self) -> bool:
        """Look once. True while slots are in doubt.

        Raises:
            NotLeading: the term is over.
            StoreError: the ledger doesn't answer; look again.
        """
        settled: list[str] = []
        for record in self._ledger.unfinished():
            if isinstance(record, str):
                settled.append(record)
            elif record.state == "returned" or (
                record.state == "claimed" and record.epoch < self._term.epoch and record.prefer == "duplicate"
            ):
                self._inherit(record)
            elif record.state == "claimed" and record.epoch < self._term.epoch:
                self._doubtful[record.key] = record
            elif record.state == "claimed":
                # Ours, and no batch is under way while the sweep runs: the claim came to be after its batch was
                # given up. Nobody will publish it.
                self._ledger.give_back(record.epoch, record.batch, [record.key], "its claim came too late")
            else:
                settled.append(record.key)
        # What was in doubt stays in doubt here until the answer has been seen: it is reported once.
        keys = [*self._doubtful, *settled]
        if not keys:
            return False
        for key, state in zip(keys, self._ledger.doubt(self._term, keys, self._until), strict=True):
            if state == "wait":
                continue
            claim = self._doubtful.pop(key, None)
            if claim is not None and state == "unconfirmed":
                reason = f"epoch {claim.epoch} claimed it and was gone before it confirmed it"
                report_missed(self._app, claim.entry, claim.slot, claim.slot, 1, reason)
        return bool(self._doubtful)

    def _inherit(self, record: SlotRecord) -> None:
        plan = self._plans.get(record.entry)
        if plan is not None and plan.last is not None:
            if record.slot not in plan.returned:
                plan.give_back(record.slot)
                self._taken_up(plan)
            return
        self._ledger.miss(self._term, record.entry, record.slot, record.slot, 1, _REMOVED, "", [record.key])
        report_missed(self._app, record.entry, record.slot, record.slot, 1, _REMOVED)
