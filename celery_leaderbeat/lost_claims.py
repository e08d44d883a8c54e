"""Slots that were claimed or given back, and whose records Redis has lost: what becomes of each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial

from celery_leaderbeat.batch import record_lifetime
from celery_leaderbeat.errors import StampError
from celery_leaderbeat.ledger import Ledger
from celery_leaderbeat.plan import Plan, Returned
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
#: So many slots of an entry are missed at once.
_AT_ONCE = 100


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
        self._unswept: dict[str, Returned] = {}

    def registered(self) -> None:
        """The term begins: until the sweep has found it again, what waits is known here alone."""
        self._unswept = self._waiting()
        self._shadow.see_claimed(self._unswept, led=False)

    def left(self) -> None:
        """This replica doesn't lead any more: whoever does need not know of what waits, if Redis loses it."""
        self._shadow.leaves({**self._unswept, **self._given_back()})

    def swept(self) -> None:
        """The sweep has found all that waits and is recorded."""
        self._unswept = {}

    def settle(self, term: Term) -> None:
        """Decide about all slots whose records are lost.

        What this leader knows to be unsent is recorded again as given back. The others may have been sent: they go as
        their entry prefers. What is recorded again stays known here until the sweep has found it: it may be lost again.

        Raises:
            NotLeading: the lease is gone.
            StoreError: no answer; ask again.
        """
        waiting, claims = self._waiting(), dict(self._shadow.open_claims)
        lost = [key for key, record in self._ledger.slots([*{**waiting, **claims}]).items() if record is None]
        self._progress()
        recalled: list[Claim] = []
        missed: list[str] = []
        for key in lost:
            back = waiting.get(key)
            claim = self._claim(key, (claims.get(key) if back is None else back.attempt) or 1)
            sure = back is not None and not back.maybe_sent and not self._shadow.gap_is_open
            by_another = claims.get(key) is None if back is None else back.maybe_sent
            if claim is not None and (sure or self._goes_twice(claim, by_another)):
                recalled.append(claim)
            else:
                missed.append(key)
        if recalled:
            self._record_again(term, recalled)
        self._miss(term, missed)

    def _waiting(self) -> dict[str, Returned]:
        """The slots that this leader has to send, which it hasn't sent, though an earlier leader may have."""
        if not self._shadow.led_last:
            # Another leader has taken them up.
            return {}
        return {**self._unswept, **self._given_back()}

    def _given_back(self) -> dict[str, Returned]:
        return {
            tick_key(name, slot): back
            for name, plan in self._plans.items()
            for slot, back in plan.returned.items()
            # What was asked for needn't have a record.
            if not back.request
        }

    def _goes_twice(self, claim: Claim, by_another: bool) -> bool:
        """Whether a slot that may have been sent is sent again."""
        if claim.prefer != "duplicate" or not self._shadow.led_last:
            return False
        # What others had claimed may have been begun by a worker that died.
        return not by_another or claim.on_crash != "skip"

    def _claim(self, key: str, attempt: int) -> Claim | None:
        """A claim as it was; None where the schedule doesn't have its entry."""
        try:
            entry, slot = parse_tick_key(key)
        except StampError:
            return None
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

    def _miss(self, term: Term, keys: Iterable[str]) -> None:
        """Miss these slots, in the order of each entry's schedule."""
        slots: dict[str, list[tuple[datetime, str]]] = {}
        unreadable = []
        for key in keys:
            try:
                entry, slot = parse_tick_key(key)
            except StampError:
                unreadable.append(key)
            else:
                slots.setdefault(entry, []).append((slot, key))
        self._shadow.settled(*unreadable)
        for entry, found in slots.items():
            found.sort()
            for i in range(0, len(found), _AT_ONCE):
                self._progress()
                self._miss_some(term, entry, found[i : i + _AT_ONCE])

    def _miss_some(self, term: Term, entry: str, slots: Sequence[tuple[datetime, str]]) -> None:
        plan = self._plans.get(entry)
        fingerprint, prefer = ("", "missed") if plan is None else (plan.fingerprint, plan.policy.prefer)
        (first, _), (last, _), keys = slots[0], slots[-1], [key for _, key in slots]
        what = (entry, first, last, len(slots), LOST)
        with self._reports.after(partial(self._reports.missed, *what, prefer)):
            self._ledger.write_off(term, "missed", *what, fingerprint, keys)
        # The ledger knows it.
        for slot, key in slots:
            self._unswept.pop(key, None)
            if plan is not None:
                plan.returned.pop(slot, None)
        self._shadow.settled(*keys)
