"""Tick keys, message headers and task ids: the identity of a slot, as text.

A tick key is `<entry>@<slot>`, where the slot is an instant in UTC as ISO 8601 text with a `Z`. Each instant
has exactly one such text: no fraction for a whole second, three digits for a whole millisecond, else six. So
two replicas that compute the same slot write the same key, and keys can be compared as text.

All arithmetic on instants is done in integer microseconds; a float would lose them from the year 2255 on
and round differently before.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from celery_leaderbeat.errors import StampError

__all__ = [
    "ASKED_HEADER",
    "ATTEMPT_HEADER",
    "EPOCH_HEADER",
    "PUT_OFF_HEADER",
    "RUN_HEADER",
    "SLOT_HEADER",
    "TICK_KEY_HEADER",
    "Stamp",
    "parse_tick_key",
    "slot_from_us",
    "slot_text",
    "slot_to_us",
    "task_id",
    "tick_key",
]

TICK_KEY_HEADER = "leaderbeat_tick_key"
EPOCH_HEADER = "leaderbeat_fencing_epoch"
SLOT_HEADER = "leaderbeat_slot"
ATTEMPT_HEADER = "leaderbeat_attempt"
#: The run whose retry this message is.
RUN_HEADER = "leaderbeat_run"
#: The runs under which this message asked to begin without seeing the answer, separated by spaces.
ASKED_HEADER = "leaderbeat_asked"
#: How often this message was put off.
PUT_OFF_HEADER = "leaderbeat_put_off"

_UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)
_SLOT_TEXT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{3}|\.\d{6})?Z", re.ASCII)
# Fixed for ever: another namespace would give every slot another task id.
_TASK_IDS = uuid.UUID("ef5b8ffe-4a3a-4d3b-b1fd-9ae5d2023183")


def slot_to_us(slot: datetime) -> int:
    """The instant as whole microseconds since the Unix epoch.

    Raises:
        ValueError: `slot` is naive.
    """
    return (_in_utc(slot) - _UNIX_EPOCH) // _MICROSECOND


def slot_from_us(us: int) -> datetime:
    """The instant `us` microseconds after the Unix epoch, as an aware datetime in UTC.

    Raises:
        OverflowError: the instant lies outside the years 1 to 9999.
    """
    return _UNIX_EPOCH + timedelta(microseconds=us)


def slot_text(slot: datetime) -> str:
    """The slot as ISO 8601 text in UTC: `2026-10-02T03:00:00Z`, with a fraction only where there is one.

    Raises:
        ValueError: `slot` is naive.
    """
    instant = _in_utc(slot)
    if instant.microsecond == 0:
        precision = "seconds"
    elif instant.microsecond % 1000 == 0:
        precision = "milliseconds"
    else:
        precision = "microseconds"
    return instant.replace(tzinfo=None).isoformat(timespec=precision) + "Z"


def tick_key(entry: str, slot: datetime) -> str:
    """The identity of one slot of one entry.

    Raises:
        ValueError: `slot` is naive.
    """
    return f"{entry}@{slot_text(slot)}"


def parse_tick_key(key: str) -> tuple[str, datetime]:
    """The entry and the slot of a tick key. The entry may itself contain any character, `@` too.

    Raises:
        StampError: `key` isn't a tick key in the one form that `tick_key` writes.
    """
    if isinstance(key, str):
        entry, at, text = key.rpartition("@")
        slot = _parse_slot(text)
        if at and slot is not None:
            return entry, slot
    raise StampError(
        f"{key!r} is no tick key: expected <entry>@<slot in UTC>, as in job@2026-10-02T03:00:00Z"
    )


def task_id(prefix: str, key: str, attempt: int) -> str:
    """The task id of an attempt at a slot: a UUID 5, the same from every replica.

    Parameters:
        prefix: the key prefix, so that two apps with entries of one name don't share ids.
        key: the tick key.
        attempt: 1 at first.
    """
    # JSON keeps the three apart whatever characters they contain, and is ASCII.
    return str(uuid.uuid5(_TASK_IDS, json.dumps([prefix, key, attempt])))


@dataclass(frozen=True)
class Stamp:
    """What a message says about the slot it is for.

    Attributes:
        key: the tick key.
        entry: the entry's name.
        slot: the nominal time of the slot, aware, in UTC.
        epoch: the epoch under which the message was sent.
        attempt: which attempt at the slot this is; 1 at first.
        run: the run whose retry this message is, else empty.
        put_off: how often this message was put off.
        asked: the runs under which this message asked to begin without seeing the answer.
    """

    key: str
    entry: str
    slot: datetime
    epoch: int
    attempt: int = 1
    run: str = ""
    put_off: int = 0
    asked: tuple[str, ...] = ()

    def headers(self) -> dict[str, object]:
        """The message headers that carry this stamp; strings and integers only."""
        headers: dict[str, object] = {
            TICK_KEY_HEADER: self.key,
            EPOCH_HEADER: self.epoch,
            SLOT_HEADER: slot_text(self.slot),
            ATTEMPT_HEADER: self.attempt,
        }
        if self.run:
            headers[RUN_HEADER] = self.run
        if self.asked:
            headers[ASKED_HEADER] = " ".join(self.asked)
        if self.put_off:
            headers[PUT_OFF_HEADER] = self.put_off
        return headers

    @classmethod
    def from_headers(cls, headers: Mapping[str, Any] | None) -> Stamp | None:
        """The stamp in the headers of a message; None when it carries no tick key (a manual `.delay()`).

        Raises:
            StampError: there is a tick key, but a header is missing, malformed or contradicts it.
        """
        key = headers.get(TICK_KEY_HEADER) if headers else None
        if headers is None or key is None:
            return None
        try:
            entry, slot = parse_tick_key(key)
        except StampError as error:
            raise StampError(f"header {TICK_KEY_HEADER}: {error}") from None
        text = slot_text(slot)
        if headers.get(SLOT_HEADER) != text:
            raise _bad(headers, SLOT_HEADER, f"{text!r}, the slot of the tick key {key!r}")
        return cls(
            key=key,
            entry=entry,
            slot=slot,
            epoch=_integer(headers, EPOCH_HEADER, least=1),
            attempt=_integer(headers, ATTEMPT_HEADER, least=1),
            run=_text(headers, RUN_HEADER),
            asked=tuple(_text(headers, ASKED_HEADER).split()),
            put_off=0 if headers.get(PUT_OFF_HEADER) is None else _integer(headers, PUT_OFF_HEADER, least=0),
        )


def _in_utc(slot: datetime) -> datetime:
    if slot.utcoffset() is None:
        raise ValueError(f"the slot {slot!r} is naive: a slot is an instant and needs a time zone")
    return slot.astimezone(timezone.utc)


def _parse_slot(text: str) -> datetime | None:
    if not _SLOT_TEXT.fullmatch(text):
        return None
    try:
        slot = datetime.fromisoformat(text[:-1]).replace(tzinfo=timezone.utc)
    except ValueError:
        return None
    # A second spelling of the same instant would be a second key for the same slot.
    return slot if slot_text(slot) == text else None


def _integer(headers: Mapping[str, Any], name: str, least: int) -> int:
    value = headers.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _bad(headers, name, f"an integer of at least {least}")
    return value


def _text(headers: Mapping[str, Any], name: str) -> str:
    value = headers.get(name)
    if not (value is None or isinstance(value, str)):
        raise _bad(headers, name, "a string")
    return value or ""


def _bad(headers: Mapping[str, Any], name: str, expected: str) -> StampError:
    value = headers.get(name)
    found = "is missing" if value is None else f"is {value!r}"
    return StampError(f"header {name} {found}: expected {expected} (tick key {headers[TICK_KEY_HEADER]!r})")
