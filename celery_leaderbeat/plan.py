"""The plan of one entry: its schedule, its policy, and where it stands while this replica leads. Pure.

Slots come to be decided in two ways. Fresh ones are what the schedule gives after the last decided slot, each
once it is time to send it. The others are given back: claimed before and known to be unsent, or *owed*, which
is what died in mid-run and is to be run again (attempt 2 and later), and what somebody asked for (a request).

What is owed is no part of the sequence of fresh slots. It is sent before them, without regard to catch_up,
lookback, deadline and jitter, never before its nominal time, and moves nothing on. A pause holds back what is
to be run again, and lets through what was asked for.

Where slots of the entry mustn't overlap, the one that a leader claimed and was gone before it said more goes
first: its message may be on its way, so the others wait for it. Where they queue, one that was given back is
one that waits: it keeps its place whatever the lookback, and fresh ones are decided beside it.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from itertools import chain
from typing import Any

from celery_leaderbeat.due import due_slots, send_times
from celery_leaderbeat.expiry import born_expired
from celery_leaderbeat.pauses import Pauses
from celery_leaderbeat.policy import Decision, Due, Miss, Policy, Send, decide, send_time
from celery_leaderbeat.timeline import next_slot

__all__ = ["ASK_AGAIN_AFTER", "POLICY_OPTION", "Plan", "Returned"]

#: The key of an entry's `options` that holds its policy. Celery's own beat never looks at it.
POLICY_OPTION = "leaderbeat"
#: A schedule that failed is asked again after this time.
ASK_AGAIN_AFTER = timedelta(minutes=1)
#: Slots that a pause holds back are looked at again after this time.
_HELD_FOR = timedelta(seconds=1)
#: A slot that has to wait for another one of its entry is tried again after this time.
_WAIT = timedelta(seconds=0.5)


@dataclass(frozen=True)
class Returned:
    """How a slot that was given back is to be sent.

    Attributes:
        attempt: which attempt at the slot it will be; 1 at first.
        request: the id of the request that asked for it, else empty.
        maybe_sent: whether it may have been sent: a leader claimed it, and was gone before it said more.
    """

    attempt: int = 1
    request: str = ""
    maybe_sent: bool = False

    @property
    def owed(self) -> bool:
        """Whether the slot is to be sent whatever catch_up, lookback and deadline say."""
        return self.attempt > 1 or bool(self.request)


@dataclass
class Plan:
    """One entry, and its slots that are still to be decided.

    `last` is the slot that was decided last, `next` the one after it (None: there is none any more), and
    `returned` holds slots that were to be sent and are known to be unsent, oldest first. `task_expires` is what the
    task says of when its messages expire, where the entry says nothing.
    """

    name: str
    entry: Any
    schedule: Any
    fingerprint: str
    policy: Policy
    task_expires: Any = None
    last: datetime | None = None
    next: datetime | None = None
    returned: dict[datetime, Returned] = field(default_factory=dict)
    failure: Exception | None = None
    failures: int = 0
    _doomed: dict[datetime, str] = field(default_factory=dict)
    _postponed: datetime | None = None
    # When `next` is to be sent.
    _next_at: datetime | None = None
    # Owed slots later than `last` that are decided: the schedule may have them too.
    _ahead: set[datetime] = field(default_factory=set)
    # From when on the slots that were given back are looked at again.
    _returned_from: datetime | None = None

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of its messages."""
        own: Mapping[str, Any] = self.entry.options or {}
        if self.task_expires is None or "expires" in own:
            return own
        # Celery would count it from this host's wall clock.
        return {**own, "expires": self.task_expires}

    def start(self, last: datetime) -> None:
        """Go on after the slot `last`. Raises what the schedule raises."""
        self.last = last
        self.returned = {}
        self.failures = 0
        self._doomed = {}
        self._postponed = None
        self._ahead = set()
        self._returned_from = None
        self._look_ahead()

    @property
    def when(self) -> datetime | None:
        """When this entry has to be looked at; None if never."""
        if self._postponed is not None:
            return self._postponed
        oldest = next(iter(self.returned), None)
        if oldest is not None and self._returned_from is not None:
            oldest = max(oldest, self._returned_from)
        if oldest is None or self._next_at is None:
            return oldest or self._next_at
        return min(oldest, self._next_at)

    def decide(self, now: datetime, led_since: datetime, pauses: Pauses | None = None) -> list[Decision]:
        """What becomes of the slots that are due at `now`: first what is owed, then the others, oldest first.

        Where slots of the entry mustn't overlap there is one `Send` at most, the last item: what comes after
        it is decided in the next call. Where all that is due is held back by a pause, the plan is postponed.
        Raises what the schedule raises.
        """
        if self.last is None:
            return []
        if self._postponed is not None:
            self._look_ahead()
            self._postponed = None
        decisions: list[Decision] = []
        expired = born_expired(self.options, now)
        for decision in self._decisions(now, led_since, pauses or Pauses()):
            _append(decisions, self._unless_doomed(decision, expired))
            if self.policy.overlap != "allow" and isinstance(decisions[-1], Send):
                break
        if not decisions and self.when is not None and self.when <= now:
            self.postpone(now + _HELD_FOR)
        return decisions

    def advance(self, slot: datetime) -> None:
        """`slot` is decided.

        A schedule that fails here is asked again later; `failure` holds what it raised.
        """
        back = self.returned.pop(slot, None)
        self._doomed.pop(slot, None)
        if self.last is not None and slot <= self.last:
            return
        if back is not None and back.owed:
            self._ahead.add(slot)
        elif slot not in self._ahead:
            self.last = slot
            self._doomed = {s: r for s, r in self._doomed.items() if s > slot or s in self.returned}
        try:
            self._look_ahead()
        except Exception as exc:  # noqa: BLE001  # a user's schedule may raise anything
            self.next = self._next_at = None
            self.failure = exc
            self.postpone(slot + ASK_AGAIN_AFTER)

    def period_of(self, slot: datetime) -> timedelta:
        """The time from a slot to the one that follows; 0 where there is none, or the schedule fails."""
        try:
            following = next_slot(self.schedule, slot)
        except Exception:  # noqa: BLE001  # a user's schedule may raise anything; it is asked for its slots elsewhere
            following = None
        return timedelta(0) if following is None else following - slot

    def postpone(self, until: datetime) -> None:
        """Look at this entry again at `until`; what is due stays due."""
        self._postponed = until

    def wait(self, slot: datetime, now: datetime) -> None:
        """`slot` can't be sent while another one is unfinished: look again soon.

        If it was given back, fresh slots are decided meanwhile, in their own time.
        """
        if slot in self.returned:
            self._returned_from = now + _WAIT
        else:
            self.postpone(now + _WAIT)

    def give_back(
        self, slot: datetime, attempt: int = 1, request: str = "", maybe_sent: bool = False
    ) -> None:
        """`slot` is to be sent again: as this attempt, and for the request with this id if there is one.

        Of two things that are known of one slot the later attempt counts, and of the same attempt the
        request.
        """
        known = self.returned.get(slot)
        if known is not None and (known.attempt, known.request != "") > (attempt, request != ""):
            return
        in_place = known is not None or not self.returned or slot > next(reversed(self.returned))
        self.returned[slot] = Returned(attempt, request, maybe_sent)
        if not in_place:
            self.returned = dict(sorted(self.returned.items()))

    def take_up(self, slots: Mapping[datetime, int], request: str) -> None:
        """Send these slots, each as the attempt that is given, for the request with this id."""
        for slot, attempt in slots.items():
            known = self.returned.get(slot)
            if known is None or known.attempt <= attempt:
                self.returned[slot] = Returned(attempt, request)
        self.returned = dict(sorted(self.returned.items()))

    def doom(self, slot: datetime, reason: str) -> None:
        """`slot` can't be sent: it will be missed for this reason."""
        self._doomed[slot] = reason

    def _decisions(self, now: datetime, led_since: datetime, pauses: Pauses) -> Iterator[Decision]:
        judge = partial(decide, led_since=led_since, now=now, pauses=pauses)
        fresh = self._fresh(now, pauses)
        if self._returned_from is not None and now < self._returned_from:
            return _lazily(judge, self.policy, fresh)
        self._returned_from = None
        held = pauses.in_force(now) is not None
        if self.policy.overlap == "allow":
            returned = self._came_back(now, (False, True))
            return chain(
                self._owed(now, held, (False, True)),
                _lazily(judge, self.policy, heapq.merge(returned, fresh)),
            )
        # What waits for its turn doesn't give way to newer slots.
        queues = self.policy.overlap == "queue"
        patient = replace(self.policy, lookback=sys.maxsize) if queues else self.policy
        first = chain(self._owed(now, held, (True,)), _lazily(judge, patient, self._came_back(now, (True,))))
        owed, returned = self._owed(now, held, (False,)), self._came_back(now, (False,))
        if queues:
            return chain(first, owed, _lazily(judge, patient, returned), _lazily(judge, self.policy, fresh))
        return chain(first, owed, _lazily(judge, self.policy, heapq.merge(returned, fresh)))

    def _owed(self, now: datetime, held: bool, maybe_sent: Collection[bool]) -> Iterator[Decision]:
        for slot, back in self.returned.items():
            if slot > now:
                return
            if (
                back.maybe_sent in maybe_sent
                and back.owed
                and (back.request or not held or slot in self._doomed)
            ):
                yield Send(slot, back.attempt, back.request)

    def _came_back(self, now: datetime, maybe_sent: Collection[bool]) -> Iterator[Due]:
        for slot, back in self.returned.items():
            if slot > now:
                return
            if back.maybe_sent in maybe_sent and not back.owed:
                yield Due(slot, self._at(slot), returned=True)

    def _fresh(self, now: datetime, pauses: Pauses) -> Iterator[Due]:
        """What the schedule gives after the last decided slot, as far as it is time to send it."""
        if self.last is None or self._next_at is None or self._next_at > now:
            return
        known = {slot for slot in (*self.returned, *self._ahead) if slot > self.last}
        yield from due_slots(
            self.name, self.schedule, self.policy, self.last, now, now=now, pauses=pauses, known=known
        )

    def _at(self, slot: datetime) -> datetime:
        following = next_slot(self.schedule, slot) if self.policy.jitter else None
        return send_time(self.name, slot, following, self.policy.jitter)

    def _look_ahead(self) -> None:
        """Find the next slot; owed ones that are decided already are passed over."""
        if self.last is None:
            return
        self.next = self._next_at = None
        for slot, at in send_times(self.name, self.schedule, self.policy.jitter, self.last):
            if slot not in self._ahead:
                self.next, self._next_at = slot, at
                break
            self.last = slot
        self._ahead = {slot for slot in self._ahead if slot > self.last}

    def _unless_doomed(self, decision: Decision, expired: str) -> Decision:
        reason = self._doomed.get(decision.slot, expired) if isinstance(decision, Send) else ""
        if not isinstance(decision, Send) or not reason:
            return decision
        slot = decision.slot
        returned = (slot,) if slot in self.returned else ()
        return Miss(slot, slot, 1, reason, returned)


def _append(decisions: list[Decision], decision: Decision) -> None:
    """Add a decision; fresh slots that are missed one after the other for the same reason are one range."""
    before = decisions[-1] if decisions else None
    if (
        isinstance(before, Miss)
        and isinstance(decision, Miss)
        and before.reason == decision.reason
        and not (before.returned or decision.returned)
    ):
        decisions[-1] = Miss(before.first, decision.last, before.count + decision.count, decision.reason)
    else:
        decisions.append(decision)


def _lazily(judge: Callable[..., list[Decision]], policy: Policy, due: Iterable[Due]) -> Iterator[Decision]:
    """The decisions, made once somebody asks for the first."""
    yield from judge(policy, due)
