"""Fingerprints of schedules: text that tells a changed schedule from an unchanged one. Pure.

They are stored with an entry's last slot and compared by other processes, of other Python versions too. So
they are made of values alone, never of `hash()`, `id()` or the order of a set, and the texts of existing
kinds must not change: that would make every stored schedule a changed one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from typing import Any

from celery_leaderbeat.crontab_fields import fields_of
from celery_leaderbeat.interval_slots import period_us
from celery_leaderbeat.kinds import kind_of, name_of
from celery_leaderbeat.zones import zone_name, zone_of

__all__ = ["fingerprint"]

#: Types of plain data. Their own repr, not that of a subclass: calendar.MONDAY is an enum since Python 3.12.
_PLAIN: tuple[Any, ...] = (bool, int, float, str, timedelta, datetime, date, time)


def fingerprint(schedule: Any) -> str:
    """Text that is the same for the same schedule in every process, and another for a changed one.

    Raises:
        ScheduleError: the schedule is none, has no slots, or has no zone.
    """
    kind = kind_of(schedule)
    if kind == "interval":
        return f"interval:{period_us(schedule)}us"
    if kind == "crontab":
        return f"crontab:{fields_of(schedule)}@{zone_name(zone_of(schedule))}"
    if kind == "solar":
        return f"solar:{schedule.event}@{float(schedule.lat)!r},{float(schedule.lon)!r}"
    attributes = ",".join(_simple_attributes(schedule))
    return f"{name_of(schedule)}({attributes})@{zone_name(zone_of(schedule))}"


def _simple_attributes(schedule: Any) -> Iterator[str]:
    """The public attributes whose value is plain data, by name; no cached properties, which come and go."""
    for name, value in sorted(getattr(schedule, "__dict__", {}).items()):
        computed = hasattr(inspect.getattr_static(type(schedule), name, None), "__get__")
        text = _simple(value)
        if text is not None and not name.startswith("_") and name not in ("nowfun", "tz") and not computed:
            yield f"{name}={text}"


def _simple(value: Any) -> str | None:
    if value is None:
        return "None"
    for cls in _PLAIN:
        if isinstance(value, cls):
            return str(cls.__repr__(value))
    if isinstance(value, dict):
        texts = [_simple(item) for item in value.items()]
    elif isinstance(value, (set, frozenset, list, tuple)):
        texts = [_simple(item) for item in value]
    else:
        return None
    if None in texts:
        return None
    known = [text for text in texts if text is not None]
    return f"[{','.join(known if isinstance(value, (list, tuple)) else sorted(known))}]"
