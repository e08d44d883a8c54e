"""Which schedule an entry had when, and the slots that it called for. Pure.

A definition keeps a schedule's fingerprint. For intervals and crontabs the fingerprint is the whole schedule
as text, so that their slots can be computed again long after the code that defined them is gone. Of other
kinds it is only a mark of identity: these can be recomputed while a schedule with that mark is at hand.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

from celery_leaderbeat.errors import ScheduleError
from celery_leaderbeat.schedules import crontab
from celery_leaderbeat.tick import slot_from_us
from celery_leaderbeat.timeline import fingerprint, next_slot, slots_between

__all__ = ["Definition", "can_recompute", "parse_definitions", "period_of", "schedule_of", "slots"]

_INTERVAL = re.compile(r"interval:([0-9]+)us", re.ASCII)
_CRONTAB = re.compile(r"crontab:(\S+) (\S+) (\S+) (\S+) (\S+)@(.+)")
#: How Python writes an offset that has no name.
_OFFSET = re.compile(r"UTC([+-])(\d\d):(\d\d)(?::(\d\d)(?:\.(\d{6}))?)?", re.ASCII)


@dataclass(frozen=True)
class Definition:
    """The schedule that an entry had in a span of time.

    Attributes:
        fingerprint: of the schedule, as `timeline.fingerprint` gives it.
        since: from when on; the first slot is later than that.
        until: up to when, the last slot included; None while it is in force.
    """

    fingerprint: str
    since: datetime
    until: datetime | None = None


def parse_definitions(text: str | None) -> list[Definition]:
    """The definitions in one field of the `definitions` hash, oldest first; none for an empty one or None.

    The field is a JSON list of objects: `fingerprint`, and `since` and `until` in microseconds since the Unix
    epoch, as numbers or as text; the last one's `until` may be missing.

    Raises:
        ValueError: the text isn't such a list; says what was found.
    """
    items = json.loads(text) if text else []
    if not isinstance(items, list):
        raise ValueError(f"the definitions are {text!r}: expected a JSON list")
    return sorted(map(_definition, items), key=lambda definition: definition.since)


def schedule_of(text: str) -> Any:
    """The schedule with this fingerprint; None where the text doesn't hold a whole schedule.

    It gives the same slots as the one that the fingerprint was taken of, and has the same fingerprint.
    """
    schedule = _interval(text) or _crontab(text)
    try:
        return schedule if schedule is not None and fingerprint(schedule) == text else None
    except ScheduleError:
        return None


def can_recompute(definition: Definition, current: Any = None) -> bool:
    """Whether the slots of a definition can be computed; `current` as in `slots`."""
    return _schedule(definition, _with_fingerprint(current)) is not None


def period_of(slot: datetime, definition: Definition, current: Any = None) -> timedelta:
    """The time from a slot to the one that follows by the same definition; 0 where it can't be computed."""
    schedule = _schedule(definition, _with_fingerprint(current))
    try:
        following = None if schedule is None else next_slot(schedule, slot)
    except ScheduleError:
        following = None
    return timedelta(0) if following is None else following - slot


def slots(
    definitions: Iterable[Definition], since: datetime, until: datetime, current: Any = None
) -> Iterator[tuple[datetime, Definition]]:
    """The slots in (since, until] that an entry called for, ascending, each with its definition.

    Those of definitions that can't be recomputed are left out; see `can_recompute`. A definition ends where
    the next one begins, whatever its `until` says.

    Parameters:
        definitions: the entry's, in any order.
        since: an aware datetime.
        until: an aware datetime.
        current: a schedule to use for the definitions with its fingerprint, or None.

    Raises:
        ScheduleError: the slots of `current` can't be computed; from the iterator.
    """
    known = _with_fingerprint(current)
    ordered = sorted(definitions, key=lambda definition: definition.since)
    for definition, following in itertools.zip_longest(ordered, ordered[1:]):
        ends = [until, definition.until, following.since if following else None]
        schedule = _schedule(definition, known)
        if schedule is not None:
            begin, end = max(since, definition.since), min(end for end in ends if end is not None)
            yield from ((slot, definition) for slot in slots_between(schedule, begin, end))


def _definition(item: Any) -> Definition:
    try:
        text, until = item["fingerprint"], item.get("until")
        if not isinstance(text, str):
            raise ValueError(f"{text!r} is no fingerprint")
        return Definition(text, _instant(item["since"]), None if until is None else _instant(until))
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(
            f"the definition {item!r} can't be read: expected fingerprint, and since and until in microseconds"
        ) from error


def _instant(value: Any) -> datetime:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"{value!r} is no number of microseconds")
    return slot_from_us(int(value))


def _with_fingerprint(current: Any) -> dict[str, Any]:
    try:
        return {} if current is None else {fingerprint(current): current}
    except ScheduleError:
        return {}


def _schedule(definition: Definition, known: dict[str, Any]) -> Any:
    # The schedule itself is better than what its fingerprint tells of it.
    return known.get(definition.fingerprint) or schedule_of(definition.fingerprint)


def _interval(text: str) -> timedelta | None:
    found = _INTERVAL.fullmatch(text)
    try:
        return timedelta(microseconds=int(found[1])) if found else None
    except (OverflowError, ValueError):
        return None


def _crontab(text: str) -> Any:
    found = _CRONTAB.fullmatch(text)
    zone = _zone(found[6]) if found else None
    if found is None or zone is None:
        return None
    minute, hour, day, month, weekday = found.groups()[:5]
    try:
        return crontab(minute, hour, weekday, day, month, tz=zone)
    except ValueError:
        return None


def _zone(name: str) -> tzinfo | None:
    offset = _OFFSET.fullmatch(name)
    try:
        if offset is not None:
            return timezone(_offset(*offset.groups()))
        return timezone.utc if name == "UTC" else ZoneInfo(name)
    except (ValueError, KeyError, OSError):
        return None


def _offset(sign: str, hours: str, minutes: str, seconds: str | None, us: str | None) -> timedelta:
    offset = timedelta(
        hours=int(hours), minutes=int(minutes), seconds=int(seconds or 0), microseconds=int(us or 0)
    )
    return -offset if sign == "-" else offset
