"""Schedules rebuilt from their fingerprints, and the slots that an entry called for."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery, schedules
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_leaderbeat.definitions import (
    Definition,
    can_recompute,
    parse_definitions,
    schedule_of,
    slots,
)
from celery_leaderbeat.errors import ScheduleError
from celery_leaderbeat.tick import slot_to_us
from celery_leaderbeat.timeline import fingerprint, slots_after

UTC = timezone.utc
T0 = datetime(2026, 3, 28, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)


@functools.cache
def app(zone: str = "UTC") -> Celery:
    made = Celery("definitions", set_as_current=False)
    made.conf.timezone = zone
    return made


class Zoned(schedules.crontab):  # type: ignore[misc]
    """A crontab with a zone of its own."""

    tz: Any = None


def zoned(tz: Any, **fields: Any) -> Any:
    schedule = Zoned(**fields)
    schedule.tz = tz
    return schedule


class Own(schedules.BaseSchedule):  # type: ignore[misc]
    """A schedule that can't be rebuilt from its fingerprint."""

    def __init__(self, hours: int) -> None:
        self.hours = hours
        super().__init__(app=app())

    def slots_after(self, after: datetime) -> Iterator[datetime]:
        step = self.hours * HOUR
        count = (after - T0) // step + 1
        return (T0 + number * step for number in itertools.count(count))


def first_slots(schedule: Any, after: datetime, count: int = 20) -> list[datetime]:
    return list(itertools.islice(slots_after(schedule, after), count))


ZONES = ["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu", "Etc/GMT+5"]
offsets = st.integers(-86_399, 86_399).map(lambda s: timezone(timedelta(seconds=s)))


def some(values: range) -> st.SearchStrategy[str]:
    """A field of a crontab: all its values, or some of them."""
    named = st.sets(st.sampled_from(values), min_size=1).map(lambda chosen: ",".join(map(str, chosen)))
    return st.just("*") | named


@settings(max_examples=1_000, deadline=None)
@given(st.integers(1_000, 10**15), st.datetimes(datetime(1990, 1, 1), datetime(2100, 1, 1)))
def test_an_interval_is_rebuilt_from_its_fingerprint(us: int, after: datetime) -> None:
    schedule = schedules.schedule(timedelta(microseconds=us), app=app())
    rebuilt = schedule_of(fingerprint(schedule))
    assert fingerprint(rebuilt) == fingerprint(schedule)
    assert first_slots(rebuilt, after.replace(tzinfo=UTC), 3) == first_slots(
        schedule, after.replace(tzinfo=UTC), 3
    )


@settings(max_examples=1_000, deadline=None)
@given(
    minute=some(range(60)),
    hour=some(range(24)),
    day=st.just("*") | st.just("1,15,31"),
    month=st.just("*") | st.just("3,10"),
    weekday=some(range(7)),
    zone=st.sampled_from(ZONES).map(ZoneInfo) | offsets | st.just(UTC),
    after=st.datetimes(datetime(2026, 1, 1), datetime(2027, 1, 1)),
)
def test_a_crontab_is_rebuilt_with_its_zone(
    minute: str, hour: str, day: str, month: str, weekday: str, zone: Any, after: datetime
) -> None:
    schedule = zoned(
        zone, minute=minute, hour=hour, day_of_month=day, month_of_year=month, day_of_week=weekday
    )
    rebuilt = schedule_of(fingerprint(schedule))
    assert fingerprint(rebuilt) == fingerprint(schedule)
    assert first_slots(rebuilt, after.replace(tzinfo=UTC), 3) == first_slots(
        schedule, after.replace(tzinfo=UTC), 3
    )


@pytest.mark.parametrize("zone", ZONES)
def test_a_crontab_of_an_app_is_rebuilt_over_changes_of_offset(zone: str) -> None:
    schedule = schedules.crontab(minute="*/20", hour="0-4", app=app(zone))
    rebuilt = schedule_of(fingerprint(schedule))
    for begin in (datetime(2026, 3, 7, tzinfo=UTC), datetime(2026, 10, 24, tzinfo=UTC)):
        assert first_slots(rebuilt, begin, 500) == first_slots(schedule, begin, 500)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "interval:",
        "interval:0us",
        "interval:999us",
        "interval:-5us",
        "interval:1000us ",
        "interval:\u0663000us",
        "interval:" + "9" * 30 + "us",
        "interval:" + "9" * 5_000 + "us",
        "crontab:0 2 * * *",
        "crontab:0 2 * * *@",
        "crontab:0 2 * * *@Nowhere/Atlantis",
        "crontab:0 2 * * *@../etc/passwd",
        "crontab:0 2 * * *@UTC+25:00",
        "crontab:0 2 * *@UTC",
        "crontab:60 2 * * *@UTC",
        "crontab:5,3 2 * * *@UTC",
        "crontab:*/5 2 * * *@UTC",
        "crontab:x 2 * * *@UTC",
        "solar:sunset@52.5,13.4",
        "myapp.schedules.Tides(port='Kiel')@UTC",
    ],
)
def test_what_holds_no_whole_schedule_is_none(text: str) -> None:
    assert schedule_of(text) is None
    assert not can_recompute(Definition(text, T0))


def test_definitions_are_read_the_oldest_first() -> None:
    us = slot_to_us(T0)
    text = json.dumps(
        [
            {"fingerprint": "interval:5000000us", "since": str(us + 1)},
            {"fingerprint": "solar:x", "since": us, "until": str(us + 1)},
        ]
    )
    later = T0 + timedelta(microseconds=1)
    assert parse_definitions(text) == [
        Definition("solar:x", T0, later),
        Definition("interval:5000000us", later),
    ]
    assert parse_definitions(None) == parse_definitions("") == parse_definitions("[]") == []


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        "[7]",
        '["x"]',
        "[null]",
        "[{}]",
        '[{"since": 1}]',
        '[{"fingerprint": 7, "since": 1}]',
        '[{"fingerprint": "x"}]',
        '[{"fingerprint": "x", "since": true}]',
        '[{"fingerprint": "x", "since": 1.5}]',
        '[{"fingerprint": "x", "since": 1, "until": "later"}]',
        '[{"fingerprint": "x", "since": 99999999999999999999999}]',
    ],
)
def test_what_is_no_list_of_definitions_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        parse_definitions(text)


HOURLY = "interval:3600000000us"
DAILY = "crontab:0 12 * * *@UTC"


def test_each_slot_comes_from_the_definition_in_force_at_its_time() -> None:
    daily, hourly = Definition(DAILY, T0 - 9 * DAY, T0), Definition(HOURLY, T0)
    found = list(slots([hourly, daily], T0 - 2 * DAY, T0 + 2 * HOUR))
    assert found == [
        (T0 - DAY, daily),
        (T0, daily),
        (T0 + HOUR, hourly),
        (T0 + 2 * HOUR, hourly),
    ]


def test_the_begin_is_left_out_and_the_end_belongs_to_it() -> None:
    hourly = Definition(HOURLY, T0 - DAY)
    assert [slot for slot, _ in slots([hourly], T0, T0 + HOUR)] == [T0 + HOUR]
    assert list(slots([hourly], T0, T0)) == []
    assert list(slots([hourly], T0 + HOUR, T0)) == []
    assert list(slots([], T0, T0 + DAY)) == []


def test_a_time_without_a_definition_calls_for_nothing() -> None:
    spans = [Definition(HOURLY, T0, T0 + HOUR), Definition(HOURLY, T0 + 3 * HOUR, T0 + 4 * HOUR)]
    assert [slot for slot, _ in slots(spans, T0 - DAY, T0 + DAY)] == [T0 + HOUR, T0 + 4 * HOUR]


def test_a_definition_ends_where_the_next_one_begins() -> None:
    for end in (None, T0 + DAY):
        old, new = Definition(HOURLY, T0 - HOUR, end), Definition(HOURLY, T0 + HOUR)
        assert list(slots([old, new], T0 - HOUR, T0 + 2 * HOUR)) == [
            (T0, old),
            (T0 + HOUR, old),
            (T0 + 2 * HOUR, new),
        ]


def test_what_cant_be_rebuilt_is_recomputed_from_the_current_schedule_if_that_is_the_same() -> None:
    own = Own(2)
    same, other = Definition(fingerprint(own), T0 - DAY, T0), Definition(fingerprint(Own(3)), T0)
    assert [can_recompute(item) for item in (same, other)] == [False, False]
    assert [can_recompute(item, own) for item in (same, other)] == [True, False]
    assert list(slots([same, other], T0 - 3 * HOUR, T0 + DAY)) == []
    assert list(slots([same, other], T0 - 3 * HOUR, T0 + DAY, own)) == [(T0 - 2 * HOUR, same), (T0, same)]


def test_a_current_schedule_with_another_fingerprint_is_of_no_matter() -> None:
    hourly = Definition(HOURLY, T0)
    for current in (Own(2), schedules.crontab(minute=0, app=app()), object()):
        assert list(slots([hourly], T0, T0 + HOUR, current)) == [(T0 + HOUR, hourly)]


def test_a_fixed_offset_that_bears_the_name_of_a_zone_is_not_taken_for_the_zone() -> None:
    fixed = zoned(timezone(HOUR, "Europe/Berlin"), minute=0, hour=12)
    daily = Definition(fingerprint(fixed), T0)
    summer = datetime(2026, 7, 1, tzinfo=UTC)
    assert list(slots([daily], summer, summer + DAY)) == []
    assert [slot.hour for slot, _ in slots([daily], summer, summer + DAY, fixed)] == [11]


def test_a_current_schedule_that_fails_says_so_when_its_slots_are_asked_for() -> None:
    own = Own(2)
    definition = Definition(fingerprint(own), T0)
    own.slots_after = lambda after: 1 / 0  # type: ignore[assignment, method-assign]
    with pytest.raises(ScheduleError):
        list(slots([definition], T0, T0 + DAY, own))
