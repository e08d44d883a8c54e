"""The fields of a crontab, as sets of numbers, and the wall times that they name. Pure arithmetic, no zones.

Wall times are whole minutes since 1970-01-01T00:00 on a clock that never changes its offset, days are days
since 1970-01-01. A date is named where month, day of month and day of week name it, all three, as in Celery.
"""

from __future__ import annotations

from bisect import bisect_left
from calendar import isleap
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import MAXYEAR, MINYEAR, date
from functools import cached_property, lru_cache
from typing import Any

from celery_leaderbeat.errors import ScheduleError

__all__ = ["MINUTES_A_DAY", "Fields", "fields_of"]

MINUTES_A_DAY = 1440

#: The longest way between two dates that a crontab can name: 29 February on a given weekday, around a
#: century without a leap day.
_SEARCH_YEARS = 40
#: The lengths of the months, from the first on, in a year that isn't a leap year.
_LENGTHS = (0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_UNIX_EPOCH_DAY = date(1970, 1, 1).toordinal()
#: Celery's names, in the order of a crontab's line, each with the number of its values.
_FIELDS = (("minute", 60), ("hour", 24), ("day_of_month", 31), ("month_of_year", 12), ("day_of_week", 7))


def fields_of(schedule: Any) -> Fields:
    """The fields that Celery has expanded.

    Raises:
        ScheduleError: a field is empty, or has something else than whole numbers; names the field.
    """
    sets = []
    for name, _ in _FIELDS:
        values = getattr(schedule, name)
        try:
            sets.append(tuple(sorted(values)))
        except TypeError:
            raise _no_numbers(name, values) from None
    return _kept(tuple(sets))


@lru_cache(maxsize=1024)
def _kept(sets: tuple[tuple[Any, ...], ...]) -> Fields:
    minutes, hours, days, months, weekdays = (
        _whole(name, values) for (name, _), values in zip(_FIELDS, sets, strict=True)
    )
    return Fields(minutes, hours, days, months, weekdays)


def _whole(name: str, values: tuple[Any, ...]) -> tuple[int, ...]:
    if not values:
        raise ScheduleError(f"the crontab's {name} is empty: it must name at least one value")
    try:
        whole = tuple(int(value) for value in values)
    except (TypeError, ValueError):
        raise _no_numbers(name, values) from None
    if whole != values:
        raise _no_numbers(name, values)
    return whole


def _no_numbers(name: str, values: Any) -> ScheduleError:
    return ScheduleError(f"the crontab's {name} is {values!r}: it must name whole numbers")


@dataclass(frozen=True)
class Fields:
    """A crontab's field sets, ascending."""

    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: tuple[int, ...]
    months: tuple[int, ...]
    weekdays: tuple[int, ...]
    # The named days of a month, by its length and the weekday that it begins with.
    _named: dict[tuple[int, int], list[int]] = field(default_factory=dict, compare=False, repr=False)

    def __str__(self) -> str:
        sets = (self.minutes, self.hours, self.days, self.months, self.weekdays)
        return " ".join(
            "*" if len(values) == full else ",".join(map(str, values))
            for values, (_, full) in zip(sets, _FIELDS, strict=True)
        )

    @property
    def every_hour(self) -> bool:
        """Whether the hours are all 24."""
        return len(self.hours) == 24

    @cached_property
    def times(self) -> tuple[int, ...]:
        """The named times of a day, as minutes since midnight, ascending."""
        return tuple(hour * 60 + minute for hour in self.hours for minute in self.minutes)

    def day_from(self, first: int) -> int | None:
        """The first named day that isn't earlier than `first`, or None."""
        begin = date.fromordinal(first + _UNIX_EPOCH_DAY)
        for year in range(begin.year, min(begin.year + _SEARCH_YEARS, MAXYEAR - 1) + 1):
            for month in self.months:
                if (year, month) >= (begin.year, begin.month):
                    begin_of_month, named = self._month(year, month)
                    at = bisect_left(named, first - begin_of_month)
                    if at < len(named):
                        return begin_of_month + named[at]
        return None

    def day_back_from(self, last: int) -> int | None:
        """The last named day that isn't later than `last`, or None."""
        end = date.fromordinal(last + _UNIX_EPOCH_DAY)
        for year in range(end.year, max(end.year - _SEARCH_YEARS, MINYEAR) - 1, -1):
            for month in reversed(self.months):
                if (year, month) <= (end.year, end.month):
                    begin_of_month, named = self._month(year, month)
                    at = bisect_left(named, last + 1 - begin_of_month)
                    if at:
                        return begin_of_month + named[at - 1]
        return None

    def walls(self, begin: int, end: int, backwards: bool = False) -> Iterator[int]:
        """The named wall times in `begin <= wall time < end`, ascending or, on request, descending."""
        if begin >= end:
            return
        times = self.times
        first, last = begin // MINUTES_A_DAY, (end - 1) // MINUTES_A_DAY
        for day in self._days(first, last, backwards):
            midnight = day * MINUTES_A_DAY
            low = bisect_left(times, begin - midnight) if day == first else 0
            high = bisect_left(times, end - midnight) if day == last else len(times)
            for index in reversed(range(low, high)) if backwards else range(low, high):
                yield midnight + times[index]

    def count(self, begin: int, end: int) -> int:
        """How many named wall times there are in `begin <= wall time < end`; no walk over them."""
        if begin >= end:
            return 0
        return self._count_to(end) - self._count_to(begin) + self._count_days(begin, end)

    def _count_to(self, wall: int) -> int:
        """The named times of the day of `wall` that are earlier."""
        day, time = divmod(wall, MINUTES_A_DAY)
        return bisect_left(self.times, time) if time and self._names(day) else 0

    def _count_days(self, begin: int, end: int) -> int:
        """The named times of the days from that of `begin` up to, and without, that of `end`."""
        first, last = begin // MINUTES_A_DAY, end // MINUTES_A_DAY - 1
        number = 0
        for month, days in self._months(first, last):
            if first <= month and month + 31 <= last:
                number += len(days)
            else:
                number += bisect_left(days, last + 1 - month) - bisect_left(days, first - month)
        return number * len(self.times)

    def _names(self, day: int) -> bool:
        at = date.fromordinal(day + _UNIX_EPOCH_DAY)
        return at.month in self.months and at.day in self.days and at.isoweekday() % 7 in self.weekdays

    def _days(self, first: int, last: int, backwards: bool) -> Iterator[int]:
        for month, days in self._months(first, last, backwards):
            low, high = bisect_left(days, first - month), bisect_left(days, last + 1 - month)
            for index in reversed(range(low, high)) if backwards else range(low, high):
                yield month + days[index]

    def _months(self, first: int, last: int, backwards: bool = False) -> Iterator[tuple[int, list[int]]]:
        """The named months with days from `first` to `last`: first day, and how far the named days are from it."""
        if first > last:
            return
        begin, end = date.fromordinal(first + _UNIX_EPOCH_DAY), date.fromordinal(last + _UNIX_EPOCH_DAY)
        months = range(begin.year * 12 + begin.month - 1, end.year * 12 + end.month)
        for number in reversed(months) if backwards else months:
            year, index = divmod(number, 12)
            if index + 1 in self.months:
                yield self._month(year, index + 1)

    def _month(self, year: int, month: int) -> tuple[int, list[int]]:
        begin = date(year, month, 1).toordinal()
        length = _LENGTHS[month] + (month == 2 and isleap(year))
        # The first day of the calendar was a Monday, and Celery's week begins with Sunday, as 0.
        key = length, begin % 7
        named = self._named.get(key)
        if named is None:
            named = self._named[key] = [
                day - 1 for day in self.days if day <= length and (begin + day - 1) % 7 in self.weekdays
            ]
        return begin - _UNIX_EPOCH_DAY, named
