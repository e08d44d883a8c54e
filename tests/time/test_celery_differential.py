"""Our crontab slots against Celery's own, and the rows of the tables in `docs/time.md`.

Away from changes of offset both give the same slots. Where they differ, the tables say so, and a test here
plays beat to the installed Celery to see that it is still so.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import celery
import pytest
from celery import Celery, schedules
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from celery_leaderbeat.errors import ScheduleError
from celery_leaderbeat.schedules import crontab
from celery_leaderbeat.timeline import next_slot, slots_after, slots_between

UTC = timezone.utc
DAY = timedelta(days=1)
DOCS = Path(__file__).parents[2] / "docs" / "time.md"

OLDER = tuple(int(part) for part in celery.__version__.split(".")[:2]) < (5, 7)
needs_5_7 = pytest.mark.skipif(OLDER, reason="the table is about Celery 5.7")


@functools.cache
def app(zone: str) -> Celery:
    made = Celery("differential", set_as_current=False)
    made.conf.timezone = zone
    return made


def cron(zone: str, **fields: Any) -> Any:
    return schedules.crontab(app=app(zone), **fields)


def utc(*fields: int) -> datetime:
    return datetime(*fields, tzinfo=UTC)  # type: ignore[misc]


def played(schedule: Any, after: datetime, until: datetime) -> list[datetime]:
    """When Celery's beat, that sent last at `after`, sends up to `until`."""
    zone = schedule.app.timezone
    now = after
    schedule.nowfun = lambda: now.astimezone(zone)
    last = schedule.now()
    found = []
    while now <= until:
        due, wait = schedule.is_due(last)
        if due:
            found.append(now)
            last = schedule.now()
        now += timedelta(seconds=wait) if wait else timedelta(milliseconds=1)
    schedule.nowfun = None
    return found


def ours(schedule: Any, after: datetime, until: datetime) -> list[datetime]:
    return list(slots_between(schedule, after, until))


# Away from changes


def field(low: int, high: int) -> st.SearchStrategy[str]:
    values = st.integers(low, high)
    return (
        st.just("*")
        | values.map(str)
        | st.lists(values, min_size=1, max_size=5).map(lambda some: ",".join(map(str, some)))
        | st.tuples(values, values).map(lambda ends: f"{ends[0]}-{ends[1]}")
        | st.integers(1, high).map(lambda step: f"*/{step}")
    )


weekdays = field(0, 6) | st.sampled_from(["mon-fri", "sun", "sat,sun", "fri-mon", "tuesday"])


def quiet(zone: ZoneInfo, at: datetime) -> bool:
    """Whether the zone's offset is the same for three days before and after."""
    return (
        len({(at + hours * timedelta(hours=6)).astimezone(zone).utcoffset() for hours in range(-12, 13)}) == 1
    )


@settings(max_examples=500, deadline=None)
@given(
    zone=st.sampled_from(
        [
            *("UTC", "Europe/Berlin", "America/New_York", "America/St_Johns", "Asia/Kathmandu"),
            *("Australia/Lord_Howe", "Pacific/Chatham", "Africa/Casablanca", "Asia/Tokyo", "Pacific/Apia"),
        ]
    ),
    minute=field(0, 59),
    hour=field(0, 23),
    day_of_week=weekdays,
    day_of_month=field(1, 31),
    month_of_year=field(1, 12),
    after=st.datetimes(datetime(2012, 1, 1), datetime(2036, 1, 1), timezones=st.just(UTC)),
)
def test_away_from_changes_the_slots_are_those_of_celery(zone: str, after: datetime, **fields: str) -> None:
    try:
        theirs = cron(zone, **fields)
    except ValueError:
        # Dates that never come.
        assume(False)
    tz = ZoneInfo(zone)
    after = after.replace(microsecond=0)
    assume(quiet(tz, after))
    schedule = cron(zone, **fields)
    for slot, _ in zip(slots_after(schedule, after), range(12), strict=False):
        if not quiet(tz, slot):
            break
        if OLDER and slot.astimezone(tz).utcoffset() != after.astimezone(tz).utcoffset():
            # Before 5.7, Celery is off by the difference when it looks over a change of offset.
            break
        now = after
        theirs.nowfun = lambda: now.astimezone(tz)  # noqa: B023 - asked before it changes
        assert now + theirs.remaining_estimate(now.astimezone(tz)) == slot
        now = slot - timedelta(seconds=1)
        assert not theirs.is_due(after.astimezone(tz)).is_due
        now = slot
        assert theirs.is_due(after.astimezone(tz)).is_due
        after = slot


# The table of changes of offset


def row(test: Callable[..., Any]) -> Callable[..., Any]:
    """The test proves a row of a table in the documentation, which names it."""
    assert f"`{test.__name__}`" in DOCS.read_text(encoding="utf-8"), (
        f"{test.__name__} is no row of {DOCS.name}"
    )
    return test


@row
@needs_5_7
def test_the_repeated_hour_of_an_hourly_crontab() -> None:
    hourly = cron("Europe/Berlin", minute=0)
    after, until = utc(2026, 10, 24, 23), utc(2026, 10, 25, 2)
    assert ours(hourly, after, until) == [utc(2026, 10, 25, hour) for hour in (0, 1, 2)]
    assert played(hourly, after, until) == [utc(2026, 10, 25, hour) for hour in (0, 2)]
    every = cron("Europe/Berlin")
    assert len(ours(every, after, until)) == 180
    assert len(played(every, after, until)) == 120


@row
@needs_5_7
def test_the_repeated_half_hour_of_lord_howe() -> None:
    quarterly = cron("Australia/Lord_Howe", minute="*/15")
    after, until = utc(2026, 4, 4, 14), utc(2026, 4, 4, 16)
    assert len(ours(quarterly, after, until)) == 8
    assert len(played(quarterly, after, until)) == 6


@row
def test_the_skipped_hour_of_an_hourly_crontab() -> None:
    hourly = cron("Europe/Berlin", minute=30)
    after, until = utc(2026, 3, 28, 23, 30), utc(2026, 3, 29, 3)
    right = [utc(2026, 3, 29, hour, 30) for hour in (0, 1, 2)]
    assert ours(hourly, after, until) == right
    assert played(hourly, after, until) == right


@row
def test_a_wall_time_in_a_gap() -> None:
    for schedule, after, right in (
        (cron("Europe/Berlin", minute=30, hour=2), utc(2026, 3, 28, 12), utc(2026, 3, 29, 1, 30)),
        (cron("America/New_York", minute=30, hour=2), utc(2026, 3, 7, 12), utc(2026, 3, 8, 7, 30)),
        (cron("Asia/Beirut", minute=0, hour=0), utc(2026, 3, 28, 12), utc(2026, 3, 28, 22)),
    ):
        assert ours(schedule, after, after + DAY) == [right]
        assert played(schedule, after, after + DAY) == [right]


@row
def test_a_wall_time_in_a_repeated_hour() -> None:
    for schedule, after, right in (
        (cron("Europe/Berlin", minute=30, hour=2), utc(2026, 10, 24, 12), utc(2026, 10, 25, 0, 30)),
        (cron("America/New_York", minute=30, hour=1), utc(2026, 10, 31, 12), utc(2026, 11, 1, 5, 30)),
    ):
        assert ours(schedule, after, after + DAY) == [right]
        assert played(schedule, after, after + DAY) == [right]


@row
def test_a_slot_that_a_gap_moves_onto_another() -> None:
    both = cron("Europe/Berlin", minute="0,30", hour="2,3")
    after = utc(2026, 3, 28, 12)
    right = [utc(2026, 3, 29, 1), utc(2026, 3, 29, 1, 30)]
    assert ours(both, after, after + DAY) == right
    assert played(both, after, after + DAY) == right


@row
def test_every_other_hour() -> None:
    even = cron("Europe/Berlin", minute=0, hour="*/2")
    for after, right in (
        (utc(2026, 3, 28, 23), [utc(2026, 3, 29, 1), utc(2026, 3, 29, 2)]),
        (utc(2026, 10, 24, 22), [utc(2026, 10, 25, 0), utc(2026, 10, 25, 3)]),
    ):
        assert ours(even, after, right[-1]) == right
        assert played(even, after, right[-1]) == right


# The table of fields


@row
def test_the_day_fields_are_combined_with_and() -> None:
    friday_13 = cron("UTC", minute=0, hour=0, day_of_month=13, day_of_week="fri")
    after, until = utc(2026, 1, 1), utc(2026, 12, 31)
    right = [utc(2026, 2, 13), utc(2026, 3, 13), utc(2026, 11, 13)]
    assert ours(friday_13, after, until) == right
    assert played(friday_13, after, until) == right


@row
@pytest.mark.parametrize("seven", [7, "7", "5-7"])
def test_sunday_as_7_is_an_error(seven: Any) -> None:
    for make in (cron, lambda zone, **fields: crontab(tz=zone, **fields)):
        with pytest.raises(ValueError, match="7"):
            make("UTC", day_of_week=seven)
        assert make("UTC", day_of_week="sun").day_of_week == {0}


@row
@pytest.mark.parametrize("name", ["minute", "hour", "day_of_week", "day_of_month", "month_of_year"])
def test_an_empty_field_is_refused_at_start(name: str) -> None:
    try:
        empty = cron("UTC", **{name: []})
    except ValueError:
        return  # no day at all: Celery 5.7 sees that by itself
    with pytest.raises(ScheduleError, match=f"{name} is empty"):
        next_slot(empty, utc(2026, 1, 1))
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        empty.is_due(utc(2026, 1, 1))


@row
@needs_5_7
def test_a_date_that_never_comes() -> None:
    with pytest.raises(ValueError, match="never occurs"):
        cron("UTC", day_of_month=31, month_of_year=2)
    never = cron("UTC", day_of_month=31)
    never.month_of_year = {2}
    assert next_slot(never, utc(2026, 1, 1)) is None


@row
def test_a_range_of_weekdays_goes_over_the_weekend() -> None:
    assert cron("UTC", day_of_week="fri-mon").day_of_week == {5, 6, 0, 1}


@row
def test_a_rare_date_is_found() -> None:
    leap = cron("UTC", minute=0, hour=0, day_of_month=29, month_of_year=2, day_of_week="mon")
    after = utc(2026, 1, 1)
    assert next_slot(leap, after) == utc(2044, 2, 29)
    leap.nowfun = lambda: after
    assert after + leap.remaining_estimate(after) == utc(2044, 2, 29)


@row
def test_fields_are_read_in_the_zone_of_the_app_or_of_the_crontab() -> None:
    after = utc(2026, 7, 1)
    assert next_slot(cron("Europe/Berlin", minute=0, hour=6), after) == utc(2026, 7, 1, 4)
    assert next_slot(crontab(0, 6, tz="Asia/Tokyo", app=app("Europe/Berlin")), after) == utc(2026, 7, 1, 21)


def test_every_row_of_the_tables_names_a_test_that_is_there() -> None:
    named = {word for word in DOCS.read_text(encoding="utf-8").split("`") if word.startswith("test_")}
    places = (Path(__file__), Path(__file__).parents[1] / "system" / "test_clock_steps.py")
    there = {
        name
        for path in places
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M)
    }
    assert named
    assert named <= there
