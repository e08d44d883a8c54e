"""What became of each slot that an entry called for. Pure: the ledger brings what it knows.

The slots are computed again, from the definitions that were in force at the time, and not read from what
happened: a slot that nothing happened to shows, too. Each gets one end:

`done`, `failed`, `refused`, `abandoned`   its run ended so, was refused, or died and isn't run again
`running`, `retrying`, `sent`, `claimed`, `returned`   so far it has come
`missed`, `skipped`   it wasn't sent, for the reason that is given
`overdue`        nobody has led, or come to it, since it came due
`forgotten`      it was decided so long ago that its record has expired, or Redis has lost its record with other data
`unexplained`    none of these: a fault of this package, or a record that Redis has lost
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from celery_leaderbeat.definitions import Definition, period_of
from celery_leaderbeat.records import EntryRecord, Request, SlotRecord, UnsentRange
from celery_leaderbeat.tick import tick_key

__all__ = ["Audit", "Explanation", "Known", "explain"]

#: Records are kept for so many periods at least.
_PERIODS = 3


@dataclass(frozen=True)
class Explanation:
    """The end of one slot.

    Attributes:
        key: its tick key.
        slot: its nominal time.
        end: one of the words of this module's text.
        reason: why, where there is a reason.
        called_for: the schedule had it; False for one that was only asked for by a request.
        record: the ledger's record, None where there is none.
    """

    key: str
    slot: datetime
    end: str
    reason: str
    called_for: bool
    record: SlotRecord | None


@dataclass(frozen=True)
class Audit:
    """The slots of an entry in (since, until], oldest first, each with its end.

    Attributes:
        known_since: from when on the ledger knows the entry's schedule, None if it doesn't.
        not_computed: definitions whose slots can't be computed here (a custom schedule that isn't at hand); of
            their time, only slots that left a trace are listed.
    """

    entry: str
    since: datetime
    until: datetime
    known_since: datetime | None
    not_computed: tuple[Definition, ...]
    slots: tuple[Explanation, ...]

    @property
    def counts(self) -> dict[str, int]:
        """How many slots have which end."""
        return dict(Counter(slot.end for slot in self.slots))

    def having(self, end: str) -> list[Explanation]:
        """The slots with this end."""
        return [slot for slot in self.slots if slot.end == end]


@dataclass(frozen=True)
class Known:
    """What the ledger knows of an entry.

    Attributes:
        entry: its record, None if there is none (any more).
        records: tick key -> the slot's record, for those that have one.
        unsent: the ranges without records, ascending.
        requests: those that are still to be carried out.
        unsent_from: ranges that ended before this time are no longer kept; None if all are.
        retention: seconds for which a slot's record is kept at least.
        now: the server's time.
    """

    entry: EntryRecord | None
    records: Mapping[str, SlotRecord]
    unsent: Sequence[UnsentRange]
    requests: Sequence[Request]
    unsent_from: datetime | None
    retention: float
    now: datetime

    def range_of(self, slot: datetime) -> UnsentRange | None:
        """The range in which a slot lies, or None."""
        place = bisect_left(self.unsent, slot, key=lambda found: found.last)
        return next((found for found in self.unsent[place : place + 2] if found.first <= slot), None)


def explain(
    name: str, slots: Iterable[tuple[datetime, Definition | None]], known: Known, current: Any = None
) -> list[Explanation]:
    """The end of each of an entry's slots, each with the definition that called for it, or None.

    `current`: a schedule for definitions that can't be recomputed.
    """
    found = []
    for slot, definition in slots:
        key = tick_key(name, slot)
        record = known.records.get(key)
        if record is not None:
            end, reason = _end_of(record, known.now)
        else:
            end, reason = _end_without_record(slot, definition, known, current)
        found.append(Explanation(key, slot, end, reason, definition is not None, record))
    return found


def _end_of(record: SlotRecord, now: datetime) -> tuple[str, str]:
    if record.state == "unconfirmed":
        return "missed", record.reason
    if record.state == "running" and record.run_until is not None and record.run_until < now.timestamp():
        return "running", f"its run on {record.worker} died"
    return record.state, record.reason


def _end_without_record(
    slot: datetime, definition: Definition | None, known: Known, current: Any
) -> tuple[str, str]:
    unsent = known.range_of(slot)
    if unsent is not None:
        return unsent.state, unsent.reason
    request = next((request for request in known.requests if request.asks_for(slot)), None)
    if request is not None:
        return "overdue", f"{request.by} has asked for it, and its turn hasn't come"
    entry = known.entry
    if definition is not None and (entry is None or slot > entry.slot):
        if definition.until is not None:
            return "skipped", "its entry was removed"
        return "overdue", "no leader has decided about it yet"
    if known.unsent_from is not None and slot < known.unsent_from:
        return "forgotten", "what was missed or skipped so long ago isn't kept"
    period = timedelta(0) if definition is None else period_of(slot, definition, current)
    kept = max(_PERIODS * period, timedelta(seconds=known.retention))
    if slot + kept < known.now:
        return "forgotten", "its record has expired"
    return "unexplained", "it was decided, and its record isn't there"
