"""What a new leader puts back into a ledger that has lost data, from its shadow and its schedule. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from itertools import islice, takewhile

from celery_leaderbeat.due import send_times
from celery_leaderbeat.plan import Plan
from celery_leaderbeat.records import EntryRecord, Recalled
from celery_leaderbeat.shadow import Shadow
from celery_leaderbeat.tick import slot_from_us
from celery_leaderbeat.timeline import backlog

__all__ = ["LOST", "recall"]

#: Why a slot is missed that may have been decided.
LOST = "Redis has lost data, and with it whether it was sent"
#: So many slots are walked over where they can't be counted.
_MOST = 1000
_MICROSECOND = timedelta(microseconds=1)


def recall(
    shadow: Shadow,
    plans: Mapping[str, Plan],
    stored: Mapping[str, EntryRecord],
    now: datetime,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Recalled]:
    """What the ledger lacks, by entry; nothing where nothing was lost.

    Once something is lacking, any entry may have been decided in the gap of which nobody knows: slots that
    were to be sent then count as missed, those of entries that the schedule doesn't have as well.

    Parameters:
        shadow: what this replica remembers; its `gap` is set.
        plans: the plans of all entries.
        stored: what the ledger holds.
        now: the time at which it was read.
        progress: called between entries.
    """
    lacking = shadow.lacking({name: entry.slot for name, entry in stored.items()}, now)
    if not lacking:
        return {}
    found = {}
    for name in {**stored, **lacking}:
        progress()
        if name in lacking:
            record = lacking[name].record
            slot, fingerprint = slot_from_us(lacking[name].slot), str(record["fingerprint"])
            unknown = _unknown(shadow, plans.get(name), fingerprint, slot)
            found[name] = Recalled(json.dumps(record), *(unknown or ()))
            continue
        unknown = _unknown(shadow, plans.get(name), stored[name].fingerprint, stored[name].slot)
        if unknown is not None:
            found[name] = Recalled("", *unknown)
    return found


def _unknown(
    shadow: Shadow, plan: Plan | None, fingerprint: str, after: datetime
) -> tuple[datetime, datetime, int] | None:
    """The slots later than `after` that may have been sent in the gap: first, last and number."""
    if shadow.gap is None or not shadow.gap_is_open or after >= shadow.gap[1]:
        return None
    until = shadow.gap[1]
    if plan is None:
        return (after + _MICROSECOND, until, 0)
    if shadow.led_last and plan.policy.prefer == "duplicate":
        # As far as anybody knows, nobody has led since this replica did.
        return None
    if plan.fingerprint != fingerprint:
        # What its earlier schedule had due is skipped.
        return None
    try:
        if not plan.policy.jitter:
            counted = backlog(plan.schedule, after, until, 0)
            if counted is not None:
                return counted
        times = send_times(plan.name, plan.schedule, plan.policy.jitter, after)
        slots = [slot for slot, _ in islice(takewhile(lambda pair: pair[1] <= until, times), _MOST)]
    except Exception:  # noqa: BLE001  # a user's schedule may raise anything; it is asked again, and logged, as the term begins
        return (after + _MICROSECOND, until, 0)
    if len(slots) == _MOST:
        return (slots[0], until, 0)
    return (slots[0], slots[-1], len(slots)) if slots else None
