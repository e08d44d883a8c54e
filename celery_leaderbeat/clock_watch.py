"""Watches on the clocks: this host's wall clock that is off, and the fleet's clock that has stepped."""

from __future__ import annotations

import logging

from celery_leaderbeat.clock import FleetClock

__all__ = ["OffsetWatch", "StepWatch"]

logger = logging.getLogger(__name__)

#: A wall clock that is further off the server's than this (seconds) is worth a warning ...
_OFF = 1.0
#: ... and right again below this.
_RIGHT = 0.5
#: A step of the fleet's clock that is shorter than this (seconds) is as a tick that came late.
_STEP = 5.0


class OffsetWatch:
    """Warns of a wall clock that differs from the Redis server's.

    Parameters:
        clock: the fleet's clock, which measures the offset.
    """

    def __init__(self, clock: FleetClock) -> None:
        self._clock = clock
        self._warned = False
        self._seen = False

    def look(self) -> None:
        """Take a look; to be called now and then.

        A process may be frozen in the middle of one: two in a row count.
        """
        offset = self._clock.offset
        differs = abs(offset) > (_RIGHT if self._warned else _OFF)
        if differs != self._seen or differs == self._warned:
            self._seen = differs
            return
        self._warned = differs
        if differs:
            logger.warning(
                "The wall clock of this host is %.1f s off the clock of the Redis server%s. Have a time service (NTP) "
                "set the clocks of both.",
                -offset,
                ", which decides when a slot is due" if self._clock.source == "redis" else "",
                extra={"action": "clock_offset", "offset": offset},
            )
        else:
            logger.info(
                "The wall clock of this host agrees with the clock of the Redis server again.",
                extra={"action": "clock_agrees", "offset": offset},
            )


class StepWatch:
    """Notices steps of the fleet's clock, what it did beyond the time that went by, and tells of them.

    It steps where the clock that it follows does: the server's was set, or this host's with
    `leaderbeat_clock = "local"`, or this host slept.

    Parameters:
        clock: the fleet's clock.
    """

    def __init__(self, clock: FleetClock) -> None:
        self._clock = clock
        self._shift = clock.shift

    def step(self) -> float:
        """By how many seconds the clock stepped since the last look; 0 for what a late tick would do, too."""
        before, self._shift = self._shift, self._clock.shift
        step = self._shift - before
        if abs(step) <= _STEP:
            return 0.0
        if step > 0:
            logger.warning(
                "The clock that decides when a slot is due went forward by %.0f s; what came due in that time is "
                "caught up as each entry's policy says.",
                step,
                extra={"action": "clock_stepped", "step": step},
            )
        else:
            logger.warning(
                "The clock that decides when a slot is due went back by %.0f s; entries rest until the times that they "
                "have been decided about, and count from now where those are more than five minutes away.",
                -step,
                extra={"action": "clock_stepped", "step": step},
            )
        return step
