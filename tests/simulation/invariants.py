"""What must hold of a story, whatever happened in it: the journal, which saw everything, against the audit."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from celery_leaderbeat.audit import Audit, Explanation
from celery_leaderbeat.policy import REASON_CATCH_UP_NONE, REASON_DEADLINE, REASON_LOOKBACK
from celery_leaderbeat.tick import parse_tick_key, slot_to_us
from tests.simulation.journal import Journal, Run
from tests.simulation.workers import TASKS
from tests.simulation.world import BEGAN, World

__all__ = ["Verdict", "judge", "unfinished"]

#: Ends at which nothing is left to do.
_FINAL = ("done", "failed", "abandoned", "missed", "skipped", "refused")
#: So far back slots are asked for.
_BEFORE = timedelta(hours=1)
#: Seconds within which a run has come to its end, whatever happens to it.
_A_RUN = 200.0
#: Ends of slots of which a message has left.
_SENT = ("sent", "running", "retrying", "done", "failed", "refused", "abandoned")


@dataclass
class Verdict:
    """What was found: the broken guarantees, and how many slots have which end."""

    broken: list[str] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return ", ".join(f"{count} {end}" for end, count in sorted(self.ends.items()))


def judge(world: World, until: datetime, after: datetime | None = None) -> Verdict:
    """Judge the slots of all entries up to a time. What comes later is under way, and may look like anything.

    Slots up to `after` aren't judged: Redis has lost what it knew of them.
    """
    verdict = Verdict(broken=[*world.journal.violations, *world.journal.troubles])
    runs: defaultdict[str, list[Run]] = defaultdict(list)
    for run in world.journal.runs.values():
        runs[run.key].append(run)
    since = datetime.fromtimestamp(BEGAN / 1e6 - 1, timezone.utc)
    ledger = world.ledger()
    # Nothing happens while the world is judged.
    ledger.events = functools.cache(ledger.events)  # type: ignore[method-assign]
    for name, entry in world.schedule.items():
        audit = ledger.audit(name, since, until)
        verdict.ends.update(audit.counts)
        verdict.broken += _uncounted(name, entry, audit)
        # What somebody has asked for may be of the time before the world began.
        earlier = ledger.audit(name, since - _BEFORE, since).slots
        held_up = any(_Slot(slot, entry, world.journal, [], False).holds_up for slot in earlier)
        holding = unfinished(world, name)
        for slot in audit.slots:
            judged = _Slot(slot, entry, world.journal, runs[slot.key], held_up)
            # Also one that isn't judged.
            held_up = held_up or judged.holds_up
            if after is not None and slot.slot <= after:
                continue
            judged.asked_for_in_vain = bool(holding - {slot.key}) and " has asked for it" in slot.reason
            verdict.broken += [f"{slot.key} ({slot.end}: {slot.reason}): {what}" for what in judged.broken()]
    verdict.broken += _early(world.journal)
    return verdict


def _uncounted(name: str, entry: Mapping[str, Any], audit: Audit) -> Iterator[str]:
    """Whether the audit has all slots that the schedule called for, counted here in another way."""
    if audit.not_computed or audit.known_since is None:
        yield f"{name}: its slots can't be computed"
    elif isinstance(entry["schedule"], (int, float, timedelta)):
        period = slot_to_us(datetime.fromtimestamp(0, timezone.utc) + _as_delta(entry["schedule"]))
        first, last = slot_to_us(audit.known_since), slot_to_us(audit.until)
        # What Redis lost, it may have learnt again only after the time that is judged.
        wanted = max(last // period - first // period, 0)
        found = sum(slot.called_for for slot in audit.slots)
        if wanted != found:
            yield f"{name}: {wanted} slots were called for, and the audit has {found}"


def unfinished(world: World, name: str) -> set[str]:
    """The slots of an entry with an overlap policy that still count as unfinished: whatever is asked for waits for them.

    As `claim` has it. One of which nobody knows whether its message left counts until it must have begun, which may be
    an hour.
    """
    ledger, now = world.ledger(), world.hub.now / 1000
    entry = ledger.entries(name).get(name)
    found = set()
    for key in entry.open if entry is not None else ():
        record = ledger.store.table(ledger.store.keys.slot(key))
        state, counts = record.get("state"), now < float(record.get("busy_until", 0))
        if (
            (state in ("claimed", "sent", "unconfirmed", "retrying") and counts)
            or (
                state == "running"
                and (record["on_crash"] == "rerun" or now < float(record.get("run_until", 0)))
            )
            or (state == "returned" and counts and int(record["attempt"]) > 1)
        ):
            found.add(key)
    return found


def _as_delta(schedule: Any) -> timedelta:
    return schedule if isinstance(schedule, timedelta) else timedelta(seconds=schedule)


def _early(journal: Journal) -> Iterator[str]:
    for key, attempts in journal.sent.items():
        earliest = min(copy.at for copies in attempts.values() for copy in copies)
        if earliest < slot_to_us(parse_tick_key(key)[1]):
            yield f"{key} was sent before its time"


class _Slot:
    """One slot: what the audit says, what happened, and what its entry was promised."""

    def __init__(
        self,
        slot: Explanation,
        entry: Mapping[str, Any],
        journal: Journal,
        runs: list[Run],
        held_up: bool,
    ) -> None:
        policy = entry.get("options", {}).get("leaderbeat", {})
        self.prefer = policy.get("prefer", "missed")
        self.on_crash = policy.get("on_crash", "auto")
        self.overlap = policy.get("overlap", "allow")
        #: One slot after the other: what isn't finished holds up what is to be sent next.
        unfinished = ("sent", "unconfirmed", "running", "retrying", "returned")
        queued = self.overlap == "queue"
        self.holds_up = queued and slot.record is not None and slot.record.state in unfinished
        self.held_up = held_up
        #: Somebody has asked for it, and it waits for another one that counts as unfinished.
        self.asked_for_in_vain = False
        #: And none is left out.
        self.paced = queued and policy.get("catch_up") == "all"
        self.catch_up = policy.get("catch_up", "latest")
        self.lookback = policy.get("lookback")
        self.deadline = policy.get("deadline")
        self.max_attempts = policy.get("max_attempts", 3)
        self.fenced = entry["task"].startswith("fenced")
        self.acks_late = TASKS[entry["task"]][1]
        self.slot = slot
        self.end = slot.end
        self.runs = runs
        self.copies = journal.sent.get(slot.key, {})
        self.journal = journal
        self.bodies = journal.bodies.get(slot.key, [])
        self.asked_for = bool(slot.record and slot.record.request)
        self.done = [run for run in runs if run.ended == "done"]
        self.ended = [run for run in runs if run.ended in ("done", "failed")]

    def broken(self) -> Iterator[str]:
        yield from self._explained()
        yield from self._sent()
        if self.fenced:
            yield from self._ran()
            yield from self._came_to_an_end()

    def _explained(self) -> Iterator[str]:
        waits = (self.paced and self.held_up) or self.asked_for_in_vain
        if self.end in ("unexplained", "forgotten", "claimed") or (self.end == "overdue" and not waits):
            yield f"{self.end} isn't an explanation"
        if self.end == "returned" and not (self.held_up or self.slot.record.waits):
            yield "nobody has sent it again"

    def _sent(self) -> Iterator[str]:
        if self.prefer == "missed":
            for attempt, copies in self.copies.items():
                if len(copies) > 1:
                    yield f"attempt {attempt} was sent {len(copies)} times: {copies}"
            if len(self.copies) > 1 and self.on_crash != "rerun" and not self.asked_for:
                yield f"it was sent as {len(self.copies)} attempts"
        elif self.end == "missed" and not self._given_up():
            yield "a duplicate was preferred"
        if self.end in _SENT and not self.copies:
            yield "no message of it has ever reached the broker"
        if self.end in ("missed", "skipped"):
            # An earlier attempt may have run, and died; also one whose first run had put its message back.
            attempt = self.slot.record.attempt if self.slot.record else 1
            latest = [
                run
                for run in self.runs
                if run.attempt >= attempt or (run in self.ended and not self.asked_for)
            ]
            if latest:
                yield f"it ran: {latest}"

    def _given_up(self) -> bool:
        """Whether the entry's own policy gives the slot up, or Redis has lost what there was to know."""
        reason = self.slot.reason
        return (
            (reason == REASON_CATCH_UP_NONE and self.catch_up == "none")
            or (reason == REASON_LOOKBACK and (self.catch_up != "all" or self.lookback is not None))
            or (reason.startswith(REASON_DEADLINE) and self.deadline is not None)
            or self.journal.was_emptied
        )

    def _ran(self) -> Iterator[str]:
        if len(self.done) > 1:
            yield f"it is done by several runs: {self.done}"
        if len(self.ended) > 1 and not self.asked_for:
            yield f"it has ended several times: {self.ended}"
        if (self.end == "done") != bool(self.done):
            yield f"the runs that are done: {self.done}"
        if self.end == "failed" and not self.ended:
            yield "no run of it has failed"
        if self.end == "abandoned":
            attempts = self.slot.record.attempt
            if self.on_crash == "auto" or (self.on_crash == "rerun" and attempts < self.max_attempts):
                yield f"it was given up after {attempts} attempts"

    def _came_to_an_end(self) -> Iterator[str]:
        if self.end in (*_FINAL, "returned", "overdue"):
            return
        if self._unheard() or self._recently_begun():
            return
        if self.acks_late:
            # Its messages come back until they have been looked at, so nothing can be left behind.
            yield "it was left behind"
        elif self.end == "running" and self.on_crash != "auto":
            yield "its death has not been noticed"

    def _unheard(self) -> bool:
        """Whether its last run ended, and the ledger was out of reach for so long that it couldn't be told."""
        last = max(self.runs, key=lambda run: run.at, default=None)
        return last is not None and not last.ended and any(b.run == last.id and b.end for b in self.bodies)

    def _recently_begun(self) -> bool:
        """Whether its turn has come only now."""
        since = self.journal.hub.now - round(_A_RUN * 1e6)
        return any(run.at > since for run in self.runs)
