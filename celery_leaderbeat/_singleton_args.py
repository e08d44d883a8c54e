"""The arguments of the functions in `singleton`, checked before anything runs: job, name, slot, numbers."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar, cast

from celery.exceptions import TaskPredicate

from celery_leaderbeat.task import Tick
from celery_leaderbeat.tick import tick_key

__all__ = ["as_job", "checked_key", "checked_seconds", "refuse_no_count"]

T = TypeVar("T")


def as_job(fn: Callable[[], T] | Callable[[Tick], T]) -> Callable[[Tick], T]:
    """`fn` as a function of the tick, whether it wants it or not."""
    _refuse_what_would_run_later(fn)
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        # A function written in C may not say.
        parameters = []
    needed = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if len(needed) > 1 or any(parameter.kind is parameter.KEYWORD_ONLY for parameter in needed):
        names = ", ".join(parameter.name for parameter in needed)
        raise TypeError(
            f"The job {fn!r} needs the arguments {names}; it gets none, or the Tick as the only one. Bind "
            "the others with functools.partial."
        )
    call = cast("Callable[[Tick], T]", fn) if needed else functools.partial(_without_tick, fn)

    def job(tick: Tick) -> T:
        try:
            return call(tick)
        except TaskPredicate as exc:
            raise RuntimeError(
                f"The job {tick.entry!r} raised Celery's {exc!r}, which says what becomes of a message; "
                "here is none. Raise an ordinary exception, or return."
            ) from exc

    return job


def _without_tick(fn: Any, _: Tick) -> Any:
    return fn()


def _refuse_what_would_run_later(fn: Any) -> None:
    if not callable(fn):
        raise TypeError(f"The job {fn!r} can't be called: pass the function, not what it returns.")
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise TypeError(
            f"The job {fn!r} is a coroutine function or a generator: calling it would run nothing. Wrap it, "
            "as in lambda: asyncio.run(job())."
        )


def checked_key(name: object, slot: object) -> str:
    """The tick key of a job's slot.

    Raises:
        TypeError: `slot` is no datetime.
        ValueError: `name` is empty or no text, or `slot` is naive.
    """
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"name = {name!r}: a job needs a name, a text that isn't empty.")
    if not isinstance(slot, datetime):
        raise TypeError(
            f"slot = {slot!r}: it must be a datetime with a time zone, the time that the job is for."
        )
    if slot.utcoffset() is None:
        raise ValueError(
            f"slot = {slot!r} is naive: a slot is an instant. Pass an aware datetime, as in "
            "slot.replace(tzinfo=timezone.utc) or django.utils.timezone.make_aware(slot)."
        )
    return tick_key(name, slot)


def refuse_no_count(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a whole number of at least 1; `name` is what it was passed as."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} = {value!r}: it must be a whole number of at least 1.")


def checked_seconds(name: str, value: object, least: float, most: float) -> float:
    """`value` in seconds; raises ValueError unless it is a number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        bounds = f"at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        raise ValueError(f"{name} = {value!r}: it must be a number of seconds, {bounds}.")
    return float(value)
