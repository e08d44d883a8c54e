"""Going on from what Redis knows, and putting back what it has lost: the leader's use of the shadow."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from datetime import datetime

from celery_leaderbeat.clock import FleetClock
from celery_leaderbeat.election import Elector
from celery_leaderbeat.ledger import Ledger, NotLeading
from celery_leaderbeat.lost_claims import LostClaims
from celery_leaderbeat.pauses import Pause, Pauses, lacking_pauses
from celery_leaderbeat.plan import Plan
from celery_leaderbeat.recall import LOST, recall
from celery_leaderbeat.records import EntryRecord, Recalled
from celery_leaderbeat.reports import Reports
from celery_leaderbeat.shadow_reader import decided_in
from celery_leaderbeat.term import Term
from celery_leaderbeat.tick import slot_text

__all__ = ["Restorer"]

logger = logging.getLogger(__name__)


class Restorer:
    """What one replica puts back into the ledger while it leads.

    Parameters:
        clock: the fleet's clock.
        elector: whose shadow is used.
        plans: the plans of all entries.
        ledger: what may have lost data.
        reports: says what is missed.

    Attributes:
        found_loss: whether data was found to be lost as the term began.
    """

    def __init__(
        self, clock: FleetClock, elector: Elector, plans: Mapping[str, Plan], ledger: Ledger, reports: Reports
    ) -> None:
        self._clock = clock
        self._elector = elector
        self._shadow = elector.shadow
        self._plans = plans
        self._ledger = ledger
        self._reports = reports
        self._lost_claims = LostClaims(elector.shadow, plans, ledger, reports, elector.progress)
        self._recalled: tuple[Term, Mapping[str, Recalled]] | None = None
        self._registered = 0
        # What was decided by the ledger's totals at the latest look, and what this replica had claimed by then. One value:
        # a signal handler may ask in between.
        self._seen = (0, 0)
        self.found_loss = False

    def register(self, term: Term) -> dict[str, tuple[str, datetime]]:
        """As `Ledger.register`; what the ledger has lost is put back first.

        Raises:
            NotLeading: the lease is gone.
            StoreError: no answer; ask again.
        """
        now = self._clock.utcnow()
        # Before the entries: from then on it is known that these slots were decided, and they may be lost before the
        # sweep has looked after them.
        due = self._ledger.store.due_members(self._ledger.store.keys.unfinished)
        stored = self._ledger.entries()
        self._shadow.see_claimed(due, led=False)
        if self._recalled is None or self._recalled[0] != term:
            # Kept until an answer has been seen: what is missed is said once.
            found = recall(self._shadow, self._plans, stored, now, self._elector.progress)
            self._recalled = (term, found)
        recalled = self._recalled[1]
        if recalled:
            self._lost_claims.settle(term)
        fingerprints = {name: plan.fingerprint for name, plan in self._plans.items()}
        self.found_loss = bool(recalled)
        positions = self._ledger.register(term, fingerprints, now, stored, recalled, LOST)
        self._recalled = None
        self._lost_claims.registered()
        self._note(positions, stored, now)
        if recalled:
            self._say(recalled, positions)
        return positions

    def _note(
        self, positions: Mapping[str, tuple[str, datetime]], stored: Mapping[str, EntryRecord], now: datetime
    ) -> None:
        for name, (kind, slot) in positions.items():
            record = stored.get(name)
            if kind == "forgotten":
                self._shadow.forget(name)
            elif name in self._plans:
                self._shadow.stands(name, slot, self._plans[name].fingerprint)
            elif record is None:
                self._shadow.removed(name, slot, now if kind == "removed" else None)
            else:
                # Who led before may have decided more of it than this replica has read.
                self._shadow.removed(name, slot, record.removed or now, record.fingerprint)
        self._shadow.put_back()
        self._seen = (0, self._shadow.claims)
        self._registered = sum(kind != "forgotten" for kind, _ in positions.values())

    def _say(self, recalled: Mapping[str, Recalled], positions: Mapping[str, tuple[str, datetime]]) -> None:
        logger.warning(
            "Redis has lost data of %d entries. This replica has put back what it remembers of them, up to %s; the "
            "records of their slots are gone. Does Redis keep its data?",
            len(recalled),
            slot_text(max(positions[name][1] for name in recalled)),
            extra={"action": "ledger_recalled", "count": len(recalled)},
        )
        for name, known in recalled.items():
            plan = self._plans.get(name)
            if plan is not None and known.first is not None and known.last is not None:
                self._reports.missed(name, known.first, known.last, known.count, LOST, plan.policy.prefer)

    def has_gone_back(self, term: Term) -> bool:
        """Whether the ledger has lost what was decided since the last look, as in a failover to a replica that lagged.

        A flush takes the lease with it: this replica finds that out before a standby has to.

        Raises:
            NotLeading: the lease is gone.
            StoreError: the ledger doesn't answer.
        """
        sent, at, before = self._clock.clock.monotonic(), self._clock.utcnow(), self._elector.sight.before()
        look = self._ledger.store.look(self._ledger.store.keys.wake)
        self._clock.observe(look.now, sent, self._clock.clock.monotonic())
        if look.value != term.value:
            if look.value is not None and Term.read(look.value).holder != term.holder:
                self._shadow.another_leads()
            raise NotLeading(look.value or "")
        self._elector.sight.held(at, before, look)
        at_least, decided = self.decided_at_least, decided_in(look.counts)
        self._seen = (decided, self._shadow.claims)
        return decided < at_least

    @property
    def decided_at_least(self) -> int:
        """How many slots the ledger's totals have, unless data was lost. May be asked for inside a signal handler."""
        decided, claims = self._seen
        # Others may have added to it, but what this leader has claimed since must be there.
        return decided + self._shadow.claims - claims

    def is_incomplete(self) -> bool:
        """Whether the ledger holds fewer entries than were registered.

        Raises:
            StoreError: the ledger doesn't answer.
        """
        return self._ledger.entry_count() < self._registered

    def pauses(self, term: Term, stored: dict[str, list[Pause]]) -> dict[str, list[Pause]]:
        """The pauses that count; those that the ledger has lost are put back.

        Raises:
            NotLeading: the lease is gone; nothing was written.
            StoreError: no answer; ask again.
        """
        known = self._shadow.see_pauses(stored, self._clock.utcnow())
        lacking = lacking_pauses(known, stored)
        if lacking:
            self._ledger.recall_pauses(term, lacking)
        # Those that are over still explain what was skipped; nobody has to lift them.
        now = self._clock.utcnow()
        held = [name for name in sorted(lacking) if Pauses(lacking[name]).in_force(now) is not None]
        if held:
            names = ", ".join(repr(name) if name else "all entries" for name in held)
            logger.warning(
                "Redis has lost pauses of %s. This replica has put them back: whoever wants them lifted uses "
                "`leaderbeat resume`.",
                names,
                extra={"action": "pauses_recalled", "count": len(held)},
            )
        return known

    def decided(self, plan: Plan, slot: datetime) -> None:
        """A slot is decided under this leader."""
        self._shadow.decided(plan.name, slot, plan.fingerprint)

    def swept(self, doubtful: Iterable[str]) -> None:
        """All that was claimed has been looked after, but for these slots."""
        self._lost_claims.swept()
        self._shadow.swept(doubtful)

    def left(self) -> None:
        """This replica doesn't lead any more."""
        self._lost_claims.left()

    def leads(self, term: Term) -> None:
        """The term begins, and all that was decided before is known."""
        until = self._elector.trusted_until(term)
        if until is not None:
            self._shadow.leads(until)
