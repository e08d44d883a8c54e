"""The leader's work: decide what is due, send it, and look after what was sent.

A round: the orders that people gave are looked at, the plans that are due are asked for their decisions
(`policy`), what is missed or skipped is written off, what is to be sent goes to the `sender`, and every other
second the `sweep` looks after slots that earlier leaders left and runs that died. A term begins with a sweep, before
anything is sent; where Redis is found to have lost data, it begins anew (`restoring`).
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

from celery_leaderbeat.agenda import Agenda
from celery_leaderbeat.batch import Batch
from celery_leaderbeat.clock import FleetClock
from celery_leaderbeat.clock_watch import StepWatch
from celery_leaderbeat.election import Elector
from celery_leaderbeat.errors import StoreError, sentence
from celery_leaderbeat.ledger import HORIZON, Ledger, NotLeading
from celery_leaderbeat.message import Message, build_message
from celery_leaderbeat.orders import Orders
from celery_leaderbeat.pauses import PAUSES_KEPT, Pause, Pauses
from celery_leaderbeat.plan import ASK_AGAIN_AFTER, Plan
from celery_leaderbeat.policy import Miss, Send, Skip
from celery_leaderbeat.records import ALL, Request
from celery_leaderbeat.reports import Reports
from celery_leaderbeat.requested import Requested
from celery_leaderbeat.restoring import Restorer
from celery_leaderbeat.sender import Sender
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
#: Seconds between two looks at the orders.
_LOOK_EVERY = 0.5
#: Longest that the tick loop sleeps, in seconds: it has to show that it comes round, and to look at the orders.
_LONGEST_SLEEP = 0.5
#: Wait before a term begins anew, in seconds.
_ANEW = 0.01
_NEVER = datetime.max.replace(tzinfo=timezone.utc)


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
        self._orders = Orders(self._ledger)
        self._reports = Reports(app)
        self._sender = Sender(
            app, settings, clock, elector, plans, self._ledger, self._reports, self._advance
        )
        self._restorer = Restorer(clock, elector, plans, self._ledger, self._reports)
        self._term: Term | None = None
        self._steps = StepWatch(clock)
        self._took_over: Term | None = None
        self._led_since = _NEVER
        self._agenda = Agenda(())
        self._sweep: Sweep | None = None
        self._requested: Requested | None = None
        self._pauses: Mapping[str, list[Pause]] = {}
        self._sweep_at = 0.0
        self._look_at = 0.0
        self._round = self._looked_in = 0
        self._ledger_is_away = False
        self._led = False

    def tick(self, term: Term) -> float:
        """Do what is due under `term`; the seconds until there is more to do."""
        self._led = True
        try:
            self._round += 1
            if term != self._took_over:
                self._take_over(term)
            elif (
                self._clock_went_back()
                # The same term once more: the lease lapsed, and was found again.
                or not self._elector.shadow.is_complete
                or (term == self._term and self._restorer.has_gone_back(term))
            ):
                self._term = None
            begins = term != self._term
            if begins:
                self._term = None
                self._begin(term)
                self._sender.start()
            self._sender.settle()
            self._put_back(self._sender.go_on())
            # Before anything is sent in a new term: what is older goes first, and should Redis lose it, it is known.
            if begins and not self._look_after(term):
                return _ANEW
            self._look_at_orders(term)
            if self._sender.held_for <= 0:
                self._dispatch(term)
            if self._monotonic() >= self._sweep_at and not self._look_after(term):
                return _ANEW
            self._sender.look_at_broker(term)
        except NotLeading as exc:
            logger.debug(
                "The lease of epoch %d is not ours any more: %s",
                term.epoch,
                exc,
                extra={"action": "not_leading", "epoch": term.epoch},
            )
            self._sender.drop()
            self._elector.lost(term)
            return 0.05
        except StoreError as exc:
            if not self._ledger_is_away:
                self._ledger_is_away = True
                logger.warning(
                    "The ledger is out of reach, and nothing is sent until it answers: %s",
                    sentence(exc),
                    extra={"action": "ledger_unavailable"},
                )
            return random.uniform(0.1, 0.5)
        if self._ledger_is_away:
            self._ledger_is_away = False
            logger.info("The ledger answers again.", extra={"action": "ledger_available"})
        return self._pause()

    def idle(self) -> None:
        """This replica doesn't lead: settle what an earlier term of ours left open."""
        self._sender.drop()
        if self._led:
            self._led = False
            self._restorer.left()
        with contextlib.suppress(StoreError):
            self._sender.settle_standing_by()

    def restore(self, term: Term, patience: float) -> bool:
        """Put back what Redis has lost, and send nothing; for a replica that stops.

        False if `term` doesn't lead, or Redis gives no answer within `patience` seconds.
        """
        self._led = True
        self._ledger.store.hurry(patience)
        try:
            self._take_over(term)
            self._begin(term)
        except NotLeading:
            self._sender.drop()
            self._elector.lost(term)
            return False
        except StoreError as exc:
            logger.debug("Not put back yet: %s", exc, extra={"action": "not_put_back"})
            return False
        return True

    @property
    def decided_at_least(self) -> int:
        """How many slots the ledger's totals have, unless data was lost. May be asked for inside a signal handler."""
        return self._restorer.decided_at_least

    def close(self, timeout: float) -> None:
        """Give back what is claimed and not published, in about `timeout` seconds; see `Sender.close`."""
        self._sender.close(timeout)

    def _pause(self) -> float:
        pause = _LONGEST_SLEEP
        when = self._agenda.next_time()
        if when is not None:
            pause = min(pause, max((when - self._clock.utcnow()).total_seconds(), 0.0))
        return max(pause, min(self._sender.held_for, _LONGEST_SLEEP))

    def _look_after(self, term: Term) -> bool:
        """Sweep. False if the ledger has lost data meanwhile: then the term has to begin anew."""
        if self._sweep is None:
            return True
        self._sweep_at = self._monotonic() + _SWEEP_EVERY
        # What the ledger wasn't told in this round must not look like a claim that nobody published.
        self._sender.settle()
        doubtful = self._sweep.run()
        if self._restorer.has_gone_back(term) or self._restorer.is_incomplete():
            # What the sweep hasn't found isn't settled by that.
            self._term = None
            return False
        self._restorer.swept(doubtful)
        if doubtful:
            self._sweep_at = self._monotonic() + _SWEEP_EVERY / 4
        return True

    def _look_at_orders(self, term: Term) -> None:
        if self._requested is None or self._monotonic() < self._look_at:
            return
        self._look_at = self._monotonic() + _LOOK_EVERY
        self._looked_in = self._round
        _, requests = self._read_orders(term)
        self._requested.look(requests, self._pauses_of, self._clock.utcnow())

    def _read_orders(self, term: Term) -> tuple[dict[str, list[Pause]], list[Request]]:
        """The pauses as they are stored, and the requests; the pauses that count are kept."""
        stored, requests = self._orders.look()
        self._pauses = self._restorer.pauses(term, stored)
        return stored, requests

    def _take_over(self, term: Term) -> None:
        """From now on, `term` leads."""
        since = datetime.fromtimestamp(self._clock.at(term.since), timezone.utc)
        self._steps, self._led_since = StepWatch(self._clock), min(since, self._clock.utcnow())
        self._took_over = term

    def _clock_went_back(self) -> bool:
        """Whether the fleet's clock stepped back so far that entries have to begin anew."""
        step = self._steps.step()
        if not step:
            return False
        now = self._clock.utcnow()
        # Nobody led in the time that a step forward skipped.
        self._led_since = now if step > 0 else min(self._led_since, now)
        horizon = now + timedelta(seconds=HORIZON)
        return step < 0 and (
            -step > HORIZON or any(plan.last and plan.last > horizon for plan in self._plans.values())
        )

    def _pauses_of(self, plan: Plan) -> Pauses:
        return Pauses(self._pauses.get(plan.name, ()), self._pauses.get(ALL, ()))

    def _begin(self, term: Term) -> None:
        """Go on where the entries stand in Redis."""
        self._sender.drop()
        self._sender.settle()
        positions = self._restorer.register(term)
        for name, (kind, slot) in positions.items():
            self._elector.progress()
            if kind == "reset":
                logger.warning(
                    "Entry %r: its last decided slot lay in the future (a clock had jumped); it counts from now.",
                    name,
                    extra={"action": "entry_reset", "entry": name},
                )
            elif kind not in ("kept", "recalled"):
                logger.info("Entry %r is %s.", name, kind, extra={"action": f"entry_{kind}", "entry": name})
            if name in self._plans:
                self._start(self._plans[name], slot)
        self._agenda = Agenda(self._plans.values())
        grace = self._settings.publish_timeout + 0.5
        self._sweep = Sweep(
            self._app,
            self._ledger,
            term,
            self._plans,
            self._reports,
            grace,
            self._agenda.put,
            self._sender.known_end,
        )
        # From here on all is known that was decided before.
        self._restorer.leads(term)
        before = self._requested
        self._requested = Requested(
            self._ledger, self._orders, self._plans, self._agenda.put, self._elector.progress
        )
        self._sweep_at = self._look_at = 0.0
        stored, requests = self._read_orders(term)
        if before is not None and self._restorer.found_loss:
            before.say_lost(requests)
        self._orders.forget_pauses(stored, self._clock.utcnow() - PAUSES_KEPT)
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

    def _dispatch(self, term: Term) -> None:
        """Send, miss or skip what is due."""
        now = self._clock.utcnow()
        taken = self._agenda.take(now, _CLAIM_BATCH)
        messages: list[Message] = []
        try:
            for plan in taken:
                self._elector.progress()
                messages += self._decided(term, plan, now)
            while messages:
                sent = self._sender.send(Batch(term, self._plans, messages[:_CLAIM_BATCH]))
                self._put_back(sent)
                # Where one slot is held, the later ones of its entry mustn't pass it.
                held = {message.entry for message in sent if message.held}
                messages = [message for message in messages[_CLAIM_BATCH:] if message.entry not in held]
                if self._sender.held_for > 0:
                    break
        finally:
            for plan in taken:
                self._agenda.put(plan)

    def _put_back(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._agenda.put(self._plans[message.entry])

    def _decided(self, term: Term, plan: Plan, now: datetime) -> list[Message]:
        """Decide about the due slots of one entry: miss what is missed; the messages of the others.

        A slot whose message can't be built is decided as missed in the next round, so that the slots before
        it are claimed first.
        """
        try:
            decisions = plan.decide(now, self._led_since, self._pauses_of(plan))
            if self._looked_in != self._round and any(isinstance(item, Skip) for item in decisions):
                # The pause may have been lifted since: what came due after that isn't paused.
                self._read_orders(term)
                self._looked_in = self._round
                decisions = plan.decide(now, self._led_since, self._pauses_of(plan))
        except (StoreError, NotLeading):
            raise
        except Exception:  # noqa: BLE001  # a user's schedule may raise anything; it is logged
            plan.postpone(now + ASK_AGAIN_AFTER)
            self._schedule_failed(plan)
            return []
        messages: list[Message] = []
        for decision in decisions:
            if not isinstance(decision, Send):
                if messages:
                    break
                self._write_off(term, plan, decision)
                continue
            message = self._message(term, plan, decision)
            if message is None:
                break
            messages.append(message)
            if len(messages) == _CLAIM_BATCH:
                # The other entries have their turn, too.
                break
        return messages

    def _message(self, term: Term, plan: Plan, send: Send) -> Message | None:
        """The message of a slot; None if it can't be sent, which is noted."""
        force = self._requested is not None and self._requested.forces(send.request)
        try:
            return build_message(
                plan, send.slot, term.epoch, self._settings.key_prefix, send.attempt, send.request, force
            )
        except Exception as exc:
            logger.exception(
                "Entry %r: its arguments can't be built.",
                plan.name,
                extra={"action": "impossible", "entry": plan.name},
            )
            plan.doom(send.slot, f"its arguments can't be built: {exc!r}")
            return None

    def _write_off(self, term: Term, plan: Plan, decision: Miss | Skip) -> None:
        returned = [tick_key(plan.name, slot) for slot in decision.returned]
        what = (plan.name, decision.first, decision.last, decision.count, decision.reason)
        if isinstance(decision, Miss):
            end, say = "missed", partial(self._reports.missed, *what, prefer=plan.policy.prefer)
        else:
            end, say = "skipped", partial(self._reports.skipped, *what)
        with self._reports.after(say):
            self._ledger.write_off(term, end, *what, plan.fingerprint, returned)
            for slot in dict.fromkeys((*decision.returned, decision.last)):
                self._advance(plan, slot)

    def _advance(self, plan: Plan, slot: datetime) -> None:
        back = plan.returned.get(slot)
        if back is None or not back.owed:
            # What is owed moves the last decided slot nowhere.
            self._restorer.decided(plan, slot)
        plan.advance(slot)
        failure, plan.failure = plan.failure, None
        if failure is not None:
            self._schedule_failed(plan, failure)

    def _monotonic(self) -> float:
        return self._clock.clock.monotonic()
