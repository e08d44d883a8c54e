"""A test of slots that are a minute or more apart isn't to meet one of them by chance."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["away_from_slots", "periods_of"]

_MINUTE, _HOUR = 60.0, 3600.0
#: How long before a slot such a test may still begin, in s; a quarter of the period at most.
_ROOM = 60.0
#: What came due right before a term began is sent as if it had come in time. So it waits for longer, in s.
_AFTER = 2.0


def periods_of(schedule: Mapping[str, Mapping[str, Any]]) -> set[float]:
    """How far the slots of the entries lie apart, in s, where that is a minute or more.

    A crontab counts as one of each minute, or of each hour if it names the minute.
    """
    periods = set()
    for entry in schedule.values():
        crontab = entry.get("crontab")
        if crontab is not None:
            periods.add(_MINUTE if crontab.get("minute", "*") == "*" else _HOUR)
        elif "every" in entry and entry["every"] >= _MINUTE:
            periods.add(float(entry["every"]))
    return periods


def away_from_slots(
    periods: Iterable[float],
    now: Callable[[], float] = time.time,
    wait: Callable[[float], None] = time.sleep,
) -> None:
    """Return once no slot of these periods is close: at once, but for the last and the first seconds of one."""
    periods = set(periods)
    while True:
        into = {period: now() % period for period in periods}
        late = [p - into[p] + _AFTER for p in periods if into[p] > p - min(_ROOM, p / 4)]
        early = [_AFTER - into[p] for p in periods if into[p] < _AFTER]
        if not (late or early):
            return
        wait(max(late + early))
