"""The checker for schedulers that don't say which slot a message is for: it can only count. Pure.

Such a scheduler sends an entry again one period after its last send, at whatever phase that left it. So a send less
than half a period after the one before is a second one, and where more than a period and a half goes by, the slots in
between are lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tests.chaos.schedule import Entry
from tests.chaos.tap import Arrival

__all__ = ["Tally", "tally"]

_MINUTE = 60.0


@dataclass(frozen=True)
class Tally:
    """What was counted: slots that had to run, sends, and of those the second ones; slots that were lost."""

    slots: int
    sends: int
    doubled: int
    lost: int


def tally(entries: Mapping[str, Entry], arrivals: Iterable[Arrival], began: float, ended: float) -> Tally:
    """Count the messages that came to the broker between two times."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    sends = 0
    for arrival in arrivals:
        if began < arrival.t <= ended and arrival.key in entries:
            times[arrival.key].append(arrival.t)
            sends += 1
    slots = doubled = lost = 0
    for name, entry in entries.items():
        # A crontab here is one of every minute.
        period = entry.every or _MINUTE
        slots += int((ended - began) // period)
        last = None
        for t in sorted(times[name]):
            if last is not None and t - last < period / 2:
                doubled += 1
                continue
            lost += int((t - began) // period) if last is None else max(round((t - last) / period) - 1, 0)
            last = t
        lost += int((ended - (began if last is None else last)) // period)
    return Tally(slots, sends, doubled, lost)
