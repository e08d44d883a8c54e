"""The leader's part of requests: slots that somebody asked for are sent, whatever policy and pauses say.

A request stays in Redis until each of its slots has been claimed, or needn't be. So a leader that comes in
between goes through it again, and finds by the slots' records, which name the request, what has been done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import islice

from celery_leaderbeat.due import due_slots
from celery_leaderbeat.ledger import Ledger
from celery_leaderbeat.orders import MOST, Orders
from celery_leaderbeat.pauses import Pause, Pauses
from celery_leaderbeat.plan import Plan
from celery_leaderbeat.policy import Send, decide
from celery_leaderbeat.records import ALL, Request, SlotRecord
from celery_leaderbeat.tick import slot_text, tick_key
from celery_leaderbeat.timeline import slots_between

__all__ = ["Requested"]

logger = logging.getLogger(__name__)

#: Ends of a slot that wasn't done: from these a request starts it again.
_REPEATABLE = ("missed", "skipped", "failed", "refused", "abandoned", "unconfirmed")

#: A request for an entry that no leader has is kept so long.
_KEPT_FOR = timedelta(hours=1)
#: A request for all entries is taken up for so many of them at once.
_PLANS_AT_ONCE = 100
_MICROSECOND = timedelta(microseconds=1)


@dataclass
class _Open:
    """A request, the plans that it is still to be taken up for, and those that have taken up its slots."""

    request: Request
    ahead: list[Plan]
    taken_up: list[Plan] = field(default_factory=list)
    oldest: datetime | None = None

    def unsent(self) -> list[datetime]:
        """Its slots that are still to be sent, the oldest first."""
        return sorted(
            slot
            for plan in self.taken_up
            for slot, owed in plan.returned.items()
            if owed.request == self.request.id
        )


class Requested:
    """The requests of one term.

    Parameters:
        ledger: where the slots' records are.
        orders: where the requests are.
        plans: the plans of all entries.
        taken_up: called with each plan that has got slots to send.
        progress: called between plans, to show that the tick goes on.
    """

    def __init__(
        self,
        ledger: Ledger,
        orders: Orders,
        plans: Mapping[str, Plan],
        taken_up: Callable[[Plan], None],
        progress: Callable[[], None],
    ) -> None:
        self._ledger = ledger
        self._orders = orders
        self._plans = plans
        self._taken_up = taken_up
        self._progress = progress
        self._unknown: set[str] = set()
        self._open: dict[str, _Open] = {}

    def forces(self, request: str) -> bool:
        """Whether the request is for slots that are done or under way, too."""
        known = self._open.get(request)
        return known is not None and known.request.force

    def look(self, requests: Iterable[Request], pauses_of: Callable[[Plan], Pauses], now: datetime) -> None:
        """Take up requests that are new, and close those that are carried out.

        Catching up after one pause waits while another one is in force.

        Raises:
            StoreError: the ledger doesn't answer; look again.
        """
        for request in requests:
            known = self._open.get(request.id)
            if known is None:
                plans = self._plans_of(request)
                if not plans and now - request.at < _KEPT_FOR:
                    # Newer code may lead soon.
                    continue
                known = self._open[request.id] = _Open(request, plans)
            self._go_on(known, pauses_of, now)
        for key, known in list(self._open.items()):
            unsent = [] if known.ahead else known.unsent()
            if not known.ahead and not unsent:
                self._orders.done_with(known.request)
                del self._open[key]
            elif unsent and known.request.kind == "backfill" and unsent[0] != known.oldest:
                # The records of the slots before it may expire while this goes on.
                known.oldest = unsent[0]
                self._orders.note_progress(known.request, unsent[0] - _MICROSECOND)

    def say_lost(self, kept: Iterable[Request]) -> None:
        """Redis has lost data: say which of these requests it has lost with that, as `kept` are left."""
        left = {request.id for request in kept}
        for known in self._open.values():
            request = known.request
            if request.id in left:
                continue
            logger.warning(
                "Redis has lost the request (%s) of %s for slots of %s up to %s, and what of it isn't sent yet won't be: "
                "ask again.",
                request.kind,
                request.by,
                repr(request.entry) if request.entry else "all entries",
                slot_text(request.until),
                extra={"action": "request_lost", "entry": request.entry},
            )

    def _go_on(self, known: _Open, pauses_of: Callable[[Plan], Pauses], now: datetime) -> None:
        """Take a request up for some of the plans that it is still to be taken up for."""
        request, waiting = known.request, []
        for _ in range(min(len(known.ahead), _PLANS_AT_ONCE)):
            plan = known.ahead[0]
            self._progress()
            if request.kind == "catch_up" and pauses_of(plan).in_force(now):
                waiting.append(plan)
            else:
                self._take_up_of(plan, request, now)
                known.taken_up.append(plan)
            del known.ahead[0]
        known.ahead += waiting

    def _plans_of(self, request: Request) -> list[Plan]:
        if request.entry == ALL:
            return list(self._plans.values())
        if request.entry in self._plans:
            return [self._plans[request.entry]]
        if request.id not in self._unknown:
            self._unknown.add(request.id)
            logger.warning(
                "%s asks for slots of the entry %r, which this leader doesn't have: nothing is sent, unless a leader "
                "that has it comes within an hour.",
                request.by,
                request.entry,
                extra={"action": "request_refused", "entry": request.entry},
            )
        return []

    def _take_up_of(self, plan: Plan, request: Request, now: datetime) -> None:
        try:
            slots = _slots(plan, request, now)
        except Exception:
            logger.exception(
                "Entry %r: its schedule can't say which slots %s asks for: nothing is sent.",
                plan.name,
                request.by,
                extra={"action": "request_refused", "entry": plan.name},
            )
            return
        if len(slots) > MOST:
            logger.warning(
                "%s asks for more than %d slots of the entry %r: nothing is sent. Ask for less at once.",
                request.by,
                MOST,
                plan.name,
                extra={"action": "request_refused", "entry": plan.name},
            )
            return
        records = self._ledger.slots([tick_key(plan.name, slot) for slot in slots])
        attempts = {
            slot: _attempt(request, record) for slot, record in zip(slots, records.values(), strict=True)
        }
        wanted = {slot: attempt for slot, attempt in attempts.items() if attempt}
        if wanted:
            plan.take_up(wanted, request.id)
            self._taken_up(plan)
        logger.info(
            "Entry %r: %s asks for %d %s up to %s, of which %d %s to be sent.",
            plan.name,
            request.by,
            len(slots),
            "slot" if len(slots) == 1 else "slots",
            slot_text(request.until),
            len(wanted),
            "is" if len(wanted) == 1 else "are",
            extra={"action": "requested", "entry": plan.name, "count": len(wanted)},
        )


def _slots(plan: Plan, request: Request, now: datetime) -> list[datetime]:
    if request.kind == "run":
        return [request.until]
    until = min(request.until, now)
    if request.kind == "catch_up":
        # What was to be sent in the pause may have come due before it.
        since = request.since - timedelta(seconds=plan.policy.jitter) - _MICROSECOND
        pause = Pauses([Pause(request.since, until)])
        due = due_slots(plan.name, plan.schedule, plan.policy, since, until, now=now, pauses=pause)
        caught = (item for item in due if pause.covers(item.at))
        decisions = decide(plan.policy, caught, led_since=now, now=now)
        return [decision.slot for decision in decisions if isinstance(decision, Send)]
    return list(islice(slots_between(plan.schedule, request.since, until), MOST + 1))


def _attempt(request: Request, record: SlotRecord | None) -> int:
    """As which attempt a slot is to be sent; 0 if it isn't."""
    if record is None:
        return 1
    if record.state == "returned":
        return record.attempt
    if record.request == request.id:
        return 0
    return record.attempt + 1 if request.force or record.state in _REPEATABLE else 0
