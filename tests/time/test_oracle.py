"""Every zone, every change of offset from 2000 to 2037: the slots are those of a walk through time.

A sample runs always. `LEADERBEAT_ALL_ZONES=1` (`make test-time`) is all of them.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from functools import cache
from typing import Any
from zoneinfo import ZoneInfo, available_timezones

import pytest

from celery_leaderbeat.schedules import crontab
from celery_leaderbeat.timeline import backlog, slots_before, slots_between
from tests.time import oracle
from tests.time.oracle import MINUTE, QUARTER, UTC, Fields

ALL = bool(os.environ.get("LEADERBEAT_ALL_ZONES"))
ZONES = sorted(available_timezones())
SAMPLE = [
    *("UTC", "Europe/Berlin", "Europe/Dublin", "Europe/London", "Europe/Istanbul", "Europe/Volgograd"),
    *("America/New_York", "America/St_Johns", "America/Havana", "America/Santiago", "America/Caracas"),
    *("America/Scoresbysund", "America/Sao_Paulo", "America/Asuncion", "America/Argentina/San_Luis"),
    *("Africa/Cairo", "Africa/Casablanca", "Africa/Juba", "Africa/Windhoek", "Antarctica/Troll"),
    *("Antarctica/Casey", "Asia/Beirut", "Asia/Gaza", "Asia/Kathmandu", "Asia/Tehran", "Asia/Pyongyang"),
    *("Asia/Amman", "Asia/Dhaka", "Atlantic/Azores", "Australia/Lord_Howe", "Australia/Eucla"),
    *("Pacific/Apia", "Pacific/Chatham", "Pacific/Fiji", "Pacific/Norfolk"),
]
YEARS = range(2000, 2038) if ALL else (2011, 2016, 2026)
WANTED = [zone for zone in ZONES if ALL or zone in SAMPLE]

DAY = timedelta(days=1)
EVERY: Fields = {
    "minute": frozenset(range(60)),
    "hour": frozenset(range(24)),
    "day_of_week": frozenset(range(7)),
    "day_of_month": frozenset(range(1, 32)),
    "month_of_year": frozenset(range(1, 13)),
}


def fields(**named: Any) -> Fields:
    sets = {name: frozenset({value} if isinstance(value, int) else value) for name, value in named.items()}
    return {**EVERY, **sets}


#: Looked at for a day and a half on either side of a change.
DENSE = {
    "every minute": EVERY,
    "every 15 minutes": fields(minute=range(0, 60, 15)),
    "hourly": fields(minute=0),
    "every 2 hours": fields(minute=0, hour=range(0, 24, 2)),
    "every minute of 23 hours": fields(hour=set(range(24)) - {12}),
    "daily at 02:30": fields(minute=30, hour=2),
    "daily at 01:30": fields(minute=30, hour=1),
    "daily at midnight": fields(minute=0, hour=0),
}
#: For five weeks.
SPARSE = {
    "monthly": fields(minute=0, hour=0, day_of_month=1),
    "monthly, every hour": fields(minute=30, day_of_month={1, 29, 30, 31}),
    "on weekdays": fields(minute=0, hour=9, day_of_week=range(1, 6)),
    "on Sundays at 02:30": fields(minute=30, hour=2, day_of_week=0),
    "on the second Sunday": fields(minute=30, hour=2, day_of_week=0, day_of_month=range(8, 15)),
    "on Friday the 13th": fields(minute=0, hour={0, 12}, day_of_week=5, day_of_month=13),
}


def at_change(at: datetime, before: timedelta, after: timedelta) -> Iterator[tuple[str, Fields, bool]]:
    """Crontabs that name wall times which this change skips or repeats."""
    walls = (at + before).replace(tzinfo=None), (at + after).replace(tzinfo=None)
    begin, end = min(walls), max(walls)
    what = "gap" if after > before else "repeated hour"
    for place, exactly in (("begin", begin), ("middle", begin + (end - begin) / 2)):
        # Lord Howe's gap is half an hour, and some changes come a minute past midnight.
        wall = exactly - (exactly - datetime(2000, 1, 1)) % QUARTER
        daily = {"minute": wall.minute, "hour": wall.hour}
        weekday, days = wall.isoweekday() % 7, range(max(wall.day - 3, 1), min(wall.day + 3, 31) + 1)
        yield f"daily at the {place} of the {what}", fields(**daily), False
        yield f"monthly at the {place} of the {what}", fields(**daily, day_of_month=wall.day), True
        yield f"weekly at the {place} of the {what}", fields(**daily, day_of_week=weekday), True
        both = fields(**daily, day_of_week=weekday, day_of_month=days, month_of_year=wall.month)
        yield f"AND of days at the {place} of the {what}", both, True


@cache
def schedule(zone: str, named: tuple[tuple[str, frozenset[int]], ...]) -> Any:
    return crontab(tz=zone, **{name: set(values) for name, values in named})


def compare(zone: str, at: datetime, before: timedelta, after: timedelta) -> int:
    """Compare all crontabs around one change; how many slots."""
    tz = ZoneInfo(zone)
    near = (at - 1.5 * DAY, at + 1.5 * DAY)
    far = (at - 35 * DAY, at + 35 * DAY)
    clocks = oracle.look_at_clock(tz, *near), oracle.look_at_clock(tz, *far, step=QUARTER)
    # With steps of a quarter nothing is missed: all that is sparse is on a quarter, here and in UTC.
    assert all(offset % QUARTER == timedelta(0) for _, offset in clocks[1][3])
    crontabs = [(name, sets, False) for name, sets in DENSE.items()]
    crontabs += [(name, sets, True) for name, sets in SPARSE.items()]
    crontabs += at_change(at, before, after)
    compared = 0
    for name, sets, sparse in crontabs:
        begin, end = far if sparse else near
        right = oracle.slots(clocks[sparse], sets, begin, end)
        ours = schedule(zone, tuple(sorted(sets.items())))
        told = f"{zone}, {at}, {name}"
        assert list(slots_between(ours, begin, end)) == right, told
        counted = (right[0], right[-1], len(right)) if right else None
        assert backlog(ours, begin, end, 0) == counted, told
        if len(right) < 500 or zlib.crc32(told.encode()) % 10 == 0:
            assert list(slots_before(ours, end, begin)) == right[::-1], told
        compared += len(right)
    return compared


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("year", YEARS)
def test_slots_around_every_change_of_offset_are_those_of_a_walk(
    year: int, tell: Callable[[str, str], None]
) -> None:
    compared = changes = 0
    for zone in WANTED:
        begin, end = datetime(year, 1, 1, tzinfo=UTC), datetime(year + 1, 1, 1, tzinfo=UTC)
        for at, before, after in oracle.changes(ZoneInfo(zone), begin, end):
            changes += 1
            compared += compare(zone, at, before, after)
    schedule.cache_clear()
    assert compared > 1000
    tell(
        "slots against a walk",
        f"{year}: {len(WANTED)} zones, {changes} changes of offset, {compared:,} slots",
    )


def test_zones_that_never_change_are_compared_too(tell: Callable[[str, str], None]) -> None:
    begin, end = datetime(2026, 6, 1, tzinfo=UTC), datetime(2026, 6, 3, tzinfo=UTC)
    compared = 0
    for zone in WANTED:
        clock = oracle.look_at_clock(ZoneInfo(zone), begin, end)
        for sets in DENSE.values():
            right = oracle.slots(clock, sets, begin, end)
            assert list(slots_between(schedule(zone, tuple(sorted(sets.items()))), begin, end)) == right, zone
            compared += len(right)
    tell("slots against a walk", f"an ordinary day: {len(WANTED)} zones, {compared:,} slots")


def test_the_oracle_itself_on_what_is_known() -> None:
    berlin = ZoneInfo("Europe/Berlin")
    begin, end = datetime(2026, 3, 28, 12, tzinfo=UTC), datetime(2026, 3, 29, 12, tzinfo=UTC)
    clock = oracle.look_at_clock(berlin, begin, end)
    # 02:30 doesn't exist, and is read as 03:30 in summer time.
    assert oracle.slots(clock, DENSE["daily at 02:30"], begin, end) == [
        datetime(2026, 3, 29, 1, 30, tzinfo=UTC)
    ]
    assert oracle.slots(clock, EVERY, begin, end) == [begin + n * MINUTE for n in range(1, 1441)]
    begin, end = datetime(2026, 10, 24, 12, tzinfo=UTC), datetime(2026, 10, 25, 12, tzinfo=UTC)
    clock = oracle.look_at_clock(berlin, begin, end)
    assert oracle.slots(clock, DENSE["daily at 02:30"], begin, end) == [
        datetime(2026, 10, 25, 0, 30, tzinfo=UTC)
    ]
    assert len(oracle.slots(clock, DENSE["hourly"], begin, end)) == 24
