"""Releases: which of two is the newer one. Pure.

A release is a number, a dotted version or a time:

- `42`, `"42"`, `"1.10"`, `"v2.0.1"`: compared number by number, so that 1.10 is newer than 1.9. Zeros at the end
  don't count: 2.0 is 2.
- `"2026-11-30"`, `"2026-11-30T14:05:00Z"`, `"2026-11-30T15:05:00+01:00"`, a `datetime` or a `date`: compared as instants;
  without an offset they are in UTC, and a date is its first moment.

A number and a time have no order: neither is newer. A replica that has no release is older than any that has
one.

The rank of a release is a text of ASCII letters and digits that compares as the release does, also inside
Redis: a letter for the kind, and then each number with its length ahead of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from typing import Any

__all__ = ["Release"]

_NUMBERS = re.compile(r"v?([0-9]{1,18}(?:\.[0-9]{1,18}){0,9})", re.ASCII)
_TIME = re.compile(
    r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d{1,6})?)?(?:[zZ]|[+-]\d\d:?\d\d)?)?", re.ASCII
)
_FIRST = datetime(1, 1, 1, tzinfo=timezone.utc)
_RULE = (
    "it must be something that has an order: a whole number, a dotted version such as '1.10.2', or a time such as "
    "'2026-11-30T14:05:00Z'"
)


@dataclass(frozen=True)
class Release:
    """A release of the code and the schedule that a replica runs.

    Attributes:
        text: as it is shown; empty for none.
        rank: of two with the same first letter, the newer one's is greater; empty for none.
    """

    text: str = ""
    rank: str = ""

    def __str__(self) -> str:
        return self.text

    @classmethod
    def read(cls, value: Any) -> Release:
        """The release that a setting means; None is none.

        Raises:
            ValueError: it has no order; says what it must be.
        """
        if value is None:
            return cls()
        if isinstance(value, float):
            raise ValueError(f"{_RULE}; a number with a point is written as text, for 1.10 isn't 1.1")
        if isinstance(value, (int, date)) and not isinstance(value, bool):
            value = value.isoformat() if isinstance(value, date) else str(value)
        if not isinstance(value, str):
            raise ValueError(_RULE)
        text = value.strip()
        numbers = _NUMBERS.fullmatch(text)
        if numbers:
            return cls(text, _rank_of_numbers(numbers[1]))
        if _TIME.fullmatch(text):
            return cls(text, _rank_of_time(text))
        raise ValueError(f"{_RULE}; a commit's hash has none")

    def has_order_with(self, other: Release) -> bool:
        """Whether it is known which of the two is newer, or that neither is because they are equal."""
        return not self.rank or not other.rank or self.rank[:1] == other.rank[:1]

    def newer_than(self, other: Release) -> bool:
        """Whether this one is newer; False where the two have no order."""
        if not other.rank:
            return bool(self.rank)
        return self.has_order_with(other) and self.rank > other.rank


def _rank_of_numbers(text: str) -> str:
    numbers = [int(part) for part in text.split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return "n" + "".join(f"{len(str(number)):02}{number}" for number in numbers)


def _rank_of_time(text: str) -> str:
    # Python 3.10 reads neither the Z nor an offset without a colon, nor fractions of any length.
    iso = re.sub(r"[zZ]$", "+00:00", text)
    iso = re.sub(r"([+-]\d\d)(\d\d)$", r"\1:\2", iso) if "T" in iso or " " in iso else iso
    iso = re.sub(r"\.(\d{1,6})", lambda found: f".{found[1]:0<6}", iso)
    try:
        found = datetime.fromisoformat(iso)
        found = found if found.tzinfo is not None else found.replace(tzinfo=timezone.utc)
        return f"t{(found - _FIRST) // timedelta(microseconds=1):020}"
    except (ValueError, OverflowError) as exc:
        raise ValueError(f"it looks like a time and is none ({exc})") from None
