"""Looking after slots that earlier leaders claimed without a confirm, or gave back, and runs that died."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from functools import partial
from itertools import pairwise
from typing import Any

from celery_leaderbeat.errors import StampError
from celery_leaderbeat.ledger import Ledger
from celery_leaderbeat.plan import Plan
from celery_leaderbeat.records import SlotRecord
from celery_leaderbeat.reports import Reports
from celery_leaderbeat.signals import run_died, slot_abandoned
from celery_leaderbeat.term import Term
from celery_leaderbeat.tick import parse_tick_key

__all__ = ["Sweep"]

logger = logging.getLogger(__name__)

_LOST = "Redis has lost its record, and with it whether it was sent"
_REMOVED = "no entry of its name can be sent: it was removed, or refused at start"


class Sweep:
    """The sweep of one term.

    A slot that was given back, or that an older epoch claimed for an entry that prefers a duplicate, is taken
    up again. One that an older epoch claimed for an entry that prefers a missed slot counts as missed, once
    that epoch's leader can't publish it any more: its trust ended before this term began, and what it had
    under way then is over after the grace. A run whose lease is over has died: its slot is taken up again as
    the next attempt (`on_crash: "rerun"`), abandoned, or left to the broker's redelivery.

    Parameters:
        app: the sender of signals.
        ledger: where the records are.
        term: the term that sweeps.
        plans: the plans of all entries.
        reports: says what is missed.
        grace: seconds after the begin of the term.
        taken_up: called with each plan that has got a slot back.
        known_end: what became of a claim of this replica's, as `Sender.known_end` has it.
    """

    def __init__(
        self,
        app: Any,
        ledger: Ledger,
        term: Term,
        plans: Mapping[str, Plan],
        reports: Reports,
        grace: float,
        taken_up: Callable[[Plan], None],
        known_end: Callable[[SlotRecord], str] = lambda _: "",
    ) -> None:
        self._app = app
        self._ledger = ledger
        self._term = term
        self._plans = plans
        self._reports = reports
        self._until = term.since + grace
        self._taken_up = taken_up
        self._known_end = known_end
        self._doubtful: dict[str, SlotRecord] = {}
        self._dying: dict[str, SlotRecord] = {}

    def run(self) -> Collection[str]:
        """Look once. The tick keys of slots that are in doubt still.

        Raises:
            NotLeading: the term is over.
            StoreError: the ledger doesn't answer; look again.
        """
        settled: list[str] = []
        for found in self._ledger.unfinished():
            if isinstance(found, str):
                self._lost(found)
                settled.append(found)
            elif found.state == "running":
                self._dying[found.key] = found
            elif found.state == "returned" or (
                found.state == "claimed" and found.epoch < self._term.epoch and found.prefer == "duplicate"
            ):
                self._inherit(found, found.attempt)
            elif found.state == "claimed" and found.epoch < self._term.epoch:
                self._doubtful[found.key] = found
            elif found.state == "claimed" and found.epoch > self._term.epoch:
                # A newer leader's, which is about to publish it: this term is over, and hasn't heard of it yet.
                continue
            elif found.state == "claimed":
                # Ours, and no batch is under way while the sweep runs: the claim came to be after its batch was
                # given up, and nobody will publish it; or Redis has gone back to a time before it was confirmed.
                end = self._known_end(found)
                if end:
                    self._ledger.confirm(found.epoch, found.batch, {found.key: end})
                else:
                    self._ledger.give_back(found.epoch, found.batch, [found.key], "its claim came too late")
            else:
                settled.append(found.key)
        self._bury()
        return self._doubt(settled)

    def _doubt(self, settled: list[str]) -> Collection[str]:
        # What was in doubt stays in doubt here until the answer has been seen: it is reported once.
        claims = sorted(self._doubtful.values(), key=lambda claim: (claim.entry, claim.slot))
        keys = [*(claim.key for claim in claims), *settled]
        if not keys:
            return ()
        following = {after.key for before, after in pairwise(claims) if self._follows(before, after)}
        answers = self._ledger.doubt(self._term, keys, self._until, following)
        missed: list[SlotRecord] = []
        # The answers about what is settled come last, and say nothing new.
        for claim, state in zip(claims, answers, strict=False):
            if missed and (state != "unconfirmed" or claim.key not in following):
                self._unconfirmed(missed)
                missed = []
            if state == "unconfirmed":
                missed.append(claim)
            if state != "wait":
                del self._doubtful[claim.key]
        if missed:
            self._unconfirmed(missed)
        return self._doubtful.keys()

    def _follows(self, before: SlotRecord, after: SlotRecord) -> bool:
        """Whether two claims of one epoch are neighbours on their entry's schedule."""
        plan = self._plans.get(before.entry)
        return (
            (before.entry, before.epoch) == (after.entry, after.epoch)
            and plan is not None
            and before.slot + plan.period_of(before.slot) == after.slot
        )

    def _unconfirmed(self, claims: list[SlotRecord]) -> None:
        """Report neighbouring slots that one leader left unconfirmed."""
        first, last = claims[0], claims[-1]
        them = "it" if first is last else "them"
        reason = f"unconfirmed: epoch {first.epoch} claimed {them} and was gone before it confirmed {them}"
        self._reports.missed(first.entry, first.slot, last.slot, len(claims), reason)

    def _lost(self, key: str) -> None:
        """Redis has lost the record of a slot that was to be looked after."""
        try:
            entry, slot = parse_tick_key(key)
        except StampError:
            return
        plan = self._plans.get(entry)
        prefer = "missed" if plan is None else plan.policy.prefer
        self._write_off(key, (entry, slot, slot, 1, _LOST), prefer)

    def _write_off(self, key: str, what: tuple[str, datetime, datetime, int, str], prefer: str) -> None:
        with self._reports.after(partial(self._reports.missed, *what, prefer)):
            self._ledger.write_off(self._term, "missed", *what, "", [key])

    def _bury(self) -> None:
        """Decide about runs whose lease is over."""
        # As with doubts: what was asked about is asked again until the answer has been seen.
        dying = list(self._dying.values())
        if not dying:
            return
        answers = self._ledger.crash(self._term, list(self._dying))
        self._dying.clear()
        for record, state in zip(dying, answers, strict=True):
            if state not in ("returned", "abandoned", "died"):
                continue
            following = {"returned": "rerun", "abandoned": "abandoned", "died": "redelivery"}[state]
            told = {"key": record.key, "entry": record.entry, "slot": record.slot, "attempt": record.attempt}
            run_died.send_robust(sender=self._app, worker=record.worker, next=following, **told)
            extra = {
                "action": following,
                "entry": record.entry,
                "tick_key": record.key,
                "worker": record.worker,
            }
            if state == "returned":
                logger.warning(
                    "Slot %s: its run on %s died. It is sent again as attempt %d.",
                    record.key,
                    record.worker,
                    record.attempt + 1,
                    extra=extra,
                )
                self._inherit(record, record.attempt + 1)
            elif state == "abandoned":
                now = self._ledger.slot(record.key)
                reason = now.reason if now is not None else f"its run on {record.worker} died"
                logger.error(
                    "Slot %s is abandoned: %s. Nothing runs it again but a request (`leaderbeat backfill`, or `leaderbeat "
                    "run` for a slot that isn't the schedule's).",
                    record.key,
                    reason,
                    extra=extra,
                )
                slot_abandoned.send_robust(sender=self._app, reason=reason, **told)
            else:
                logger.warning(
                    "Slot %s: its run on %s died. Nothing runs it again unless the broker delivers its message again.",
                    record.key,
                    record.worker,
                    extra=extra,
                )

    def _inherit(self, record: SlotRecord, attempt: int) -> None:
        plan = self._plans.get(record.entry)
        if plan is not None and plan.last is not None:
            if record.slot not in plan.returned:
                plan.give_back(record.slot, attempt, record.request, record.state == "claimed")
                self._taken_up(plan)
            return
        self._write_off(record.key, (record.entry, record.slot, record.slot, 1, _REMOVED), record.prefer)
