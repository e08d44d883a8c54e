"""The first and the last instant for which slots are computed. Pure."""

from __future__ import annotations

from datetime import MAXYEAR, datetime, timezone

from celery_leaderbeat.tick import slot_to_us

__all__ = ["EARLIEST", "EARLIEST_US", "LATEST", "LATEST_US"]

# A year from the ends of the calendar, so that no offset of a zone and no look at a neighbouring day leaves it.
EARLIEST = datetime(2, 1, 1, tzinfo=timezone.utc)
LATEST = datetime(MAXYEAR - 1, 1, 1, tzinfo=timezone.utc)
EARLIEST_US = slot_to_us(EARLIEST)
LATEST_US = slot_to_us(LATEST)
