"""How a standby keeps its shadow: it reads along, as often as is cheap."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import datetime, timezone

from celery_leaderbeat.clock import FleetClock
from celery_leaderbeat.errors import StampError, StoreError
from celery_leaderbeat.pauses import Pause, parse_pauses
from celery_leaderbeat.shadow import Shadow, slot_of
from celery_leaderbeat.store import Look, Store
from celery_leaderbeat.term import Term
from celery_leaderbeat.tick import parse_tick_key, slot_to_us

__all__ = ["ShadowReader", "decided_in"]

logger = logging.getLogger(__name__)

#: What isn't counted (new, changed and removed entries) is read within so many seconds.
_AT_LEAST_EVERY = 5.0
#: After reading, a standby waits so many times as long as that took. What is decided meanwhile it doesn't know.
_PAUSE = 5

#: Totals that grow when a last decided slot moves.
_DECISIONS = ("claimed", "missed", "skipped")


class ShadowReader:
    """Reads along while a replica stands by.

    The ledger's totals tell at each look whether anything was decided since the last one; only then the entries are
    read again. That takes a sixth of the time at most. Where nobody leads it is done at once, and at each look: data may
    have been lost, and whoever is elected has to know. What was read after the look before doesn't tell: all may have been
    put back by then, and lost again since, with totals that look the same.

    Parameters:
        store: the elector's connection.
        shadow: what is to be kept.
        clock: the fleet's clock.
        holder: the identity of this replica.
    """

    def __init__(self, store: Store, shadow: Shadow, clock: FleetClock, holder: str) -> None:
        self._store = store
        self._shadow = shadow
        self._clock = clock
        self._holder = holder
        self._seen: tuple[str | None, int] | None = None
        self._counts: Mapping[str, str] | None = None
        self._not_before = self._not_after = float("-inf")

    def begin(self) -> None:
        """This replica stands by from now on: what it saw before it led is out of date."""
        self._seen = None
        self._not_before = float("-inf")

    @property
    def lacks(self) -> bool:
        """Whether the ledger holds less than is remembered, as far as has been seen."""
        return self._shadow.lacks

    @property
    def knows_nothing(self) -> bool:
        """Whether no entry is remembered, as in a replica that has just started."""
        return not len(self._shadow)

    def fingerprints(self) -> dict[str, str]:
        """Of the leader's entries, as they were read last."""
        return self._shadow.fingerprints()

    def look(self, look: Look) -> None:
        """Follow what a look at the lease has shown."""
        at = datetime.fromtimestamp(self._clock.at(look.now), timezone.utc)
        self._shadow.see_pauses(_readable(look.paused), at)
        led = look.value is not None
        if look.value is not None and Term.read(look.value).holder != self._holder:
            self._shadow.another_leads()
        seen = (look.value, decided_in(look.counts))
        began = self._clock.clock.monotonic()
        anew = not led or seen != self._seen or began >= self._not_after
        if anew and led and began < self._not_before:
            return
        try:
            due = None
            if anew or look.counts != self._counts or self._shadow.left_claims:
                # Before the entries, which may be lost with the claims in between.
                due = self._store.due_members(self._store.keys.unfinished, look.now)
                self._counts = look.counts
            if not anew:
                self._shadow.unchanged(at, led)
                if due is not None:
                    settles = led and not self._shadow.lacks
                    settles = settles and self._store.size(self._store.keys.entries) >= len(self._shadow)
                    self._shadow.see_claimed(due, settles)
                return
            stored = self._store.scan_table(self._store.keys.entries)
            # What was claimed before the entries were read, and after the claims were, is decided by them.
            later = self._store.due_members(self._store.keys.unfinished)
            due = [*(due or ()), *(key for key in later if _is_decided(key, stored))]
        except StoreError as exc:
            # It must not be in the way of an election; if Redis is away, the next look says so.
            logger.debug("The shadow isn't refreshed: %s", exc, extra={"action": "shadow_not_refreshed"})
            return
        self._shadow.see(stored, at, self._clock.utcnow(), led)
        # Where all was lost since the look, what was claimed isn't settled.
        self._shadow.see_claimed(due, led and not self._shadow.lacks)
        ended = self._clock.clock.monotonic()
        self._seen = seen
        self._not_before = ended + _PAUSE * (ended - began)
        self._not_after = max(ended + _AT_LEAST_EVERY, self._not_before)


def decided_in(counts: Mapping[str, str]) -> int:
    """How many slots were decided, by the ledger's totals."""
    return sum(int(text) for name, text in counts.items() if name in _DECISIONS and text.isdecimal())


def _is_decided(key: str, stored: Mapping[str, str]) -> bool:
    """Whether a slot that was claimed doesn't lie beyond the last decided one of its entry."""
    try:
        entry, slot = parse_tick_key(key)
    except StampError:
        return False
    return entry in stored and slot_to_us(slot) <= (slot_of(stored[entry]) or 0)


def _readable(table: Mapping[str, str]) -> dict[str, list[Pause]]:
    found = {}
    for entry, text in table.items():
        try:
            found[entry] = parse_pauses(text)
        except ValueError:
            # The leader says so.
            continue
    return found
