"""What was expected, and what happened, read back from the ledger and the database."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from rich.box import MARKDOWN, ROUNDED
from rich.console import Console
from rich.table import Table

__all__ = ["Check", "EntryResult", "entry_results", "lateness", "show"]

#: A slot this close (seconds) to the first election or to the end may fall on either side.
EDGE = 0.25


@dataclass(frozen=True)
class Check:
    """One thing that was expected."""

    what: str
    expected: str
    happened: str
    ok: bool


@dataclass(frozen=True)
class EntryResult:
    """What became of the slots of one entry, from the first election to the end."""

    entry: str
    expected: int
    sent: int
    executed: int
    doubled: int
    missed: int
    refused: int
    refused_expected: int
    #: Executions of this entry for an instant that is no slot of its schedule.
    astray: int

    @property
    def ok(self) -> bool:
        whole = self.sent == self.executed == self.expected
        return (
            whole
            and not (self.doubled or self.missed or self.astray)
            and self.refused == self.refused_expected
        )


def entry_results(
    schedules: dict[str, Any], ledger: Any, first: float, last: float, replayed: set[str]
) -> list[EntryResult]:
    """Compare each entry's schedule with its records and journals.

    Parameters:
        schedules: the entries' schedules.
        ledger: where the slots' records are.
        first: moment of the first election, Unix seconds.
        last: moment at which the last leader was told to stop, Unix seconds.
        replayed: tick keys of which a stale copy was put into the queue, one refusal each.
    """
    from celery_leaderbeat.tick import tick_key
    from celery_leaderbeat.timeline import slots_between
    from invoices.models import Execution, Refusal

    runs = Counter(Execution.objects.values_list("tick_key", flat=True))
    refusals = Counter(Refusal.objects.values_list("tick_key", flat=True))
    results = []
    for entry, schedule in schedules.items():
        records = {}
        for slot in slots_between(schedule, moment(first), moment(last)):
            key = tick_key(entry, slot)
            record = ledger.slot(key)
            edge = min(slot.timestamp() - first, last - slot.timestamp()) < EDGE
            if record is not None or not edge:
                records[key] = record
        executed = sum(runs[key] for key in records)
        distinct = sum(1 for key in records if runs[key])
        results.append(
            EntryResult(
                entry=entry,
                expected=len(records),
                sent=sum(
                    1 for record in records.values() if record and (record.sent_at or record.started_at)
                ),
                executed=executed,
                doubled=executed - distinct,
                missed=len(records) - distinct,
                refused=sum(refusals[key] for key in records),
                refused_expected=len(replayed & records.keys()),
                astray=sum(count for key, count in runs.items() if of(key) == entry and key not in records),
            )
        )
    return results


def lateness(since: float, until: float) -> float:
    """How long after its slot the latest execution began, of the slots between two moments; in seconds."""
    from invoices.models import Execution, Invoice

    slots = dict(
        Invoice.objects.filter(slot__gte=moment(since), slot__lte=moment(until)).values_list(
            "tick_key", "slot"
        )
    )
    waits = [
        (run.created_at - slots[run.tick_key]).total_seconds()
        for run in Execution.objects.filter(tick_key__in=slots)
    ]
    return max(waits, default=0.0)


def moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, tz=timezone.utc)


def of(key: str) -> str:
    """The entry that a tick key names."""
    return key.rpartition("@")[0]


def show(console: Console, entries: list[EntryResult], checks: list[Check]) -> None:
    """Print both tables."""
    box = ROUNDED if console.is_terminal else MARKDOWN
    table = Table(title="Slots, by entry", box=box)
    for name in ("entry", "expected", "sent", "executed", "doubled", "missed", "refused", "verdict"):
        table.add_column(name, justify="left" if name in {"entry", "verdict"} else "right")
    for entry in entries:
        refused = str(entry.refused)
        if entry.refused_expected:
            refused += f" of {entry.refused_expected}"
        numbers = (entry.expected, entry.sent, entry.executed, entry.doubled, entry.missed)
        table.add_row(entry.entry, *map(str, numbers), refused, verdict(entry.ok))
    if entries:
        console.print(table)
    table = Table(title="What else was expected", box=box)
    for name in ("what", "expected", "happened", "verdict"):
        table.add_column(name)
    for check in checks:
        table.add_row(check.what, check.expected, check.happened, verdict(check.ok))
    console.print(table)


def verdict(ok: bool) -> str:
    return "[green]ok[/]" if ok else "[bold red]OFF[/]"
