"""What happened, told by somebody who sees everything: the story's lines, and each effect outside of Redis."""

from __future__ import annotations

import json
import os
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from celery_leaderbeat.term import Term
from celery_leaderbeat.tick import slot_to_us
from tests.simulation.virtual import Hub, Process

__all__ = ["Body", "Journal", "LeftOut", "Run", "Sent"]

#: The lines of a story that a failed test shows.
_LAST = int(os.environ.get("LEADERBEAT_STORY_LINES", "60"))


#: Answers after which nobody knows for sure whether a message of the slot is on its way.
_DOUBTS = {"unconfirmed", "returned", "superseded"}


@dataclass(frozen=True)
class Sent:
    """A leader's message that reached the broker."""

    at: int
    epoch: int
    by: str


@dataclass(frozen=True)
class LeftOut:
    """What a leader said of slots that it won't send: `end` is `missed` or `skipped`; in µs, both ends included."""

    end: str
    first: int
    last: int
    reason: str
    by: str


@dataclass
class Run:
    """A run that the ledger let in.

    Attributes:
        leased_until: the end of its run lease, in µs.
        ended: the end that the ledger accepted: `done`, `failed`, `retrying`, `requeued`; else empty.
    """

    id: str
    key: str
    epoch: int
    attempt: int
    at: int
    by: Process | None
    leased_until: int
    ended: str = ""


@dataclass
class Body:
    """A body that was entered. `end` is how it was left: empty while it runs, and for ever where it died."""

    key: str
    run: str
    attempt: int
    by: Process
    at: int
    end: str = ""


@dataclass(repr=False)
class Journal:
    """The story, and the effects: what reached the broker, which runs were let in, which bodies ran.

    Attributes:
        exclusive: entries whose slots mustn't overlap.
        doubtful: slots of which a leader didn't know at some time whether they were sent.
        troubles: what the package itself didn't count on.
        violations: guarantees that were broken before everybody's eyes.
        elected_at: when somebody was elected the last time, in µs.
        first_elected_at: when somebody was elected the first time, in µs.
        left_out: what leaders said of slots that they won't send, by entry.
    """

    hub: Hub
    lines: list[tuple[int, str, str]] = field(default_factory=list)
    sent: defaultdict[str, dict[int, list[Sent]]] = field(default_factory=lambda: defaultdict(dict))
    runs: dict[str, Run] = field(default_factory=dict)
    bodies: defaultdict[str, list[Body]] = field(default_factory=lambda: defaultdict(list))
    exclusive: set[str] = field(default_factory=set)
    doubtful: set[str] = field(default_factory=set)
    _attempts: dict[str, int] = field(default_factory=dict)
    _claims: dict[str, int] = field(default_factory=dict)
    _decided: dict[str, datetime] = field(default_factory=dict)
    _lease: tuple[str, int] = ("", 0)
    epoch: int = 0
    elected_at: int = 0
    first_elected_at: int = 0
    left_out: defaultdict[str, list[LeftOut]] = field(default_factory=lambda: defaultdict(list))
    _given_up: dict[str, int] = field(default_factory=dict)
    _emptied: set[int] = field(default_factory=set)
    _latest: defaultdict[str, deque[Body]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=8))
    )
    troubles: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        copies = sum(len(copies) for attempts in self.sent.values() for copies in attempts.values())
        bodies = [body for bodies in self.bodies.values() for body in bodies]
        died = sum(not body.end for body in bodies)
        return f"{copies} messages, {len(self.runs)} runs, {len(bodies)} bodies ({died} died)"

    def note(self, who: object, what: str) -> None:
        """Add a line to the story."""
        self.lines.append((self.hub.now, str(who), what))

    def violate(self, what: str) -> None:
        """Note that a guarantee is broken, at the moment when it is."""
        self.note("!!!", what)
        self.violations.append(what)

    def trouble(self, text: str) -> None:
        """Note that the package met something that it doesn't count on."""
        self.note("!!!", text)
        self.troubles.append(text)

    def tail(self, count: int = _LAST) -> str:
        """The end of the story."""
        return "\n".join(self._line(*line) for line in self.lines[-count:])

    def about(self, key: str) -> str:
        """The lines of the story that name a tick key."""
        found = [line for line in self.lines if key in line[2]]
        return "\n".join(self._line(*line) for line in found[-_LAST:])

    def _line(self, at: int, who: str, what: str) -> str:
        time = datetime.fromtimestamp(at / 1e6, timezone.utc).strftime("%H:%M:%S.%f")
        return f"{time} {who:>12}  {what}"

    def answered(
        self,
        process: Process | None,
        script: str,
        keys: Sequence[str],
        args: Sequence[Any],
        answer: Any,
        state: str | None,
    ) -> None:
        """A script ran, whether or not its answer arrives; `state` is what `finish` left the slot in."""
        if script == "begin":
            self._begin(process, args, answer)
        elif script == "renew_run":
            for run, held in zip(args[1:], answer, strict=True):
                if held and run in self.runs:
                    self._renewed(self.runs[run], args[0])
            self.note(process or "late", f"renew_run -> {answer}")
        elif script == "finish":
            self._finish(process, args, answer, state)
        else:
            slots = _slots(keys)
            if script == "claim" and answer[0] == 1:
                self._claim(process, slots, args, answer[1:])
                return
            self.note(process or "late", f"{script} {slots or ''} -> {answer}")
            if script in ("elect", "renew", "release"):
                self._lead(script, args, answer)
            if script == "doubt":
                given_up = [
                    key for key, state in zip(slots, answer[1:], strict=False) if state == "unconfirmed"
                ]
                self._given_up.update(dict.fromkeys(given_up, self.hub.now))
            if not _DOUBTS.isdisjoint(map(str, answer if isinstance(answer, list) else ())):
                self.doubtful.update(slots)

    def _lead(self, script: str, args: Sequence[Any], answer: Any) -> None:
        if script == "elect" and answer[0] == "elected":
            epoch = Term.read(answer[1]).epoch
            if epoch <= self.epoch:
                self.violate(f"epoch {epoch} follows epoch {self.epoch}")
            self.elected_at = self.hub.now
            self.first_elected_at = self.first_elected_at or self.hub.now
            self.epoch, self._lease = epoch, (answer[1], self._lease_end(args[1]))
        elif script == "renew" and answer[0] == 1:
            if args[0] != self._lease[0]:
                self.violate(f"a lease was renewed for {args[0]}, who doesn't hold it")
            self._lease = (args[0], self._lease_end(args[1]))
        elif script == "release" and answer == "released":
            if args[0] != self._lease[0]:
                self.violate(f"a lease was released for {args[0]}, who doesn't hold it")
            self._lease = ("", 0)

    def _claim(
        self, process: Process | None, slots: Sequence[str], args: Sequence[Any], answers: Sequence[str]
    ) -> None:
        told = [f"{slot}: {found}" for slot, found in zip(slots, answers, strict=False)]
        self.note(process or "late", f"claim {', '.join(told)}")
        if "claimed" in answers and (
            args[0] != self._lease[0] or self._lease[1] < self.hub.now // 1000 * 1000
        ):
            self.violate(f"{slots[0]} (or one beside it) was claimed by who doesn't lead")
        for text, found in zip(args[3:], answers, strict=False):
            if found == "claimed":
                item = json.loads(text)
                self._attempts[item["key"]] = item["attempt"]
                self._claims[item["key"]] = int(args[1])
                # It had been given back by who turned out to be alive and to have it unsent.
                self._given_up.pop(item["key"], None)
                if item["attempt"] > item["max_attempts"] and not item["request"]:
                    self.violate(
                        f"{item['key']} is claimed as attempt {item['attempt']} of {item['max_attempts']}"
                    )

    def _begin(self, process: Process | None, args: Sequence[Any], answer: Any) -> None:
        run, key = str(args[0]), str(args[9])
        self.note(process or "late", f"begin {key} #{args[2]} e{args[1]} {run[-6:]} -> {answer}")
        if answer[0] != "run":
            return
        if int(args[2]) < self._attempts.get(key, 1):
            self.violate(f"{key} is begun as attempt {args[2]}, and attempt {self._attempts[key]} is claimed")
        if answer[1] in ("claimed", "sent", "unconfirmed") and int(args[1]) < self._claims.get(key, 0):
            self.violate(
                f"{key} is begun under epoch {args[1]}, and epoch {self._claims[key]} has claimed it"
            )
        # The record is its run's now, also where a newer epoch had claimed the slot and given it back.
        self._claims[key] = int(args[1])
        until = self._lease_end(args[6])
        before = [other for other in self.runs.values() if other.key == key and other.id != run]
        if answer[1] == "running" and all(other.leased_until <= self.hub.now for other in before):
            # It asked before and never saw the answer, and had been taken for dead since.
            self.doubtful.add(key)
        if run in self.runs:
            self.runs[run].leased_until = until
        else:
            self.runs[run] = Run(run, key, int(args[1]), int(args[2]), self.hub.now, process, until)

    def _renewed(self, run: Run, lease: Any) -> None:
        if run.leased_until <= self.hub.now:
            # It had been taken for dead.
            self.doubtful.add(run.key)
        run.leased_until = self._lease_end(lease)

    def _lease_end(self, lease: Any) -> int:
        # The scripts reckon in whole ms.
        return (self.hub.now // 1000 + int(lease)) * 1000

    def _finish(self, process: Process | None, args: Sequence[Any], answer: Any, state: str | None) -> None:
        run = self.runs.get(str(args[0]))
        key = run.key if run is not None else "?"
        self.note(process or "late", f"finish {key} {str(args[0])[-6:]} {args[1]} -> {answer}")
        if run is None or not answer[0] or run.ended:
            return
        if state == args[1] or (args[1] == "requeued" and state in ("sent", "retrying")):
            run.ended = str(args[1])
        else:
            self.violate(f"{key} is {state}, and its run {run.id} was told that its end, {args[1]}, counts")

    def emptied(self) -> None:
        """Redis has lost everything: nothing that it had granted stands any more."""
        self._emptied.add(self.epoch)
        self._lease = ("", 0)
        self._attempts.clear()
        self._claims.clear()
        self._decided.clear()
        self.doubtful.update(self.bodies, self.sent)
        for run in self.runs.values():
            run.leased_until = min(run.leased_until, self.hub.now)

    def reported(self, end: str, entry: str, first: datetime, last: datetime, reason: str) -> None:
        """A leader says that slots of an entry are missed or skipped."""
        by = str(self.hub.process or "")
        self.note(by, f"says of {entry}, {first:%H:%M:%S.%f} to {last:%H:%M:%S.%f}: {end}, {reason}")
        self.left_out[entry].append(LeftOut(end, slot_to_us(first), slot_to_us(last), reason, by))

    @property
    def was_emptied(self) -> bool:
        """Whether Redis has lost everything at some time."""
        return bool(self._emptied)

    def relied_on(self, lease: str, until: int, by: object) -> None:
        """A replica would rely on its lease until this time."""
        if lease == self._lease[0] and until > self._lease[1]:
            self.violate(
                f"{by} relies on its lease for {(until - self._lease[1]) / 1e6:.6f} s beyond its end"
            )

    def decided(self, last: Mapping[str, datetime]) -> None:
        """The last-decided slots of the entries, as they are now: they never move back."""
        for entry, slot in last.items():
            if slot < self._decided.get(entry, slot):
                self.violate(f"the last-decided slot of {entry} has moved back to {slot}")
        self._decided = dict(last)

    def published(self, key: str, due: int) -> None:
        """A leader publishes, and would have done so at `due` but for a freeze since it made sure that it leads.

        Until `due` nobody may have said that the slot is missed: the grace of whoever does so covers the slowest
        publish. It can't cover a leader that stands still after it made sure; how long it stood still is all that
        excuses it.
        """
        if self._given_up.get(key, due + 1) <= due:
            self.violate(f"{key} is published, and counts as missed already")

    def went_back(self, lease: str) -> None:
        """Redis has lost data, and holds this lease now: a leader of another hasn't heard of that yet."""
        if lease != self._lease[0]:
            self._emptied.add(self.epoch)

    def trusted(self, key: str, epoch: int) -> None:
        """A leader relies on its own clock for being the leader, and is about to publish."""
        leads = Term.read(self._lease[0]).epoch if self._lease[0] else 0
        if epoch in self._emptied:
            return
        if leads != epoch or self._lease[1] <= self.hub.now:
            self.violate(f"{key} is published by who trusts in epoch {epoch}, and its lease is over")

    def arrived(self, key: str, attempt: int, epoch: int, by: object) -> None:
        """A leader's message reached the broker."""
        self.note(by, f"the broker has {key} #{attempt} e{epoch}")
        self.sent[key].setdefault(attempt, []).append(Sent(self.hub.now, epoch, str(by)))

    def enter(self, key: str, run: str, attempt: int, by: Process) -> Body:
        """A body begins."""
        body = Body(key, run, attempt, by, self.hub.now)
        # A worker that froze after it was let in enters the body all the same.
        if self._lives(body):
            self._exclude(body)
        self.bodies[key].append(body)
        self._latest[key.rpartition("@")[0]].append(body)
        self.note(by, f"runs {key} #{attempt} as {run[-6:]}")
        return body

    def _exclude(self, body: Body) -> None:
        """A slot runs once at a time; and where slots of an entry mustn't overlap, none runs beside another.

        The latter as far as the leaders knew what there was: an earlier slot that was sent and counts as missed, or
        that the broker delivers again, comes when it comes.
        """
        key, entry = body.key, body.key.rpartition("@")[0]
        for other in self.bodies[key]:
            if self._lives(other):
                self.violate(f"{key} runs twice at once: {other.run} on {other.by}, {body.run} on {body.by}")
        if entry not in self.exclusive or key in self.doubtful or self.bodies[key]:
            return
        for other in self._latest[entry]:
            known = other.key not in self.doubtful and len(self.bodies[other.key]) == 1
            if other.key != key and known and self._lives(other):
                self.violate(f"{key} ({body.run}) runs beside {other.key} ({other.run}) of its entry")

    def leave(self, body: Body, end: str) -> None:
        """A body is left."""
        body.end = end
        self.note(body.by, f"{body.key} as {body.run[-6:]} has {end}")

    def _lives(self, body: Body) -> bool:
        """Whether a body runs under a live lease; a ghost may still be there when its lease is over."""
        run = self.runs.get(body.run)
        return not body.end and body.by.alive and run is not None and run.leased_until > self.hub.now


def _slots(keys: Sequence[str]) -> list[str]:
    """The tick keys among a script's keys."""
    return [str(key).partition(":slot:")[2] for key in keys if ":slot:" in str(key)]
