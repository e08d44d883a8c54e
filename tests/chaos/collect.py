"""Brings together what the processes, the taps and the ledger tell of a run."""

from __future__ import annotations

import contextlib
import re
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any

from celery import Celery

from celery_leaderbeat.errors import StoreError
from celery_leaderbeat.ledger import Ledger
from celery_leaderbeat.settings import Settings
from tests.chaos.fleet import Fleet, read_journal
from tests.chaos.history import Body, Effect, End, History, Loss, Report, Term
from tests.chaos.nemesis import Struck
from tests.chaos.schedule import entries

__all__ = ["Collector"]

_RANGE = re.compile(r"(?:from (?P<first>\S+Z) to (?P<last>\S+Z) are|the slot (?P<slot>\S+Z) is) missed")
#: Longest that a slot takes to come to its end, in seconds.
_LONGEST = 60.0
#: Longest that is tried to read what was lost, in seconds.
_READING = 15.0
#: Ends that later looks don't change.
_NO_ANSWER = ("unexplained", "forgotten")


class Collector:
    """Listens to a fleet's ledger while it runs, and reads everything at the end.

    What the audit would have said right before a loss of data is asked for as well: who watches his slots has read it
    by then.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._app = Celery("project", broker="memory://", set_as_current=False)
        assert fleet.ledger is not None
        self._app.conf.update(fleet.ledger.conf)
        self._ledger = self._reader(fleet.ledger.url())
        self._lost = self._reader(fleet.ledger.lost_url())
        self._reading: threading.Thread | None = None
        self._ends: dict[str, End] = {}
        self._losses: list[Loss] = []
        self._lock = threading.Lock()
        self.since = fleet.now()

    def _reader(self, url: str) -> Ledger:
        self._app.conf.leaderbeat_redis_url = url
        return Ledger(Settings.from_app(self._app, warn=False))

    def close(self) -> None:
        """Close the connections."""
        self._wait()
        self._ledger.close()
        self._lost.close()
        self._app.close()

    def audit(self, until: float | None = None) -> list[str]:
        """Ask what became of each slot so far; the keys of those that aren't at their end."""
        self._wait()
        return self._audit(self._ledger, self.since, until if until is not None else self._fleet.now())

    def _audit(self, ledger: Ledger, since: float, until: float) -> list[str]:
        with self._lock:
            open_keys = []
            for name, entry in _all_entries(self._fleet.version).items():
                for slot in ledger.audit(name, _instant(since), _instant(until), None).slots:
                    record = slot.record
                    told = End(
                        slot.end,
                        slot.reason,
                        record.state if record else "",
                        record.attempt if record else 1,
                        self._fleet.now(),
                    )
                    before = self._ends.get(slot.key)
                    if before is None or told.end not in _NO_ANSWER:
                        self._ends[slot.key] = told
                    open_ends = ("claimed", "returned", "overdue", "running", "retrying")
                    if told.end in open_ends or (told.end == "sent" and entry.fenced):
                        open_keys.append(slot.key)
            return open_keys

    def lose(self) -> None:
        """Have Redis lose its data, and read what was lost, as the audit would have had it."""
        self._wait()
        assert self._fleet.ledger is not None
        since = max(self.since, self._losses[-1].t - _LONGEST) if self._losses else self.since
        self._fleet.ledger.flush()
        lost = self._fleet.now()
        self._losses.append(Loss(lost, "flush"))
        self._reading = threading.Thread(target=self._read_lost, args=(since, lost))
        self._reading.start()

    def _read_lost(self, since: float, until: float) -> None:
        # It stays where it was put until the next loss; the server may be away, or busy.
        deadline = time.monotonic() + _READING
        while time.monotonic() < deadline:
            with contextlib.suppress(StoreError):
                self._audit(self._lost, since, until)
                return
            time.sleep(0.2)

    def _wait(self) -> None:
        """Wait until what was lost is read: what is said later counts more."""
        if self._reading is not None:
            self._reading.join()

    def history(
        self, seed: int, began: float, ended: float, struck: Iterable[Struck], trouble: Iterable[str]
    ) -> History:
        """Everything, at the end."""
        self._wait()
        fleet = self._fleet
        bodies: list[Body] = []
        refused: defaultdict[str, list[str]] = defaultdict(list)
        expired: dict[str, float] = {}
        for name in fleet.setup.worker_names:
            for line in read_journal(fleet.journal(name)):
                if line["event"] in ("start", "end"):
                    bodies.append(_body(name, line))
                elif line["event"] == "expired" and line["key"]:
                    expired[line["key"]] = line["t"]
                elif line.get("action") == "refused":
                    refused[line["tick_key"]].append(line["reason"])
        journals = [
            (name, line) for name in fleet.setup.beat_names for line in read_journal(fleet.journal(name))
        ]
        journals.sort(key=lambda pair: pair[1]["t"])
        return History(
            seed=seed,
            began=began,
            ended=ended,
            settled=fleet.now(),
            broker=fleet.setup.broker,
            versions={version: entries(version) for version in range(fleet.version + 1)},
            struck=sorted(struck, key=lambda each: each.begun),
            lives=tuple(fleet.lives),
            terms=_terms(journals, fleet),
            arrivals=tuple(fleet.tap.arrivals),
            bodies=sorted(bodies, key=lambda body: body.t),
            effects=_effects(fleet),
            reports=[report for name, line in journals if (report := _report(name, line))],
            ends=dict(self._ends),
            losses=tuple(self._losses),
            exits=tuple(fleet.exits),
            expired=expired,
            refused=dict(refused),
            trouble=tuple(trouble),
        )


def _all_entries(version: int) -> dict[str, Any]:
    return {name: entry for number in range(version + 1) for name, entry in entries(number).items()}


def _instant(t: float) -> datetime:
    return datetime.fromtimestamp(t, timezone.utc)


def _body(worker: str, line: dict[str, Any]) -> Body:
    key = line["key"] or ""
    return Body(
        t=line["t"],
        event=line["event"],
        worker=worker,
        pid=line["pid"],
        key=key,
        entry=key.rpartition("@")[0],
        epoch=int(line["epoch"] or 0),
        attempt=int(line["attempt"] or 1),
        retries=line["retries"],
        id=line["id"],
        redelivered=line["redelivered"],
    )


def _terms(journals: list[tuple[str, dict[str, Any]]], fleet: Fleet) -> list[Term]:
    """Each term, from `elected` to the beat's own word that it is over, the next election, or its death."""
    terms: list[Term] = []
    elected = [(name, line) for name, line in journals if line.get("action") == "elected"]
    over = [(name, line) for name, line in journals if line.get("action") in ("lost", "released")]
    for number, (name, line) in enumerate(elected):
        ends = [other["t"] for beat, other in over if beat == name and other["t"] > line["t"]]
        ends += [life.t for life in fleet.lives if life.name == name and life.t > line["t"]]
        ends += [other["t"] for _, other in elected[number + 1 :]]
        terms.append(Term(name, line["pid"], int(line["epoch"]), line["t"], min(ends, default=fleet.now())))
    return terms


def _report(beat: str, line: dict[str, Any]) -> Report | None:
    if line["event"] == "skipped":
        return Report(
            line["t"],
            beat,
            "skipped",
            line["entry"],
            line["first"],
            line["last"],
            line["count"],
            line["reason"],
        )
    if line.get("action") == "missed":
        match = _RANGE.search(line["text"])
        if match is None:
            raise ValueError(f"no range in {line['text']!r}")
        first, last = (_unix(match["slot"] or match[name]) for name in ("first", "last"))
        return Report(line["t"], beat, "missed", line["entry"], first, last, line["count"], line["reason"])
    return None


def _unix(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def _effects(fleet: Fleet) -> list[Effect]:
    connection = sqlite3.connect(fleet.effects)
    try:
        rows = connection.execute("SELECT t, key, fence, accepted, run, pid FROM effects ORDER BY rowid")
        return [Effect(t, key, fence, bool(accepted), run, pid) for t, key, fence, accepted, run, pid in rows]
    finally:
        connection.close()
