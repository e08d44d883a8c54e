"""From a schedule to its slots: pure functions of time, the same on every replica and Celery version.

Interval (Celery's `schedule`): the multiples of the period since the Unix epoch (`interval_slots`). Crontab:
two rules, for real instants and for wall times (`crontab_slots`). Solar: the sun's events, to the second
(`solar_slots`). Anything else is asked (`asked_slots`).

All instants that come in are aware, in any zone; all slots are aware, in UTC. What the rules mean for an
operator, and where Celery's own crontab and Unix cron differ, is in `docs/time.md`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from celery_leaderbeat.asked_slots import AskedSlots, OwnSlots
from celery_leaderbeat.crontab_slots import CrontabSlots
from celery_leaderbeat.fingerprint import fingerprint
from celery_leaderbeat.horizon import EARLIEST, LATEST
from celery_leaderbeat.interval_slots import IntervalSlots
from celery_leaderbeat.kinds import kind_of
from celery_leaderbeat.solar_slots import SolarSlots
from celery_leaderbeat.tick import slot_from_us, slot_to_us

__all__ = [
    "backlog",
    "can_count",
    "fingerprint",
    "next_slot",
    "slots_after",
    "slots_before",
    "slots_between",
]


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
    after = _clip(after)
    slots = _slots_of(schedule)
    return iter(()) if after >= LATEST else slots.after(after)


def slots_between(schedule: Any, after: datetime, until: datetime) -> Iterator[datetime]:
    """The slots later than `after` and not later than `until`, ascending. Raises as `slots_after`."""
    until = _clip(until)
    return itertools.takewhile(lambda slot: slot <= until, slots_after(schedule, after))


def slots_before(schedule: Any, until: datetime, after: datetime) -> Iterator[datetime]:
    """The slots later than `after` and not later than `until`, the newest first. Raises as `slots_after`.

    Those of intervals and crontabs are searched backwards from `until`, however far away `after` is. Those of
    other schedules have to be searched forwards, all of them.
    """
    until, after = _clip(until), _clip(after)
    slots = _slots_of(schedule)
    if isinstance(slots, (IntervalSlots, CrontabSlots)):
        return itertools.takewhile(lambda slot: slot > after, slots.before(until))
    return reversed(list(slots_between(schedule, after, until)))


def backlog(
    schedule: Any, after: datetime, until: datetime, keep: int
) -> tuple[datetime, datetime, int] | None:
    """First, last and number of the slots in (after, until] without the newest `keep`.

    No slot is walked over but the newest `keep`; a year of minutes is counted in less than a millisecond.

    Returns:
        None where there are no more than `keep`, or where they can't be counted without a walk over them.

    Raises:
        ScheduleError, ValueError: as `slots_after`.
    """
    after, until = _clip(after), _clip(until)
    slots = _slots_of(schedule)
    if not isinstance(slots, (IntervalSlots, CrontabSlots)):
        return None
    count = slots.count(after, until) - keep
    if count <= 0:
        return None
    first = next(slots.after(after))
    last = first if count == 1 else next(itertools.islice(slots.before(until), keep, None))
    return first, last, count


def can_count(schedule: Any) -> bool:
    """Whether slots of the schedule are counted without a walk, as those of intervals and crontabs are."""
    return kind_of(schedule) in ("interval", "crontab")


def next_slot(schedule: Any, after: datetime) -> datetime | None:
    """The first slot later than `after`, or None where the search finds none. Raises as `slots_after`."""
    return next(slots_after(schedule, after), None)


def _slots_of(schedule: Any) -> IntervalSlots | CrontabSlots | SolarSlots | OwnSlots | AskedSlots:
    kind = kind_of(schedule)
    if kind == "interval":
        return IntervalSlots(schedule)
    if kind == "crontab":
        return CrontabSlots(schedule)
    if kind == "solar":
        return SolarSlots(schedule)
    return OwnSlots(schedule) if kind == "own" else AskedSlots(schedule)


def _clip(instant: datetime) -> datetime:
    """The instant in UTC, not beyond what slots are computed for."""
    return min(max(slot_from_us(slot_to_us(instant)), EARLIEST), LATEST)
