"""From a schedule to its slots: pure functions of time, the same on every replica and Celery version.

Interval (Celery's `schedule`): the multiples of the period since the Unix epoch, in integer microseconds.

Crontab: computed here from the field sets that Celery expanded, day of month AND day of week as in Celery,
in the schedule's zone. Two rules, by the hour set:

* All 24 hours: real instants. Whatever minute the local clock shows counts, both times in a repeated hour,
  never in a skipped one.
* Any other: wall times (RFC 5545, sections 3.3.5 and 3.3.10), one slot per date and time. A wall time in a
  gap is read with the offset before the change (02:30 becomes 03:30); in a repeated hour the first pass
  counts. A slot that a gap moves onto another one is one slot.

The computation goes through UTC only: a day of UTC is cut into spans of constant offset, and in a span wall
time is linear. So the only question asked of a zone is its offset at an instant, which every `tzinfo` answers
right, with or without `fold`. Days that no date field names are jumped over.

Solar: the events that `ephem` finds with the schedule's own observer, always searched from a midnight in
UTC, because the result of the search depends on its start by up to a tenth of a second.

Anything else is asked: by its own `slots_after(after)` where it has one, else by playing beat to it: `is_due`
is called with a clock that moves on as it says until it is due (or `remaining_estimate`, where there is only
that). Slots that were searched are rounded up to the whole second, so that replicas agree; a schedule finer
than a second should offer `slots_after`.
"""

from __future__ import annotations

import heapq
import inspect
import itertools
import re
from calendar import monthrange
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import MAXYEAR, date, datetime, time, timedelta, timezone, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

from celery import schedules

from celery_leaderbeat.errors import ScheduleError
from celery_leaderbeat.tick import slot_from_us, slot_to_us

__all__ = ["backlog", "fingerprint", "next_slot", "slots_after", "slots_between"]

#: The longest way between two dates that a crontab can name: 29 February on a given weekday, around a
#: century without a leap day.
_SEARCH_YEARS = 40
#: Days searched for a solar event. In a polar day or night it comes back within a year or never.
_SOLAR_DAYS = 370
#: How often a schedule is asked for one slot.
_MAX_QUESTIONS = 10_000
#: How much later a schedule that doesn't say when to ask again is asked, in seconds.
_UNSAID = 60.0

_DAY = timedelta(days=1)
_SECOND = timedelta(seconds=1)
_MICROSECOND = timedelta(microseconds=1)
_EARLIEST = datetime(2, 1, 1, tzinfo=timezone.utc)
_LATEST = datetime(MAXYEAR - 1, 1, 1, tzinfo=timezone.utc)

_MINUTES, _HOURS, _MONTHS, _DAYS, _WEEKDAYS = range(60), range(24), range(1, 13), range(1, 32), range(7)


def slots_after(schedule: Any, after: datetime) -> Iterator[datetime]:
    """The slots strictly later than `after`, ascending, aware, in UTC; as a rule without end.

    Parameters:
        schedule: what an entry of `beat_schedule` may have: a Celery schedule, a timedelta, or seconds.
        after: an aware datetime.

    Raises:
        ScheduleError: the schedule has no slots, or they can't be computed; for a schedule that has to be
            asked, from the iterator.
        ValueError: `after` is naive.
    """
    after = slot_from_us(slot_to_us(after))
    if after >= _LATEST:
        return iter(())
    after = max(after, _EARLIEST)
    kind = _kind(schedule)
    if kind == "interval":
        return _interval_slots(_period(schedule), after)
    if kind == "crontab":
        return _crontab_slots(_Fields.of(schedule), _zone(schedule), after)
    if kind == "solar":
        return _solar_slots(schedule, after)
    if kind == "own":
        return _own_slots(schedule, after)
    return _asked_slots(schedule, after)


def slots_between(schedule: Any, after: datetime, until: datetime) -> Iterator[datetime]:
    """The slots later than `after` and not later than `until`. Raises as `slots_after`."""
    slot_to_us(until)
    return itertools.takewhile(lambda slot: slot <= until, slots_after(schedule, after))


def backlog(
    schedule: Any, after: datetime, until: datetime, keep: int
) -> tuple[datetime, datetime, int] | None:
    """First, last and number of the slots in (after, until] without the newest `keep`.

    None where there are no more than `keep`, or where they can't be counted without a walk over them.
    """
    if _kind(schedule) != "interval":
        return None
    period = _period(schedule)
    first, last = slot_to_us(after) // period + 1, slot_to_us(until) // period - keep
    if last < first:
        return None
    return slot_from_us(first * period), slot_from_us(last * period), last - first + 1


def next_slot(schedule: Any, after: datetime) -> datetime | None:
    """The first slot later than `after`, or None where the search finds none. Raises as `slots_after`."""
    return next(slots_after(schedule, after), None)


def fingerprint(schedule: Any) -> str:
    """Text that is the same for the same schedule in every process, and another for a changed one.

    Raises:
        ScheduleError: as `slots_after`.
    """
    kind = _kind(schedule)
    if kind == "interval":
        return f"interval:{_period(schedule)}us"
    if kind == "crontab":
        return f"crontab:{_Fields.of(schedule)}@{_zone_name(_zone(schedule))}"
    if kind == "solar":
        return f"solar:{schedule.event}@{float(schedule.lat)!r},{float(schedule.lon)!r}"
    cls = type(schedule)
    attributes = ",".join(_simple_attributes(schedule))
    return f"{cls.__module__}.{cls.__qualname__}({attributes})@{_zone_name(_zone(schedule))}"


def _kind(schedule: Any) -> str:
    if callable(getattr(schedule, "slots_after", None)):
        return "own"
    if isinstance(schedule, (int, float, timedelta)) and not isinstance(schedule, bool):
        return "interval"
    for kind, base, methods in (
        ("interval", schedules.schedule, ("is_due", "remaining_estimate")),
        ("crontab", schedules.crontab, ("is_due", "remaining_estimate", "remaining_delta")),
        ("solar", schedules.solar, ("is_due", "remaining_estimate")),
    ):
        if isinstance(schedule, base) and all(
            getattr(type(schedule), name) is getattr(base, name) for name in methods
        ):
            return kind
    if _offers(schedule, "is_due") or _offers(schedule, "remaining_estimate"):
        return "asked"
    raise ScheduleError(
        f"{schedule!r} is no schedule: expected seconds, a timedelta, crontab(...), solar(...), or an object"
        " with slots_after, is_due or remaining_estimate"
    )


def _offers(schedule: Any, name: str) -> bool:
    method = getattr(type(schedule), name, None)
    return callable(method) and method is not getattr(schedules.BaseSchedule, name)


# Interval


def _period(schedule: Any) -> int:
    """The period in microseconds."""
    every = getattr(schedule, "run_every", schedule)
    try:
        period = every if isinstance(every, timedelta) else timedelta(seconds=every)
    except (TypeError, ValueError, OverflowError):
        period = timedelta(0)
    us = period // _MICROSECOND
    if us < 1000:
        found = f"{every.total_seconds():.15g} s" if isinstance(every, timedelta) else repr(every)
        raise ScheduleError(f"the interval is {found}: it must be a time of at least 1 ms")
    return us


def _interval_slots(period: int, after: datetime) -> Iterator[datetime]:
    first = slot_to_us(after) // period + 1
    last = slot_to_us(_LATEST) // period
    return (slot_from_us(count * period) for count in range(first, last + 1))


# Crontab


@dataclass(frozen=True)
class _Fields:
    """A crontab's field sets, ascending."""

    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: tuple[int, ...]
    months: tuple[int, ...]
    weekdays: tuple[int, ...]

    @classmethod
    def of(cls, schedule: Any) -> _Fields:
        names = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")
        fields = [tuple(sorted(getattr(schedule, name))) for name in names]
        for name, field in zip(names, fields, strict=True):
            if not field:
                raise ScheduleError(f"the crontab's {name} is empty: it must name at least one value")
        return cls(*fields)

    def __str__(self) -> str:
        pairs = (
            (self.minutes, _MINUTES),
            (self.hours, _HOURS),
            (self.days, _DAYS),
            (self.months, _MONTHS),
            (self.weekdays, _WEEKDAYS),
        )
        return " ".join(
            "*" if len(field) == len(full) else ",".join(map(str, field)) for field, full in pairs
        )

    def names(self, day: date) -> bool:
        """Whether the date is one of this crontab's."""
        return day.month in self.months and day.day in self.days and day.isoweekday() % 7 in self.weekdays

    def date_from(self, first: date) -> date | None:
        """The first date of this crontab that isn't earlier than `first`."""
        for year in range(first.year, min(first.year + _SEARCH_YEARS, MAXYEAR - 1) + 1):
            for month in self.months:
                if (year, month) < (first.year, first.month):
                    continue
                length = monthrange(year, month)[1]
                for day in itertools.takewhile(length.__ge__, self.days):
                    found = date(year, month, day)
                    if found >= first and found.isoweekday() % 7 in self.weekdays:
                        return found
        return None

    def slots_in(self, span: _Span) -> Iterator[datetime]:
        """The slots in a span, ascending."""
        begin, end = span.begin + span.offset, span.end + span.offset
        day = begin.date()
        while day <= end.date():
            if self.names(day):
                for hour in self.hours:
                    if day == begin.date() and hour < begin.hour:
                        continue
                    for minute in self.minutes:
                        wall = datetime.combine(day, time(hour, minute))
                        if wall >= end:
                            return
                        if wall >= begin:
                            yield wall - span.offset
            day += _DAY


@dataclass(frozen=True)
class _Span:
    """The instants `begin <= instant < end`, naive in UTC, whose wall time is read as instant + offset."""

    begin: datetime
    end: datetime
    offset: timedelta

    def within(self, begin: datetime, end: datetime) -> _Span:
        return _Span(max(self.begin, begin), min(self.end, end), self.offset)


def _crontab_slots(fields: _Fields, zone: tzinfo, after: datetime) -> Iterator[datetime]:
    start = after.replace(tzinfo=None) + _MICROSECOND
    day = start.date()
    while True:
        # An instant's local date is that of UTC, the day before or the day after.
        found = fields.date_from(day - _DAY)
        if found is None:
            return
        day = max(day, found - _DAY)
        yield from _crontab_slots_of(day, fields, zone, start)
        day += _DAY


def _crontab_slots_of(day: date, fields: _Fields, zone: tzinfo, start: datetime) -> Iterator[datetime]:
    """The slots of one day of UTC that aren't earlier than `start`."""
    begin = datetime.combine(day, time.min)
    end = begin + _DAY
    every_hour = len(fields.hours) == len(_HOURS)
    # A change reaches at most a day ahead: the longest gap there was is a whole day (Samoa, 2011).
    spans = [span.within(max(begin, start), end) for span in _spans(zone, begin - _DAY, end, every_hour)]
    streams = [fields.slots_in(span) for span in spans if span.begin < span.end]
    previous = None
    for slot in streams[0] if len(streams) == 1 else heapq.merge(*streams):
        if slot != previous:
            yield slot.replace(tzinfo=timezone.utc)
        previous = slot


def _spans(zone: tzinfo, begin: datetime, end: datetime, every_hour: bool) -> Iterator[_Span]:
    before = _offset(zone, begin - _SECOND)
    while begin < end:
        offset = _offset(zone, begin)
        change = _next_change(zone, begin, end)
        if every_hour:
            yield _Span(begin, change, offset)
        else:
            # The wall times that a step back repeats have had their first pass.
            yield _Span(begin + max(before - offset, timedelta(0)), change, offset)
            # The wall times that a step forward skips, read with the offset before it.
            yield _Span(begin, begin + max(offset - before, timedelta(0)), before)
        before, begin = offset, change


def _offset(zone: tzinfo, instant: datetime) -> timedelta:
    return instant.replace(tzinfo=timezone.utc).astimezone(zone).utcoffset() or timedelta(0)


def _next_change(zone: tzinfo, begin: datetime, end: datetime) -> datetime:
    """The first instant after `begin` with another offset, or `end`; both are whole seconds."""
    offset = _offset(zone, begin)
    changed = end - _SECOND
    if _offset(zone, changed) == offset:
        return end
    while changed - begin > _SECOND:
        middle = begin + (changed - begin) // _SECOND // 2 * _SECOND
        if _offset(zone, middle) == offset:
            begin = middle
        else:
            changed = middle
    return changed


def _zone(schedule: Any) -> tzinfo:
    """The zone in which the schedule's fields are read.

    That is the schedule's `tz`. Where this is only the app's, a `nowfun` that gives times in another zone
    counts for more: that is how Celery documents a crontab with a zone of its own.
    """
    zone = getattr(schedule, "tz", None) or timezone.utc
    nowfun = getattr(schedule, "nowfun", None)
    if nowfun is not None and zone == getattr(getattr(schedule, "app", None), "timezone", None):
        zone = getattr(_answer(schedule, nowfun), "tzinfo", None) or zone
    if isinstance(zone, str):
        try:
            return ZoneInfo(zone)
        except (ValueError, KeyError, OSError) as error:
            raise ScheduleError(
                f"the schedule's tz is {zone!r}: no time zone of this name is known"
            ) from error
    if not isinstance(zone, tzinfo):
        raise ScheduleError(f"the schedule's tz is {zone!r}: it must be a tzinfo or the name of a time zone")
    return zone


# Solar


def _solar_slots(schedule: Any, after: datetime) -> Iterator[datetime]:
    # From the day before, so that an event next to midnight is found from the same start by every search.
    day = datetime.combine(after.date() - _DAY, time.min)
    previous = None
    empty = 0
    while empty < _SOLAR_DAYS:
        empty += 1
        for event in _solar_events(schedule, day):
            empty = 0
            if previous is None or event - previous > timedelta(hours=1):
                slot = _whole_second(event.replace(tzinfo=timezone.utc))
                if slot > after:
                    yield slot
            previous = event
        day += _DAY


def _solar_events(schedule: Any, day: datetime) -> Iterator[datetime]:
    """The events of one day of UTC, naive; one within a second of its end may also be of the next day."""
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
        start = event + timedelta(hours=1)


# Schedules that are asked


def _own_slots(schedule: Any, after: datetime) -> Iterator[datetime]:
    slots = _answer(schedule, lambda: iter(schedule.slots_after(after)))
    previous = after
    while True:
        slot: datetime | None = _answer(schedule, _next_of, slots)
        if slot is None:
            return
        if slot <= previous:
            raise ScheduleError(
                f"{_name(schedule)}.slots_after gave {slot.isoformat()} after {previous.isoformat()}:"
                " slots must ascend and be later than what was asked for"
            )
        yield slot
        previous = slot


def _next_of(slots: Iterator[datetime]) -> datetime | None:
    slot = next(slots, None)
    return None if slot is None else slot_from_us(slot_to_us(slot))


def _asked_slots(schedule: Any, after: datetime) -> Iterator[datetime]:
    asked = _Asked(schedule)
    search = asked.due_after if _offers(schedule, "is_due") else asked.estimate_after
    slot = _answer(schedule, search, after)
    while slot is not None:
        yield slot
        after = slot
        slot = _answer(schedule, search, after)


class _Asked:
    """A copy of a schedule with a clock that is set for each question."""

    def __init__(self, schedule: Any) -> None:
        self._zone = _zone(schedule)
        self._now = _EARLIEST
        # Not copy.copy: the __reduce__ of Celery's schedules drops the app, and knows only their arguments.
        self._schedule: Any = object.__new__(type(schedule))
        vars(self._schedule).update(vars(schedule))
        vars(self._schedule).update(nowfun=self._clock, now=self._clock)

    def _clock(self) -> datetime:
        return self._now.astimezone(self._zone)

    def due_after(self, last: datetime) -> datetime | None:
        """The first instant at which beat, having sent at `last`, would find the schedule due."""
        self._now = last
        for _ in range(_MAX_QUESTIONS):
            due, wait = self._schedule.is_due(last.astimezone(self._zone))
            # Due at `last` is what has just been sent: beat asks again when it was told to.
            if due and self._now > last:
                return self._now
            following = _later(self._now, _UNSAID if wait is None else wait)
            if following is None:
                return None
            self._now = max(following, _second_after(self._now))
        return None

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


def _later(at: datetime, wait: float | timedelta) -> datetime | None:
    """The whole second `wait` (seconds) after `at`; None for never."""
    try:
        found = _whole_second(at + (wait if isinstance(wait, timedelta) else timedelta(seconds=wait)))
    except OverflowError:
        return None
    return found if found < _LATEST else None


def _whole_second(instant: datetime) -> datetime:
    """Rounded up, never early; a millisecond is forgiven, so that a float's error isn't a second."""
    us = slot_to_us(instant) - 1000
    return slot_from_us(-(-us // 1_000_000) * 1_000_000)


def _second_after(instant: datetime) -> datetime:
    return slot_from_us((slot_to_us(instant) // 1_000_000 + 1) * 1_000_000)


def _answer(schedule: Any, question: Callable[..., Any], *about: Any) -> Any:
    # A user's code: whatever it raises concerns this one entry.
    try:
        return question(*about)
    except Exception as error:
        raise ScheduleError(f"the schedule {_name(schedule)} can't say when it is due: {error!r}") from error


def _name(schedule: Any) -> str:
    return f"{type(schedule).__module__}.{type(schedule).__qualname__}"


# Fingerprints


def _zone_name(zone: tzinfo) -> str:
    name = getattr(zone, "key", None) or getattr(zone, "zone", None)
    if not isinstance(name, str):
        # A default repr has the address of the object, which differs between processes.
        name = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(zone) if type(zone) is not timezone else str(zone))
    return name


def _simple_attributes(schedule: Any) -> Iterator[str]:
    """The public attributes whose value is plain data, by name; no cached properties, which come and go."""
    for name, value in sorted(getattr(schedule, "__dict__", {}).items()):
        computed = hasattr(inspect.getattr_static(type(schedule), name, None), "__get__")
        text = _simple(value)
        if text is not None and not name.startswith("_") and name not in ("nowfun", "tz") and not computed:
            yield f"{name}={text}"


def _simple(value: Any) -> str | None:
    if value is None or isinstance(value, (bool, int, float, str, timedelta, datetime, date, time)):
        return repr(value)
    if isinstance(value, dict):
        value = sorted(value.items(), key=repr)
    elif isinstance(value, (set, frozenset)):
        value = sorted(value, key=repr)
    elif not isinstance(value, (list, tuple)):
        return None
    texts = [_simple(item) for item in value]
    return None if None in texts else f"[{','.join(text for text in texts if text is not None)}]"
