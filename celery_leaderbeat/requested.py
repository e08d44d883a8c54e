"""The leader's part of requests: slots that somebody asked for are sent, whatever the entry's policy and pauses.

A request stays in Redis until each of its slots has been claimed, or needn't be. So a leader that comes in between
goes through it again, and finds by the slots' records, which name the request, what has been done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import islice

from celery_leaderbeat.due import due_slots
from celery_leaderbeat.ledger import Ledger
from celery_leaderbeat.orders import ALL, MOST, Orders, Request
from celery_leaderbeat.pauses import Pauses
from celery_leaderbeat.plan import Plan
from celery_leaderbeat.policy import Send, decide
from celery_leaderbeat.records import SlotRecord
from celery_leaderbeat.tick import slot_text, tick_key
from celery_leaderbeat.timeline import slots_between

__all__ = ["Requested"]

logger = logging.getLogger(__name__)

#: Ends of a slot that wasn't done: from these a request starts it again.
_REPEATABLE = ("missed", "skipped", "failed", "refused", "abandoned", "unconfirmed")


@dataclass
class _Open:
    """A request, the plans that it is still to be taken up for, and those that have taken up its slots."""

    request: Request
    ahead: list[Plan]
    taken_up: list[Plan] = field(default_factory=list)

    def unsent(self) -> bool:
        """Whether slots of it are still to be sent."""
        return any(
            owed.request == self.request.id for plan in self.taken_up for owed in plan.returned.values()
        )


class Requested:
    """The requests of one term.

    Parameters:
        ledger: where the slots' records are.
        orders: where the requests are.
        plans: the plans of all entries.
        taken_up: called with each plan that has got slots to send.
    """

    def __init__(
        self, ledger: Ledger, orders: Orders, plans: Mapping[str, Plan], taken_up: Callable[[Plan], None]
    ) -> None:
        self._ledger = ledger
        self._orders = orders
        self._plans = plans
        self._taken_up = taken_up
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
                known = _Open(request, self._plans_of(request))
            for plan in list(known.ahead):
                if request.kind == "catch_up" and pauses_of(plan).in_force(now):
                    continue
                self._take_up_of(plan, request, now)
                known.ahead.remove(plan)
                known.taken_up.append(plan)
            self._open[request.id] = known
        for key, known in list(self._open.items()):
            if not known.ahead and not known.unsent():
                self._orders.done_with(known.request)
                del self._open[key]

    def _plans_of(self, request: Request) -> list[Plan]:
        if request.entry == ALL:
            return list(self._plans.values())
        if request.entry in self._plans:
            return [self._plans[request.entry]]
        logger.warning(
            "%s asks for slots of the entry %r, which isn't in the schedule: nothing is sent.",
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
        wanted = [(slot, attempt) for slot, attempt in attempts.items() if attempt]
        for slot, attempt in wanted:
            plan.give_back(slot, attempt, request.id)
        if wanted:
            self._taken_up(plan)
        logger.info(
            "Entry %r: %s asks for %d slots up to %s; %d of them are sent.",
            plan.name,
            request.by,
            len(slots),
            slot_text(request.until),
            len(wanted),
            extra={"action": "requested", "entry": plan.name, "count": len(wanted)},
        )


def _slots(plan: Plan, request: Request, now: datetime) -> list[datetime]:
    if request.kind == "run":
        return [request.until]
    until = min(request.until, now)
    if request.kind == "catch_up":
        policy = replace(plan.policy, jitter=0)
        due = due_slots(plan.name, plan.schedule, policy, request.since, until, now=now, pauses=Pauses())
        decisions = decide(policy, due, led_since=now, now=now)
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
