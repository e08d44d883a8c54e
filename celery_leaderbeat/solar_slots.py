"""The slots of solar schedules: the sun's events that `ephem` finds with the schedule's own observer. Pure.

Each search starts from a midnight in UTC, because its result depends on its start by up to a tenth of a
second. Events are rounded up to the whole second.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, time, timedelta, timezone
from typing import Any

from celery_leaderbeat.asked_slots import whole_second

__all__ = ["SolarSlots"]

#: Days searched for an event. In a polar day or night it comes back within a year or never.
_SEARCH_DAYS = 370
#: Two findings that are nearer to each other are one event.
_APART = timedelta(hours=1)

_DAY = timedelta(days=1)
_SECOND = timedelta(seconds=1)


class SolarSlots:
    """The slots of one solar schedule."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule

    def after(self, after: datetime) -> Iterator[datetime]:
        """The slots later than `after`, ascending; they end where the event doesn't come for a year."""
        # From the day before, so that an event next to midnight is found from the same start by every search.
        day = datetime.combine(after.date() - _DAY, time.min)
        previous = None
        empty = 0
        while empty < _SEARCH_DAYS:
            empty += 1
            for event in self._events(day):
                empty = 0
                if previous is None or event - previous > _APART:
                    slot = whole_second(event.replace(tzinfo=timezone.utc))
                    if slot > after:
                        yield slot
                previous = event
            day += _DAY

    def _events(self, day: datetime) -> Iterator[datetime]:
        """The events of one day of UTC, naive; one within a second of its end may also be of the next day."""
        schedule = self._schedule
        ephem = schedule.ephem
        search = getattr(schedule.cal.copy(), schedule.method)
        options = {"use_center": True} if schedule.use_center else {}
        start = day
        while True:
            try:
                event: datetime = search(ephem.Sun(), start=ephem.Date(start), **options).datetime()
            except ephem.CircumpolarError:
                return
            if event >= day + _DAY + _SECOND:
                return
            yield event
            start = event + _APART
