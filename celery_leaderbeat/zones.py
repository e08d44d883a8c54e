"""Time zones of schedules: which one, its name, and the spans between its changes of offset. Pure.

The only question asked of a zone is its offset at an instant, which every `tzinfo` answers right, with or
without `fold`. It is asked once for each day of UTC, and by halves on a day whose ends differ; the answers
are kept, month by month, since the same months are looked at again and again.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from datetime import date, datetime, timedelta, timezone, tzinfo
from functools import lru_cache
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo, available_timezones

from celery_leaderbeat.errors import ScheduleError
from celery_leaderbeat.kinds import ask

__all__ = [
    "Span",
    "instant_of_month",
    "month_of",
    "named_zone",
    "spans",
    "spans_of_year",
    "zone_name",
    "zone_of",
]

_UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_UNIX_EPOCH_DAY = date(1970, 1, 1).toordinal()
_DAY = timedelta(days=1)
_MICROSECOND = timedelta(microseconds=1)
_SECOND_US = 1_000_000
_DAY_US = 86_400 * _SECOND_US


class Span(NamedTuple):
    """Instants with one reading of wall times. All times are microseconds, instants since the Unix epoch.

    Attributes:
        begin: the first instant.
        end: the first instant after it.
        offset: a wall time is an instant plus this.
        skipped_offset: if not None, the wall times of `begin + this` to `end + this` were skipped by the
            change at the begin or shortly before, and are read with this offset, too.
    """

    begin: int
    end: int
    offset: int
    skipped_offset: int | None = None


def zone_of(schedule: Any) -> tzinfo:
    """The zone in which the schedule's fields are read.

    That is the schedule's `tz`. Where this is only the app's, a `nowfun` that gives times in another zone
    counts for more: that is how Celery documents a crontab with a zone of its own.

    Raises:
        ScheduleError: its `tz` is no time zone, or its `nowfun` raises.
    """
    zone = getattr(schedule, "tz", None) or timezone.utc
    nowfun = getattr(schedule, "nowfun", None)
    if nowfun is not None and zone == getattr(getattr(schedule, "app", None), "timezone", None):
        # Not nowfun itself: a schedule with a zone of its own converts what its nowfun gives.
        now = ask(schedule, getattr(schedule, "now", nowfun))
        zone = getattr(now, "tzinfo", None) or zone
    return named_zone(zone, "the schedule's tz")


def named_zone(zone: Any, what: str) -> tzinfo:
    """The zone of this name, or the zone itself.

    Parameters:
        zone: a name of the IANA database, or a tzinfo.
        what: what it is a value of; begins the error's message.

    Raises:
        ScheduleError: no zone of this name is known, or it is neither.
    """
    if isinstance(zone, tzinfo):
        return zone
    if not isinstance(zone, str):
        raise ScheduleError(f"{what} is {zone!r}: it must be a tzinfo or the name of a time zone")
    try:
        return ZoneInfo(zone)
    except (ValueError, KeyError, OSError) as error:
        known = available_timezones()
        if not known:
            remedy = "this system has no time zones at all; pip install tzdata"
        else:
            folded = {name.casefold(): name for name in sorted(known)}
            nearest = difflib.get_close_matches(zone.casefold().replace(" ", "_"), folded, 1)
            remedy = f"did you mean {folded[nearest[0]]!r}?" if nearest else "write it as in 'Europe/Berlin'"
        raise ScheduleError(f"{what} is {zone!r}: no time zone of this name is known; {remedy}") from error


def zone_name(zone: tzinfo) -> str:
    """A name of the zone that is the same in every process."""
    name = getattr(zone, "key", None) or getattr(zone, "zone", None)
    if not isinstance(name, str):
        # A default repr has the address of the object, which differs between processes.
        name = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(zone))
        if type(zone) is timezone:
            # One that was given a name of its own, such as that of `astimezone()`, doesn't say its offset by it.
            name, offset = str(zone), str(timezone(zone.utcoffset(None)))
            name = name if name == offset else f"{name}={offset}"
    return name


def month_of(instant: int) -> int:
    """The month of UTC in which an instant lies, counted from the year 0."""
    day = date.fromordinal(instant // _DAY_US + _UNIX_EPOCH_DAY)
    return day.year * 12 + day.month - 1


def instant_of_month(month: int) -> int:
    """The first instant of a month that is counted from the year 0."""
    year, index = divmod(month, 12)
    return (date(year, index + 1, 1).toordinal() - _UNIX_EPOCH_DAY) * _DAY_US


def spans(zone: tzinfo, month: int, real: bool) -> tuple[Span, ...]:
    """The spans of a month of UTC, ascending, that don't overlap.

    Parameters:
        month: counted from the year 0.
        real: whether wall times are read as what a clock shows: both times in a repeated hour, never in a
            skipped one, so that the spans are the whole month. Else each wall time has one instant: the first
            in a repeated hour, so that the second pass is in no span; and in a skipped one the instant that
            the offset before the change gives.
    """
    try:
        return _kept_spans(zone, month, real)
    except TypeError:
        # Not hashable, as those of dateutil.
        return tuple(_spans(zone, month, real))


def spans_of_year(zone: tzinfo, year: int, real: bool) -> tuple[Span, ...]:
    """The spans of a year of UTC, as those of its months in `spans`."""
    try:
        return _kept_spans_of_year(zone, year, real)
    except TypeError:
        return tuple(_spans_of_year(zone, year, real))


@lru_cache(maxsize=4096)
def _kept_spans(zone: tzinfo, month: int, real: bool) -> tuple[Span, ...]:
    return tuple(_spans(zone, month, real))


@lru_cache(maxsize=1024)
def _kept_spans_of_year(zone: tzinfo, year: int, real: bool) -> tuple[Span, ...]:
    return tuple(_spans_of_year(zone, year, real))


def _spans_of_year(zone: tzinfo, year: int, real: bool) -> Iterator[Span]:
    whole: Span | None = None
    for month in range(year * 12, year * 12 + 12):
        for span in spans(zone, month, real):
            if whole is not None and whole.end == span.begin and whole[2:] == span[2:]:
                whole = whole._replace(end=span.end)
                continue
            if whole is not None:
                yield whole
            whole = span
    if whole is not None:
        yield whole


def _spans(zone: tzinfo, month: int, real: bool) -> Iterator[Span]:
    begin, end = instant_of_month(month), instant_of_month(month + 1)
    if isinstance(zone, timezone):
        yield Span(begin, end, _offset(zone, begin))
        return
    # A change reaches at most a day ahead: the longest gap there was is a whole day (Samoa, 2011).
    segments = _segments(zone, begin - _DAY_US, end)
    for span in segments if real else _read_once(segments, _offset(zone, begin - _DAY_US - _SECOND_US)):
        if span.end > begin:
            yield span._replace(begin=max(span.begin, begin))


def _read_once(segments: Iterator[Span], before: int) -> Iterator[Span]:
    for begin, end, offset, _ in segments:
        # The wall times that a step back repeats have had their first pass.
        start = begin + max(before - offset, 0)
        # The wall times that a step forward skips are read with the offset before it.
        moved_until = min(begin + max(offset - before, 0), end)
        if moved_until > begin:
            yield Span(begin, moved_until, offset, before)
        start = max(start, moved_until)
        if start < end:
            yield Span(start, end, offset)
        before = offset


def _segments(zone: tzinfo, begin: int, end: int) -> Iterator[Span]:
    """The longest spans of one offset; `begin` and `end` are midnights."""
    start, offset = begin, _offset(zone, begin)
    known = timedelta(microseconds=offset)
    last_second = _moment(begin - _SECOND_US)
    for midnight in range(begin + _DAY_US, end + 1, _DAY_US):
        last_second += _DAY
        if last_second.astimezone(zone).utcoffset() == known:
            continue
        last = midnight - _SECOND_US
        while _offset(zone, last) != offset:
            # The last second of the day before has been looked at: the offset was still this one.
            change = _change(zone, max(start, last - _DAY_US), last, offset)
            yield Span(start, change, offset)
            start, offset = change, _offset(zone, change)
        known = timedelta(microseconds=offset)
    yield Span(start, end, offset)


def _change(zone: tzinfo, before: int, after: int, offset: int) -> int:
    """The first whole second later than `before` with another offset, where `after` has another."""
    while after - before > _SECOND_US:
        middle = before + (after - before) // _SECOND_US // 2 * _SECOND_US
        if _offset(zone, middle) == offset:
            before = middle
        else:
            after = middle
    return after


def _offset(zone: tzinfo, instant: int) -> int:
    return (_moment(instant).astimezone(zone).utcoffset() or timedelta(0)) // _MICROSECOND


def _moment(instant: int) -> datetime:
    return _UNIX_EPOCH + timedelta(microseconds=instant)
