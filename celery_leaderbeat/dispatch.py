"""The leader's work: claim the slots that are due, publish them, and leave every one with a known end.

For each slot in this order: `policy` decides; the claim is written in one script together with the check of
the lease; the message is published under the lease's local deadline; the publisher confirms it at once. So a
slot stands between claim and confirm only while its own message is on the way, and a leader that dies there
leaves at most that one in doubt, however many were claimed with it.

What a slot becomes when something goes wrong:

=========================================  ==================================================================
no connection, or not ours any more        given back: this leader tries again, or the next one does
the outcome of the publish is unknown      prefers missed: unconfirmed, which counts as missed unless a worker
                                           begins it after all; prefers duplicate: given back
the message can't be built or serialised   missed, with the reason
this process dies after the claim          prefers missed: unconfirmed after a grace; prefers duplicate: the
                                           next leader claims it at once
=========================================  ==================================================================

What Redis couldn't be told (it was away) is kept as a debt and told when it is back.
"""

from __future__ import annotations

import contextlib
import logging
import random
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from celery_leaderbeat.agenda import Agenda
from celery_leaderbeat.clock import FleetClock
from celery_leaderbeat.debts import Debt, Debts
from celery_leaderbeat.election import Elector
from celery_leaderbeat.entries import ASK_AGAIN_AFTER, Plan
from celery_leaderbeat.errors import StoreError
from celery_leaderbeat.ledger import Claim, Ledger, NotLeading, SlotRecord
from celery_leaderbeat.message import Message, Outcome, build_message, expired_before
from celery_leaderbeat.policy import Miss
from celery_leaderbeat.publisher import Publisher
from celery_leaderbeat.settings import Settings
from celery_leaderbeat.signals import slots_missed
from celery_leaderbeat.term import Term
from celery_leaderbeat.tick import slot_text, tick_key

__all__ = ["Dispatcher"]

logger = logging.getLogger(__name__)

#: Slots that are claimed at once. A leader that is killed between claim and publish costs at most so many
#: slots of entries that prefer a missed one.
_CLAIM_BATCH = 32
#: Seconds between two looks at the slots that somebody has to look after.
_SWEEP_EVERY = 2.0
#: Longest that the tick loop sleeps, in seconds: it has to show that it comes round.
_LONGEST_SLEEP = 1.0
#: Bounds of the wait after a publish that failed, in seconds.
_BACKOFF = (0.1, 5.0)
#: Records are kept for at least this many periods of their entry.
_PERIODS = 3
_LONGEST_RETENTION = 400 * 86_400.0


@dataclass
class _Batch:
    """Messages that are claimed together, and how far they have come."""

    term: Term
    plans: dict[str, Plan]
    messages: list[Message]
    claims: list[Claim]
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


class Dispatcher:
    """Sends what is due while this replica leads.

    Parameters:
        app: the Celery application.
        settings: bounds and retention.
        clock: the fleet's clock.
        elector: who knows whether we lead.
        plans: called at the begin of each term: the plans of all entries.
    """

    def __init__(
        self,
        app: Any,
        settings: Settings,
        clock: FleetClock,
        elector: Elector,
        plans: Callable[[], Mapping[str, Plan]],
    ) -> None:
        self._app = app
        self._settings = settings
        self._clock = clock
        self._elector = elector
        self._load_plans = plans
        timeout = settings.publish_timeout
        self._ledger = Ledger(settings, timeout)
        self._confirmations = Ledger(settings, timeout)
        self._publisher: Publisher | None = None
        self._term: Term | None = None
        self._plans: Mapping[str, Plan] = {}
        self._agenda = Agenda(())
        self._batch: _Batch | None = None
        self._debts = Debts(self._ledger)
        self._sweep_at = 0.0
        self._hold_until = 0.0
        self._failures = 0
        self._failing_since: float | None = None
        self._ledger_is_away = False

    # -- the tick ------------------------------------------------------------------------------------------

    def tick(self, term: Term) -> float:
        """Do what is due under `term`; the seconds until there is more to do."""
        try:
            if term != self._term:
                self._begin(term)
            self._debts.settle()
            if self._batch is not None:
                self._send(self._batch)
            if self._monotonic() >= self._sweep_at:
                self._sweep(term)
            if self._monotonic() >= self._hold_until:
                self._dispatch(term)
        except NotLeading as exc:
            logger.debug("The lease of epoch %d is not ours any more: %s", term.epoch, exc)
            self._drop_batch()
            self._elector.lost(term)
            return 0.05
        except StoreError as exc:
            if not self._ledger_is_away:
                self._ledger_is_away = True
                logger.warning(
                    "The ledger is out of reach, and nothing is sent until it answers: %s.",
                    exc,
                    extra={"action": "ledger_unavailable"},
                )
            return random.uniform(0.1, 0.5)
        if self._ledger_is_away:
            self._ledger_is_away = False
            logger.info("The ledger answers again.", extra={"action": "ledger_available"})
        return self._pause()

    def idle(self) -> None:
        """This replica doesn't lead: settle what an earlier term of ours left open."""
        if self._batch is not None:
            self._drop_batch()
        with contextlib.suppress(StoreError):
            self._debts.settle()

    def _pause(self) -> float:
        pause = _LONGEST_SLEEP
        when = self._agenda.next_time()
        if when is not None:
            pause = min(pause, max((when - self._clock.utcnow()).total_seconds(), 0.0))
        held = self._hold_until - self._monotonic()
        return max(pause, min(held, _LONGEST_SLEEP))

    def _begin(self, term: Term) -> None:
        """Go on where the entries stand in Redis."""
        self._drop_batch()
        self._debts.settle()
        plans = self._load_plans()
        now = self._clock.utcnow()
        fingerprints = {name: plan.fingerprint for name, plan in plans.items()}
        positions = self._ledger.register(term, fingerprints, now)
        for name, (kind, slot) in positions.items():
            if kind == "reset":
                logger.warning(
                    "Entry %r: its last decided slot lay in the future (a clock had jumped); it counts from now.",
                    name,
                    extra={"action": "entry_reset", "entry": name},
                )
            elif kind != "kept":
                logger.info("Entry %r is %s.", name, kind, extra={"action": f"entry_{kind}", "entry": name})
            if name in plans:
                self._start(plans[name], slot)
        self._plans = plans
        self._agenda = Agenda(plan for plan in plans.values() if plan.last is not None)
        self._term = term
        self._sweep_at = self._hold_until = 0.0
        self._failures, self._failing_since = 0, None

    def _start(self, plan: Plan, slot: datetime) -> None:
        try:
            plan.start(slot)
        except Exception as exc:
            plan.last = None
            logger.exception(
                "Entry %r has no next slot: %r. The other entries run.",
                plan.name,
                exc,
                extra={"action": "entry_refused", "entry": plan.name},
            )
            return
        if plan.next is None:
            logger.error(
                "Entry %r never comes due after %s: %r. The other entries run.",
                plan.name,
                slot_text(slot),
                plan.schedule,
                extra={"action": "entry_parked", "entry": plan.name},
            )

    def _dispatch(self, term: Term) -> None:
        """Send or miss what is due."""
        now = self._clock.utcnow()
        taken = self._agenda.take(now, _CLAIM_BATCH)
        messages: list[Message] = []
        try:
            for plan in taken:
                messages += self._decided(term, plan, now)
            for i in range(0, len(messages), _CLAIM_BATCH):
                self._send(self._claimable(term, messages[i : i + _CLAIM_BATCH]))
        finally:
            for plan in taken:
                self._agenda.put(plan)

    def _decided(self, term: Term, plan: Plan, now: datetime) -> list[Message]:
        """Decide about the due slots of one entry: miss what is missed, and the messages of the others."""
        led_since = datetime.fromtimestamp(term.since, timezone.utc)
        try:
            decisions = plan.decide(now, led_since)
        except Exception:
            plan.postpone(now + ASK_AGAIN_AFTER)
            logger.exception(
                "Entry %r: its schedule %r failed. It is asked again in %d s; the other entries run.",
                plan.name,
                plan.schedule,
                ASK_AGAIN_AFTER.total_seconds(),
                extra={"action": "schedule_failed", "entry": plan.name},
            )
            return []
        messages = []
        for decision in decisions:
            if isinstance(decision, Miss):
                self._miss(term, plan, decision)
            else:
                message = self._message(term, plan, decision.slot, now)
                if message is not None:
                    messages.append(message)
        return messages

    # -- building ------------------------------------------------------------------------------------------

    def _message(self, term: Term, plan: Plan, slot: datetime, now: datetime) -> Message | None:
        """The message of a slot; None if the slot had to be missed instead."""
        try:
            message = build_message(plan, slot, term.epoch, self._settings.key_prefix)
        except Exception as exc:
            logger.exception(
                "Entry %r: its arguments can't be built.",
                plan.name,
                extra={"action": "impossible", "entry": plan.name},
            )
            self._miss_one(term, plan, slot, f"its arguments can't be built: {exc!r}")
            return None
        expires = message.options.get("expires")
        if expired_before(expires, now, self._app.timezone):
            self._miss_one(term, plan, slot, f"born expired: expires is {expires}")
            return None
        return message

    def _claimable(self, term: Term, messages: list[Message]) -> _Batch:
        plans = {message.entry: self._plans[message.entry] for message in messages}
        claims = [
            Claim(
                key=message.key,
                entry=message.entry,
                slot=message.slot,
                fingerprint=plans[message.entry].fingerprint,
                task=message.task,
                task_id=message.task_id,
                prefer=message.prefer,
                ttl=self._retention(plans[message.entry]),
            )
            for message in messages
        ]
        return _Batch(term, plans, messages, claims)

    def _retention(self, plan: Plan) -> float:
        """How long a slot's record is kept, in seconds."""
        period = 0.0
        if plan.last is not None and plan.next is not None:
            period = (plan.next - plan.last).total_seconds()
        return min(max(_PERIODS * period, self._settings.slot_retention), _LONGEST_RETENTION)

    # -- claim, publish, and what became of it -------------------------------------------------------------

    def _send(self, batch: _Batch) -> None:
        """Claim the batch and publish it. Raises what the claim raises; then the batch is asked for again."""
        self._batch = batch
        answers = self._ledger.claim(batch.term, batch.id, batch.claims)
        claimed: list[Message] = []
        for message, answer in zip(batch.messages, answers, strict=True):
            plan = batch.plans[message.entry]
            was_returned = message.slot in plan.returned
            plan.advance(message.slot)
            if answer == "claimed":
                claimed.append(message)
                continue
            message.take()
            message.confirmed = True
            logger.info(
                "Slot %s is not sent by this replica: it is %s already.",
                message.key,
                answer,
                extra={"action": "not_claimed", "tick_key": message.key, "state": answer},
            )
            if was_returned and answer == "decided":
                self._report(plan.name, message.slot, message.slot, 1, "its record is gone")
        if claimed:
            self._publish(batch, claimed)
        self._batch = None
        for plan in batch.plans.values():
            self._agenda.put(plan)

    def _publish(self, batch: _Batch, messages: list[Message]) -> None:
        if self._publisher is None or not self._publisher.usable:
            self._publisher = Publisher(
                self._app, self._settings.publish_timeout, self._clock.clock, self._confirm
            )
        failed = ""
        for message in self._publisher.publish(messages, lambda: self._elector.trusts(batch.term)):
            self._elector.progress()
            outcome = message.outcome
            assert outcome is not None
            if outcome.kind != "sent":
                failed = outcome.reason
                self._not_sent(batch, message, outcome)
            message.confirmed = True
        if not failed:
            self._failures, self._failing_since = 0, None
            self._elector.proven()
            return
        now = self._monotonic()
        self._failures += 1
        low, high = _BACKOFF
        self._hold_until = now + random.uniform(low, min(high, low * 2.0**self._failures))
        self._failing_since = now if self._failing_since is None else self._failing_since
        if now - self._failing_since > self._settings.stall_timeout:
            self._failing_since = now
            self._elector.step_down(f"it can't publish: {failed}")

    def _confirm(self, message: Message) -> None:
        """Confirm a message; runs in the publishing thread."""
        try:
            self._confirmations.confirm(message.stamp.epoch, {message.key: "sent"})
        except StoreError as exc:
            logger.warning(
                "Slot %s is sent, but the ledger couldn't be told (%s); it will be.",
                message.key,
                exc,
                extra={"action": "confirm_later", "tick_key": message.key},
            )
            self._debts.add(Debt(message.stamp.epoch, message.key, "sent"))

    def _not_sent(self, batch: _Batch, message: Message, outcome: Outcome) -> None:
        plan = batch.plans[message.entry]
        epoch = batch.term.epoch
        if outcome.kind == "unknown" and message.prefer != "duplicate":
            self._debts.owe(Debt(epoch, message.key, "unconfirmed", outcome.reason))
            self._report(plan.name, message.slot, message.slot, 1, f"unconfirmed: {outcome.reason}")
            return
        self._debts.owe(Debt(epoch, message.key, "returned", outcome.reason))
        if outcome.kind == "impossible":
            logger.error(
                "Entry %r can't be sent: %s.",
                plan.name,
                outcome.reason,
                extra={"action": "impossible", "entry": plan.name, "tick_key": message.key},
            )
            with contextlib.suppress(NotLeading):
                self._miss_one(
                    batch.term, plan, message.slot, f"it can't be sent: {outcome.reason}", returned=True
                )
            return
        plan.give_back(message.slot)
        logger.warning(
            "Slot %s is not sent yet: %s.",
            message.key,
            outcome.reason,
            extra={"action": "returned", "tick_key": message.key, "reason": outcome.reason},
        )

    # -- slots that aren't sent ----------------------------------------------------------------------------

    def _miss(self, term: Term, plan: Plan, miss: Miss) -> None:
        counted = self._ledger.miss(
            term,
            plan.name,
            miss.last,
            miss.count,
            miss.reason,
            plan.fingerprint,
            [tick_key(plan.name, slot) for slot in miss.returned],
        )
        for slot in (*miss.returned, miss.last):
            plan.advance(slot)
        if counted:
            self._report(plan.name, miss.first, miss.last, counted, miss.reason)

    def _miss_one(
        self, term: Term, plan: Plan, slot: datetime, reason: str, returned: bool | None = None
    ) -> None:
        if returned is None:
            returned = slot in plan.returned
        self._miss(term, plan, Miss(slot, slot, 1, reason, (slot,) if returned else ()))

    def _report(self, entry: str, first: datetime, last: datetime, count: int, reason: str) -> None:
        if count == 1:
            what = f"the slot {slot_text(last)} is missed"
        else:
            what = f"{count} slots from {slot_text(first)} to {slot_text(last)} are missed"
        logger.warning(
            "Entry %r: %s: %s.",
            entry,
            what,
            reason,
            extra={"action": "missed", "entry": entry, "count": count, "reason": reason},
        )
        slots_missed.send_robust(sender=self, entry=entry, first=first, last=last, count=count, reason=reason)

    # -- slots that earlier leaders left -------------------------------------------------------------------

    def _sweep(self, term: Term) -> None:
        """Look after slots that were claimed and not confirmed, or given back."""
        doubtful: dict[str, SlotRecord | None] = {}
        for record in self._ledger.unfinished():
            if isinstance(record, str):
                doubtful[record] = None
            elif record.state == "returned" or (
                record.state == "claimed" and record.epoch < term.epoch and record.prefer == "duplicate"
            ):
                self._inherit(term, record)
            elif record.epoch != term.epoch or record.state != "claimed":
                doubtful[record.key] = record
        waiting = False
        if doubtful:
            keys = list(doubtful)
            states = self._ledger.doubt(term, keys, self._settings.publish_timeout)
            for key, state in zip(keys, states, strict=True):
                waiting = waiting or state == "wait"
                claim = doubtful[key]
                if state == "unconfirmed" and claim is not None and claim.state == "claimed":
                    reason = f"epoch {claim.epoch} claimed it and was gone before it confirmed it"
                    self._report(claim.entry, claim.slot, claim.slot, 1, reason)
        self._sweep_at = self._monotonic() + (1.0 if waiting else _SWEEP_EVERY)

    def _inherit(self, term: Term, record: SlotRecord) -> None:
        """Take up a slot that is known to be unsent, or whose entry prefers a second copy to none."""
        plan = self._plans.get(record.entry)
        if plan is not None and plan.last is not None:
            if record.slot not in plan.returned:
                plan.give_back(record.slot)
                self._agenda.put(plan)
            return
        reason = "its entry was removed before it was sent"
        if self._ledger.miss(term, record.entry, record.slot, 1, reason, "", [record.key]):
            self._report(record.entry, record.slot, record.slot, 1, reason)

    # -- the end of a term ---------------------------------------------------------------------------------

    def _drop_batch(self) -> None:
        """A batch whose term is over, and which wasn't published: give back what may have been claimed."""
        batch, self._batch = self._batch, None
        if batch is None:
            return
        for message in batch.messages:
            if message.take():
                self._debts.add(Debt(batch.term.epoch, message.key, "returned", "its leader lost the lease"))
        for plan in batch.plans.values():
            self._agenda.put(plan)

    # -- the end -------------------------------------------------------------------------------------------

    def close(self, timeout: float) -> None:
        """Give back what is claimed and not published. Takes at most `timeout` seconds, roughly.

        May run inside a signal handler that has interrupted any line above: it takes no lock, and speaks to
        Redis over a connection of its own. A message that is on its way gets half of the time to arrive.
        """
        publisher, batch = self._publisher, self._batch
        if publisher is not None:
            publisher.abandon()
        debts = self._debts.open()
        if batch is not None:
            for message in batch.messages:
                if message.take():
                    message.outcome = Outcome("unsent", "its leader stopped")
            deadline = self._monotonic() + timeout / 2
            while self._monotonic() < deadline and any(m.outcome is None for m in batch.messages if m.taken):
                self._clock.clock.sleep(0.001)
            debts += _ends(batch)
        if not debts:
            return
        ledger = Ledger(self._settings, timeout / 2)
        try:
            for debt in dict.fromkeys(debts):
                debt.tell(ledger)
        except StoreError as exc:
            logger.warning(
                "Couldn't tell the ledger of %d slots: %s. The next leader decides about them.",
                len(debts),
                exc,
                extra={"action": "close_incomplete"},
            )
        finally:
            ledger.close()

    def _monotonic(self) -> float:
        return self._clock.clock.monotonic()


def _ends(batch: _Batch) -> Iterable[Debt]:
    """What has to be said about the messages of a batch that was interrupted."""
    for message in batch.messages:
        outcome = message.outcome
        if message.confirmed or outcome is None or outcome.kind == "sent":
            continue
        if outcome.kind == "unknown" and message.prefer != "duplicate":
            yield Debt(batch.term.epoch, message.key, "unconfirmed", outcome.reason)
        else:
            yield Debt(batch.term.epoch, message.key, "returned", outcome.reason)
