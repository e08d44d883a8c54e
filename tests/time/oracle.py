"""The slots of a crontab, found by a walk through time. Shares no code with the package.

Every minute of UTC is converted to the local wall time by `zoneinfo`, and its fields are looked up in the
crontab's sets; then the two rules of the documentation (`docs/time.md`) are applied as they are written there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

UTC = timezone.utc
MINUTE = timedelta(minutes=1)
QUARTER = timedelta(minutes=15)
#: Longer than the longest step that a clock ever made (a day, in Samoa): what came before has no part in it.
MARGIN = timedelta(hours=26)

Fields = Mapping[str, frozenset[int]]
#: The begin of a walk, its step, and after how many steps the clock shows which offset.
Clock = tuple[datetime, timedelta, int, tuple[tuple[int, timedelta], ...]]


def changes(zone: ZoneInfo, begin: datetime, end: datetime) -> list[tuple[datetime, timedelta, timedelta]]:
    """The first minutes with another offset than the minute before: when, the offset before, and after."""
    found = []
    step = timedelta(hours=6)
    at, offset = begin, difference(begin, zone)
    while at < end:
        following = difference(at + step, zone)
        if following != offset:
            minute = at
            while minute < at + step:
                now = difference(minute + MINUTE, zone)
                if now != offset:
                    found.append((minute + MINUTE, offset, now))
                    offset = now
                minute += MINUTE
        at += step
    return found


def difference(at: datetime, zone: ZoneInfo) -> timedelta:
    """What the local clock shows at an instant, less what a clock of UTC shows."""
    offset = at.astimezone(zone).utcoffset()
    assert offset is not None
    return offset


def look_at_clock(zone: ZoneInfo, begin: datetime, end: datetime, step: timedelta = MINUTE) -> Clock:
    """Look at the local clock at every step, on whole steps, of a walk that begins well before `begin`."""
    begin -= MARGIN
    begin -= (begin - datetime(2000, 1, 1, tzinfo=UTC)) % step
    offsets: list[tuple[int, timedelta]] = []
    at, number = begin, 0
    while at <= end:
        offset = difference(at, zone)
        if not offsets or offset != offsets[-1][1]:
            offsets.append((number, offset))
        at += step
        number += 1
    return begin, step, number, tuple(offsets)


def rows(clock: Clock) -> Iterator[tuple[datetime, datetime]]:
    """The steps of a walk: the instant, and what the local clock shows."""
    begin, step, number, offsets = clock
    changing = dict(offsets)
    offset = timedelta(0)
    for count in range(number):
        offset = changing.get(count, offset)
        at = begin + count * step
        yield at, (at + offset).replace(tzinfo=None)


@functools.lru_cache(maxsize=40)
def both(clock: Clock) -> tuple[dict[datetime, datetime], dict[datetime, datetime]]:
    """What is shown at each instant; and the one instant of each wall time.

    Zones whose clocks show the same share the answer.
    """
    step = clock[1]
    shown: dict[datetime, datetime] = {}
    instants: dict[datetime, datetime] = {}
    expected = None
    for at, wall in rows(clock):
        shown[at] = wall
        if expected is not None:
            # A clock that hadn't been put forward would show these now, one by one.
            skipped, then = expected, at
            while skipped < wall:
                instants.setdefault(skipped, then)
                skipped += step
                then += step
        instants.setdefault(wall, at)
        expected = wall + step
    return shown, instants


@functools.lru_cache(maxsize=4000)
def _slots(clock: Clock, fields: tuple[tuple[str, frozenset[int]], ...]) -> list[datetime]:
    sets = dict(fields)
    minutes, hours, weekdays = sets["minute"], sets["hour"], sets["day_of_week"]
    days, months = sets["day_of_month"], sets["month_of_year"]

    def named(wall: datetime) -> bool:
        """Whether the crontab names the date that the clock shows."""
        return wall.day in days and wall.month in months and wall.isoweekday() % 7 in weekdays

    shown, instants = both(clock)
    if len(hours) == 24:
        return [at for at, wall in shown.items() if wall.minute in minutes and named(wall)]
    return sorted(
        {at for wall, at in instants.items() if wall.minute in minutes and wall.hour in hours and named(wall)}
    )


def slots(clock: Clock, fields: Fields, after: datetime, until: datetime) -> list[datetime]:
    """The slots later than `after` and not later than `until`."""
    found = _slots(clock, tuple(sorted(fields.items())))
    return [slot for slot in found if after < slot <= until]
