"""The shadow: what one replica remembers of the ledger, to put it back when Redis has lost data. Pure.

A replica that leads notes what it decides; one that stands by reads along. Both know of the entries how far
they were decided, and *until when* they know it: nobody can have decided anything until then that isn't in the
shadow. For a leader that has read what was decided before its term, that is the end of its trust in its lease, for
a standby its latest look. (With fast failover, another may lead before that trust ends: `sight` tells when that can't
be ruled out.) Of slots that were claimed, and of which nobody knows whether they were sent, both remember the tick
keys, since their records are lost with the rest; a leader knows the attempts of its own.

What Redis holds is behind the shadow when data was lost: an empty restart, a flush, evicted keys, a failover to
a replica that lagged. Decisions that came between the latest look and the look that showed the loss are known to
nobody. This is the gap: what came due in it may or may not have been sent, so it counts as missed, and isn't sent
again; unless this replica led last, as far as anybody knows, and the entry prefers a duplicate. A leader that gets
its lease back before its trust had ended has no gap.

Last-decided slots only ever move forward, and pauses only ever get shorter, so that two states of knowledge can be
merged in any order. There is one exception: a slot in the far future was written while a clock had jumped, and
gives way to any other.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from celery_leaderbeat.pauses import Pause, merged_pauses
from celery_leaderbeat.records import FAR_AHEAD, REMOVED_LIFETIME
from celery_leaderbeat.tick import slot_to_us

__all__ = ["Remembered", "Shadow", "slot_of"]

#: A replica that hasn't looked for so long may have missed that another led: two looks are half as far apart.
_OUT_OF_SIGHT = timedelta(seconds=1)


@dataclass(frozen=True)
class Remembered:
    """What is remembered of an entry: its last decided slot in µs, and its record as JSON without changes since."""

    slot: int
    text: str
    fingerprint: str | None = None

    @property
    def record(self) -> dict[str, Any]:
        """The whole record, as the hash `entries` keeps it."""
        record: dict[str, Any] = json.loads(self.text)
        if self.fingerprint is not None:
            record |= {"slot": str(self.slot), "fingerprint": self.fingerprint}
            record.pop("removed", None)
        return record

    def is_far_ahead(self, at: int) -> bool:
        """Whether at `at` (µs) only a clock that had jumped can have written the slot."""
        return self.slot > at + FAR_AHEAD

    def is_forgotten(self, at: int) -> bool:
        """Whether the entry was removed so long ago that a leader forgets it at `at` (µs)."""
        removed = self.record.get("removed")
        return removed is not None and int(removed) < at - REMOVED_LIFETIME


class Shadow:
    """What one replica remembers. Safe to use from several threads.

    Attributes:
        known_until: nothing was decided until then that isn't remembered; None while nothing is known.
        gap: from when until when anything may have been decided that isn't remembered, since Redis has lost
            it; None where nothing is missing.
        claims: how many slots this replica has claimed as a leader.
        led_last: nobody is known to have led since this replica did.
        is_complete: as a leader, this replica knows what was decided before its term.
        left_claims: this replica has left slots to others, and hasn't seen since whether the ledger has them.
    """

    def __init__(self) -> None:
        self.known_until: datetime | None = None
        self.gap: tuple[datetime, datetime] | None = None
        self._entries: dict[str, Remembered] = {}
        self._behind: dict[str, int] = {}
        self._pauses: dict[str, list[Pause]] = {}
        # The attempt of an own claim; None for what was read.
        self._claimed: Mapping[str, int | None] = {}
        self.claims = 0
        self.led_last = self.left_claims = False
        self.is_complete = False
        # When the lease was last seen to be this replica's.
        self._own_at: datetime | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def stands(self, entry: str, slot: datetime, fingerprint: str) -> None:
        """The ledger has said that this is the last decided slot of the entry."""
        with self._lock:
            self._put(entry, slot_to_us(slot), fingerprint)

    def decided(self, entry: str, slot: datetime, fingerprint: str) -> None:
        """The leader has decided a slot of the entry."""
        with self._lock:
            known = self._entries.get(entry)
            if known is None or known.slot < slot_to_us(slot):
                self._put(entry, slot_to_us(slot), fingerprint)

    def claimed(self, key: str, attempt: int) -> None:
        """The leader has claimed a slot, and will know what becomes of its message."""
        with self._lock:
            self.claims += 1
            self._claimed = {**self._claimed, key: attempt}

    def settled(self, *keys: str) -> None:
        """It is known what became of slots that were claimed."""
        known = set(keys)
        with self._lock:
            if not known.isdisjoint(self._claimed):
                self._claimed = {key: attempt for key, attempt in self._claimed.items() if key not in known}

    def swept(self, doubtful: Iterable[str]) -> None:
        """The leader has looked after all that was claimed but for these, and nothing is under way."""
        with self._lock:
            self._claimed = dict.fromkeys(doubtful)

    @property
    def open_claims(self) -> Mapping[str, int | None]:
        """The tick keys of slots that were claimed, and of which it isn't known whether they were sent.

        With the attempt that this replica has claimed; None where another did, or where it is given back.
        """
        return self._claimed

    def removed(self, entry: str, slot: datetime, at: datetime | None, fingerprint: str = "") -> None:
        """The ledger has an entry as removed, and `slot` as the last that was decided of it.

        `at`: since when, and `fingerprint`: its schedule's; where they aren't given, both are as remembered.
        """
        with self._lock:
            known = self._entries.get(entry)
            record = {} if known is None else known.record
            record["slot"] = str(slot_to_us(slot))
            if at is not None:
                record["removed"] = str(slot_to_us(at))
            if fingerprint:
                record["fingerprint"] = fingerprint
            if "fingerprint" in record:
                self._entries[entry] = Remembered(slot_to_us(slot), json.dumps(record))
                self._behind.pop(entry, None)

    def forget(self, entry: str) -> None:
        """The ledger has forgotten an entry that was removed."""
        with self._lock:
            self._entries.pop(entry, None)
            self._behind.pop(entry, None)

    def begins(self) -> None:
        """A term of this replica begins, and what was decided before it hasn't been read yet."""
        with self._lock:
            self.is_complete = False

    def leads(self, until: datetime) -> None:
        """This replica leads, and has read what was decided before: nobody else can decide anything until then."""
        with self._lock:
            self.led_last = self.is_complete = True
            self._know(until)

    def held(self, at: datetime) -> None:
        """At `at`, or later, the lease was this replica's."""
        with self._lock:
            self._own_at = at

    def doubts(self, since: datetime, until: datetime) -> None:
        """Against what this replica trusted, another may have led from `since` on, and nobody knows at `until`."""
        with self._lock:
            if self.known_until is not None and since < self.known_until:
                self.known_until = since
                if self._behind:
                    self.gap = (since if self.gap is None else min(self.gap[0], since), max(since, until))

    def renewed(self, until: datetime) -> None:
        """The lease is renewed: what was true until now is until then."""
        with self._lock:
            if self.is_complete:
                self._know(until)

    def ended(self, at: datetime) -> None:
        """This replica's leadership ended at `at`: from then on others decide."""
        with self._lock:
            self._know(at, led=True)

    def _put(self, entry: str, slot: int, fingerprint: str) -> None:
        known = self._entries.get(entry)
        self._entries[entry] = Remembered(slot, "{}" if known is None else known.text, fingerprint)
        self._behind.pop(entry, None)

    def another_leads(self) -> None:
        """Another replica was seen to lead."""
        with self._lock:
            if self.led_last and self._own_at is not None and self.known_until is not None:
                # What it has decided since isn't known before the entries are read.
                self.known_until = min(self.known_until, self._own_at)
            self.led_last = False

    def unchanged(self, at: datetime, led: bool = False) -> None:
        """At `at` the ledger was as it had been seen before, and somebody led, or not."""
        with self._lock:
            self._know(at, led or not self._behind)

    def leaves(self, keys: Iterable[str]) -> None:
        """This replica doesn't lead any more, and these slots wait to be sent by whoever does."""
        with self._lock:
            self._claimed = {**dict.fromkeys(keys), **self._claimed}
            self.left_claims = True

    def see_claimed(self, keys: Iterable[str], led: bool) -> None:
        """These slots were claimed or given back, while somebody led, or not."""
        with self._lock:
            self.left_claims = False
            # What is lost with the lease isn't settled by that.
            self._claimed = dict.fromkeys(keys) if led else {**dict.fromkeys(keys), **self._claimed}

    def see(self, stored: Mapping[str, str], at: datetime, until: datetime, led: bool = False) -> None:
        """Between `at` and `until` the hash `entries` held this, and somebody led, or not."""
        with self._lock:
            now = slot_to_us(at)
            behind: dict[str, int] = {}
            for name, text in stored.items():
                known = self._entries.get(name)
                if known is not None and known.text == text and known.fingerprint is None:
                    continue
                slot = slot_of(text)
                if slot is not None and (known is None or slot >= known.slot or known.is_far_ahead(now)):
                    self._entries[name] = Remembered(slot, text)
                elif known is not None:
                    behind[name] = slot or 0
            for name in self._entries.keys() - stored.keys():
                if self._entries[name].is_forgotten(now):
                    del self._entries[name]
                else:
                    behind[name] = 0
            self._note(behind, until)
            # Where nobody leads and nothing is lost, anybody may be elected from now on.
            self._know(at, led or not behind)

    def fingerprints(self) -> dict[str, str]:
        """Of the schedule's entries, without those that were removed, as the ledger last showed them."""
        with self._lock:
            entries = dict(self._entries)
        records = {name: known.record for name, known in entries.items()}
        return {
            name: str(record["fingerprint"])
            for name, record in records.items()
            if "fingerprint" in record and "removed" not in record
        }

    @property
    def lacks(self) -> bool:
        """Whether the ledger holds less than is remembered, as far as has been seen."""
        return bool(self._behind)

    def _know(self, at: datetime, led: bool = False) -> None:
        known = self.known_until
        # Where another leads, an own trust that reached further says nothing any more. And where a clock that had
        # jumped has come back, what was known of the time to come isn't known.
        if led or known is None or at > known or known - at > timedelta(microseconds=FAR_AHEAD):
            self.known_until = at

    def _note(self, behind: dict[str, int], until: datetime) -> None:
        """Note a loss: what is stored has fallen behind, or further behind than it was.

        Where nobody has looked for a while, another may have led, and its decisions be lost again, since the look that
        showed as little.
        """
        before, self._behind = self._behind, behind
        known = self.known_until
        if not behind:
            self.gap = None
        elif known is not None and (
            until - known > _OUT_OF_SIGHT
            or any(slot < before.get(name, sys.maxsize) for name, slot in behind.items())
        ):
            since = known if self.gap is None else min(self.gap[0], known)
            self.gap = (since, max(since, until))

    def lacking(self, stored: Mapping[str, datetime], now: datetime) -> dict[str, Remembered]:
        """What is remembered, and stored no longer or only as it was before. Sets `gap`.

        Parameters:
            stored: the last decided slots in the ledger at `now`.
            now: what was written far ahead of it, while a clock had jumped, isn't put back.
        """
        at = slot_to_us(now)
        with self._lock:
            found = {
                name: known
                for name, known in self._entries.items()
                if not known.is_far_ahead(at)
                and (name not in stored or slot_to_us(stored[name]) < known.slot)
                and not known.is_forgotten(at)
            }
            self._note({name: slot_to_us(stored[name]) if name in stored else 0 for name in found}, now)
            return found

    @property
    def gap_is_open(self) -> bool:
        """Whether anything may have been decided that isn't remembered, and is lost."""
        return self.gap is not None and self.gap[0] < self.gap[1]

    def put_back(self) -> None:
        """What was lacking is back in the ledger."""
        with self._lock:
            self.gap, self._behind = None, {}

    def see_pauses(self, stored: Mapping[str, list[Pause]], at: datetime) -> dict[str, list[Pause]]:
        """The stored pauses together with those that are remembered, which may be more."""
        with self._lock:
            self._pauses = merged_pauses(self._pauses, stored, at)
            return dict(self._pauses)


def slot_of(text: str) -> int | None:
    """The last decided slot in an entry's record, None where it can't be read."""
    try:
        data = json.loads(text)
        slot = int(data["slot"])
        # Of another shape than this no record is put back.
        return slot if slot > 0 and isinstance(data["fingerprint"], str) else None
    except (ValueError, TypeError, KeyError):
        return None
