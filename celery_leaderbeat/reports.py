"""Saying that slots are missed: one WARNING and one signal per entry and range."""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Any

from celery_leaderbeat.signals import slots_missed
from celery_leaderbeat.tick import slot_text

__all__ = ["report_missed"]

logger = logging.getLogger(__name__)


def report_missed(app: Any, entry: str, first: datetime, last: datetime, count: int, reason: str) -> None:
    """Say that `count` slots of an entry, from `first` to `last`, are missed, and why."""
    if count == 1:
        what = f"the slot {slot_text(last)} is missed"
    else:
        what = f"{count} slots from {slot_text(first)} to {slot_text(last)} are missed"
    logger.warning(
        "Entry %r: %s: %s.",
        entry,
        what,
        reason,
        extra={"action": "missed", "entry": entry, "count": count, "reason": reason},
    )
    slots_missed.send_robust(sender=app, entry=entry, first=first, last=last, count=count, reason=reason)
