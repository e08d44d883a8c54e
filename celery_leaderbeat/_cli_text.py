"""How the command line reads times, and how it writes what the ledger says. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta, timezone, tzinfo
from typing import Any

from celery_leaderbeat.audit import Audit, Explanation
from celery_leaderbeat.pauses import Pause
from celery_leaderbeat.records import ALL, Request
from celery_leaderbeat.tick import slot_from_us, slot_text

__all__ = [
    "ENDS",
    "audit_json",
    "audit_lines",
    "event_json",
    "event_line",
    "pause_text",
    "read_duration",
    "read_instant",
    "request_text",
    "whose",
]

#: The ends of a slot, as `audit` names them.
ENDS = (
    "done",
    "failed",
    "refused",
    "abandoned",
    "running",
    "retrying",
    "sent",
    "claimed",
    "returned",
    "missed",
    "skipped",
    "overdue",
    "forgotten",
    "unexplained",
)

_UNITS = {"w": 604_800, "d": 86_400, "h": 3_600, "m": 60, "s": 1}
_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?[wdhms]\s*)+", re.ASCII)
_PART = re.compile(r"([0-9.]+)([wdhms])", re.ASCII)
#: Fields of events that hold an instant in µs, and those that hold a number.
_INSTANTS = ("from", "to", "until")
_NUMBERS = ("epoch", "attempt", "count")


def read_instant(text: str, zone: tzinfo) -> datetime:
    """The instant that an ISO 8601 text means, in UTC; without an offset it is read in `zone`.

    Raises:
        ValueError: the text is no time, or one beyond the years 1 to 9999; says what to write.
    """
    try:
        # Python 3.10 doesn't read the Z.
        found = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text.strip()))
        aware = found if found.tzinfo is not None else found.replace(tzinfo=zone)
        return aware.astimezone(timezone.utc)
    except (ValueError, OverflowError):
        raise ValueError(
            f"{text!r} is no time: write it as 2026-10-02T03:00 (in the app's time zone), "
            "2026-10-02T03:00:00Z or 2026-10-02T03:00+02:00"
        ) from None


def read_duration(text: str) -> timedelta:
    """The length of time that a text such as `2h`, `1d12h` or `90m` means.

    Raises:
        ValueError: the text is no duration, or not above 0; says what to write.
    """
    cleaned = text.strip().lower()
    try:
        if _DURATION.fullmatch(cleaned):
            found = timedelta(seconds=sum(float(n) * _UNITS[unit] for n, unit in _PART.findall(cleaned)))
            if found > timedelta(0):
                return found
    except OverflowError:
        pass
    raise ValueError(
        f"{text!r} is no duration: write a number above 0 with its unit, w, d, h, m or s, as in 2h or 1d12h"
    )


def whose(entry: str) -> str:
    """The entry of an order, in words."""
    return "all entries" if entry == ALL else f"entry {entry!r}"


def pause_text(pause: Pause) -> str:
    """Since when, until when, by whom and why."""
    until = "until it is resumed" if pause.until is None else f"until {slot_text(pause.until)}"
    by = f" by {pause.by}" if pause.by else ""
    note = f": {pause.note}" if pause.note else ""
    return f"since {slot_text(pause.since)}{by}, {until}{note}"


def request_text(request: Request) -> str:
    """What somebody asked for."""
    if request.kind == "run":
        what = f"run of {whose(request.entry)} for {slot_text(request.until)}"
    else:
        what = (
            f"{request.kind.replace('_', ' ')} of {whose(request.entry)} after {slot_text(request.since)} "
            f"up to {slot_text(request.until)}"
        )
    return f"{what}, by {request.by or '?'}" + (", by force" if request.force else "")


def audit_lines(audit: Audit, only: str | None) -> Iterator[str]:
    """One line for each slot, with this end or any, and the sums."""
    for slot in audit.slots if only is None else audit.having(only):
        more = ", ".join(_more(slot))
        yield f"{slot_text(slot.slot):<27} {slot.end:<11}{' ' + more if more else ''}".rstrip()
    if audit.known_since is None:
        yield "The ledger knows no schedule of this entry: only slots that left a trace are listed."
    elif audit.known_since > audit.since:
        yield (
            f"The ledger knows the entry's schedule since {slot_text(audit.known_since)}: of the time before, only "
            "slots that left a trace are listed."
        )
    for definition in audit.not_computed:
        yield (
            f"From {slot_text(definition.since)} on, the schedule was {definition.fingerprint}, which can't be "
            "computed here: of that time, only slots that left a trace are listed."
        )
    sums = ", ".join(f"{count} {end}" for end, count in sorted(audit.counts.items())) or "no slots"
    yield f"{audit.entry}, after {slot_text(audit.since)} up to {slot_text(audit.until)}: {sums}"


def _more(slot: Explanation) -> Iterator[str]:
    record = slot.record
    if slot.reason:
        yield slot.reason
    if record is not None and record.started_at is not None:
        span = f"{_clock(record.started_at)} to {_clock(record.finished_at)}"
        yield f"ran {span} on {record.worker}" if record.finished_at else f"began {_clock(record.started_at)}"
    if record is not None and record.attempt > 1:
        yield f"attempt {record.attempt}"
    if not slot.called_for:
        yield "asked for by a request"


def _clock(seconds: float | None) -> str:
    return "?" if seconds is None else f"{datetime.fromtimestamp(seconds, timezone.utc):%H:%M:%S}Z"


def audit_json(audit: Audit, only: str | None) -> dict[str, Any]:
    """An audit as plain data: times as ISO 8601 in UTC."""
    return {
        "entry": audit.entry,
        "since": slot_text(audit.since),
        "until": slot_text(audit.until),
        "known_since": None if audit.known_since is None else slot_text(audit.known_since),
        "not_computed": [
            {"fingerprint": found.fingerprint, "since": slot_text(found.since)}
            for found in audit.not_computed
        ],
        "counts": audit.counts,
        "slots": [_slot_json(slot) for slot in (audit.slots if only is None else audit.having(only))],
    }


def _slot_json(slot: Explanation) -> dict[str, Any]:
    found: dict[str, Any] = {
        "key": slot.key,
        "slot": slot_text(slot.slot),
        "end": slot.end,
        "reason": slot.reason,
        "called_for": slot.called_for,
    }
    record = slot.record
    if record is not None:
        for name in ("attempt", "epoch", "worker", "request"):
            found[name] = getattr(record, name)
        for name in ("claimed_at", "sent_at", "started_at", "finished_at"):
            seconds = getattr(record, name)
            found[name] = None if seconds is None else _ms_text(round(seconds * 1000))
    return found


def event_json(event_id: str, fields: Mapping[str, str]) -> dict[str, Any]:
    """An event as plain data: instants as ISO 8601 in UTC, numbers as numbers."""
    found: dict[str, Any] = {"id": event_id, "at": _ms_text(int(event_id.partition("-")[0]))}
    for name, text in fields.items():
        if name in _INSTANTS and text.isdecimal():
            found[name] = slot_text(slot_from_us(int(text)))
        else:
            found[name] = int(text) if name in _NUMBERS and text.isdecimal() else text
    return found


def event_line(event_id: str, fields: Mapping[str, str]) -> str:
    """An event as a line: when, what, whose, and the rest."""
    found = event_json(event_id, fields)
    at, name, entry = found.pop("at"), found.pop("event", "?"), found.pop("entry", None)
    key = found.pop("key", None)
    subject = key or ("" if entry is None else entry or "all entries")
    rest = ", ".join(f"{field} {value}" for field, value in found.items() if field != "id" and value != "")
    return " ".join(part for part in (f"{at:<24} {name:<11}", subject, f"({rest})" if rest else "") if part)


def _ms_text(ms: int) -> str:
    return slot_text(slot_from_us(ms * 1000))
