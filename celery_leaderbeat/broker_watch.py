"""What a leader makes of the broker's silence: how long to wait, and when to leave the lead to another.

A broker that gives no sign of life for `silence` seconds, or takes no message for as long although it is tried, may
be out of reach for this replica alone. Then it steps down; the elector goes on leading where no other replica can
do better. What the broker refuses, or puts off with an alarm, is no silence: another replica would hear the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from celery_leaderbeat.backoff import backoff
from celery_leaderbeat.clock import Clock
from celery_leaderbeat.message import Outcome
from celery_leaderbeat.term import Term

__all__ = ["BrokerWatch"]

logger = logging.getLogger(__name__)

#: Bounds of the wait while the broker can't be reached, in seconds.
_AWAY = (0.1, 5.0)


class BrokerWatch:
    """Signs of life of the broker, in one leadership after the other.

    `heard` comes from the publishing thread, `failed` from there and from the tick loop, all else from the tick loop.

    Parameters:
        clock: monotonic, for all of it.
        silence: seconds without a sign of life after which a leader steps down.
        step_down: called with the term and the reason.
    """

    def __init__(self, clock: Clock, silence: float, step_down: Callable[[Term, str], None]) -> None:
        self._clock = clock
        self._silence = silence
        self._step_down = step_down
        self._failing: tuple[float, str] | None = None
        self._told = False
        self._unsent_since: float | None = None
        self._failures = 0
        self._hold_until = 0.0
        self._asked = float("-inf")

    def begin(self) -> None:
        """A new term begins, and with it a new chance."""
        self._failing = self._unsent_since = None
        self._failures, self._hold_until = 0, 0.0
        self._asked = float("-inf")

    def heard(self) -> None:
        """The broker has answered."""
        self._failing = None
        if self._told:
            self._told = False
            logger.info("The broker answers again.", extra={"action": "broker_available"})

    def failed(self, since: float, reason: str) -> None:
        """What was asked of the broker at `since` (monotonic) came to nothing."""
        # Read once: the other thread may hear the broker meanwhile.
        failing = self._failing
        if not self._told:
            self._told = True
            logger.warning(
                "The broker is out of reach: %s. Trying again until it answers.",
                reason,
                extra={"action": "broker_unavailable"},
            )
        self._failing = (since if failing is None else failing[0], reason)

    @property
    def held_for(self) -> float:
        """Seconds until it is worth trying to send again; 0 or less if it is now."""
        return self._hold_until - self._clock.monotonic()

    def taken(self) -> None:
        """The broker has taken what it was given, or has refused it."""
        self._unsent_since, self._failures = None, 0

    def not_sent(self, began: float, outcome: Outcome) -> None:
        """The broker has taken nothing of what was handed over at `began` (monotonic), for its own reasons."""
        self._hold_until = self._clock.monotonic() + backoff(self._failures, *_AWAY)
        self._failures += 1
        if outcome.kind == "blocked":
            self._unsent_since = None
            return
        if self._unsent_since is None:
            self._unsent_since = began
        self.failed(began, outcome.reason)

    def look(self, term: Term, tried: bool = False) -> None:
        """Step down from `term` if it is time to; `tried` says that a publish has just failed."""
        now, failing = self._clock.monotonic(), self._failing
        if failing is None:
            return
        since, reason = failing
        if tried and self._unsent_since is not None:
            since = min(since, self._unsent_since)
        if now - max(since, self._asked) > self._silence:
            self._asked = now
            self._step_down(term, f"it can't publish: {reason}")
