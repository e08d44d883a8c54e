"""The slots of intervals: the multiples of the period since the Unix epoch. Pure, in integer microseconds."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from celery_leaderbeat.errors import ScheduleError
from celery_leaderbeat.horizon import EARLIEST_US, LATEST_US
from celery_leaderbeat.tick import slot_from_us, slot_to_us

__all__ = ["IntervalSlots", "period_us"]

_MICROSECOND = timedelta(microseconds=1)
_LEAST_US = 1000


def period_us(schedule: Any) -> int:
    """The period of a Celery `schedule`, a timedelta or a number of seconds, in microseconds.

    Raises:
        ScheduleError: it is no time, or less than a millisecond.
    """
    every = getattr(schedule, "run_every", schedule)
    try:
        period = every if isinstance(every, timedelta) else timedelta(seconds=every)
    except (TypeError, ValueError, OverflowError):
        period = timedelta(0)
    us = period // _MICROSECOND
    if us < _LEAST_US:
        found = f"{every.total_seconds():.15g} s" if isinstance(every, timedelta) else repr(every)
        raise ScheduleError(f"the interval is {found}: it must be a time of at least 1 ms")
    return us


class IntervalSlots:
    """The slots of one interval. All instants are within `horizon`. Raises as `period_us`."""

    def __init__(self, schedule: Any) -> None:
        self._period = period_us(schedule)

    def after(self, after: datetime) -> Iterator[datetime]:
        """The slots later than `after`, ascending."""
        return self._slots(range(self._number(after) + 1, LATEST_US // self._period + 1))

    def before(self, until: datetime) -> Iterator[datetime]:
        """The slots not later than `until`, descending."""
        first = -(-EARLIEST_US // self._period)
        return self._slots(range(self._number(until), first - 1, -1))

    def count(self, after: datetime, until: datetime) -> int:
        """How many slots there are in (after, until]."""
        return max(self._number(until) - self._number(after), 0)

    def _number(self, instant: datetime) -> int:
        return slot_to_us(instant) // self._period

    def _slots(self, numbers: range) -> Iterator[datetime]:
        return (slot_from_us(number * self._period) for number in numbers)
