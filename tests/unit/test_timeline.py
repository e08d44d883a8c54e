"""From schedules to slots: intervals, crontabs in zones with changes of offset, the sun, and others."""

from __future__ import annotations

import functools
import itertools
import shutil
import subprocess
import sys
import sysconfig
import timeit
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery, schedules
from hypothesis import example, given, settings
from hypothesis import strategies as st

from celery_leaderbeat.errors import ScheduleError
from celery_leaderbeat.timeline import (
    backlog,
    can_count,
    fingerprint,
    next_slot,
    slots_after,
    slots_before,
    slots_between,
)

# On a busy machine, 120 s are a few seconds of computing. Hypothesis takes the watchdog for a case that fails, and
# finds that it doesn't fail again.
pytestmark = pytest.mark.timeout(600)

UTC = timezone.utc
MINUTE = timedelta(minutes=1)
DAY = timedelta(days=1)


@functools.cache
def app(zone: str = "UTC") -> Celery:
    made = Celery("timeline", set_as_current=False)
    made.conf.timezone = zone
    return made


def cron(zone: str = "UTC", **fields: Any) -> Any:
    return schedules.crontab(app=app(zone), **fields)


def every(period: float | timedelta) -> Any:
    return schedules.schedule(period, app=app())


def utc(*fields: int) -> datetime:
    return datetime(*fields, tzinfo=UTC)  # type: ignore[misc]


def between(schedule: Any, after: datetime, until: datetime) -> list[str]:
    return [slot.strftime("%m-%d %H:%M") for slot in slots_between(schedule, after, until)]


# Intervals


def test_interval_slots_are_the_multiples_of_the_period_since_the_unix_epoch() -> None:
    assert next_slot(every(60), utc(2026, 10, 2, 3, 0, 30)) == utc(2026, 10, 2, 3, 1)
    assert next_slot(every(DAY), utc(2026, 10, 2, 3)) == utc(2026, 10, 3)
    assert next_slot(every(7), datetime.fromtimestamp(0, UTC)) == datetime.fromtimestamp(7, UTC)


def test_an_interval_slot_is_strictly_later_than_after() -> None:
    assert next_slot(every(60), utc(2026, 10, 2, 3)) == utc(2026, 10, 2, 3, 1)
    just_before = utc(2026, 10, 2, 3) - timedelta(microseconds=1)
    assert next_slot(every(60), just_before) == utc(2026, 10, 2, 3)


@settings(max_examples=300)
@given(
    period=st.integers(1_000, 10**14),
    after=st.datetimes(
        min_value=datetime(1900, 1, 1), max_value=datetime(2500, 1, 1), timezones=st.just(UTC)
    ),
)
def test_every_search_finds_the_same_interval_slots(period: int, after: datetime) -> None:
    schedule = every(timedelta(microseconds=period))
    first, second = itertools.islice(slots_after(schedule, after), 2)
    assert timedelta(0) < first - after <= timedelta(microseconds=period)
    assert (first - utc(1970, 1, 1)) % timedelta(microseconds=period) == timedelta(0)
    assert second - first == timedelta(microseconds=period)
    assert next_slot(schedule, first - timedelta(microseconds=1)) == first


def test_intervals_are_exact_across_a_change_of_offset() -> None:
    schedule = schedules.schedule(timedelta(hours=6), app=app("Europe/Berlin"))
    slots = list(slots_between(schedule, utc(2026, 10, 24), utc(2026, 10, 26)))
    assert {after - before for before, after in itertools.pairwise(slots)} == {timedelta(hours=6)}


@pytest.mark.parametrize("period", [0.1, 0.3, 1 / 3, 7.7])
def test_an_interval_doesnt_drift_in_a_day(period: float) -> None:
    schedule = every(period)
    step, begin = schedule.run_every, utc(2026, 10, 2)
    epoch = utc(1970, 1, 1)
    slot, count = begin, 0
    for count, slot in enumerate(slots_between(schedule, begin, begin + DAY), 1):  # noqa: B007
        pass
    assert count == (begin + DAY - epoch) // step - (begin - epoch) // step
    assert slot == epoch + (begin + DAY - epoch) // step * step
    assert next_slot(schedule, slot - timedelta(microseconds=1)) == slot


# Case 24
def test_an_interval_of_a_day_with_a_search_every_six_hours_has_one_slot_a_day() -> None:
    found = {next_slot(every(DAY), utc(2026, 10, 2) + timedelta(hours=6 * step)) for step in range(1, 41)}
    assert len(found) == 11


def test_numbers_and_timedeltas_are_intervals_as_in_beat_schedule() -> None:
    for schedule in (30, 30.0, timedelta(seconds=30)):
        assert next_slot(schedule, utc(2026, 1, 1)) == utc(2026, 1, 1, 0, 0, 30)


@pytest.mark.parametrize(
    ("period", "value"),
    [(0, "0 s"), (-5, "-5 s"), (0.0009, "0.0009 s"), (None, "None"), (timedelta(0), "0 s")],
)
def test_an_interval_below_a_millisecond_is_refused_with_its_value_and_the_rule(
    period: Any, value: str
) -> None:
    with pytest.raises(ScheduleError, match=rf"the interval is {value}.*at least 1 ms"):
        slots_after(every(period), utc(2026, 1, 1))


@pytest.mark.parametrize("schedule", [None, "*/5 * * * *", True, object(), schedules.BaseSchedule()])
def test_what_is_no_schedule_is_refused_with_its_value(schedule: Any) -> None:
    with pytest.raises(ScheduleError, match="is no schedule"):
        slots_after(schedule, utc(2026, 1, 1))
    with pytest.raises(ScheduleError):
        fingerprint(schedule)


def test_naive_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="naive"):
        slots_after(every(60), datetime(2026, 1, 1))
    with pytest.raises(ValueError, match="naive"):
        slots_between(every(60), utc(2026, 1, 1), datetime(2026, 1, 2))


def test_after_may_be_in_any_zone_and_slots_are_in_utc() -> None:
    after = datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin"))
    for schedule in (every(3600), cron(minute=0)):
        slot = next_slot(schedule, after)
        assert slot == utc(2026, 10, 25, 2)
        assert slot.tzinfo is UTC


def test_slots_between_has_its_end_and_not_its_begin() -> None:
    assert between(cron(minute=0), utc(2026, 1, 1, 3), utc(2026, 1, 1, 5)) == ["01-01 04:00", "01-01 05:00"]
    assert between(cron(minute=0), utc(2026, 1, 1, 5), utc(2026, 1, 1, 3)) == []


def test_the_ends_of_the_calendar_are_no_error() -> None:
    for schedule in (every(3600), cron(minute=0)):
        assert next_slot(schedule, datetime.min.replace(tzinfo=UTC)) is not None
        assert next_slot(schedule, datetime.max.replace(tzinfo=UTC)) is None
        assert len(list(slots_after(schedule, utc(9997, 12, 31, 20)))) >= 4


# Crontabs: hard cases with their values


# Case 18
def test_both_passes_of_a_repeated_hour_fire_under_an_hourly_crontab() -> None:
    hourly = cron("Europe/Berlin", minute=0)
    assert between(hourly, utc(2026, 10, 24, 22, 30), utc(2026, 10, 25, 2)) == [
        "10-24 23:00",
        "10-25 00:00",
        "10-25 01:00",
        "10-25 02:00",
    ]


def test_no_minute_of_a_repeated_hour_is_lost() -> None:
    slots = list(slots_between(cron("Europe/Berlin"), utc(2026, 10, 24, 20), utc(2026, 10, 25, 4)))
    assert slots == [utc(2026, 10, 24, 20) + number * MINUTE for number in range(1, 8 * 60 + 1)]


def test_an_hourly_crontab_has_no_slot_in_a_skipped_hour() -> None:
    slots = list(slots_between(cron("Europe/Berlin", minute=30), utc(2026, 3, 29), utc(2026, 3, 29, 3)))
    assert slots == [utc(2026, 3, 29, 0, 30), utc(2026, 3, 29, 1, 30), utc(2026, 3, 29, 2, 30)]
    assert [slot.astimezone(ZoneInfo("Europe/Berlin")).hour for slot in slots] == [1, 3, 4]


# Case 19
def test_a_wall_time_in_a_gap_is_one_slot_with_the_offset_before() -> None:
    nightly = cron("America/New_York", minute=30, hour=2)
    assert between(nightly, utc(2026, 3, 7, 12), utc(2026, 3, 8, 12)) == ["03-08 07:30"]


def test_a_wall_time_in_a_repeated_hour_is_one_slot_in_the_first_pass() -> None:
    nightly = cron("America/New_York", minute=30, hour=1)
    assert between(nightly, utc(2026, 10, 31, 12), utc(2026, 11, 1, 12)) == ["11-01 05:30"]


def test_a_daily_wall_time_comes_once_a_day_across_both_changes() -> None:
    zone = ZoneInfo("America/New_York")
    slots = slots_between(cron("America/New_York", minute=4, hour=16), utc(2026, 1, 1), utc(2027, 1, 1))
    local = [slot.astimezone(zone) for slot in slots]
    assert [slot.date() for slot in local] == [date(2026, 1, 1) + number * DAY for number in range(365)]
    assert {slot.time() for slot in local} == {time(16, 4)}


# Case 20
def test_a_gap_at_midnight_moves_the_slot_and_loses_nothing() -> None:
    daily = cron("Asia/Beirut", minute=0, hour=0)
    assert between(daily, utc(2026, 3, 27, 12), utc(2026, 3, 29, 22)) == [
        "03-27 22:00",
        "03-28 22:00",
        "03-29 21:00",
    ]


def test_half_hour_changes_are_real_instants() -> None:
    quarterly = cron("Australia/Lord_Howe", minute="*/15")
    for begin in (utc(2026, 4, 4, 12), utc(2026, 10, 3, 12)):
        slots = list(slots_between(quarterly, begin, begin + timedelta(hours=6)))
        assert slots == [begin + number * 15 * MINUTE for number in range(1, 25)]


def test_half_hour_changes_are_read_right_as_wall_times() -> None:
    repeated = cron("Australia/Lord_Howe", minute=45, hour=1)
    assert between(repeated, utc(2026, 4, 4), utc(2026, 4, 5)) == ["04-04 14:45"]
    skipped = cron("Australia/Lord_Howe", minute=15, hour=2)
    assert between(skipped, utc(2026, 10, 3), utc(2026, 10, 4)) == ["10-03 15:45"]


def test_a_slot_that_a_gap_moves_onto_another_is_one_slot() -> None:
    both = cron("Europe/Berlin", minute="0,30", hour="2,3")
    assert between(both, utc(2026, 3, 29), utc(2026, 3, 29, 12)) == ["03-29 01:00", "03-29 01:30"]


def test_a_skipped_day_is_moved_by_a_day_and_merges_with_the_next() -> None:
    daily = cron("Pacific/Apia", minute=0, hour=10)
    assert between(daily, utc(2011, 12, 28, 12), utc(2012, 1, 1)) == [
        "12-28 20:00",
        "12-29 20:00",
        "12-30 20:00",
        "12-31 20:00",
    ]


def test_a_changed_zone_moves_the_slots() -> None:
    after = utc(2026, 7, 1)
    assert next_slot(cron("Asia/Tokyo", minute=0, hour=6), after) == utc(2026, 7, 1, 21)
    assert next_slot(cron("Europe/Berlin", minute=0, hour=6), after) == utc(2026, 7, 1, 4)


# Case 21


@pytest.mark.parametrize("enable_utc", [True, False])
@pytest.mark.parametrize(
    ("zone", "hour"), [("UTC", 6), ("Europe/Berlin", 4), ("America/New_York", 10), ("Asia/Kolkata", 0.5)]
)
def test_fields_are_read_in_the_apps_zone_whatever_enable_utc_says(
    zone: str, hour: float, enable_utc: bool
) -> None:
    made = Celery("zoned", set_as_current=False)
    made.conf.update(timezone=zone, enable_utc=enable_utc)
    daily, hourly = schedules.crontab(0, 6, app=made), schedules.schedule(3600, app=made)
    right = utc(2026, 7, 1) + timedelta(hours=hour)
    # A cold start just before, one long before, a restart just after it, and one at the slot itself.
    assert next_slot(daily, right - timedelta(seconds=1)) == right
    assert next_slot(daily, right - DAY) == right
    assert next_slot(daily, right + timedelta(seconds=1)) == right + DAY
    assert next_slot(daily, right) == right + DAY
    assert next_slot(hourly, utc(2026, 7, 1)) == utc(2026, 7, 1, 1)


@pytest.mark.parametrize("enable_utc", [True, False])
def test_a_changed_zone_is_a_changed_crontab_and_the_same_interval(enable_utc: bool) -> None:
    texts = []
    for zone in ("Europe/Berlin", "Asia/Tokyo"):
        made = Celery("zoned", set_as_current=False)
        made.conf.update(timezone=zone, enable_utc=enable_utc)
        texts.append(
            (fingerprint(schedules.crontab(0, 6, app=made)), fingerprint(schedules.schedule(60, app=made)))
        )
    (before, interval), (after, same) = texts
    assert before != after
    assert interval == same


def test_without_a_timezone_the_zone_is_utc_or_with_enable_utc_off_the_systems() -> None:
    made = Celery("zoned", set_as_current=False)
    assert next_slot(schedules.crontab(0, 6, app=made), utc(2026, 7, 1)) == utc(2026, 7, 1, 6)
    made = Celery("zoned", set_as_current=False)
    made.conf.enable_utc = False
    slot = next_slot(schedules.crontab(0, 6, app=made), utc(2026, 7, 1))
    assert slot is not None
    assert slot.astimezone(made.timezone).hour == 6


class Zoned(schedules.crontab):  # type: ignore[misc]
    """A crontab with a zone of its own, as users write it."""

    def __init__(self, *args: Any, tz: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tz = tz


# Case 22; also `test_schedules.py`
@pytest.mark.parametrize("tz", [ZoneInfo("Asia/Tokyo"), "Asia/Tokyo", timezone(timedelta(hours=9))])
def test_a_crontab_with_its_own_tz_fires_in_its_zone(tz: Any) -> None:
    assert next_slot(Zoned(0, 6, tz=tz, app=app("Europe/Berlin")), utc(2026, 7, 1)) == utc(2026, 7, 1, 21)


def test_a_nowfun_in_another_zone_gives_the_zone() -> None:
    daily = cron("Europe/Berlin", minute=0, hour=6, nowfun=lambda: datetime.now(ZoneInfo("Asia/Tokyo")))
    assert next_slot(daily, utc(2026, 7, 1)) == utc(2026, 7, 1, 21)


def test_a_nowfun_without_a_zone_leaves_the_apps() -> None:
    daily = cron("Europe/Berlin", minute=0, hour=6, nowfun=lambda: datetime(2026, 1, 1))
    assert next_slot(daily, utc(2026, 7, 1)) == utc(2026, 7, 1, 4)


def test_an_own_tz_counts_for_more_than_the_zone_of_nowfun() -> None:
    daily = Zoned(0, 6, tz=ZoneInfo("Asia/Tokyo"), app=app("Europe/Berlin"), nowfun=lambda: datetime.now(UTC))
    assert next_slot(daily, utc(2026, 7, 1)) == utc(2026, 7, 1, 21)


@pytest.mark.parametrize("tz", ["Mars/Olympus", 5])
def test_an_unknown_zone_is_refused_with_its_value(tz: Any) -> None:
    with pytest.raises(ScheduleError, match=rf"tz is {tz!r}"):
        slots_after(Zoned(0, 6, tz=tz, app=app()), utc(2026, 7, 1))


# Case 23; also `tests/time/test_celery_differential.py`
def test_the_day_fields_are_combined_with_and() -> None:
    friday_13 = cron(minute=0, hour=0, day_of_month=13, day_of_week="fri")
    assert list(slots_between(friday_13, utc(2026, 1, 1), utc(2027, 1, 1))) == [
        utc(2026, 2, 13),
        utc(2026, 3, 13),
        utc(2026, 11, 13),
    ]


def test_sunday_is_day_0() -> None:
    weekly = cron(minute=0, hour=0, day_of_week=0)
    assert next_slot(weekly, utc(2026, 10, 2)) == utc(2026, 10, 4)


def test_the_29_february_on_a_monday_is_found_without_a_long_search() -> None:
    asked = 0

    class Counting(tzinfo):
        def utcoffset(self, moment: datetime | None) -> timedelta:
            nonlocal asked
            asked += 1
            return timedelta(0)

        def dst(self, moment: datetime | None) -> timedelta:
            return timedelta(0)

    fields = {"minute": 0, "hour": 0, "day_of_month": 29, "month_of_year": 2, "day_of_week": 1}
    leap = Zoned(tz=Counting(), app=app(), **fields)
    assert next_slot(leap, utc(2026, 1, 1)) == utc(2044, 2, 29)
    assert asked < 100
    assert next_slot(leap, utc(2072, 2, 29)) == utc(2112, 2, 29)


@pytest.mark.parametrize("weekday", range(7))
def test_every_weekday_of_29_february_is_found_from_any_year(weekday: int) -> None:
    leap = cron(minute=0, hour=0, day_of_month=29, month_of_year=2, day_of_week=weekday)
    oracle = [
        utc(year, 2, 29)
        for year in range(2000, 2500, 4)
        if (year % 100 or year % 400 == 0) and utc(year, 2, 29).isoweekday() % 7 == weekday
    ]
    assert list(slots_between(leap, utc(1999, 12, 31), utc(2500, 1, 1))) == oracle


def test_a_date_that_never_comes_ends_the_search() -> None:
    never = cron(minute=0, hour=0, day_of_month=30)
    never.month_of_year = {2}
    assert next_slot(never, utc(2026, 1, 1)) is None
    assert list(slots_between(never, utc(2026, 1, 1), utc(2027, 1, 1))) == []


@pytest.mark.parametrize("name", ["minute", "hour", "day_of_week", "day_of_month", "month_of_year"])
def test_an_empty_field_is_refused_by_name(name: str) -> None:
    empty = cron(minute=0)
    setattr(empty, name, set())
    for function in (fingerprint, lambda schedule: slots_after(schedule, utc(2026, 1, 1))):
        with pytest.raises(ScheduleError, match=f"{name} is empty"):
            function(empty)


def test_hour_as_an_empty_list_is_refused() -> None:
    with pytest.raises(ScheduleError, match="hour is empty"):
        slots_after(cron(hour=[]), utc(2026, 1, 1))


# Case 25
def test_a_new_or_changed_crontab_waits_for_its_next_slot() -> None:
    sunday = cron(minute=0, hour=0, day_of_week="sun")
    assert next_slot(sunday, utc(2026, 10, 2, 15)) == utc(2026, 10, 4)
    assert next_slot(cron(minute=0, hour=6), utc(2026, 10, 2, 10)) == utc(2026, 10, 3, 6)
    assert next_slot(every(60), utc(2026, 10, 2, 10, 0, 1)) == utc(2026, 10, 2, 10, 1)


def test_three_days_of_minutes_are_all_there() -> None:
    slots = list(slots_between(cron("Europe/Berlin"), utc(2026, 10, 24), utc(2026, 10, 27)))
    assert len(slots) == 4320
    assert len(set(slots)) == 4320


# Crontabs against an oracle that walks minute by minute

ZONES = [
    "UTC",
    "Europe/Berlin",
    "Europe/Dublin",
    "America/New_York",
    "America/St_Johns",
    "America/Havana",
    "America/Santiago",
    "America/Scoresbysund",
    "Africa/Cairo",
    "Africa/Casablanca",
    "Antarctica/Troll",
    "Asia/Beirut",
    "Asia/Kathmandu",
    "Asia/Tehran",
    "Atlantic/Azores",
    "Australia/Lord_Howe",
    "Pacific/Apia",
    "Pacific/Chatham",
]


@functools.cache
def changes(zone: str) -> list[datetime]:
    """The hours after which the zone's offset is another one, 2009 to 2031; a quiet one where none is."""
    tz = ZoneInfo(zone)
    hours = [utc(2009, 1, 1) + timedelta(hours=6 * number) for number in range(4 * 366 * 22)]
    offsets = [hour.astimezone(tz).utcoffset() for hour in hours]
    found = [
        hour for hour, before, after in zip(hours, offsets, offsets[1:], strict=False) if before != after
    ]
    return found or [utc(2026, 5, 5)]


def named(schedule: Any, moment: datetime) -> bool:
    return (
        moment.minute in schedule.minute
        and moment.hour in schedule.hour
        and moment.day in schedule.day_of_month
        and moment.month in schedule.month_of_year
        and moment.isoweekday() % 7 in schedule.day_of_week
    )


def walk(schedule: Any, zone: ZoneInfo, after: datetime, until: datetime) -> list[datetime]:
    """Every minute of the UTC clock, or, for wall times, of a calendar; `fold=0` is RFC 5545's reading."""
    found = set()
    if len(schedule.hour) == 24:
        moment = after.replace(second=0, microsecond=0)
        while moment <= until:
            if named(schedule, moment.astimezone(zone)):
                found.add(moment)
            moment += MINUTE
    else:
        wall = after.replace(tzinfo=None, second=0, microsecond=0) - 2 * DAY
        while wall <= until.replace(tzinfo=None) + 2 * DAY:
            if wall.minute in schedule.minute and named(schedule, wall):
                found.add(wall.replace(tzinfo=zone, fold=0).astimezone(UTC))
            wall += MINUTE
    return sorted(slot for slot in found if after < slot <= until)


def field(values: range, most: int) -> Any:
    return st.just(set(values)) | st.sets(st.sampled_from(values), min_size=1, max_size=most)


# Made once: making strategies takes longer than drawing from them.
zones = st.sampled_from(ZONES)
fields_of_crontabs = {
    "minute": field(range(60), 4),
    "hour": field(range(24), 4) | st.sets(st.sampled_from(range(5)), min_size=1),
    "day_of_week": st.just(set(range(7))) | field(range(7), 5),
    "day_of_month": st.just(set(range(1, 32))) | field(range(1, 32), 20),
    "month_of_year": st.just(set(range(1, 13))) | field(range(1, 13), 8),
}
seconds_from_a_change = st.integers(-2 * 86_400, 43_200)
minutes_of_a_span = st.integers(1, 3 * 1440)


@functools.cache
def some_change(zone: str) -> st.SearchStrategy[datetime]:
    return st.sampled_from(changes(zone))


@st.composite
def crontabs(draw: st.DrawFn) -> tuple[str, dict[str, set[int]], datetime, datetime]:
    zone = draw(zones)
    fields = {name: draw(values) for name, values in fields_of_crontabs.items()}
    after = draw(some_change(zone)) + timedelta(seconds=draw(seconds_from_a_change))
    return zone, fields, after, after + timedelta(minutes=draw(minutes_of_a_span))


EVERY: dict[str, set[int]] = {
    "minute": set(range(60)),
    "hour": set(range(24)),
    "day_of_week": set(range(7)),
    "day_of_month": set(range(1, 32)),
    "month_of_year": set(range(1, 13)),
}


@settings(max_examples=400, deadline=None)
@given(crontabs())
# Back over midnight at 00:01: the last hour of a day comes again after the first minute of the next.
@example(("America/St_Johns", EVERY, utc(2010, 11, 7), utc(2010, 11, 8)))
@example(("America/St_Johns", {**EVERY, "hour": {0, 23}}, utc(2010, 11, 7), utc(2010, 11, 8)))
# The end of a month passes twice.
@example(("America/Scoresbysund", {**EVERY, "day_of_month": {31}}, utc(2026, 3, 28), utc(2026, 4, 1)))
# A day that didn't exist.
@example(("Pacific/Apia", {**EVERY, "hour": set(range(23))}, utc(2011, 12, 29), utc(2012, 1, 1)))
@example(("Pacific/Apia", EVERY, utc(2011, 12, 29), utc(2012, 1, 1)))
@example(("Pacific/Apia", {**EVERY, "day_of_month": {30}, "hour": {4}}, utc(2011, 12, 29), utc(2012, 1, 1)))
@example(("Pacific/Apia", {**EVERY, "day_of_month": {30}, "hour": {20}}, utc(2011, 12, 29), utc(2012, 1, 1)))
@example(("Antarctica/Troll", {**EVERY, "hour": {1, 2, 3}}, utc(2026, 3, 28), utc(2026, 3, 30)))
def test_crontab_slots_are_those_of_a_walk_minute_by_minute(
    case: tuple[str, dict[str, set[int]], datetime, datetime],
) -> None:
    zone, fields, after, until = case
    schedule = cron(zone)
    vars(schedule).update(fields)
    assert list(slots_between(schedule, after, until)) == walk(schedule, ZoneInfo(zone), after, until)


@settings(max_examples=300, deadline=None)
@given(crontabs())
def test_every_search_finds_the_same_crontab_slots(
    case: tuple[str, dict[str, set[int]], datetime, datetime],
) -> None:
    zone, fields, after, until = case
    schedule = cron(zone)
    vars(schedule).update(fields)
    slots = list(itertools.islice(slots_between(schedule, after, until), 50))
    assert all(before < later for before, later in itertools.pairwise(slots))
    for before, later in itertools.pairwise(slots):
        assert next_slot(schedule, before) == later


# Backwards, and counted


@settings(max_examples=1_000, deadline=None)
@given(crontabs(), st.integers(0, 5))
@example(("Pacific/Apia", {**EVERY, "hour": set(range(23))}, utc(2011, 12, 29), utc(2012, 1, 1)), 2)
@example(("Pacific/Apia", EVERY, utc(2011, 12, 29), utc(2012, 1, 1)), 0)
@example(("America/Scoresbysund", {**EVERY, "hour": {0, 23}}, utc(2026, 3, 28), utc(2026, 4, 1)), 1)
def test_slots_backwards_and_their_number_are_those_of_the_walk(
    case: tuple[str, dict[str, set[int]], datetime, datetime], keep: int
) -> None:
    zone, fields, after, until = case
    until = min(until, after + 1.5 * DAY)
    schedule = cron(zone)
    vars(schedule).update(fields)
    walked = list(slots_between(schedule, after, until))
    assert list(slots_before(schedule, until, after)) == walked[::-1]
    rest = walked[: max(len(walked) - keep, 0)]
    assert backlog(schedule, after, until, keep) == ((rest[0], rest[-1], len(rest)) if rest else None)


some_crontab = crontabs()
days_of_a_long_span = st.integers(1, 1500)
seconds_of_a_day = st.integers(0, 86_400)


@st.composite
def long_spans(draw: st.DrawFn) -> tuple[Any, datetime, datetime]:
    zone, fields, after, _ = draw(some_crontab)
    schedule = cron(zone)
    vars(schedule).update(fields)
    if len(fields["minute"]) * len(fields["hour"]) > 24:
        schedule.minute = {min(fields["minute"])}
    return (
        schedule,
        after,
        after + timedelta(days=draw(days_of_a_long_span), seconds=draw(seconds_of_a_day)),
    )


@settings(max_examples=200, deadline=None)
@given(long_spans())
def test_the_number_of_slots_in_years_is_that_of_the_walk(span: tuple[Any, datetime, datetime]) -> None:
    schedule, after, until = span
    walked = list(slots_between(schedule, after, until))
    assert list(itertools.islice(slots_before(schedule, until, after), 100)) == walked[:-101:-1]
    assert backlog(schedule, after, until, 0) == ((walked[0], walked[-1], len(walked)) if walked else None)


@settings(max_examples=200)
@given(
    period=st.integers(1_000_000, 10**10),
    begin=st.datetimes(datetime(1960, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)),
    length=st.integers(-(10**9), 10**9),
    keep=st.integers(0, 5),
)
def test_intervals_backwards_and_their_number_are_those_of_the_walk(
    period: int, begin: datetime, length: int, keep: int
) -> None:
    schedule, end = every(timedelta(microseconds=period)), begin + timedelta(microseconds=length)
    walked = list(slots_between(schedule, begin, end))
    assert list(slots_before(schedule, end, begin)) == walked[::-1]
    rest = walked[: max(len(walked) - keep, 0)]
    assert backlog(schedule, begin, end, keep) == ((rest[0], rest[-1], len(rest)) if rest else None)


@pytest.mark.timed
@pytest.mark.parametrize(
    ("schedule", "span"),
    [
        (cron("Europe/Berlin"), 365 * DAY),
        (cron("Europe/Berlin", minute="*/15", hour="8-17", day_of_week="mon-fri"), 365 * DAY),
        (cron("America/New_York", minute=0), 3650 * DAY),
    ],
)
def test_a_long_backlog_and_its_newest_slots_are_found_in_less_than_a_millisecond(
    schedule: Any, span: timedelta
) -> None:
    now = utc(2026, 10, 2, 3)

    def find() -> None:
        assert backlog(schedule, now - span, now, 3) is not None
        assert len(list(itertools.islice(slots_before(schedule, now, now - span), 3))) == 3

    assert min(timeit.repeat(find, number=1, repeat=50)) < 0.001


@pytest.mark.parametrize(
    ("schedule", "count"),
    [
        (cron("Europe/Berlin"), 1000 * 365 * 1440 + 242 * 1440),
        (cron("Europe/Berlin", minute=0, hour=2), 1000 * 365 + 242),
        (every(60), 1000 * 365 * 1440 + 242 * 1440),
    ],
)
def test_a_thousand_years_are_counted_and_not_walked_over(schedule: Any, count: int) -> None:
    begin, end = utc(2026, 10, 2), utc(3026, 10, 2)
    found = backlog(schedule, begin, end, 1)
    assert found is not None
    assert found[2] == count - 1
    assert found[1] < next(slots_before(schedule, end, begin)) <= end


def test_slots_that_have_to_be_asked_for_are_walked_over() -> None:
    schedule = OnTheHourByDue(app=app())
    begin, end = utc(2026, 1, 1), utc(2026, 1, 1, 3)
    assert not can_count(schedule)
    assert backlog(schedule, begin, end, 0) is None
    assert list(slots_before(schedule, end, begin)) == [utc(2026, 1, 1, hour) for hour in (3, 2, 1)]
    assert can_count(every(60))
    assert can_count(cron())


def test_the_ends_of_the_calendar_are_no_error_backwards() -> None:
    first, last = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
    nine = Zoned(0, 9, tz=timezone(timedelta(hours=9)), app=app())
    for schedule in (every(DAY), cron(minute=0, hour=0), nine):
        newest = next(slots_before(schedule, last, first))
        assert newest == utc(9998, 1, 1)
        assert list(slots_before(schedule, utc(2, 1, 3), first)) == [utc(2, 1, 3), utc(2, 1, 2)]
        oldest = next_slot(schedule, first)
        assert backlog(schedule, first, utc(2, 1, 3), 0) == (oldest, utc(2, 1, 3), 2)
        assert backlog(schedule, utc(9997, 12, 30), last, 0) == (utc(9997, 12, 31), newest, 2)


def test_a_date_that_never_comes_isnt_found_backwards_either() -> None:
    never = cron(minute=0, hour=0, day_of_month=30)
    never.month_of_year = {2}
    assert list(slots_before(never, utc(2026, 1, 1), utc(1800, 1, 1))) == []
    assert backlog(never, utc(2000, 1, 1), utc(2026, 1, 1), 0) is None


def test_a_zone_that_cant_be_a_key_of_a_cache_is_no_error() -> None:
    class Unhashable(timezone_of_berlin()):  # type: ignore[misc]
        __hash__ = None  # type: ignore[assignment]

    ours, theirs = Zoned(0, tz=Unhashable(), app=app()), cron("Europe/Berlin", minute=0)
    span = utc(2026, 10, 20), utc(2026, 10, 30)
    assert list(slots_between(ours, *span)) == list(slots_between(theirs, *span))
    assert backlog(ours, *span, 1) == backlog(theirs, *span, 1)


def timezone_of_berlin() -> type[tzinfo]:
    berlin = ZoneInfo("Europe/Berlin")

    class Berlin(tzinfo):
        """A zone of the user's own making."""

        def fromutc(self, moment: datetime) -> datetime:
            local = moment.replace(tzinfo=UTC).astimezone(berlin)
            return local.replace(tzinfo=self)

        def utcoffset(self, moment: datetime | None) -> timedelta | None:
            return None if moment is None else moment.replace(tzinfo=berlin).utcoffset()

        def dst(self, moment: datetime | None) -> timedelta | None:
            return None if moment is None else moment.replace(tzinfo=berlin).dst()

    return Berlin


def test_an_offset_of_odd_seconds_is_read_exactly() -> None:
    # The mean time of Amsterdam, 0:19:32 ahead until 1937.
    slots = list(slots_between(cron("Europe/Amsterdam", minute=0, hour=12), utc(1936, 1, 1), utc(1936, 1, 3)))
    assert slots in (
        [utc(1936, 1, 1, 11, 40, 28), utc(1936, 1, 2, 11, 40, 28)],
        # Zone data without the years before 1970 take Brussels for Amsterdam.
        [utc(1936, 1, 1, 12), utc(1936, 1, 2, 12)],
    )
    odd = Zoned(0, tz=timezone(timedelta(seconds=-7, microseconds=250)), app=app())
    assert next_slot(odd, utc(2026, 1, 1)) == utc(2026, 1, 1, 0, 0, 6, 999_750)


def test_fields_that_are_no_whole_numbers_are_refused_by_name() -> None:
    for value in ({5.5}, {"5"}, {None, 1}):
        odd = cron()
        odd.hour = value
        with pytest.raises(ScheduleError, match=r"hour is .* whole numbers"):
            next_slot(odd, utc(2026, 1, 1))


# The sun


def solar(event: str, lat: float, lon: float) -> Any:
    pytest.importorskip("ephem")
    return schedules.solar(event, lat, lon, app=app())


def test_the_sun_rises_once_a_day_at_the_known_time() -> None:
    slots = list(slots_between(solar("sunrise", 52.52, 13.4), utc(2026, 3, 1), utc(2026, 3, 11)))
    assert len(slots) == 10
    # Berlin on 2026-03-01: 06:53 local.
    assert abs(slots[0] - utc(2026, 3, 1, 5, 53)) < 2 * MINUTE
    assert all(
        timedelta(hours=23, minutes=50) < b - a < timedelta(hours=24) for a, b in itertools.pairwise(slots)
    )
    assert all(slot.microsecond == 0 for slot in slots)


# Case 27
@pytest.mark.parametrize(
    ("event", "lat", "lon"), [("sunset", 68.0, 20.0), ("solar_noon", 10.0, 179.9), ("dawn_civil", 60, 91)]
)
def test_two_replicas_that_search_from_different_instants_find_the_same_event(
    event: str, lat: float, lon: float
) -> None:
    schedule = solar(event, lat, lon)
    slots = list(slots_between(schedule, utc(2026, 3, 1), utc(2026, 4, 20)))
    assert 48 <= len(slots) <= 52
    for before, slot in itertools.pairwise(slots):
        for part in (0.001, 0.3, 0.7, 0.999999):
            assert next_slot(schedule, before + (slot - before) * part) == slot


def test_a_slot_is_never_before_its_event() -> None:
    ephem = pytest.importorskip("ephem")
    schedule = solar("sunset", 48.1, 11.6)
    for slot in itertools.islice(slots_after(schedule, utc(2026, 6, 1)), 20):
        event = schedule.cal.previous_setting(
            ephem.Sun(), start=ephem.Date(slot.replace(tzinfo=None) + MINUTE)
        )
        assert timedelta(seconds=-0.2) < slot - event.datetime().replace(tzinfo=UTC) < timedelta(seconds=1.2)


def test_a_polar_day_has_no_slots_and_ends() -> None:
    sunset = solar("sunset", 70.0, 25.0)
    assert list(slots_between(sunset, utc(2026, 6, 1), utc(2026, 7, 5))) == []
    back = next_slot(sunset, utc(2026, 6, 1))
    assert back is not None
    assert utc(2026, 7, 15) < back < utc(2026, 8, 10)
    assert next_slot(sunset, utc(2026, 7, 1)) == back


def test_the_edge_of_a_polar_day_is_the_same_from_every_search() -> None:
    schedule = solar("sunset", 69.0, 18.0)
    slots = list(slots_between(schedule, utc(2026, 5, 10), utc(2026, 8, 5)))
    assert max(b - a for a, b in itertools.pairwise(slots)) > timedelta(days=50)
    for before, slot in itertools.pairwise(slots):
        assert next_slot(schedule, before + (slot - before) * 0.37) == slot
    assert list(slots_before(schedule, utc(2026, 8, 5), utc(2026, 5, 10))) == slots[::-1]


def test_a_polar_night_has_no_slots_and_ends() -> None:
    sunrise = solar("sunrise", 70.0, 25.0)
    assert list(slots_between(sunrise, utc(2026, 12, 1), utc(2027, 1, 5))) == []
    back = next_slot(sunrise, utc(2026, 12, 1))
    assert back is not None
    assert utc(2027, 1, 10) < back < utc(2027, 1, 31)


def test_an_event_that_never_comes_ends_the_search() -> None:
    assert next_slot(solar("sunrise", 90.0, 0.0), utc(2026, 1, 1)) is None


def test_an_event_at_midnight_is_one_slot_although_two_days_find_it() -> None:
    ephem = pytest.importorskip("ephem")

    class AtMidnight:
        def copy(self) -> AtMidnight:
            return self

        def next_rising(self, sun: Any, start: Any) -> Any:
            half_past = timedelta(seconds=0.5)
            day = (start.datetime() - half_past).replace(hour=0, minute=0, second=0, microsecond=0)
            return ephem.Date(day + DAY + half_past)

    schedule = solar("sunrise", 52.52, 13.4)
    schedule.cal = AtMidnight()
    slots = list(itertools.islice(slots_after(schedule, utc(2026, 3, 1, 12)), 3))
    assert slots == [utc(2026, 3, 2, 0, 0, 1), utc(2026, 3, 3, 0, 0, 1), utc(2026, 3, 4, 0, 0, 1)]


def test_the_schedules_own_observer_is_left_alone() -> None:
    schedule = solar("sunrise", 52.52, 13.4)
    before = schedule.cal.date
    next_slot(schedule, utc(2026, 3, 1))
    assert schedule.cal.date == before


# Other schedules


class OnTheHourByEstimate(schedules.BaseSchedule):  # type: ignore[misc]
    """Has only `remaining_estimate`."""

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        following: datetime = last_run_at.replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
        return following - self.now()


class OnTheHourByDue(schedules.BaseSchedule):  # type: ignore[misc]
    """Has only `is_due`, and pays no heed to the last run."""

    def is_due(self, last_run_at: datetime) -> tuple[bool, float]:
        now = self.now()
        past = now.minute * 60 + now.second + now.microsecond / 1e6
        return past == 0, 3600 - past


class OfficeHours(schedules.schedule):  # type: ignore[misc]
    """An interval that pauses: overrides `is_due` and inherits an estimate that knows nothing of it."""

    def is_due(self, last_run_at: datetime) -> Any:
        if not 9 <= self.now().hour < 17:
            return False, 60
        return super().is_due(last_run_at)


class Offering(schedules.BaseSchedule):  # type: ignore[misc]
    """Says itself which slots it has."""

    def __init__(self, *slots: Any) -> None:
        super().__init__()
        self.slots = slots

    def slots_after(self, after: datetime) -> Iterator[Any]:
        return iter(self.slots)

    def is_due(self, last_run_at: datetime) -> Any:
        raise AssertionError("slots_after is preferred")


# Case 27
@pytest.mark.parametrize("kind", [OnTheHourByEstimate, OnTheHourByDue])
def test_a_schedule_with_one_method_only_has_the_same_slots_from_every_search(kind: Any) -> None:
    schedule = kind(app=app("Europe/Berlin"))
    for after in (utc(2026, 1, 1, 3), utc(2026, 1, 1, 3, 0, 0, 1), utc(2026, 1, 1, 3, 59, 59, 900_000)):
        assert list(itertools.islice(slots_after(schedule, after), 3)) == [
            utc(2026, 1, 1, 4),
            utc(2026, 1, 1, 5),
            utc(2026, 1, 1, 6),
        ]


def test_the_error_of_a_float_is_not_a_second() -> None:
    class Inexact(OnTheHourByEstimate):
        def remaining_estimate(self, last_run_at: datetime) -> timedelta:
            return super().remaining_estimate(last_run_at) + timedelta(microseconds=self.error)

    for error in (-20, 0, 20):
        schedule = Inexact(app=app())
        schedule.error = error
        slots = list(itertools.islice(slots_after(schedule, utc(2026, 1, 1, 3, 30)), 2))
        assert slots == [utc(2026, 1, 1, 4), utc(2026, 1, 1, 5)]


def test_an_overridden_is_due_is_what_counts_as_in_beat() -> None:
    schedule = OfficeHours(timedelta(minutes=30), app=app("Europe/Berlin"))
    assert between(schedule, utc(2026, 1, 5, 14, 45), utc(2026, 1, 6, 9)) == [
        "01-05 15:15",
        "01-05 15:45",
        "01-06 08:00",
        "01-06 08:30",
        "01-06 09:00",
    ]


def test_a_crontab_with_its_own_is_due_is_asked() -> None:
    class Weekly(schedules.crontab):  # type: ignore[misc]
        def is_due(self, last_run_at: datetime) -> Any:
            due, wait = super().is_due(last_run_at)
            return due and self.now().isocalendar().week % 2 == 0, wait

    schedule = Weekly(0, 6, day_of_week="mon", app=app("Europe/Berlin"))
    assert between(schedule, utc(2026, 1, 1), utc(2026, 2, 10)) == [
        "01-05 05:00",
        "01-19 05:00",
        "02-02 05:00",
    ]


def test_slots_that_a_schedule_offers_itself_are_preferred_and_come_in_utc() -> None:
    berlin = ZoneInfo("Europe/Berlin")
    offered = [datetime(2026, 7, 1, 6, 0, 0, 250_000, tzinfo=berlin), datetime(2026, 7, 2, 6, tzinfo=berlin)]
    slots = list(slots_after(Offering(*offered), utc(2026, 1, 1)))
    assert slots == [utc(2026, 7, 1, 4, 0, 0, 250_000), utc(2026, 7, 2, 4)]
    assert {slot.tzinfo for slot in slots} == {UTC}


@pytest.mark.parametrize(
    "offered",
    [
        (utc(2026, 1, 2), utc(2026, 1, 2)),
        (utc(2026, 1, 3), utc(2026, 1, 2)),
        (utc(2025, 1, 1),),
        (datetime(2026, 1, 2),),
        ("soon",),
    ],
)
def test_offered_slots_that_are_no_ascending_instants_are_refused(offered: tuple[Any, ...]) -> None:
    with pytest.raises(ScheduleError, match="Offering"):
        list(slots_after(Offering(*offered), utc(2026, 1, 1)))


# Case 28
@pytest.mark.parametrize(
    "answer",
    [(False, None), (False, 0), (False, 0.01), (False, -5), (False, 10**12), (False, float("inf"))],
)
def test_a_schedule_that_is_never_due_ends_the_search(answer: tuple[bool, Any]) -> None:
    class Never(schedules.BaseSchedule):  # type: ignore[misc]
        asked = 0

        def is_due(self, last_run_at: datetime) -> tuple[bool, Any]:
            Never.asked += 1
            return answer

    assert next_slot(Never(app=app()), utc(2026, 1, 1)) is None
    assert Never.asked <= 10_000


@pytest.mark.parametrize(
    ("wait", "rest", "first"),
    [
        (5.0, timedelta(days=1), utc(2026, 1, 2, 0, 0, 1)),
        (1.0, timedelta(days=3), utc(2026, 1, 4, 0, 0, 1)),
        (60.0, timedelta(days=60), utc(2026, 3, 2, 0, 0, 1)),
    ],
)
def test_a_schedule_that_wants_to_be_asked_all_the_time_is_due_when_it_says_so_however_late(
    wait: float, rest: timedelta, first: datetime
) -> None:
    class Polled(schedules.BaseSchedule):  # type: ignore[misc]
        asked = 0

        def is_due(self, last_run_at: datetime) -> tuple[bool, float]:
            Polled.asked += 1
            return self.now() - last_run_at > rest, wait

    assert next_slot(Polled(app=app()), utc(2026, 1, 1)) == first
    assert Polled.asked <= 10_100


def test_a_schedule_that_is_always_due_has_a_slot_when_it_wants_to_be_asked_again() -> None:
    class Always(schedules.BaseSchedule):  # type: ignore[misc]
        def is_due(self, last_run_at: datetime) -> tuple[bool, Any]:
            return True, 0.01

    slots = list(itertools.islice(slots_after(Always(app=app()), utc(2026, 1, 1)), 3))
    assert slots == [utc(2026, 1, 1, 0, 0, 1), utc(2026, 1, 1, 0, 0, 2), utc(2026, 1, 1, 0, 0, 3)]


def test_an_estimate_that_makes_no_progress_ends_the_search() -> None:
    class Stuck(schedules.BaseSchedule):  # type: ignore[misc]
        def remaining_estimate(self, last_run_at: datetime) -> timedelta:
            return utc(2020, 1, 1) - self.now()

    assert next_slot(Stuck(app=app()), utc(2026, 1, 1)) is None


@pytest.mark.parametrize("answer", [None, 5, (True,), ("", "soon"), (False, float("nan"))])
def test_a_nonsensical_answer_names_the_schedule(answer: Any) -> None:
    class Odd(schedules.BaseSchedule):  # type: ignore[misc]
        def is_due(self, last_run_at: datetime) -> Any:
            return answer

    with pytest.raises(ScheduleError, match=r"Odd can't say when it is due"):
        next_slot(Odd(app=app()), utc(2026, 1, 1))


def test_an_error_of_the_schedule_names_it_and_keeps_its_cause() -> None:
    class Broken(schedules.BaseSchedule):  # type: ignore[misc]
        def is_due(self, last_run_at: datetime) -> Any:
            raise LookupError("no calendar")

    with pytest.raises(ScheduleError, match=r"Broken can't say when it is due.*no calendar") as raised:
        next_slot(Broken(app=app()), utc(2026, 1, 1))
    assert isinstance(raised.value.__cause__, LookupError)


def test_asking_leaves_the_schedule_as_it_was() -> None:
    schedule = OfficeHours(timedelta(minutes=30), app=app())
    schedule.tz  # noqa: B018 - fills the cache that is compared below
    before = dict(vars(schedule))
    next_slot(schedule, utc(2026, 1, 5, 12))
    assert vars(schedule) == before


# Fingerprints


def test_fingerprints_are_readable_and_fixed() -> None:
    assert fingerprint(every(DAY)) == "interval:86400000000us"
    assert fingerprint(0.25) == "interval:250000us"
    assert fingerprint(cron("Europe/Berlin", minute=0, hour=6)) == "crontab:0 6 * * *@Europe/Berlin"
    office = cron(minute="*/20", hour="9-11", day_of_month="1,15", month_of_year="1-3", day_of_week="mon-fri")
    assert fingerprint(office) == "crontab:0,20,40 9,10,11 1,15 1,2,3 1,2,3,4,5@UTC"
    assert fingerprint(solar("sunset", 52, 13.4)) == "solar:sunset@52.0,13.4"


def test_spellings_of_the_same_crontab_have_one_fingerprint() -> None:
    same = [{"minute": "*/30"}, {"minute": [30, 0]}, {"minute": "0,30", "hour": "*/1"}, {"minute": {0, 30}}]
    assert len({fingerprint(cron("Asia/Tokyo", **fields)) for fields in same}) == 1


def test_a_changed_schedule_or_zone_has_another_fingerprint() -> None:
    different = [
        every(60),
        every(61),
        cron(),
        cron(minute=0),
        cron("Asia/Tokyo", minute=0),
        Zoned(0, tz="Europe/Berlin", app=app()),
        Zoned(0, tz=timezone(timedelta(hours=1), "CET"), app=app()),
        Zoned(0, tz=timezone(timedelta(hours=2), "CET"), app=app()),
        OfficeHours(60, app=app()),
        OnTheHourByDue(app=app()),
        OnTheHourByEstimate(app=app()),
        OnTheHourByEstimate(app=app("Asia/Tokyo")),
    ]
    assert len({fingerprint(schedule) for schedule in different}) == len(different)


def test_the_fingerprint_of_another_schedule_shows_its_plain_public_attributes() -> None:
    schedule = OnTheHourByDue(app=app())
    before = fingerprint(schedule)
    schedule._hidden, schedule.callback = 1, object()
    assert fingerprint(schedule) == before
    schedule.days, schedule.period = {"b", "a"}, timedelta(1)
    assert fingerprint(schedule).endswith(
        "OnTheHourByDue(days=['a','b'],period=datetime.timedelta(days=1))@UTC"
    )


def test_a_fingerprint_has_no_address_and_no_cached_property() -> None:
    class Odd(tzinfo):
        pass

    schedule = OnTheHourByDue(app=app())
    before = fingerprint(schedule)
    assert schedule.utc_enabled
    assert fingerprint(schedule) == before
    assert " at 0x" not in fingerprint(Zoned(0, tz=Odd(), app=app()))


FINGERPRINTS = """
import calendar, datetime, enum
from celery import Celery, schedules
from celery_leaderbeat.schedules import crontab
from celery_leaderbeat.timeline import fingerprint

app = Celery('other', set_as_current=False)
class Own(schedules.crontab):
    def is_due(self, last_run_at): return super().is_due(last_run_at)
class Level(enum.IntEnum):
    HIGH = 3
class Flag(enum.IntFlag):
    A = 1
class Text(str, enum.Enum):
    A = 'a'
own = Own('*/20', app=app)
own.names = {'a', 'b', 'c', 'd'}
own.nested = {'x': frozenset({1, 2, 30}), 'y': [1.5, None, True]}
own.since = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)
own.kinds = [calendar.MONDAY, Level.HIGH, Flag.A, Text.A]
print(fingerprint(own), fingerprint(schedules.crontab('*/20', app=app)))
print(fingerprint(crontab('*/20', day_of_week=calendar.MONDAY, tz='Asia/Tokyo')), fingerprint(0.1))
"""


def fingerprints_of(python: str, seed: str) -> subprocess.CompletedProcess[str]:
    """What another process prints, with this environment's packages, but not its standard library."""
    here = [
        *(path for path in sys.path if not path.startswith(sys.base_prefix)),
        sysconfig.get_path("purelib"),
    ]
    return subprocess.run(
        [python, "-c", FINGERPRINTS],
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(here)},
        capture_output=True,
        text=True,
    )


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    texts = {fingerprints_of(sys.executable, seed).stdout for seed in ("1", "2")}
    assert len(texts) == 1
    assert "kinds=[0,3,1,'a']" in texts.pop()


def other_pythons() -> list[str]:
    """Interpreters of other versions, on the path or installed beside this one."""
    versions = [f"python3.{minor}" for minor in range(10, 14) if minor != sys.version_info.minor]
    beside = Path(sys.base_prefix).parent
    found = [
        next(iter(sorted(beside.glob(f"3*/bin/{name}"))), None) or shutil.which(name) for name in versions
    ]
    # A launcher may stand for a version that isn't there.
    return [str(python) for python in found if python and not subprocess.run([python, "-c", ""]).returncode]


def test_a_fingerprint_is_the_same_under_every_version_of_python() -> None:
    ours = fingerprints_of(sys.executable, "0").stdout
    theirs = {python: fingerprints_of(python, "0") for python in other_pythons()}
    # One that can't import the packages has none, or some that aren't for its version.
    texts = [
        found.stdout
        for found in theirs.values()
        if "ImportError" not in found.stderr and "ModuleNotFoundError" not in found.stderr
    ]
    if not texts:
        pytest.skip("no other Python that can import this environment's packages")
    assert ours
    assert set(texts) == {ours}
