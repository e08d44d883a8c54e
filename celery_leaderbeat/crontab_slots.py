"""The slots of crontabs, forwards, backwards and counted. Pure.

They are computed here from the field sets that Celery expanded, in the schedule's zone. Two rules, by the
hour set:

* All 24 hours: real instants. Whatever minute the local clock shows counts, both times in a repeated hour,
  never in a skipped one.
* Any other: wall times (RFC 5545, sections 3.3.5 and 3.3.10), one slot per date and time. A wall time in a
  gap is read with the offset before the change (02:30 becomes 03:30); in a repeated hour the first pass
  counts. A slot that a gap moves onto another one is one slot.

The computation goes through UTC only: a month of UTC is cut into spans (`zones.spans`) in which wall time is
linear, so that the slots in a span are the named wall times of a range, and their number is a matter of
arithmetic. Only the hours after a gap, where moved slots may meet others, are walked to be counted. Months
in which no date is named are jumped over.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, tzinfo
from typing import Any

from celery_leaderbeat.crontab_fields import MINUTES_A_DAY, Fields, fields_of
from celery_leaderbeat.horizon import EARLIEST_US, LATEST_US
from celery_leaderbeat.tick import slot_from_us, slot_to_us
from celery_leaderbeat.zones import Span, instant_of_month, month_of, spans, spans_of_year, zone_of

__all__ = ["CrontabSlots"]

_MINUTE_US = 60_000_000
_DAY_US = MINUTES_A_DAY * _MINUTE_US


class CrontabSlots:
    """The slots of one crontab. All instants are within `horizon`.

    Raises:
        ScheduleError: a field is empty, or the zone is none.
    """

    def __init__(self, schedule: Any) -> None:
        self._fields: Fields = fields_of(schedule)
        self._zone: tzinfo = zone_of(schedule)

    def after(self, after: datetime) -> Iterator[datetime]:
        """The slots later than `after`, ascending."""
        begin, end = slot_to_us(after) + 1, LATEST_US + 1
        while begin < end:
            # An instant's local date is that of UTC, the day before or the day after.
            day = self._fields.day_from(begin // _DAY_US - 1)
            if day is None:
                return
            begin = max(begin, (day - 1) * _DAY_US)
            month = month_of(begin)
            stop = min(instant_of_month(month + 1), end)
            for span in self._spans(month, begin, stop):
                yield from map(slot_from_us, self._slots(span))
            begin = stop

    def before(self, until: datetime) -> Iterator[datetime]:
        """The slots not later than `until`, descending."""
        begin, end = EARLIEST_US, slot_to_us(until) + 1
        while begin < end:
            day = self._fields.day_back_from((end - 1) // _DAY_US + 1)
            if day is None:
                return
            end = min(end, (day + 2) * _DAY_US)
            month = month_of(end - 1)
            start = max(instant_of_month(month), begin)
            for span in reversed(self._spans(month, start, end)):
                yield from map(slot_from_us, self._slots(span, backwards=True))
            end = start

    def count(self, after: datetime, until: datetime) -> int:
        """How many slots there are in (after, until]."""
        begin, end = slot_to_us(after) + 1, slot_to_us(until) + 1
        if begin >= end:
            return 0
        return sum(map(self._count_in, self._all_spans(begin, end)))

    def _count_in(self, span: Span) -> int:
        if span.skipped_offset is None:
            return self._fields.count(*_walls(span))
        return sum(1 for _ in self._slots(span))

    def _all_spans(self, begin: int, end: int) -> Iterator[Span]:
        real = self._fields.every_hour
        month, last = month_of(begin), month_of(end - 1)
        while month <= last:
            if month % 12 == 0 and month + 11 <= last:
                found = spans_of_year(self._zone, month // 12, real)
                month += 12
            else:
                found = spans(self._zone, month, real)
                month += 1
            yield from _clipped(found, begin, end)

    def _spans(self, month: int, begin: int, end: int) -> list[Span]:
        return _clipped(spans(self._zone, month, self._fields.every_hour), begin, end)

    def _slots(self, span: Span, backwards: bool = False) -> Iterator[int]:
        """The slots in a span, as microseconds since the Unix epoch."""
        found = (
            wall * _MINUTE_US - span.offset for wall in self._fields.walls(*_walls(span), backwards=backwards)
        )
        if span.skipped_offset is None:
            return found
        skipped = span._replace(offset=span.skipped_offset, skipped_offset=None)
        return iter(sorted({*found, *self._slots(skipped)}, reverse=backwards))


def _clipped(found: tuple[Span, ...], begin: int, end: int) -> list[Span]:
    """The parts of the spans in `begin <= instant < end`."""
    return [
        span
        if begin <= span.begin and span.end <= end
        else span._replace(begin=max(span.begin, begin), end=min(span.end, end))
        for span in found
        if span.begin < end and begin < span.end
    ]


def _walls(span: Span) -> tuple[int, int]:
    """The wall times in a span, in minutes: the first, and the first after it."""
    return -(-(span.begin + span.offset) // _MINUTE_US), -(-(span.end + span.offset) // _MINUTE_US)
