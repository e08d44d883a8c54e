"""Which rules give a schedule's slots. Pure.

A subclass of one of Celery's schedules goes by the rules of that one unless it overrides a method that says
when it is due: then it is asked. The exceptions are overrides that are known to do no more than convert to
the schedule's own zone (`_ONLY_CONVERT`), which the rules do anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

from celery import schedules

from celery_leaderbeat.errors import ScheduleError

__all__ = ["Kind", "ask", "kind_of", "name_of", "offers"]

Kind = Literal["interval", "crontab", "solar", "own", "asked"]

_BASES: tuple[tuple[Kind, Any, tuple[str, ...]], ...] = (
    ("interval", schedules.schedule, ("is_due", "remaining_estimate")),
    ("crontab", schedules.crontab, ("is_due", "remaining_estimate", "remaining_delta")),
    ("solar", schedules.solar, ("is_due", "remaining_estimate")),
)
#: Module and qualified name of methods that convert `last_run_at` to the schedule's zone and change nothing else.
_ONLY_CONVERT = {
    ("celery_leaderbeat.schedules", "crontab.remaining_delta"),
    ("django_celery_beat.tzcrontab", "TzAwareCrontab.is_due"),
    ("sqlalchemy_celery_beat.tzcrontab", "TzAwareCrontab.is_due"),
    ("celery_sqlalchemy_scheduler.tzcrontab", "TzAwareCrontab.is_due"),
}


def kind_of(schedule: Any) -> Kind:
    """How the slots of a schedule are found.

    `"own"`: by its own `slots_after`; `"interval"`, `"crontab"`, `"solar"`: by the rules for these;
    `"asked"`: by playing beat to it.

    Raises:
        ScheduleError: it is no schedule.
    """
    if callable(getattr(schedule, "slots_after", None)):
        return "own"
    if isinstance(schedule, (int, float, timedelta)) and not isinstance(schedule, bool):
        return "interval"
    for kind, base, methods in _BASES:
        if isinstance(schedule, base) and all(_keeps(type(schedule), base, name) for name in methods):
            return kind
    if offers(schedule, "is_due") or offers(schedule, "remaining_estimate"):
        return "asked"
    raise ScheduleError(
        f"{schedule!r} is no schedule: expected seconds, a timedelta, crontab(...), solar(...), or an object"
        " with slots_after, is_due or remaining_estimate"
    )


def offers(schedule: Any, name: str) -> bool:
    """Whether the schedule has a method of this name that isn't the empty one of `BaseSchedule`."""
    method = getattr(type(schedule), name, None)
    return callable(method) and method is not getattr(schedules.BaseSchedule, name)


def ask(schedule: Any, question: Callable[..., Any], *about: Any) -> Any:
    """The answer of a user's code.

    Raises:
        ScheduleError: it raised; names the schedule.
    """
    try:
        return question(*about)
    except Exception as error:
        raise ScheduleError(
            f"the schedule {name_of(schedule)} can't say when it is due: {error!r}"
        ) from error


def name_of(schedule: Any) -> str:
    """The schedule's class, with its module."""
    return f"{type(schedule).__module__}.{type(schedule).__qualname__}"


def _keeps(cls: type, base: type, name: str) -> bool:
    method = getattr(cls, name)
    known = (getattr(method, "__module__", None), getattr(method, "__qualname__", None))
    return method is getattr(base, name) or known in _ONLY_CONVERT
