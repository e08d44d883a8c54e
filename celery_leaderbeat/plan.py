"""The plan of one entry: its schedule, its policy, and where it stands while this replica leads. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from celery_leaderbeat.policy import Miss, Policy, Send, decide, reason_to_skip
from celery_leaderbeat.timeline import backlog, next_slot, slots_between

__all__ = ["ASK_AGAIN_AFTER", "POLICY_OPTION", "Plan"]

#: The key of an entry's `options` that holds its policy. Celery's own beat never looks at it.
POLICY_OPTION = "leaderbeat"
#: A schedule that failed is asked again after this time.
ASK_AGAIN_AFTER = timedelta(minutes=1)


@dataclass
class Plan:
    """One entry, and its slots that are still to be decided.

    `last` is the slot that was decided last, `next` the one after it (None: there is none any more), and
    `returned` holds slots that were to be sent and are known to be unsent.
    """

    name: str
    entry: Any
    schedule: Any
    fingerprint: str
    policy: Policy
    last: datetime | None = None
    next: datetime | None = None
    returned: list[datetime] = field(default_factory=list)
    failure: Exception | None = None
    failures: int = 0
    _doomed: dict[datetime, str] = field(default_factory=dict)
    _postponed: datetime | None = None

    def start(self, last: datetime) -> None:
        """Go on after the slot `last`. Raises what the schedule raises."""
        self.last = last
        self.returned = []
        self.failures = 0
        self._doomed = {}
        self._postponed = None
        self.next = next_slot(self.schedule, last)

    @property
    def when(self) -> datetime | None:
        """When this entry has to be looked at; None if never."""
        if self._postponed is not None:
            return self._postponed
        return self.returned[0] if self.returned else self.next

    def decide(self, now: datetime, led_since: datetime) -> list[Send | Miss]:
        """What becomes of the slots that are due at `now`, oldest first. Raises what the schedule raises."""
        if self.last is None:
            return []
        if self._postponed is not None:
            self.next = next_slot(self.schedule, self.last)
            self._postponed = None
        due: Iterable[datetime] = ()
        returned = tuple(self.returned)
        skipped: list[Send | Miss] = []
        if self.next is not None and self.next <= now:
            after = self.last
            long = backlog(self.schedule, after, now, self.policy.lookback)
            if long is not None:
                # However many there are: all but the newest are missed, with what was given back before them.
                first, after, count = long
                reason = reason_to_skip(self.policy, after, led_since, now)
                skipped = [Miss(min((first, *returned)), after, count + len(returned), reason, returned)]
                returned = ()
            due = slots_between(self.schedule, after, now)
        decisions = decide(self.policy, due, led_since=led_since, now=now, returned=returned)
        return [*skipped, *(self._unless_doomed(decision) for decision in decisions)]

    def advance(self, slot: datetime) -> None:
        """`slot` is decided. A schedule that fails here is asked again later; `failure` holds what it raised."""
        if slot in self.returned:
            self.returned.remove(slot)
        if self._doomed:
            self._doomed = {s: r for s, r in self._doomed.items() if s > slot or s in self.returned}
        if self.last is None or slot > self.last:
            self.last = slot
            try:
                self.next = next_slot(self.schedule, slot)
            except Exception as exc:  # noqa: BLE001  # a user's schedule may raise anything
                self.next = None
                self.failure = exc
                self.postpone(slot + ASK_AGAIN_AFTER)

    def postpone(self, until: datetime) -> None:
        """Look at this entry again at `until`; what is due stays due."""
        self._postponed = until

    def give_back(self, slot: datetime) -> None:
        """`slot` is to be sent again."""
        if slot not in self.returned:
            self.returned.append(slot)
            self.returned.sort()

    def doom(self, slot: datetime, reason: str) -> None:
        """`slot` can't be sent: it will be missed for this reason."""
        self._doomed[slot] = reason

    def _unless_doomed(self, decision: Send | Miss) -> Send | Miss:
        if isinstance(decision, Miss) or decision.slot not in self._doomed:
            return decision
        slot = decision.slot
        returned = (slot,) if slot in self.returned else ()
        return Miss(slot, slot, 1, self._doomed[slot], returned)
