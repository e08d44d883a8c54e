"""Saying what becomes of slots that aren't sent: a log line and a signal for each entry and range."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from celery_leaderbeat.signals import slots_missed, slots_skipped
from celery_leaderbeat.tick import slot_text

__all__ = ["Reports"]

logger = logging.getLogger(__name__)


class Reports:
    """What one beat has to say about slots.

    Parameters:
        app: the sender of the signals.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._skipping: dict[str, str] = {}

    @contextmanager
    def after(self, say: Callable[[], None]) -> Iterator[None]:
        """Call `say` once what is inside, where the ledger decides something, has succeeded.

        Where the beat is told to stop inside, nobody knows whether the ledger has decided it, and if it has, nobody
        says it afterwards: so it is said. If it hasn't, the next leader decides anew, and says it again. After an
        error nothing is said: it is tried again.
        """
        try:
            yield
        except Exception:
            raise
        except BaseException:
            say()
            raise
        say()

    def missed(
        self, entry: str, first: datetime, last: datetime, count: int, reason: str, prefer: str = "missed"
    ) -> None:
        """`count` slots of an entry, from `first` to `last`, are missed.

        An entry that prefers a duplicate doesn't raise an alarm for gaps: a line at INFO, and no signal.
        """
        alarm = prefer != "duplicate"
        logger.log(
            logging.WARNING if alarm else logging.INFO,
            "Entry %r: %s missed: %s.",
            entry,
            _range(first, last, count),
            reason,
            extra={"action": "missed", "entry": entry, "count": count, "reason": reason},
        )
        if alarm:
            slots_missed.send_robust(
                sender=self._app, entry=entry, first=first, last=last, count=count, reason=reason
            )

    def skipped(self, entry: str, first: datetime, last: datetime, count: int, reason: str) -> None:
        """`count` slots are skipped.

        Where that goes on for the same reason, the further lines are at DEBUG.
        """
        goes_on = self._skipping.get(entry) == reason
        self._skipping[entry] = reason
        logger.log(
            logging.DEBUG if goes_on else logging.INFO,
            "Entry %r: %s skipped: %s.",
            entry,
            _range(first, last, count),
            reason,
            extra={"action": "skipped", "entry": entry, "count": count, "reason": reason},
        )
        slots_skipped.send_robust(
            sender=self._app, entry=entry, first=first, last=last, count=count, reason=reason
        )

    def sent(self, entry: str) -> None:
        """A slot of the entry is sent: skipping is over."""
        self._skipping.pop(entry, None)


def _range(first: datetime, last: datetime, count: int) -> str:
    if count == 1:
        return f"the slot {slot_text(last)} is"
    return f"{count or 'the'} slots from {slot_text(first)} to {slot_text(last)} are"
