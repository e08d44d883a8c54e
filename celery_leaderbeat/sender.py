"""Sending: claim a batch, publish it, and leave each of its slots with a known end.

The claim is written in one script together with the check of the lease; each message is published under the
lease's local deadline; the publisher confirms it at once. A leader that is killed leaves in doubt what of its batch it
had claimed and not confirmed: the one message that was on its way, and up to 31 that nobody knows to be unsent.

What a slot becomes when something goes wrong:

=========================================  ==================================================================
too few Redis replicas have the claim      given back, and tried again (`replication`)
no connection, blocked, not ours any more  given back: this leader tries again, or the next one does
the outcome of the publish is unknown      prefers missed: unconfirmed, which counts as missed unless a worker
                                           begins it after all; prefers duplicate: given back
the message can't be built or serialised   missed, with the reason
this process dies after the claim          prefers missed: unconfirmed after a grace; prefers duplicate: the
                                           next leader claims it at once
=========================================  ==================================================================

What Redis couldn't be told (it was away) is kept as a debt and told when it is back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

from celery_leaderbeat.backoff import backoff
from celery_leaderbeat.batch import Batch
from celery_leaderbeat.broker_watch import BrokerWatch
from celery_leaderbeat.clock import FleetClock
from celery_leaderbeat.debts import Debts, tell
from celery_leaderbeat.election import Elector
from celery_leaderbeat.errors import StoreError, StoreUnavailable, sentence
from celery_leaderbeat.ledger import Ledger, NotReplicated
from celery_leaderbeat.message import Message, Outcome
from celery_leaderbeat.plan import Plan
from celery_leaderbeat.publisher import Publisher
from celery_leaderbeat.records import SlotRecord
from celery_leaderbeat.replication import Replication
from celery_leaderbeat.reports import Reports
from celery_leaderbeat.sent_before import SentBefore
from celery_leaderbeat.settings import Settings
from celery_leaderbeat.term import Term

__all__ = ["Sender"]

logger = logging.getLogger(__name__)

#: Wait before a slot whose claim Redis refused is tried again.
_REFUSED = timedelta(minutes=1)
#: Longest that a standby waits for one answer, in seconds: with connecting it stays below a second.
_STANDBY_PATIENCE = 0.4
#: Bounds of the wait before an entry whose message wasn't taken is tried again, in seconds.
_NOT_TAKEN = (0.1, 60.0)


class Sender:
    """Sends what a leader has decided to send.

    Parameters:
        app: the Celery application.
        settings: bounds and retention.
        clock: the fleet's clock.
        elector: who knows whether we lead.
        plans: the plans of all entries.
        ledger: where the slots are claimed.
        reports: says what isn't sent.
        advance: called with a plan and a slot that is decided.
    """

    def __init__(
        self,
        app: Any,
        settings: Settings,
        clock: FleetClock,
        elector: Elector,
        plans: Mapping[str, Plan],
        ledger: Ledger,
        reports: Reports,
        advance: Callable[[Plan, Any], None],
    ) -> None:
        self._app = app
        self._settings = settings
        self._clock = clock
        self._elector = elector
        self._plans = plans
        self._ledger = ledger
        self._reports = reports
        self._advance = advance
        self._confirmations = Ledger(settings, settings.publish_timeout)
        self._debts = Debts(ledger)
        self._watch = BrokerWatch(clock.clock, settings.silence, elector.step_down)
        self._replication = Replication(ledger, settings.min_replicas, clock.clock)
        self._publisher: Publisher | None = None
        self._batch: Batch | None = None
        self._sent_before = SentBefore()
        # Of each entry, the slot that is said to wait for the broker.
        self._said_to_wait: dict[str, str] = {}

    @property
    def held_for(self) -> float:
        """Seconds until it is worth trying again, the broker or the replicas; 0 or less if it is now."""
        ready = self._publisher is not None and self._publisher.ready
        return max(0.0 if ready else self._watch.held_for, self._replication.held_for)

    def start(self) -> None:
        """A new term begins: connect to the broker, so that it is known to answer before a slot comes due."""
        self._watch.begin()
        self._connected()

    def look_at_broker(self, term: Term) -> None:
        """Keep a connection to the broker; step down from `term` when it has been silent for too long."""
        self._connected()
        self._watch.look(term)

    def known_end(self, record: SlotRecord) -> str:
        """`"sent"` or `"unconfirmed"` where this process knows that of a claim, though Redis has lost it; else empty."""
        return self._sent_before.known_end(record)

    def settle(self) -> None:
        """Tell the ledger what it couldn't be told. Raises `StoreError` while it can't."""
        self._debts.settle()

    def settle_standing_by(self) -> None:
        """The same, where the tick of a standby mustn't wait for an answer that doesn't come."""
        if not self._debts.open():
            return
        patience = min(self._settings.publish_timeout, _STANDBY_PATIENCE)
        ledger = Ledger(self._settings.hurried(patience), patience)
        try:
            self._debts.settle(ledger)
        finally:
            ledger.close()

    def go_on(self) -> Sequence[Message]:
        """Send the batch whose claim hasn't been answered, if there is one; what of it was decided."""
        return () if self._batch is None else self.send(self._batch)

    def send(self, batch: Batch) -> Sequence[Message]:
        """Claim the batch and publish it once; its messages. Raises what the claim raises; then it is claimed again."""
        if batch is not self._batch and not self._replication.ready():
            for message in batch.messages:
                _hold(message)
            return batch.messages
        self._batch = batch
        now = self._clock.utcnow()
        claims = batch.claims(self._settings.slot_retention, now, self._unfinished_of(batch))
        try:
            answers = self._ledger.claim(batch.term, batch.id, claims)
        except NotReplicated as exc:
            return self._not_replicated(batch, exc)
        except StoreUnavailable:
            raise
        except StoreError as exc:
            self._batch = None
            return self._one_by_one(batch, exc)
        claimed = [
            message
            for message, answer in zip(batch.messages, answers, strict=True)
            if self._answered(message, answer)
        ]
        if claimed:
            self._replication.succeeded()
            try:
                self._publish(batch, claimed)
            except Exception:
                raise
            except BaseException:
                # Told to stop; `close` has told the ledger what is known, and nobody says it afterwards.
                for message in batch.unsettled_messages():
                    if batch.debt(message).outcome == "unconfirmed":
                        self._unconfirmed(message)
                raise
        self._batch = None
        return batch.messages

    def _not_replicated(self, batch: Batch, exc: NotReplicated) -> Sequence[Message]:
        """Give back what was claimed: a failover might lose the claim, and the slot would be sent twice."""
        for message, answer in zip(batch.messages, exc.answers, strict=True):
            if self._answered(message, answer):
                message.handling.take()
                message.settle(Outcome("unsent", str(exc)))
                message.settled = True
                self._debts.add(batch.debt(message))
                self._take_back(message)
        self._debts.try_to_settle()
        self._batch = None
        self._replication.failed(str(exc))
        return batch.messages

    def _one_by_one(self, batch: Batch, exc: StoreError) -> Sequence[Message]:
        """Redis refuses the claim of a batch, and would again: find the slot that it is about, and leave that out."""
        if len(batch.messages) > 1:
            held: set[str] = set()
            for message in batch.messages:
                if message.entry in held:
                    # It mustn't pass the earlier slot, which would never be decided then.
                    _hold(message)
                    continue
                self.send(Batch(batch.term, batch.plans, [message]))
                if message.held:
                    held.add(message.entry)
            return batch.messages
        (message,) = batch.messages
        logger.error(
            "Slot %s can't be claimed: %s. It is tried again in %d s; the other entries run.",
            message.key,
            sentence(exc),
            _REFUSED.total_seconds(),
            extra={"action": "claim_refused", "entry": message.entry, "tick_key": message.key},
        )
        _hold(message)
        self._plans[message.entry].postpone(self._clock.utcnow() + _REFUSED)
        return batch.messages

    def _unfinished_of(self, batch: Batch) -> dict[str, tuple[str, ...]]:
        names = {
            message.entry
            for message in batch.messages
            if self._plans[message.entry].policy.overlap != "allow"
        }
        if not names:
            return {}
        return {name: entry.open for name, entry in self._ledger.entries(*names).items()}

    def _answered(self, message: Message, answer: str) -> bool:
        """Note the answer to a claim. Whether the slot is ours to send."""
        plan = self._plans[message.entry]
        if answer == "claimed":
            self._elector.shadow.claimed(message.key, message.stamp.attempt)
            self._advance(plan, message.slot)
            self._reports.sent(plan.name)
            return True
        message.handling.take()
        message.settled = True
        if answer in ("paused", "busy"):
            message.held = True
            plan.wait(message.slot, self._clock.utcnow())
            return False
        was_returned = message.slot in plan.returned
        self._advance(plan, message.slot)
        if answer == "waiting":
            plan.give_back(message.slot)
            plan.wait(message.slot, self._clock.utcnow())
        elif answer == "overlapped":
            self._reports.skipped(
                plan.name, message.slot, message.slot, 1, "overlap: an earlier slot is unfinished"
            )
        else:
            logger.info(
                "Slot %s is not sent by this replica: it is %s already.",
                message.key,
                answer,
                extra={"action": "not_claimed", "tick_key": message.key, "state": answer},
            )
            if was_returned and answer == "decided":
                self._reports.missed(
                    plan.name, message.slot, message.slot, 1, "its record is gone", message.prefer
                )
        return False

    def _connected(self) -> Publisher:
        if self._publisher is None or not self._publisher.usable:
            if self._publisher is not None:
                self._publisher.abandon()
            self._publisher = Publisher(self._app, self._settings.publish_timeout, self._clock, self._watch)
        return self._publisher

    def _publish(self, batch: Batch, messages: list[Message]) -> None:
        began = self._monotonic()
        sent, away = False, None
        known = {message.key: message for message in messages if self._sent_before.settles(message)}
        publish = self._connected().publish(
            [message for message in messages if message.outcome is None],
            allowed=lambda: self._elector.trusts(batch.term),
            on_sent=lambda message: self._confirm(batch, message),
        )
        for message in chain(known.values(), publish):
            self._elector.progress()
            outcome = message.outcome
            if outcome is None:
                continue
            self._sent_before.note(message, outcome)
            if outcome.kind == "sent":
                began = self._monotonic()
                self._plans[message.entry].failures = 0
                if not message.settled:
                    self._debts.add(batch.debt(message))
            else:
                self._not_sent(batch, message, outcome)
            self._elector.shadow.settled(message.key)
            message.settled = True
            if message.key in known:
                # Nothing was asked of the broker.
                continue
            sent = sent or outcome.kind == "sent"
            if outcome.kind in ("unreachable", "blocked", "unknown") and away is None:
                away = outcome
        if sent:
            self._elector.proven()
        if sent or (away is None and len(known) < len(messages)):
            self._watch.taken()
        if away is not None:
            self._watch.not_sent(began, away)
            self._watch.look(batch.term, tried=True)

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

    def _not_sent(self, batch: Batch, message: Message, outcome: Outcome) -> None:
        plan, kind, reason = self._plans[message.entry], outcome.kind, outcome.reason
        debt = batch.debt(message)
        self._debts.owe(debt)
        if debt.outcome == "unconfirmed":
            self._unconfirmed(message)
            return
        self._take_back(message)
        if kind == "impossible":
            logger.error(
                "Entry %r can't be sent: %s.",
                plan.name,
                reason,
                extra={"action": "impossible", "entry": plan.name, "tick_key": message.key},
            )
            plan.doom(message.slot, f"it can't be sent: {reason}")
            return
        level = logging.WARNING
        if kind in ("unreachable", "blocked"):
            # That the broker is away was said: many entries, tried over and over, would bury all else.
            if self._said_to_wait.get(plan.name) == message.key:
                level = logging.DEBUG
            self._said_to_wait[plan.name] = message.key
        else:
            # The broker is there: only this entry waits.
            wait = backoff(plan.failures, *_NOT_TAKEN)
            plan.failures += 1
            plan.postpone(self._clock.utcnow() + timedelta(seconds=wait))
        logger.log(
            level,
            "Slot %s is not sent yet: %s.",
            message.key,
            reason,
            extra={"action": "returned", "tick_key": message.key, "reason": reason},
        )

    def _unconfirmed(self, message: Message) -> None:
        reason = message.outcome.reason if message.outcome is not None else ""
        self._reports.missed(
            message.entry, message.slot, message.slot, 1, f"unconfirmed: {reason}", message.prefer
        )

    def _take_back(self, message: Message) -> None:
        """Keep a slot that is claimed, and whose message is unsent, to be sent again, whatever Redis may lose of that."""
        self._plans[message.entry].give_back(message.slot, message.stamp.attempt, message.request)
        self._elector.shadow.settled(message.key)

    def drop(self) -> None:
        """The term has ended: leave the broker, and give back what may have been claimed and isn't sent."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.abandon()
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.abandon("its leader lost the lease")
            for debt in batch.unsettled():
                self._debts.add(debt)
            for message in batch.unsent():
                if message.key in self._elector.shadow.open_claims:
                    self._take_back(message)

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
        ledger = Ledger(self._settings.hurried(timeout / 4), timeout / 4)
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


def _hold(message: Message) -> None:
    """Leave the message's slot undecided."""
    message.handling.take()
    message.settled = message.held = True
