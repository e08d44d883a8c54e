"""The pauses of an entry: when nothing of it is sent, and why. Pure: the time is passed in.

A pause is a span of time, `since <= instant < until`; one without an end lasts until it is lifted. An entry
is paused by its own pauses and by those for all entries.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from celery_leaderbeat.tick import slot_from_us, slot_to_us

__all__ = ["PAUSES_KEPT", "Pause", "Pauses", "lacking_pauses", "merged_pauses", "parse_pauses", "pauses_text"]

#: A pause that ended longer ago explains no slot that is still to be decided.
PAUSES_KEPT = timedelta(days=30)


@dataclass(frozen=True)
class Pause:
    """A span of time in which nothing is sent.

    Attributes:
        since: its first instant, aware.
        until: the first instant after it, or None where it has no end yet.
        note: why, in the words of whoever paused.
        by: who paused.
    """

    since: datetime
    until: datetime | None = None
    note: str = ""
    by: str = ""

    def covers(self, instant: datetime) -> bool:
        """Whether the instant lies within."""
        return self.since <= instant and (self.until is None or instant < self.until)

    @property
    def reason(self) -> str:
        """Why a slot is skipped under this pause."""
        return f"paused: {self.note}" if self.note else "paused"


class Pauses:
    """All that pauses one entry, in the order in which it began. Where several pauses cover an instant, the
    first counts.

    Parameters:
        own: the pauses of the entry; another `Pauses` will do.
        for_all: the pauses of all entries; likewise.
    """

    def __init__(self, own: Iterable[Pause] = (), for_all: Iterable[Pause] = ()) -> None:
        self._pauses = sorted(itertools.chain(own, for_all), key=lambda pause: pause.since)

    @classmethod
    def parse(cls, own: str | None, for_all: str | None = None) -> Pauses:
        """The pauses in one or two fields of the `paused` hash; None for a field that isn't there.

        Raises:
            ValueError: as `parse_pauses`.
        """
        return cls(parse_pauses(own), parse_pauses(for_all))

    def __iter__(self) -> Iterator[Pause]:
        return iter(self._pauses)

    def __bool__(self) -> bool:
        return bool(self._pauses)

    def covers(self, instant: datetime) -> Pause | None:
        """The pause in which the instant lies, or None."""
        return next((pause for pause in self._pauses if pause.covers(instant)), None)

    def in_force(self, now: datetime) -> Pause | None:
        """The pause that is in force at `now`, or None.

        One without an end is, even where a clock that was set back shows a time before its begin.
        """
        return next((pause for pause in self._pauses if pause.until is None or pause.covers(now)), None)

    def touching(self, first: datetime, last: datetime) -> list[Pause]:
        """The pauses that cover some instant from `first` to `last`, these two included."""
        return [
            pause
            for pause in self._pauses
            if pause.since <= last and (pause.until is None or pause.until > max(first, pause.since))
        ]


def merged_pauses(
    known: Mapping[str, Iterable[Pause]], stored: Mapping[str, Iterable[Pause]], now: datetime
) -> dict[str, list[Pause]]:
    """Two states of knowledge about the pauses of entries, as one.

    Nothing that happens to a pause makes it longer, and none goes away but long after its end: so all of both
    count, each with its earlier end. Those that ended longer than `PAUSES_KEPT` before `now` are left out.
    """
    found = {}
    for entry in {**known, **stored}:
        spans: dict[datetime, Pause] = {}
        for pause in itertools.chain(stored.get(entry, ()), known.get(entry, ())):
            other = spans.setdefault(pause.since, pause)
            if pause.until is not None and (other.until is None or pause.until < other.until):
                spans[pause.since] = replace(other, until=pause.until)
        kept = [pause for pause in spans.values() if pause.until is None or pause.until > now - PAUSES_KEPT]
        if kept:
            found[entry] = sorted(kept, key=lambda pause: pause.since)
    return found


def lacking_pauses(
    known: Mapping[str, Iterable[Pause]], stored: Mapping[str, Iterable[Pause]]
) -> dict[str, list[Pause]]:
    """Those of the known pauses that are stored otherwise, or not at all."""
    found = {}
    for entry, pauses in known.items():
        there = set(stored.get(entry, ()))
        lacking = [pause for pause in pauses if pause not in there]
        if lacking:
            found[entry] = lacking
    return found


def parse_pauses(text: str | None) -> list[Pause]:
    """The pauses in one field of the `paused` hash; none for an empty one or None.

    The field is a JSON list of objects: `since` and `until` in microseconds since the Unix epoch, as numbers
    or, since Lua's JSON rounds long numbers, as text; `until` may be missing; `note` and `by`.

    Raises:
        ValueError: the text isn't such a list; says what was found.
    """
    spans = json.loads(text) if text else []
    if not isinstance(spans, list):
        raise ValueError(f"the pauses are {text!r}: expected a JSON list")
    return [_pause(span) for span in spans]


def pauses_text(pauses: Iterable[Pause]) -> str:
    """The pauses as `parse_pauses` reads them."""
    spans = []
    for pause in pauses:
        span = {"since": str(slot_to_us(pause.since)), "note": pause.note, "by": pause.by}
        if pause.until is not None:
            span["until"] = str(slot_to_us(pause.until))
        spans.append(span)
    return json.dumps(spans)


def _pause(span: Any) -> Pause:
    try:
        until = span.get("until")
        return Pause(
            since=_instant(span["since"]),
            until=None if until is None else _instant(until),
            note=_text(span.get("note")),
            by=_text(span.get("by")),
        )
    except (AttributeError, KeyError, OverflowError, ValueError) as error:
        raise ValueError(
            f"the pause {span!r} can't be read: expected since and until in microseconds, note and by"
        ) from error


def _instant(value: Any) -> datetime:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"{value!r} is no number of microseconds")
    return slot_from_us(int(value))


def _text(value: Any) -> str:
    if not (value is None or isinstance(value, str)):
        raise ValueError(f"{value!r} is no text")
    return value or ""
