"""Reading the ledger: records, entries, events, and what became of each slot. Writes nothing."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from celery_leaderbeat.audit import Audit, Known, explain
from celery_leaderbeat.definitions import Definition, can_recompute, parse_definitions, schedule_of
from celery_leaderbeat.definitions import slots as called_for
from celery_leaderbeat.records import ALL, EntryRecord, Request, SlotRecord, UnsentRange
from celery_leaderbeat.settings import Settings
from celery_leaderbeat.store import Store
from celery_leaderbeat.term import Term
from celery_leaderbeat.tick import parse_tick_key, slot_to_us, tick_key
from celery_leaderbeat.timeline import slots_after

__all__ = ["LedgerReader"]

logger = logging.getLogger(__name__)

#: Keys per round trip where many records are read.
_CHUNK = 200
#: Ranges of unsent slots that are kept of an entry (see `_prelude.lua`).
_RANGES_KEPT = 10_000
#: Events per round trip.
_EVENTS_AT_ONCE = 1000
#: Of how many slots and periods it is counted which are undone.
_LATEST, _PERIODS = 100, 3

_T = TypeVar("_T")


class LedgerReader:
    """What everybody may read of the slots' records under one key prefix, over one connection.

    Parameters:
        settings: where the server is, and the key prefix.
        timeout: longest that one answer may take, in seconds.
    """

    def __init__(self, settings: Settings, timeout: float = 5.0) -> None:
        self.settings = settings
        self.store = Store(settings, timeout)
        self._keys = self.store.keys
        self._unreadable: set[tuple[str, str]] = set()

    def close(self) -> None:
        """Close the connection. Never raises."""
        self.store.close()

    def slot(self, key: str) -> SlotRecord | None:
        """The record of a slot, by its tick key; None if there is none (any more)."""
        table = self.store.table(self._keys.slot(key))
        return SlotRecord.read(key, table) if "state" in table else None

    def slots(self, keys: Sequence[str]) -> dict[str, SlotRecord | None]:
        """The records of many slots; None where there is none, or none that can be read."""
        found: dict[str, SlotRecord | None] = {}
        for i in range(0, len(keys), _CHUNK):
            chunk = keys[i : i + _CHUNK]
            for key, table in zip(chunk, self.store.tables(map(self._keys.slot, chunk)), strict=True):
                found[key] = (
                    self._read(key, "record", partial(SlotRecord.read, key, table)) if table else None
                )
        return found

    def entries(self, *names: str) -> dict[str, EntryRecord]:
        """What is kept of these entries, or of every entry."""
        kept = (
            self.store.table_of(self._keys.entries, names) if names else self.store.table(self._keys.entries)
        )
        found = {}
        for name, text in kept.items():
            record = self._read(name, "entry", partial(EntryRecord.read, text))
            if record is not None:
                found[name] = record
        return found

    def audit(self, entry: str, since: datetime, until: datetime, current: Any = None) -> Audit:
        """What became of each slot of an entry in (since, until], as far as it has come due.

        Parameters:
            current: the entry's schedule, for those that no fingerprint computes (solar, custom).

        Raises:
            StoreError: the ledger doesn't answer.
        """
        return self._audit(entry, since, until, current, self._traces(entry, since, until))

    def _audit(
        self, entry: str, since: datetime, until: datetime, current: Any, traces: Iterable[datetime]
    ) -> Audit:
        now = self.store.now()
        until = min(until, now)
        # Before the records: what is decided while they are read counts as undecided, not as unexplained.
        (requests,) = self.store.tables([self._keys.requests])
        kept = self.entries(entry).get(entry)
        definitions = self.definitions(entry)
        called: dict[datetime, Definition | None] = dict.fromkeys(traces)
        called |= dict(called_for(definitions, since, until, current))
        ordered = sorted(called.items(), key=lambda pair: pair[0])
        records = self.slots([tick_key(entry, slot) for slot, _ in ordered])
        ranges = self.store.members(self._keys.unsent(entry))
        unsent = [
            found for text in ranges if (found := self._read(entry, "range", partial(UnsentRange.read, text)))
        ]
        known = Known(
            entry=kept,
            records={key: record for key, record in records.items() if record is not None},
            unsent=unsent,
            requests=[
                request
                for name, text in requests.items()
                if (request := self._read(name, "request", partial(Request.read, name, text)))
                and request.entry in (entry, ALL)
            ],
            unsent_from=unsent[0].first if len(unsent) >= _RANGES_KEPT else None,
            retention=self.settings.slot_retention,
            now=now,
        )
        return Audit(
            entry=entry,
            since=since,
            until=until,
            known_since=definitions[0].since if definitions else None,
            not_computed=tuple(found for found in definitions if not can_recompute(found, current)),
            slots=tuple(explain(entry, ordered, known, current)),
        )

    def undone(self, entry: str, current: Any = None) -> int:
        """How many of an entry's latest slots have no done marker though a period has passed, 100 at most.

        Skipped ones don't count. Tasks that aren't FencedTasks never leave a done marker.
        """
        now = self.store.now()
        kept = self.entries(entry).get(entry)
        schedule = current if current is not None else schedule_of(kept.fingerprint if kept else "")
        coming = [] if kept is None or schedule is None else list(islice(slots_after(schedule, kept.slot), 2))
        if len(coming) < 2:
            return 0
        period = coming[1] - coming[0]
        window = max(
            _PERIODS * period, min(timedelta(seconds=self.settings.slot_retention), _LATEST * period)
        )
        audited = self._audit(entry, now - window, now - period, current, ()).slots[-_LATEST:]
        return sum(slot.end not in ("done", "skipped", "forgotten") for slot in audited)

    def events(self, after: str = "", most: int = 1000) -> list[tuple[str, dict[str, str]]]:
        """What was decided later than the id `after`, oldest first: ids and fields.

        An id is `<ms since the Unix epoch>-<n>`.
        """
        return self.store.events(after, most)

    def _traces(self, entry: str, since: datetime, until: datetime) -> set[datetime]:
        """The slots of an entry that events tell of: those of requests are on no schedule."""
        found: set[datetime] = set()
        # A slot is claimed after it has come due.
        after = str(max(slot_to_us(since) // 1000, 0))
        while page := self.events(after, _EVENTS_AT_ONCE):
            after = page[-1][0]
            for _, fields in page:
                if fields.get("event") in ("claimed", "started") and fields.get("entry") == entry:
                    slot = parse_tick_key(fields["key"])[1]
                    if since < slot <= until:
                        found.add(slot)
        return found

    def definitions(self, entry: str) -> list[Definition]:
        """Which schedules the entry had, and when; the latest last."""
        text = self.store.table_of(self._keys.definitions, [entry]).get(entry, "[]")
        return self._read(entry, "definition", partial(parse_definitions, text)) or []

    def leader(self) -> Term | None:
        """The term that the lease names now; None if nobody leads."""
        value = self.store.text(self._keys.lease)
        return None if value is None else Term.read(value)

    def counts(self) -> dict[str, int]:
        """Totals since the prefix was first used: claimed, sent, started, done, failed, refused, missed, …"""
        return {name: int(text) for name, text in self.store.table(self._keys.counts).items()}

    def replicas(self) -> list[str]:
        """The holders seen lately."""
        return self.store.members(self._keys.replicas)

    def releases(self) -> dict[str, str]:
        """The releases of the replicas that have one, by holder."""
        noted = self.store.table(self._keys.releases)
        found = {
            holder: self._read(holder, "release", partial(_release_of, text))
            for holder, text in noted.items()
        }
        return {holder: release for holder, release in found.items() if release}

    def _read(self, name: str, what: str, read: Callable[[], _T]) -> _T | None:
        """What `read` reads; None, with an ERROR, where it can't be read."""
        try:
            return read()
        except (ValueError, TypeError, KeyError, OverflowError) as exc:
            if (name, what) in self._unreadable:
                return None
            self._unreadable.add((name, what))
            logger.error(
                "%s: the %s that the ledger keeps of it can't be read (%r), and doesn't count. Delete it from Redis.",
                name,
                what,
                exc,
                extra={"action": f"{what}_unreadable", "name_of": name},
            )
            return None


def _release_of(text: str) -> str:
    return str(json.loads(text)["release"])
