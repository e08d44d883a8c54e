"""Slots that were claimed or given back, and whose records Redis has lost: what becomes of each."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from datetime import datetime

from celery_leaderbeat.batch import record_lifetime
from celery_leaderbeat.errors import StampError
from celery_leaderbeat.ledger import Ledger
from celery_leaderbeat.plan import Plan
from celery_leaderbeat.recall import LOST
from celery_leaderbeat.records import Claim
from celery_leaderbeat.reports import Reports
from celery_leaderbeat.shadow import Shadow
from celery_leaderbeat.term import Term
from celery_leaderbeat.tick import parse_tick_key, slot_text, task_id, tick_key

__all__ = ["RECORDED_AGAIN", "LostClaims"]

logger = logging.getLogger(__name__)

#: Why slots wait to be sent whose records were lost.
RECORDED_AGAIN = "Redis has lost its record; it wasn't sent, or its entry prefers a duplicate"


class LostClaims:
    """Decides, once data was lost, about the slots that were under way.

    Parameters:
        shadow: which slots were claimed, as far as this replica remembers.
        plans: the plans of all entries.
        ledger: what may have lost data.
        reports: says what is missed.
        progress: called between slots.
    """

    def __init__(
        self,
        shadow: Shadow,
        plans: Mapping[str, Plan],
        ledger: Ledger,
        reports: Reports,
        progress: Callable[[], None],
    ) -> None:
        self._shadow = shadow
        self._plans = plans
        self._ledger = ledger
        self._reports = reports
        self._progress = progress

    def known_unsent(self) -> dict[str, int]:
        """The tick keys of slots that this leader knows to be claimed and unsent, with their attempts."""
        if not self._shadow.led_last:
            # Another leader has taken them up.
            return {}
        return {
            tick_key(name, slot): back.attempt
            for name, plan in self._plans.items()
            for slot, back in plan.returned.items()
            # What was asked for needn't have a record.
            if not back.request
        }

    def settle(self, term: Term) -> None:
        """Decide about all slots whose records are lost.

        What this leader knows to be unsent is recorded again as given back. The others may have been sent: they go as
        their entry prefers.

        Raises:
            NotLeading: the lease is gone.
            StoreError: no answer; ask again.
        """
        unsent, claims = self.known_unsent(), self._shadow.open_claims
        lost = [key for key, record in self._ledger.slots([*{**unsent, **claims}]).items() if record is None]
        named: dict[str, tuple[str, datetime]] = {}
        for key in lost:
            with contextlib.suppress(StampError):
                named[key] = parse_tick_key(key)
        recalled: list[Claim] = []
        missed: list[str] = []
        for key, (entry, slot) in named.items():
            by_another = key not in unsent and claims.get(key) is None
            claim = self._claim(key, entry, slot, unsent.get(key) or claims.get(key) or 1)
            sure = key in unsent and not self._shadow.gap_is_open
            if claim is not None and (sure or self._goes_twice(claim, by_another)):
                recalled.append(claim)
            else:
                missed.append(key)
        if recalled:
            self._record_again(term, recalled)
        for key in missed:
            self._progress()
            self._miss(term, key, *named[key])
        for key in lost:
            self._shadow.settled(key)
        for entry, slot in named.values():
            if entry in self._plans:
                self._plans[entry].returned.pop(slot, None)

    def _goes_twice(self, claim: Claim, by_another: bool) -> bool:
        """Whether a slot that may have been sent is sent again."""
        if claim.prefer != "duplicate" or not self._shadow.led_last:
            return False
        # What others had claimed may have been begun by a worker that died.
        return not by_another or claim.on_crash != "skip"

    def _claim(self, key: str, entry: str, slot: datetime, attempt: int) -> Claim | None:
        """A claim as it was; None where the schedule doesn't have its entry."""
        plan = self._plans.get(entry)
        if plan is None:
            return None
        settings = self._ledger.settings
        return Claim(
            key=key,
            entry=entry,
            slot=slot,
            fingerprint=plan.fingerprint,
            task=plan.entry.task,
            task_id=task_id(settings.key_prefix, key, attempt),
            prefer=plan.policy.prefer,
            ttl=record_lifetime(plan, slot, settings.slot_retention),
            attempt=attempt,
            on_crash=plan.policy.on_crash,
            max_attempts=plan.policy.max_attempts,
        )

    def _record_again(self, term: Term, claims: list[Claim]) -> None:
        self._ledger.recall_slots(term, claims, RECORDED_AGAIN)
        logger.warning(
            "Redis has lost the records of %d slots, from %s to %s, that weren't sent, or whose entries prefer a "
            "duplicate. They are recorded again, and sent as the policies say.",
            len(claims),
            slot_text(min(claim.slot for claim in claims)),
            slot_text(max(claim.slot for claim in claims)),
            extra={"action": "slots_recalled", "count": len(claims)},
        )

    def _miss(self, term: Term, key: str, entry: str, slot: datetime) -> None:
        plan = self._plans.get(entry)
        fingerprint, prefer = ("", "missed") if plan is None else (plan.fingerprint, plan.policy.prefer)
        self._ledger.write_off(term, "missed", entry, slot, slot, 1, LOST, fingerprint, [key])
        self._reports.missed(entry, slot, slot, 1, LOST, prefer)
