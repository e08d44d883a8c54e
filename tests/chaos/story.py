"""A run that was made up: sound at first, and then whatever a test tells of it."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone

from celery_leaderbeat.tick import tick_key
from tests.chaos.checker import Verdict, check
from tests.chaos.fleet import Life
from tests.chaos.history import Body, Effect, End, History, Loss, Report, Term
from tests.chaos.nemesis import Struck
from tests.chaos.plan import Fault
from tests.chaos.schedule import Entry
from tests.chaos.tap import Arrival

__all__ = ["BEGAN", "DUPLICATE", "ENTRIES", "EPOCH", "LATE", "MISSED", "RERUN", "SLOTS", "Story", "key"]

BEGAN = 1_800_000_000.0
EPOCH = 1_800_000_000
MISSED = Entry("m", "early", 0.0, 10.0, policy={"prefer": "missed", "catch_up": "all"})
DUPLICATE = Entry("d", "early", 0.0, 10.0, policy={"prefer": "duplicate", "catch_up": "all"})
RERUN = Entry("r", "early", 0.0, 10.0, policy={"prefer": "missed", "on_crash": "rerun", "max_attempts": 9})
LATE = Entry("l", "late", 0.0, 10.0, policy={"prefer": "duplicate", "catch_up": "all"})
ENTRIES = {entry.name: entry for entry in (MISSED, DUPLICATE, RERUN, LATE)}
SLOTS = [BEGAN + 10.0 * number for number in range(1, 7)]


def key(entry: Entry, number: int = 2) -> str:
    return tick_key(entry.name, datetime.fromtimestamp(SLOTS[number], timezone.utc))


class Story:
    """A sound run of a minute: each slot is sent, begins and ends; what is told on top of that is the test's."""

    def __init__(self, entries: dict[str, Entry] = ENTRIES, broker: str = "rabbitmq") -> None:
        self.entries = entries
        self.broker = broker
        self.arrivals: list[Arrival] = []
        self.bodies: list[Body] = []
        self.effects: list[Effect] = []
        self.reports: list[Report] = []
        self.struck: list[Struck] = []
        self.losses: list[Loss] = []
        self.ends: dict[str, End] = {}
        self.terms = [Term("beat0", 1, EPOCH, BEGAN - 5, BEGAN + 90)]
        for entry in entries.values():
            for number in range(len(SLOTS)):
                self.sent(entry, number)
                self.ran(entry, number)

    def forget(self, entry: Entry, number: int = 2) -> None:
        """Nothing was seen of this slot."""
        gone = key(entry, number)
        self.arrivals = [arrival for arrival in self.arrivals if arrival.key != gone]
        self.forget_run(entry, number)

    def forget_run(self, entry: Entry, number: int = 2) -> None:
        """It didn't run."""
        gone = key(entry, number)
        self.bodies = [body for body in self.bodies if body.key != gone]
        self.effects = [effect for effect in self.effects if effect.key != gone]
        self.ends.pop(gone, None)

    def sent(self, entry: Entry, number: int = 2, after: float = 0.01, attempt: int = 1) -> None:
        self.arrivals.append(Arrival(SLOTS[number] + after, "beat0", key(entry, number), attempt))

    def ran(
        self,
        entry: Entry,
        number: int = 2,
        after: float = 0.02,
        *,
        epoch: int = EPOCH,
        attempt: int = 1,
        worker: str = "worker0",
        written: bool = True,
    ) -> None:
        t, pid = SLOTS[number] + after, int(worker[-1])
        body = Body(t, "start", worker, pid, key(entry, number), entry.name, epoch, attempt, 0)
        self.bodies += [body, replace(body, t=t + 0.1, event="end")]
        if written:
            fence = epoch * 1_000_000 + attempt
            self.effects.append(Effect(t + 0.05, key(entry, number), fence, True, "", pid))
        self.ends[key(entry, number)] = End("done", "", "done", attempt, BEGAN + 70)

    def said(self, entry: Entry, what: str, reason: str, number: int = 2, after: float = 5.0) -> None:
        slot = SLOTS[number]
        self.reports.append(Report(slot + after, "beat0", what, entry.name, slot, slot, 1, reason))
        self.ends[key(entry, number)] = End(what, reason, what, 1, BEGAN + 70)

    def fault(self, kind: str, target: str, number: int = 2, lasts: float = 5.0) -> None:
        fault = Fault(SLOTS[number] - BEGAN, kind, target, lasts)
        self.struck.append(Struck(fault, SLOTS[number], SLOTS[number] + lasts))

    def history(self) -> History:
        return History(
            seed=1,
            began=BEGAN,
            ended=BEGAN + 60,
            settled=BEGAN + 90,
            versions={0: self.entries},
            broker=self.broker,
            struck=self.struck,
            lives=[Life(BEGAN - 6, "beat0", 1, 0)],
            terms=self.terms,
            arrivals=self.arrivals,
            bodies=sorted(self.bodies, key=lambda body: body.t),
            effects=sorted(self.effects, key=lambda effect: effect.t),
            reports=self.reports,
            ends=self.ends,
            losses=self.losses,
        )

    def verdict(self) -> Verdict:
        return check(self.history())

    def violations(self) -> list[tuple[str, str]]:
        return [(finding.kind, finding.key) for finding in self.verdict().findings]
