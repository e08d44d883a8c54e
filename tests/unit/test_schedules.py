"""Crontabs with a zone of their own: ours, django-celery-beat's, and others."""

from __future__ import annotations

import copy
import pickle
from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery, schedules
from celery.beat import ScheduleEntry

from celery_leaderbeat.errors import ScheduleError
from celery_leaderbeat.kinds import kind_of
from celery_leaderbeat.schedules import crontab
from celery_leaderbeat.timeline import fingerprint, next_slot, slots_between

UTC = timezone.utc
TOKYO = ZoneInfo("Asia/Tokyo")


def app(zone: str = "Europe/Berlin", enable_utc: bool = True) -> Celery:
    made = Celery("schedules", set_as_current=False)
    made.conf.update(timezone=zone, enable_utc=enable_utc)
    return made


def utc(*fields: int) -> datetime:
    return datetime(*fields, tzinfo=UTC)  # type: ignore[misc]


# Ours


@pytest.mark.parametrize("tz", ["Asia/Tokyo", TOKYO, timezone(timedelta(hours=9))])
@pytest.mark.parametrize("enable_utc", [True, False])
def test_it_fires_in_its_zone(tz: Any, enable_utc: bool) -> None:
    daily = crontab(minute=0, hour=6, tz=tz, app=app(enable_utc=enable_utc))
    assert next_slot(daily, utc(2026, 7, 1)) == utc(2026, 7, 1, 21)
    assert kind_of(daily) == "crontab"


def test_it_needs_no_app_for_its_slots() -> None:
    assert next_slot(crontab(0, 6, tz="Asia/Tokyo"), utc(2026, 7, 1)) == utc(2026, 7, 1, 21)


def test_its_zone_counts_also_where_it_is_the_apps_and_nowfun_is_elsewhere() -> None:
    daily = crontab(0, 6, tz="Europe/Berlin", app=app(), nowfun=lambda: datetime.now(TOKYO))
    assert next_slot(daily, utc(2026, 7, 1)) == utc(2026, 7, 1, 4)


def test_its_slots_and_fingerprint_are_those_of_celerys_in_an_app_of_that_zone() -> None:
    theirs = schedules.crontab(30, 2, day_of_week="mon-fri", app=app("America/New_York"))
    ours = crontab(30, 2, day_of_week="mon-fri", tz="America/New_York")
    span = utc(2026, 3, 1), utc(2026, 3, 20)
    assert list(slots_between(ours, *span)) == list(slots_between(theirs, *span))
    assert fingerprint(ours) == fingerprint(theirs) == "crontab:30 2 * * 1,2,3,4,5@America/New_York"


@pytest.mark.parametrize(
    ("tz", "remedy"),
    [
        ("Europe/Berlim", r"did you mean 'Europe/Berlin'\?"),
        ("europe/berlin ", r"did you mean 'Europe/Berlin'\?"),
        ("America/New York", r"did you mean 'America/New_York'\?"),
        ("???", "write it as in 'Europe/Berlin'"),
        ("", "write it as in 'Europe/Berlin'"),
        ("/etc/localtime", "no time zone of this name"),
        ("../Berlin", "no time zone of this name"),
        (None, "a tzinfo or the name of a time zone"),
        (2, "a tzinfo or the name of a time zone"),
    ],
)
def test_a_wrong_zone_is_refused_where_it_is_written(tz: Any, remedy: str) -> None:
    with pytest.raises(ScheduleError, match=r"^crontab\(tz=\.\.\.\) is ") as raised:
        crontab(0, 6, tz=tz)
    assert repr(tz) in str(raised.value)
    with pytest.raises(ScheduleError, match=remedy):
        crontab(0, 6, tz=tz)


def test_it_isnt_made_without_a_zone() -> None:
    with pytest.raises(TypeError, match="tz"):
        crontab(0, 6)  # type: ignore[call-arg]


def test_it_shows_its_zone() -> None:
    assert repr(crontab(0, 6, tz=TOKYO)) == "<crontab: 0 6 * * * (m/h/dM/MY/d) in Asia/Tokyo>"


@pytest.mark.parametrize("clone", [lambda s: pickle.loads(pickle.dumps(s)), copy.copy, copy.deepcopy])
def test_a_copy_is_the_same_schedule(clone: Any) -> None:
    original = crontab("*/5", "9-17", "mon-fri", "1-15", "1,7", tz="Asia/Tokyo", nowfun=_now)
    copied = clone(original)
    assert copied == original
    assert (repr(copied), copied.tz, copied.nowfun) == (repr(original), original.tz, _now)
    assert fingerprint(copied) == fingerprint(original)


def _now() -> datetime:
    return datetime(2026, 7, 1, 12, tzinfo=UTC)


def test_equality_includes_the_zone() -> None:
    one = crontab(0, 6, tz="Asia/Tokyo")
    assert one == crontab("0", "6", tz=TOKYO)
    assert one != crontab(0, 6, tz="Asia/Seoul")
    assert one != crontab(0, 7, tz="Asia/Tokyo")
    assert one != schedules.crontab(0, 6, app=app())
    assert schedules.crontab(0, 6, app=app()) != one
    assert one == schedules.crontab(0, 6, app=app("Asia/Tokyo"))
    assert one != "0 6 * * *"


def test_it_is_made_from_a_line() -> None:
    line = crontab.from_string("30 6 1,15 * mon-fri", tz="Asia/Tokyo")
    assert line == crontab(30, 6, day_of_month="1,15", day_of_week="mon-fri", tz="Asia/Tokyo")


@pytest.mark.parametrize("enable_utc", [True, False])
@pytest.mark.parametrize("last_zone", ["UTC", "America/New_York", "Asia/Tokyo"])
def test_a_plain_beat_fires_it_in_its_zone_once_a_day(enable_utc: bool, last_zone: str) -> None:
    now = utc(2026, 6, 30, 12)
    daily = crontab(0, 6, tz="Asia/Tokyo", app=app(enable_utc=enable_utc), nowfun=lambda: now)
    last = now.astimezone(ZoneInfo(last_zone))
    sent = []
    for _ in range(8):
        due, wait = daily.is_due(last)
        if due:
            sent.append(now)
            last = now.astimezone(ZoneInfo(last_zone))
        now += timedelta(seconds=wait)
    assert sent[:3] == [utc(2026, 6, 30, 21), utc(2026, 7, 1, 21), utc(2026, 7, 2, 21)]
    assert len(sent) == 7


def test_a_plain_beat_of_an_older_celery_gets_times_in_its_zone_too() -> None:
    daily = crontab(0, 6, tz="Asia/Tokyo", app=app(enable_utc=False))
    last = datetime(2026, 6, 30, 23, tzinfo=ZoneInfo("America/New_York"))
    assert daily.to_local(last).tzinfo is TOKYO
    start, _, now = daily.remaining_delta(last)
    assert (start, start.tzinfo, now.tzinfo) == (last, TOKYO, TOKYO)


def test_a_plain_beats_entry_begins_with_the_time_in_its_zone() -> None:
    daily = crontab(0, 6, tz="Asia/Tokyo", app=app())
    entry = ScheduleEntry(name="job", task="job", schedule=daily, app=app())
    assert entry.last_run_at.utcoffset() == timedelta(hours=9)
    naive = crontab(0, 6, tz="Asia/Tokyo", app=app(), nowfun=lambda: datetime(2026, 7, 1))
    assert naive.now() == utc(2026, 7, 1)


# Others'


class TzAwareCrontab(schedules.crontab):  # type: ignore[misc]
    """As django-celery-beat's is seen from outside: the zone as the sixth argument, `nowfun`, its own `is_due`."""

    def __init__(self, *fields: Any, tz: Any = UTC, app: Any = None, **named: Any) -> None:
        self.tz = tz
        super().__init__(*fields, nowfun=self.nowfunc, app=app, **named)

    def nowfunc(self) -> datetime:
        return datetime.now(self.tz)

    def is_due(self, last_run_at: datetime) -> Any:
        return super().is_due(last_run_at.astimezone(self.tz))


class Elsewhere(TzAwareCrontab):
    """With an `is_due` that does more."""

    def is_due(self, last_run_at: datetime) -> Any:
        due, wait = super().is_due(last_run_at)
        return due and self.now().day % 2 == 0, wait


@pytest.fixture(
    params=[
        "django_celery_beat.tzcrontab",
        "sqlalchemy_celery_beat.tzcrontab",
        "celery_sqlalchemy_scheduler.tzcrontab",
    ]
)
def at_home(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The class's `is_due` is that of a package that is known."""
    monkeypatch.setattr(TzAwareCrontab.is_due, "__module__", request.param)
    return str(request.param)


def test_the_zone_aware_crontab_of_django_celery_beat_goes_by_the_rules_in_its_zone(at_home: str) -> None:
    hourly = TzAwareCrontab(0, tz=ZoneInfo("Europe/Berlin"), app=app("Asia/Tokyo"))
    assert kind_of(hourly) == "crontab"
    assert list(slots_between(hourly, utc(2026, 10, 24, 23), utc(2026, 10, 25, 2))) == [
        utc(2026, 10, 25, hour) for hour in (0, 1, 2)
    ]
    assert fingerprint(hourly) == "crontab:0 * * * *@Europe/Berlin"


def test_a_subclass_of_it_that_says_itself_when_it_is_due_is_asked(at_home: str) -> None:
    daily = Elsewhere(0, 6, tz=TOKYO, app=app())
    assert kind_of(daily) == "asked"
    assert list(slots_between(daily, utc(2026, 7, 1), utc(2026, 7, 5))) == [
        utc(2026, 7, 1, 21),
        utc(2026, 7, 3, 21),
    ]


def test_an_is_due_that_isnt_known_is_asked_in_its_zone_and_never_in_a_loop() -> None:
    daily = TzAwareCrontab(0, 6, tz=TOKYO, app=app())
    assert kind_of(daily) == "asked"
    right = [utc(2026, 7, day, 21) for day in range(1, 5)]
    for after in (utc(2026, 7, 1), utc(2026, 7, 1, 20, 59, 59)):
        assert list(slots_between(daily, after, utc(2026, 7, 5))) == right
    assert next_slot(daily, right[0]) == right[1]
