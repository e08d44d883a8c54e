"""What the ledger keeps, as values: claims, the records of slots and entries, and answers about runs.

Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from celery_leaderbeat.tick import slot_from_us

__all__ = [
    "ALL",
    "ENDS",
    "FAR_AHEAD",
    "REMOVED_LIFETIME",
    "Claim",
    "EntryRecord",
    "Recalled",
    "Request",
    "SlotRecord",
    "UnsentRange",
    "Verdict",
]

#: Stands for all entries where an entry is named: no entry has an empty name.
ALL = ""
#: A last decided slot this much later than now (µs) was written by a clock that had jumped.
FAR_AHEAD = 300_000_000
#: How long the record of a removed entry is kept, in µs: a week, so that a rollback finds it.
REMOVED_LIFETIME = 7 * 86_400_000_000

#: States of a slot's record that nothing changes any more, requests apart.
ENDS = ("done", "failed", "abandoned", "skipped", "missed", "refused")


@dataclass(frozen=True)
class Claim:
    """A slot to be claimed. Times are in seconds.

    Attributes:
        ttl: how long its record is kept.
        paced: while an earlier slot is unfinished it stays undecided, instead of being skipped or waiting.
        request: the id of the request that asked for it, empty if it is simply due.
        force: claim it, whatever it is; for a request.
        unstarted: how long it counts as unfinished before a worker begins it.
        earlier: tick keys of the entry's slots that may be unfinished, where it has an overlap policy.
    """

    key: str
    entry: str
    slot: datetime
    fingerprint: str
    task: str
    task_id: str
    prefer: str
    ttl: float
    attempt: int = 1
    on_crash: str = "auto"
    max_attempts: int = 1
    overlap: str = "allow"
    paced: bool = False
    request: str = ""
    force: bool = False
    unstarted: float = 3600.0
    earlier: tuple[str, ...] = ()


@dataclass(frozen=True)
class SlotRecord:
    """One slot's record. Times are Unix seconds by the server's clock, None where nothing happened yet.

    Attributes:
        waits: it is given back until an earlier slot of its entry has ended.
        run_until: when the lease of its run ends, or has ended.
        died_at: when its run was found to be dead, while nobody has run the slot again.
    """

    key: str
    state: str
    entry: str
    slot: datetime
    epoch: int
    batch: str
    attempt: int
    task_id: str
    prefer: str
    on_crash: str
    request: str
    reason: str
    worker: str
    run: str
    waits: bool
    claimed_at: float | None
    sent_at: float | None
    started_at: float | None
    run_until: float | None
    died_at: float | None
    finished_at: float | None

    @classmethod
    def read(cls, key: str, table: Mapping[str, str]) -> SlotRecord:
        """Read a record's hash. Raises KeyError, ValueError or OverflowError where it can't be read."""

        def instant(field: str) -> float | None:
            return int(table[field]) / 1000 if field in table else None

        return cls(
            key=key,
            state=table["state"],
            entry=table.get("entry", ""),
            slot=slot_from_us(int(table.get("slot", "0"))),
            epoch=int(table.get("epoch", "0")),
            batch=table.get("batch", ""),
            attempt=int(table.get("attempt", "1")),
            task_id=table.get("task_id", ""),
            prefer=table.get("prefer", "missed"),
            on_crash=table.get("on_crash", "auto"),
            request=table.get("request", ""),
            reason=table.get("reason", ""),
            worker=table.get("worker", ""),
            run=table.get("run", ""),
            waits=table.get("waits") == "1",
            claimed_at=instant("claimed_at"),
            sent_at=instant("sent_at"),
            started_at=instant("started_at"),
            run_until=instant("run_until"),
            died_at=instant("died_at"),
            finished_at=instant("finished_at"),
        )


@dataclass(frozen=True)
class EntryRecord:
    """What is kept of an entry.

    Attributes:
        slot: its last decided slot.
        fingerprint: its schedule's.
        count: how many of its slots were claimed.
        missed: how many were missed.
        skipped: how many were skipped.
        removed: when it was found to be gone from the schedule, None if it is there.
        open: tick keys of its slots that may be unfinished, where it has an overlap policy.
    """

    slot: datetime
    fingerprint: str
    count: int
    missed: int
    skipped: int
    removed: datetime | None
    open: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> EntryRecord:
        """Read an entry's JSON.

        Raises ValueError, TypeError, KeyError or OverflowError where it can't be read.
        """
        data = json.loads(text)
        return cls(
            slot=slot_from_us(int(data["slot"])),
            fingerprint=str(data["fingerprint"]),
            count=int(data.get("count", 0)),
            missed=int(data.get("missed", 0)),
            skipped=int(data.get("skipped", 0)),
            removed=slot_from_us(int(data["removed"])) if "removed" in data else None,
            open=tuple(map(str, data.get("open", ()))),
        )


@dataclass(frozen=True)
class Recalled:
    """What is known of an entry beyond what the ledger holds.

    Attributes:
        record: its record as JSON, to be put back unless a later one is stored; empty for none.
        first: oldest of its slots of which nobody knows whether they were sent, None if there are none.
        last: newest of them.
        count: how many they are; 0 where they can't be counted.
    """

    record: str = ""
    first: datetime | None = None
    last: datetime | None = None
    count: int = 0


@dataclass(frozen=True)
class UnsentRange:
    """A range of slots of one entry that were never sent, and have no records; or whose records were lost.

    Attributes:
        state: `"missed"`, `"skipped"` or `"forgotten"`.
        count: how many slots it has; 0 where nobody counted them.
    """

    state: str
    first: datetime
    last: datetime
    count: int
    reason: str

    @classmethod
    def read(cls, text: str) -> UnsentRange:
        """Read a range's JSON.

        Raises ValueError, TypeError, KeyError or OverflowError where it can't be read.
        """
        data: dict[str, Any] = json.loads(text)
        return cls(
            state=str(data["state"]),
            first=slot_from_us(int(data["first"])),
            last=slot_from_us(int(data["last"])),
            count=int(data["count"]),
            reason=str(data["reason"]),
        )


@dataclass(frozen=True)
class Verdict:
    """What `begin` decided: run, refuse (with the reason), or put off (for so many seconds).

    `new`: the slot runs, and the ledger had no record of it.
    """

    kind: Literal["run", "refuse", "put_off"]
    reason: str = ""
    seconds: float = 0.0
    new: bool = False


@dataclass(frozen=True)
class Request:
    """Slots that somebody asked for.

    Attributes:
        id: its identity, which the records of the slots keep.
        kind: `"run"`: one slot of its own, at `until`; `"backfill"`: the slots in (since, until];
            `"catch_up"`: those of them that the entry's policy catches up.
        entry: the entry's name, or `ALL`.
        force: start also slots that are done or under way, as a new attempt.
        by: who asked.
        at: when.
    """

    id: str
    kind: str
    entry: str
    since: datetime
    until: datetime
    force: bool
    by: str
    at: datetime

    def asks_for(self, slot: datetime) -> bool:
        """Whether a slot of the entry is among those that it asks for."""
        return slot == self.until if self.kind == "run" else self.since < slot <= self.until

    @classmethod
    def read(cls, id: str, text: str) -> Request:  # noqa: A002  # it is the field's name
        """Read a request's JSON.

        Raises ValueError, TypeError, KeyError or OverflowError where it can't be read.
        """
        data: dict[str, Any] = json.loads(text)
        return cls(
            id=id,
            kind=str(data["kind"]),
            entry=str(data["entry"]),
            since=slot_from_us(int(data["since"])),
            until=slot_from_us(int(data["until"])),
            force=data.get("force") is True,
            by=str(data.get("by", "")),
            at=slot_from_us(int(data["at"])),
        )
