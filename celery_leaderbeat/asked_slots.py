"""The slots of schedules that only they themselves know. Pure, as far as the schedule is.

A schedule with `slots_after(after)` is asked for its slots. To any other beat is played: `is_due` is called
with a clock that moves on as it says until it is due (or `remaining_estimate`, where there is only that).
Slots that were searched are rounded up to the whole second, so that replicas agree; a schedule finer than a
second should offer `slots_after`.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from celery_leaderbeat.errors import ScheduleError
from celery_leaderbeat.horizon import EARLIEST, LATEST
from celery_leaderbeat.kinds import ask, name_of, offers
from celery_leaderbeat.tick import slot_from_us, slot_to_us
from celery_leaderbeat.zones import zone_of

__all__ = ["AskedSlots", "OwnSlots", "whole_second"]

#: How often a schedule is asked for one slot.
_MAX_QUESTIONS = 10_000
#: One that wants to be asked again and again is asked at longer intervals after so many questions (seconds).
_STRIDES = ((8_000, 3600), (1_000, 60))
#: How much later a schedule that doesn't say when to ask again is asked, in seconds.
_UNSAID = 60.0

_SECOND_US = 1_000_000


def whole_second(instant: datetime) -> datetime:
    """Rounded up, never early; a millisecond is forgiven, so that a float's error isn't a second."""
    return slot_from_us(-(-(slot_to_us(instant) - 1000) // _SECOND_US) * _SECOND_US)


class OwnSlots:
    """The slots that a schedule offers itself."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule

    def after(self, after: datetime) -> Iterator[datetime]:
        """The slots later than `after`, ascending.

        Raises:
            ScheduleError: what the schedule gives are no ascending instants, or it raises.
        """
        schedule = self._schedule
        slots = ask(schedule, lambda: iter(schedule.slots_after(after)))
        previous = after
        while True:
            slot: datetime | None = ask(schedule, _next_of, slots)
            if slot is None:
                return
            if slot <= previous:
                raise ScheduleError(
                    f"{name_of(schedule)}.slots_after gave {slot.isoformat()} after {previous.isoformat()}:"
                    " slots must ascend and be later than what was asked for"
                )
            yield slot
            previous = slot


class AskedSlots:
    """The slots at which beat would find a schedule due."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule

    def after(self, after: datetime) -> Iterator[datetime]:
        """The slots later than `after`, ascending.

        Raises:
            ScheduleError: the schedule raises, or gives what is no answer.
        """
        asked = _Asked(self._schedule)
        search = asked.due_after if offers(self._schedule, "is_due") else asked.estimate_after
        while (slot := ask(self._schedule, search, after)) is not None:
            yield slot
            after = slot


class _Asked:
    """A copy of a schedule with a clock that is set for each question."""

    def __init__(self, schedule: Any) -> None:
        self._zone = zone_of(schedule)
        self._now = EARLIEST
        # Not copy.copy: the __reduce__ of Celery's schedules drops the app, and knows only their arguments.
        self._schedule: Any = object.__new__(type(schedule))
        vars(self._schedule).update(vars(schedule))
        vars(self._schedule).update(nowfun=self._clock, now=self._clock)

    def _clock(self) -> datetime:
        return self._now.astimezone(self._zone)

    def due_after(self, last: datetime) -> datetime | None:
        """The first instant at which beat, having sent at `last`, would find the schedule due.

        Where the search had to stride, that is the first second of the last stride, as long as a schedule
        that has come due stays due until it is sent.
        """
        at, strode_from = last, None
        for number in range(_MAX_QUESTIONS):
            due, wait = self._is_due(last, at)
            # Due at `last` is what has just been sent: beat asks again when it was told to.
            if due and at > last:
                return at if strode_from is None else self._first_due(last, strode_from, at)
            told = _later(at, _UNSAID if wait is None else wait)
            stride = next((seconds for after, seconds in _STRIDES if number >= after), 0)
            ahead = _later(at, stride)
            if told is None or ahead is None:
                return None
            told = max(told, _second_after(at))
            strode_from, at = (told, ahead) if ahead > told else (None, told)
        return None

    def _is_due(self, last: datetime, at: datetime) -> Any:
        self._now = at
        return self._schedule.is_due(last.astimezone(self._zone))

    def _first_due(self, last: datetime, begin: datetime, end: datetime) -> datetime:
        """The first second from `begin` on at which the schedule is due; at `end` it is."""
        first, due = slot_to_us(begin) // _SECOND_US, slot_to_us(end) // _SECOND_US
        while first < due:
            middle = (first + due) // 2
            if self._is_due(last, slot_from_us(middle * _SECOND_US))[0]:
                due = middle
            else:
                first = middle + 1
        return slot_from_us(due * _SECOND_US)

    def estimate_after(self, last: datetime) -> datetime | None:
        """The first estimate that is later than `last`."""
        self._now = last
        for _ in range(_MAX_QUESTIONS):
            wait = self._schedule.remaining_estimate(self._clock())
            slot = None if wait is None else _later(self._now, wait)
            if slot is None or slot > last:
                return slot
            self._now = _second_after(self._now)
        return None


def _next_of(slots: Iterator[datetime]) -> datetime | None:
    slot = next(slots, None)
    return None if slot is None else slot_from_us(slot_to_us(slot))


def _later(at: datetime, wait: float | timedelta) -> datetime | None:
    """The whole second `wait` (seconds) after `at`; None for never."""
    try:
        found = whole_second(at + (wait if isinstance(wait, timedelta) else timedelta(seconds=wait)))
    except OverflowError:
        return None
    return found if found < LATEST else None


def _second_after(instant: datetime) -> datetime:
    return slot_from_us((slot_to_us(instant) // _SECOND_US + 1) * _SECOND_US)
