"""The slots of a schedule that are due and undecided, as `policy.decide` takes them. Pure.

After an outage there may be any number of them, and all but a few of the newest share a verdict. So the time
is cut into stretches at which verdicts change: where a pause begins or ends, where the deadline falls, and at
slots that are decided elsewhere. Of each stretch the newest slots that may count (`lookback`) come one by
one; those before them are one run, whose ends and number are found by looking backwards from the end of the
stretch. Only schedules that can't be counted are walked over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from datetime import datetime, timedelta
from typing import Any

from celery_leaderbeat.pauses import Pauses
from celery_leaderbeat.policy import Due, Policy, send_time
from celery_leaderbeat.timeline import backlog, can_count, next_slot, slots_after

__all__ = ["due_slots", "send_times"]

_MICROSECOND = timedelta(microseconds=1)


def due_slots(
    entry: str,
    schedule: Any,
    policy: Policy,
    after: datetime,
    until: datetime,
    *,
    now: datetime,
    pauses: Pauses,
    known: Collection[datetime] = (),
) -> Iterator[Due]:
    """The slots later than `after` that were to be sent by `until`, ascending.

    Parameters:
        entry: the entry's name.
        schedule: its schedule.
        policy: its policy.
        after: the last slot that is decided.
        until: the time by which slots are due.
        now: the time from which ages count; not earlier than `until`.
        pauses: the entry's pauses.
        known: later slots that are left out, because they are decided elsewhere.

    Raises:
        ScheduleError: as `timeline.slots_after`; from the iterator.
    """
    # With jitter the newest slot of a stretch may have been to be sent in the next one.
    keep = policy.lookback + (1 if policy.jitter else 0)
    # A schedule that has to be asked goes on from its own slots, so that its walk mustn't be interrupted.
    ends = _stretches(policy, after, until, now, pauses, known) if can_count(schedule) else [until]
    for end in ends:
        run = backlog(schedule, after, end, keep)
        if run is not None:
            first, newest, number = run
            following = next_slot(schedule, newest) if policy.jitter else None
            yield Due(newest, send_time(entry, newest, following, policy.jitter), first=first, number=number)
            after = newest
        for slot, at in send_times(entry, schedule, policy.jitter, after):
            if slot > end:
                break
            if at > until:
                return
            if slot not in known:
                yield Due(slot, at)
        after = end


def send_times(
    entry: str, schedule: Any, jitter: float, after: datetime
) -> Iterator[tuple[datetime, datetime]]:
    """The slots after `after`, each with the time at which it is to be sent.

    Raises as `timeline.slots_after`.
    """
    slots = slots_after(schedule, after)
    if not jitter:
        yield from ((slot, slot) for slot in slots)
        return
    slot = next(slots, None)
    while slot is not None:
        following = next(slots, None)
        yield slot, send_time(entry, slot, following, jitter)
        slot = following


def _stretches(
    policy: Policy,
    after: datetime,
    until: datetime,
    now: datetime,
    pauses: Pauses,
    known: Collection[datetime],
) -> list[datetime]:
    """The ends of the stretches; each begins where the one before it ends, and holds its end.

    A slot at the very beginning of a pause is of the next stretch, and a known one is a stretch of its own:
    else they would take the places of slots that may count. (Of the other ends it doesn't matter to which
    side they belong, since the newest slot of a stretch is part of no run.)
    """
    ends = {until, *known, *(slot - _MICROSECOND for slot in known)}
    for pause in pauses.touching(after, until):
        ends.add(pause.since - _MICROSECOND)
        if pause.until is not None:
            ends.add(pause.until)
    if policy.deadline is not None and policy.deadline < (now - after).total_seconds():
        ends.add(now - timedelta(seconds=policy.deadline))
    return sorted(end for end in ends if after < end <= until)
