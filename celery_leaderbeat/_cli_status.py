"""What `celery leaderbeat status` says: read once, and written as lines or as plain data. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from celery_leaderbeat._cli_text import pause_text, request_text, whose
from celery_leaderbeat.pauses import Pause
from celery_leaderbeat.records import EntryRecord, Request
from celery_leaderbeat.term import Term
from celery_leaderbeat.tick import slot_from_us, slot_text

__all__ = ["EntryStatus", "Status", "status_json", "status_lines"]

#: Totals that only FencedTasks add to.
_OF_FENCED_TASKS = "(started, done, failed, retrying and refused count FencedTasks only)"


@dataclass(frozen=True)
class EntryStatus:
    """Where one entry stands.

    Attributes:
        record: what the ledger keeps of it.
        undone: how many of its latest slots have no done marker; None where its task never leaves one.
        paused: a pause of it, or of all entries, is in force.
    """

    record: EntryRecord
    undone: int | None
    paused: bool


@dataclass(frozen=True)
class Status:
    """The ledger at one time.

    Attributes:
        at: the server's time.
        url: of the server, without its password.
        leader: the term that the lease names, None while it is free.
        ttl_left: seconds until the lease ends unless it is renewed; None where it is free, or doesn't expire.
        replicas: holder -> its release, empty for none; those seen lately.
        pauses: those in force; `ALL` for all entries.
        requests: those that no leader has dealt with yet.
    """

    at: datetime
    url: str
    key_prefix: str
    leader: Term | None
    ttl_left: float | None
    replicas: Mapping[str, str]
    pauses: Mapping[str, Pause]
    requests: Sequence[Request]
    entries: Mapping[str, EntryStatus]
    totals: Mapping[str, int]


def status_lines(status: Status) -> Iterator[str]:
    """One line for each thing, its kind first."""
    # A wrong prefix looks like a system in which nothing has happened yet.
    yield f"ledger    {status.url}, key prefix {status.key_prefix!r}"
    yield f"leader    {_leader_line(status.leader, status.ttl_left)}"
    for holder, release in status.replicas.items():
        yield f"replica   {holder}, release {release}" if release else f"replica   {holder}"
    for name, pause in sorted(status.pauses.items()):
        yield f"paused    {whose(name)} {pause_text(pause)}"
    for request in status.requests:
        yield f"request   {request_text(request)}"
    for name, entry in sorted(status.entries.items()):
        yield f"entry     {_entry_line(name, entry)}"
    sums = ", ".join(f"{name} {count}" for name, count in sorted(status.totals.items()))
    yield f"totals    {sums or 'none'}"
    yield f"          {_OF_FENCED_TASKS}"


def _leader_line(leader: Term | None, ttl_left: float | None) -> str:
    if leader is None:
        return "none: the lease is free"
    release = f", release {leader.release}" if leader.release else ""
    left = "doesn't expire" if ttl_left is None else f"has {ttl_left:.1f} s left"
    since = "" if not leader.since else f", since {slot_text(_since(leader).replace(microsecond=0))}"
    return f"{leader.holder}, epoch {leader.epoch}{since}{release}; its lease {left}"


def _entry_line(name: str, entry: EntryStatus) -> str:
    record = entry.record
    where = f"no slot yet since {slot_text(record.slot)}"
    if _decided(record):
        where = f"last decided {slot_text(record.slot)}, {record.count} claimed, {record.missed} missed"
        where += f", {record.skipped} skipped"
    if record.removed:
        where += ", removed"
    if entry.undone:
        where += f"; {entry.undone} {'slot' if entry.undone == 1 else 'slots'} without a done marker"
    return f"{name}: {where}"


def status_json(status: Status) -> dict[str, Any]:
    """The same as plain data: times as ISO 8601 in UTC, durations in seconds, '' for all entries."""
    return {
        "at": slot_text(status.at),
        "ledger": {"url": status.url, "key_prefix": status.key_prefix},
        "leader": None if status.leader is None else _leader_json(status.leader, status.ttl_left),
        "replicas": [{"holder": holder, "release": release} for holder, release in status.replicas.items()],
        "paused": [
            {
                "entry": name,
                "since": slot_text(pause.since),
                "until": _text(pause.until),
                "by": pause.by,
                "note": pause.note,
            }
            for name, pause in sorted(status.pauses.items())
        ],
        "requests": [_request_json(request) for request in status.requests],
        "entries": [_entry_json(name, entry) for name, entry in sorted(status.entries.items())],
        "totals": dict(sorted(status.totals.items())),
    }


def _leader_json(leader: Term, ttl_left: float | None) -> dict[str, Any]:
    return {
        "holder": leader.holder,
        "epoch": leader.epoch,
        "since": slot_text(_since(leader)) if leader.since else None,
        "release": leader.release,
        "ttl": leader.ttl or None,
        "ttl_left": ttl_left,
    }


def _request_json(request: Request) -> dict[str, Any]:
    is_run = request.kind == "run"
    return {
        "id": request.id,
        "kind": request.kind,
        "entry": request.entry,
        "slot": slot_text(request.until) if is_run else None,
        "since": None if is_run else slot_text(request.since),
        "until": None if is_run else slot_text(request.until),
        "force": request.force,
        "by": request.by,
        "at": slot_text(request.at),
    }


def _entry_json(name: str, entry: EntryStatus) -> dict[str, Any]:
    record = entry.record
    return {
        "entry": name,
        "last_decided": slot_text(record.slot) if _decided(record) else None,
        "no_slot_since": None if _decided(record) else slot_text(record.slot),
        "claimed": record.count,
        "missed": record.missed,
        "skipped": record.skipped,
        "removed": _text(record.removed),
        "paused": entry.paused,
        "without_done_marker": entry.undone,
    }


def _decided(record: EntryRecord) -> bool:
    """Whether anything was decided of the entry: else its slot is the time from which it counts."""
    return bool(record.count or record.missed or record.skipped)


def _since(leader: Term) -> datetime:
    return slot_from_us(round(leader.since * 1000) * 1000)


def _text(instant: datetime | None) -> str | None:
    return None if instant is None else slot_text(instant)
