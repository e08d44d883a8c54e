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
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

from celery_leaderbeat.agenda import Agenda
from celery_leaderbeat.backoff import backoff
from celery_leaderbeat.batch import Batch
from celery_leaderbeat.clock import FleetClock
from celery_leaderbeat.debts import Debts, tell
from celery_leaderbeat.election import Elector
from celery_leaderbeat.errors import StoreError
from celery_leaderbeat.ledger import Ledger, NotLeading
from celery_leaderbeat.message import Message, build_message, expired_before
from celery_leaderbeat.plan import ASK_AGAIN_AFTER, Plan
from celery_leaderbeat.policy import Miss
from celery_leaderbeat.publisher import Publisher
from celery_leaderbeat.reports import report_missed
from celery_leaderbeat.settings import Settings
from celery_leaderbeat.sweep import Sweep
from celery_leaderbeat.term import Term
from celery_leaderbeat.tick import slot_text, tick_key

__all__ = ["Dispatcher"]

logger = logging.getLogger(__name__)

#: Slots that are claimed at once. A leader that is killed between claim and publish costs at most so many
#: slots of entries that prefer a missed one.
_CLAIM_BATCH = 32
#: Seconds between two sweeps.
_SWEEP_EVERY = 2.0
#: Longest that the tick loop sleeps, in seconds: it has to show that it comes round.
_LONGEST_SLEEP = 1.0
#: Bounds of the wait while the broker can't be reached, in seconds.
_BROKER_AWAY = (0.1, 5.0)
#: Bounds of the wait before an entry whose message wasn't taken is tried again, in seconds.
_NOT_TAKEN = (0.1, 60.0)


class Dispatcher:
    """Sends what is due while this replica leads.

    Parameters:
        app: the Celery application.
        settings: bounds and retention.
        clock: the fleet's clock.
        elector: who knows whether we lead.
        plans: the plans of all entries.
    """

    def __init__(
        self,
        app: Any,
        settings: Settings,
        clock: FleetClock,
        elector: Elector,
        plans: Mapping[str, Plan],
    ) -> None:
        self._app = app
        self._settings = settings
        self._clock = clock
        self._elector = elector
        self._plans = plans
        self._ledger = Ledger(settings, settings.publish_timeout)
        self._confirmations = Ledger(settings, settings.publish_timeout)
        self._debts = Debts(self._ledger)
        self._publisher: Publisher | None = None
        self._term: Term | None = None
        self._agenda = Agenda(())
        self._sweep: Sweep | None = None
        self._batch: Batch | None = None
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
            if self._monotonic() >= self._hold_until:
                self._dispatch(term)
            if self._sweep is not None and self._monotonic() >= self._sweep_at:
                self._sweep_at = self._monotonic() + _SWEEP_EVERY
                if self._sweep.run():
                    self._sweep_at = self._monotonic() + _SWEEP_EVERY / 4
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
        fingerprints = {name: plan.fingerprint for name, plan in self._plans.items()}
        positions = self._ledger.register(term, fingerprints, self._clock.utcnow())
        lost = [
            plan.last
            for name, plan in self._plans.items()
            if plan.last is not None and positions[name][0] == "new"
        ]
        if lost:
            logger.warning(
                "The ledger has lost %d entries that this replica had decided about until %s: they count from now, "
                "and slots in between are lost. Does Redis keep its data?",
                len(lost),
                slot_text(max(lost)),
                extra={"action": "ledger_lost", "count": len(lost)},
            )
        for name, (kind, slot) in positions.items():
            self._elector.progress()
            if kind == "reset":
                logger.warning(
                    "Entry %r: its last decided slot lay in the future (a clock had jumped); it counts from now.",
                    name,
                    extra={"action": "entry_reset", "entry": name},
                )
            elif kind != "kept":
                logger.info("Entry %r is %s.", name, kind, extra={"action": f"entry_{kind}", "entry": name})
            if name in self._plans:
                self._start(self._plans[name], slot)
        self._agenda = Agenda(self._plans.values())
        grace = 2 * self._settings.publish_timeout + 0.5
        self._sweep = Sweep(self._app, self._ledger, term, self._plans, grace, self._agenda.put)
        self._sweep_at = self._hold_until = 0.0
        self._failures, self._failing_since = 0, None
        self._term = term

    def _start(self, plan: Plan, slot: datetime) -> None:
        try:
            plan.start(slot)
        except Exception:  # noqa: BLE001  # a user's schedule may raise anything; it is logged
            plan.postpone(self._clock.utcnow() + ASK_AGAIN_AFTER)
            self._schedule_failed(plan)
            return
        if plan.next is None:
            logger.error(
                "Entry %r never comes due after %s: %r. The other entries run.",
                plan.name,
                slot_text(slot),
                plan.schedule,
                extra={"action": "entry_parked", "entry": plan.name},
            )

    def _schedule_failed(self, plan: Plan, failure: Exception | None = None) -> None:
        logger.error(
            "Entry %r: its schedule %r failed. It is asked again in %d s; the other entries run.",
            plan.name,
            plan.schedule,
            ASK_AGAIN_AFTER.total_seconds(),
            exc_info=failure or True,
            extra={"action": "schedule_failed", "entry": plan.name},
        )

    # -- what is due ---------------------------------------------------------------------------------------

    def _dispatch(self, term: Term) -> None:
        """Send or miss what is due."""
        now = self._clock.utcnow()
        taken = self._agenda.take(now, _CLAIM_BATCH)
        messages: list[Message] = []
        try:
            for plan in taken:
                self._elector.progress()
                messages += self._decided(term, plan, now)
            for i in range(0, len(messages), _CLAIM_BATCH):
                self._send(Batch(term, self._plans, messages[i : i + _CLAIM_BATCH]))
        finally:
            for plan in taken:
                self._agenda.put(plan)

    def _decided(self, term: Term, plan: Plan, now: datetime) -> list[Message]:
        """Decide about the due slots of one entry: miss what is missed; the messages of the others.

        A slot whose message can't be built is decided as missed in the next round, so that the slots before
        it are claimed first.
        """
        try:
            decisions = plan.decide(now, datetime.fromtimestamp(term.since, timezone.utc))
        except Exception:  # noqa: BLE001  # a user's schedule may raise anything; it is logged
            plan.postpone(now + ASK_AGAIN_AFTER)
            self._schedule_failed(plan)
            return []
        messages: list[Message] = []
        for decision in decisions:
            if isinstance(decision, Miss):
                if messages:
                    break
                self._miss(term, plan, decision)
                continue
            message = self._message(term, plan, decision.slot, now)
            if message is None:
                break
            messages.append(message)
        return messages

    def _message(self, term: Term, plan: Plan, slot: datetime, now: datetime) -> Message | None:
        """The message of a slot; None if it can't be sent, which is noted."""
        try:
            message = build_message(plan, slot, term.epoch, self._settings.key_prefix)
        except Exception as exc:
            logger.exception(
                "Entry %r: its arguments can't be built.",
                plan.name,
                extra={"action": "impossible", "entry": plan.name},
            )
            plan.doom(slot, f"its arguments can't be built: {exc!r}")
            return None
        expires = message.options.get("expires")
        if expired_before(expires, now):
            plan.doom(slot, f"born expired: expires is {expires}")
            return None
        return message

    def _miss(self, term: Term, plan: Plan, miss: Miss) -> None:
        returned = [tick_key(plan.name, slot) for slot in miss.returned]
        self._ledger.miss(
            term, plan.name, miss.first, miss.last, miss.count, miss.reason, plan.fingerprint, returned
        )
        for slot in (*miss.returned, miss.last):
            self._advance(plan, slot)
        report_missed(self._app, plan.name, miss.first, miss.last, miss.count, miss.reason)

    def _advance(self, plan: Plan, slot: datetime) -> None:
        plan.advance(slot)
        failure, plan.failure = plan.failure, None
        if failure is not None:
            self._schedule_failed(plan, failure)

    # -- claim, publish, and what became of it -------------------------------------------------------------

    def _send(self, batch: Batch) -> None:
        """Claim the batch and publish it once. Raises what the claim raises; then it is claimed again."""
        self._batch = batch
        answers = self._ledger.claim(batch.term, batch.id, batch.claims(self._settings.slot_retention))
        claimed: list[Message] = []
        for message, answer in zip(batch.messages, answers, strict=True):
            plan = self._plans[message.entry]
            was_returned = message.slot in plan.returned
            self._advance(plan, message.slot)
            if answer == "claimed":
                claimed.append(message)
                continue
            message.handling.take()
            message.settled = True
            logger.info(
                "Slot %s is not sent by this replica: it is %s already.",
                message.key,
                answer,
                extra={"action": "not_claimed", "tick_key": message.key, "state": answer},
            )
            if was_returned and answer == "decided":
                report_missed(self._app, plan.name, message.slot, message.slot, 1, "its record is gone")
        if claimed:
            self._publish(batch, claimed)
        self._batch = None
        for message in batch.messages:
            self._agenda.put(self._plans[message.entry])

    def _publish(self, batch: Batch, messages: list[Message]) -> None:
        if self._publisher is None or not self._publisher.usable:
            self._publisher = Publisher(self._app, self._settings.publish_timeout, self._clock.clock)
        sent, away = False, ""
        publish = self._publisher.publish(
            messages,
            allowed=lambda: self._elector.trusts(batch.term),
            on_sent=lambda message: self._confirm(batch, message),
        )
        for message in publish:
            self._elector.progress()
            outcome = message.outcome
            if outcome is None:
                continue
            if outcome.kind == "sent":
                sent = True
                self._plans[message.entry].failures = 0
                if not message.settled:
                    self._debts.add(batch.debt(message))
            else:
                self._not_sent(batch, message, outcome.kind, outcome.reason)
            if outcome.kind in ("unreachable", "unknown"):
                away = outcome.reason
            message.settled = True
        self._judge_broker(batch.term, sent, away)

    def _judge_broker(self, term: Term, sent: bool, away: str) -> None:
        """Wait before the next try while the broker can't be reached; step down when that lasts."""
        if sent or not away:
            self._failures, self._failing_since = 0, None
            if sent:
                self._elector.proven()
            return
        now = self._monotonic()
        self._hold_until = now + backoff(self._failures, *_BROKER_AWAY)
        self._failures += 1
        self._failing_since = now if self._failing_since is None else self._failing_since
        if now - self._failing_since > self._settings.stall_timeout:
            self._failing_since = now
            self._elector.step_down(term, f"it can't publish: {away}")

    def _confirm(self, batch: Batch, message: Message) -> None:
        """Confirm a message; runs in the publishing thread."""
        try:
            self._confirmations.confirm(batch.term.epoch, batch.id, {message.key: "sent"})
        except StoreError as exc:
            logger.warning(
                "Slot %s is sent, but the ledger couldn't be told (%s); it will be.",
                message.key,
                exc,
                extra={"action": "confirm_later", "tick_key": message.key},
            )
        else:
            message.settled = True

    def _not_sent(self, batch: Batch, message: Message, kind: str, reason: str) -> None:
        plan = self._plans[message.entry]
        debt = batch.debt(message)
        self._debts.owe(debt)
        if debt.outcome == "unconfirmed":
            report_missed(self._app, plan.name, message.slot, message.slot, 1, f"unconfirmed: {reason}")
            return
        plan.give_back(message.slot)
        if kind == "impossible":
            logger.error(
                "Entry %r can't be sent: %s.",
                plan.name,
                reason,
                extra={"action": "impossible", "entry": plan.name, "tick_key": message.key},
            )
            plan.doom(message.slot, f"it can't be sent: {reason}")
            return
        if kind != "unreachable":
            # The broker is there: only this entry waits.
            wait = backoff(plan.failures, *_NOT_TAKEN)
            plan.failures += 1
            plan.postpone(self._clock.utcnow() + timedelta(seconds=wait))
        logger.warning(
            "Slot %s is not sent yet: %s.",
            message.key,
            reason,
            extra={"action": "returned", "tick_key": message.key, "reason": reason},
        )

    # -- the end -------------------------------------------------------------------------------------------

    def _drop_batch(self) -> None:
        """A batch that is still to be claimed when its term ends: give back what may have been claimed."""
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.abandon("its leader lost the lease")
            for debt in batch.unsettled():
                self._debts.add(debt)

    def close(self, timeout: float) -> None:
        """Give back what is claimed and not published. Takes about `timeout` seconds at most.

        May run inside a signal handler that has interrupted any line above: it takes no lock, and speaks to
        Redis over a connection of its own. A message that is on its way gets half of the time to arrive.
        """
        publisher, batch = self._publisher, self._batch
        if publisher is not None:
            publisher.abandon()
        debts = self._debts.open()
        if batch is not None:
            batch.abandon("its leader stopped")
            deadline = self._monotonic() + timeout / 2
            while batch.under_way and self._monotonic() < deadline:
                self._clock.clock.sleep(0.001)
            batch.give_up("its leader stopped")
            debts += batch.unsettled()
        if not debts:
            return
        ledger = Ledger(self._settings, timeout / 4)
        try:
            tell(ledger, dict.fromkeys(debts))
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
