"""The ledger: what Redis knows of every slot, from its claim to its end.

The leader's side claims, confirms, gives back and misses slots; the worker's side begins and finishes runs;
everybody may read. Each decision is one script (see `scripts/`), and each script can be asked again.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from celery_leaderbeat.settings import Settings
from celery_leaderbeat.store import Store
from celery_leaderbeat.term import Term
from celery_leaderbeat.tick import Stamp, slot_from_us, slot_to_us

__all__ = ["Claim", "EntryRecord", "Ledger", "NotLeading", "SlotRecord", "Verdict"]

logger = logging.getLogger(__name__)

#: A stored slot this much later than now (µs) was written by a clock that had jumped.
_HORIZON = 300_000_000
#: How long the record of a removed entry is kept, in µs: a week, so that a rollback finds it.
_REMOVED_LIFETIME = 7 * 86_400_000_000
#: Keys per round trip where many records are read.
_CHUNK = 200

_APP_ATTRIBUTE = "_leaderbeat_ledger"


class NotLeading(Exception):
    """A script found that the term no longer holds the lease; it has written nothing."""


@dataclass(frozen=True)
class Claim:
    """A slot to be claimed."""

    key: str
    entry: str
    slot: datetime
    fingerprint: str
    task: str
    task_id: str
    prefer: str
    ttl: float
    attempt: int = 1


@dataclass(frozen=True)
class SlotRecord:
    """One slot's record. Times are Unix seconds by the server's clock, None where nothing happened yet."""

    key: str
    state: str
    entry: str
    slot: datetime
    epoch: int
    batch: str
    attempt: int
    task_id: str
    prefer: str
    reason: str
    worker: str
    run: str
    claimed_at: float | None
    sent_at: float | None
    started_at: float | None
    finished_at: float | None

    @classmethod
    def read(cls, key: str, table: Mapping[str, str]) -> SlotRecord:
        """Read a record's hash."""

        def instant(field: str) -> float | None:
            return int(table[field]) / 1000 if field in table else None

        return cls(
            key=key,
            state=table["state"],
            entry=table.get("entry", ""),
            slot=slot_from_us(int(table.get("slot", "0"))),
            epoch=int(table.get("epoch", "0")),
            batch=table.get("batch", ""),
            attempt=int(table.get("attempt", "1")),
            task_id=table.get("task_id", ""),
            prefer=table.get("prefer", "missed"),
            reason=table.get("reason", ""),
            worker=table.get("worker", ""),
            run=table.get("run", ""),
            claimed_at=instant("claimed_at"),
            sent_at=instant("sent_at"),
            started_at=instant("started_at"),
            finished_at=instant("finished_at"),
        )


@dataclass(frozen=True)
class EntryRecord:
    """What is kept of an entry: its last decided slot, its schedule's fingerprint, and totals."""

    slot: datetime
    fingerprint: str
    count: int
    missed: int
    removed: bool

    @classmethod
    def read(cls, text: str) -> EntryRecord:
        """Read an entry's JSON."""
        data = json.loads(text)
        return cls(
            slot=slot_from_us(int(data["slot"])),
            fingerprint=str(data["fingerprint"]),
            count=int(data.get("count", 0)),
            missed=int(data.get("missed", 0)),
            removed="removed" in data,
        )


@dataclass(frozen=True)
class Verdict:
    """What `begin` decided: run, refuse (with the reason), or put off (for so many seconds).

    `new`: the slot runs, and the ledger had no record of it.
    """

    kind: Literal["run", "refuse", "put_off"]
    reason: str = ""
    seconds: float = 0.0
    new: bool = False


class Ledger:
    """The slots' records under one key prefix, over one connection."""

    def __init__(self, settings: Settings, timeout: float = 5.0) -> None:
        self.settings = settings
        self.store = Store(settings, timeout)
        self._keys = self.store.keys

    @classmethod
    def for_app(cls, app: Any) -> Ledger:
        """The ledger of this process for `app`; connections aren't carried over a fork."""
        cached = getattr(app, _APP_ATTRIBUTE, None)
        if cached is None or cached[0] != os.getpid():
            cached = (os.getpid(), cls(Settings.from_app(app, warn=False)))
            setattr(app, _APP_ATTRIBUTE, cached)
        ledger: Ledger = cached[1]
        return ledger

    # -- the leader's side ---------------------------------------------------------------------------------

    def register(
        self, term: Term, fingerprints: Mapping[str, str], now: datetime
    ) -> dict[str, tuple[str, datetime]]:
        """Where each entry goes on: name -> (kept, new, changed, reset, removed or forgotten; slot).

        `fingerprints` names all entries of the schedule.

        Raises:
            NotLeading: the lease is gone; nothing was written.
        """
        now_us = slot_to_us(now)
        limits = [str(now_us), str(now_us + _HORIZON), str(now_us - _REMOVED_LIFETIME)]
        stored = self.entries()
        found = {name: ("kept", stored[name].slot) for name in fingerprints if name in stored}
        pairs = [
            (name, fingerprint)
            for name, fingerprint in fingerprints.items()
            if name not in stored
            or stored[name].fingerprint != fingerprint
            or stored[name].removed
            or slot_to_us(stored[name].slot) > now_us + _HORIZON
        ]
        pairs += [(name, "") for name in stored if name not in fingerprints]
        for i in range(0, len(pairs), _CHUNK):
            chunk = pairs[i : i + _CHUNK]
            answer = self._leading(
                self.store.run(
                    "register",
                    [self._keys.lease, self._keys.entries],
                    [term.value, *limits, *(text for pair in chunk for text in pair)],
                )
            )
            for (name, _), kind, slot in zip(chunk, answer[::2], answer[1::2], strict=True):
                found[name] = (kind, slot_from_us(int(slot)))
        return found

    def claim(self, term: Term, batch: str, claims: Sequence[Claim]) -> list[str]:
        """Claim slots; for each `"claimed"`, or why not. The same `batch` may ask again.

        Raises:
            NotLeading: the lease is gone; nothing was claimed.
            StoreUnavailable: no answer; ask again with the same batch.
        """
        keys = [self._keys.lease, self._keys.entries, self._keys.unfinished, self._keys.counts]
        items = [
            json.dumps(
                {
                    "key": claim.key,
                    "entry": claim.entry,
                    "slot": str(slot_to_us(claim.slot)),
                    "fingerprint": claim.fingerprint,
                    "task": claim.task,
                    "task_id": claim.task_id,
                    "attempt": claim.attempt,
                    "prefer": claim.prefer,
                    "ttl": round(claim.ttl * 1000),
                }
            )
            for claim in claims
        ]
        answer = self.store.run(
            "claim",
            [*keys, *(self._keys.slot(claim.key) for claim in claims)],
            [term.value, term.epoch, batch, *items],
        )
        return [str(text) for text in self._leading(answer)]

    def confirm(self, epoch: int, batch: str, outcomes: Mapping[str, str]) -> list[str]:
        """Note what became of a batch's claims: tick key -> `"sent"` or `"unconfirmed"`. Returns the states."""
        answer = self.store.run(
            "confirm",
            [self._keys.unfinished, self._keys.counts, *map(self._keys.slot, outcomes)],
            [epoch, batch, *outcomes.values()],
        )
        return [str(text) for text in answer]

    def give_back(self, epoch: int, batch: str, keys: Sequence[str], reason: str) -> list[str]:
        """Give back claims of a batch that are known to be unsent. Returns the states."""
        answer = self.store.run(
            "give_back", [self._keys.unfinished, *map(self._keys.slot, keys)], [epoch, batch, reason[:500]]
        )
        return [str(text) for text in answer]

    def doubt(self, term: Term, keys: Sequence[str], until: float) -> list[str]:
        """Count older epochs' unconfirmed claims as missed from `until` on (Unix seconds). Returns the states.

        Raises:
            NotLeading: the lease is gone; nothing was written.
        """
        answer = self.store.run(
            "doubt",
            [self._keys.lease, self._keys.unfinished, self._keys.counts, *map(self._keys.slot, keys)],
            [term.value, term.epoch, round(until * 1000), *keys],
        )
        return [str(text) for text in self._leading(answer)]

    def miss(
        self,
        term: Term,
        entry: str,
        oldest: datetime,
        newest: datetime,
        count: int,
        reason: str,
        fingerprint: str,
        returned: Sequence[str] = (),
    ) -> int:
        """Decide that `count` slots will never be sent; `returned` names those that have records.

        Returns how many became missed by this call.

        Raises:
            NotLeading: the lease is gone; nothing was written.
        """
        keys = [self._keys.lease, self._keys.entries, self._keys.unfinished, self._keys.counts]
        answer = self.store.run(
            "miss",
            [*keys, *map(self._keys.slot, returned)],
            [
                term.value,
                term.epoch,
                entry,
                slot_to_us(oldest),
                slot_to_us(newest),
                count,
                reason[:500],
                fingerprint,
            ],
        )
        return int(self._leading(answer)[0])

    def unfinished(self) -> list[SlotRecord | str]:
        """Slots that a leader has to look after; a bare tick key where the record is gone or unreadable."""
        keys = self.store.members(self._keys.unfinished)
        found: list[SlotRecord | str] = []
        for i in range(0, len(keys), _CHUNK):
            chunk = keys[i : i + _CHUNK]
            for key, table in zip(chunk, self.store.tables(map(self._keys.slot, chunk)), strict=True):
                try:
                    found.append(SlotRecord.read(key, table))
                except (ValueError, KeyError, OverflowError) as exc:
                    if table:
                        logger.error(
                            "Slot %s: its record can't be read (%r).",
                            key,
                            exc,
                            extra={"action": "record_unreadable", "tick_key": key},
                        )
                    found.append(key)
        return found

    # -- the worker's side ---------------------------------------------------------------------------------

    def begin(
        self,
        stamp: Stamp,
        *,
        run: str,
        mode: str,
        redelivered: bool,
        run_lease: float,
        worker: str,
        task: str,
        task_id: str,
        asked: Sequence[str] = (),
    ) -> Verdict:
        """Ask whether the message with `stamp` may run now, and record the run `run` if so.

        `asked` are the runs under which the same message asked before without seeing the answer.

        Raises:
            StoreUnavailable: no answer; ask again with the same `run`.
        """
        answer = self.store.run(
            "begin",
            [self._keys.slot(stamp.key), self._keys.epoch, self._keys.observed, self._keys.counts],
            [
                run,
                stamp.epoch,
                stamp.attempt,
                stamp.run,
                mode,
                "1" if redelivered else "0",
                round(run_lease * 1000),
                round(self.settings.slot_retention * 1000),
                worker,
                stamp.key,
                stamp.entry,
                slot_to_us(stamp.slot),
                task,
                task_id,
                f" {' '.join(asked)} ",
            ],
        )
        if answer[0] == "refuse":
            return Verdict("refuse", reason=str(answer[1]))
        if answer[0] == "put_off":
            return Verdict("put_off", seconds=int(answer[1]) / 1000)
        return Verdict("run", new=not answer[1])

    def finish(self, key: str, run: str, state: str, reason: str = "") -> bool:
        """Record how the run ended (`done`, `failed`, `retrying`); False if it no longer held the slot."""
        answer = self.store.run(
            "finish", [self._keys.slot(key), self._keys.counts], [run, state, reason[:500]]
        )
        return bool(answer[0])

    def renew_runs(self, runs: Mapping[str, str], run_lease: float) -> dict[str, bool]:
        """Extend the run leases of `runs` (tick key -> run); for each whether it still holds its slot."""
        keys = list(runs)
        answer = self.store.run(
            "renew_run", list(map(self._keys.slot, keys)), [round(run_lease * 1000), *runs.values()]
        )
        return {key: bool(held) for key, held in zip(keys, answer, strict=True)}

    # -- reading -------------------------------------------------------------------------------------------

    def slot(self, key: str) -> SlotRecord | None:
        """The record of a slot, by its tick key; None if there is none (any more)."""
        table = self.store.table(self._keys.slot(key))
        return SlotRecord.read(key, table) if "state" in table else None

    def entries(self) -> dict[str, EntryRecord]:
        """What is kept of every entry."""
        found = {}
        for name, text in self.store.table(self._keys.entries).items():
            try:
                found[name] = EntryRecord.read(text)
            except (ValueError, TypeError, KeyError, OverflowError) as exc:
                logger.error(
                    "Entry %r: what the ledger keeps of it can't be read (%r); it counts from now.",
                    name,
                    exc,
                    extra={"action": "entry_unreadable", "entry": name},
                )
        return found

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

    def close(self) -> None:
        """Close the connection. Never raises."""
        self.store.close()

    @staticmethod
    def _leading(answer: list[Any]) -> list[Any]:
        if answer[0] != 1:
            raise NotLeading(answer[1])
        return answer[1:]
