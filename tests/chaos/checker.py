"""Judges a run: matches the slots that had to run with what really ran, and says what no policy allows. Pure.

A violation is one of

`lost`         the entry prefers a duplicate, and no message of the slot reached the broker, though neither the
               schedule nor the policy (catch_up, lookback, deadline, overlap) let it be left out
`second send`  the entry prefers a missed slot, and one attempt was handed to the broker twice
`doubled`      the guarded effect of a slot counted twice, or a body began twice, where the policy doesn't allow it
`stale`        a body began after one of a newer epoch or attempt had begun; or its effect counted
`early`        a message was sent before its slot
`epoch`        two replicas led under one epoch
`unexplained`  the slot has no end, or one that the policy doesn't know, or that contradicts what was seen; or its
               message was lost where no fault explains it
`exit`         a beat ended by itself
`harness`      the harness itself failed, and the run is worth nothing

What a policy, or a broker, allows is no violation. It is counted, by its reason.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from celery_leaderbeat.policy import REASON_CATCH_UP_NONE, REASON_DEADLINE, REASON_LOOKBACK
from celery_leaderbeat.recall import LOST
from tests.chaos.expected import Called, called_for
from tests.chaos.history import Body, Effect, History, Report
from tests.chaos.schedule import CHANGING, EXPIRES

__all__ = ["VIOLATIONS", "Finding", "Verdict", "check"]

VIOLATIONS = ("lost", "second send", "doubled", "stale", "early", "epoch", "unexplained", "exit", "harness")

#: The replicas go by the server's clock, which is this machine's; their measurement lags, and never leads.
_CLOCK_ERROR = 0.05
#: A leader's lease, in seconds.
_LEASE = 3.0
#: So long the next leader may take to find out what became of claims of entries that prefer a missed slot: until that
#: leader can't publish them any more, and a restart of Redis, in seconds.
_DOUBT = 6.0
#: So long a slot that prefers a duplicate, with on_crash "skip", may have waited to be sent again by the leader that took
#: it up: for its broker, or for its turn, in seconds. Lost meanwhile, it is missed (docs/data-loss.md): the worker that
#: began it may have died.
_TAKEN_UP = 15.0
#: A run's lease, and the patience of a worker that can't tell the ledger, in seconds; see `fleet.CONF`.
_RUN_LEASE, _PATIENCE = 4.0, 4.0
#: Seconds within which a message that nobody holds has come to a worker.
_DELIVERY = 30.0


@dataclass(frozen=True)
class Finding:
    """A violation."""

    kind: str
    key: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.key}: {self.what}"


@dataclass
class Verdict:
    """What was found.

    Attributes:
        slots: how many slots had to be looked at.
        ends: how many of them came to which end.
        end_of: the same for each tick key, for the drawing.
        findings: the violations.
        allowed: what isn't a violation, and is worth telling: reason -> how often.
    """

    slots: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    end_of: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    allowed: Counter[str] = field(default_factory=Counter)

    @property
    def counts(self) -> dict[str, int]:
        """How many violations of each kind."""
        found = Counter(finding.kind for finding in self.findings)
        return {kind: found[kind] for kind in VIOLATIONS}

    @property
    def sound(self) -> bool:
        """Whether there is none."""
        return not self.findings


def check(history: History) -> Verdict:
    """Judge a run."""
    return _Judge(history).verdict()


class _Judge:
    def __init__(self, history: History) -> None:
        self.history = history
        self.faults = _Faults(history)
        self.called = called_for(history)
        self.arrivals = defaultdict(list)
        for arrival in history.arrivals:
            self.arrivals[arrival.key].append(arrival)
        self.latest_of = {arrival.key.rpartition("@")[0]: arrival.t for arrival in history.arrivals}
        self.starts: defaultdict[str, list[Body]] = defaultdict(list)
        for body in history.bodies:
            if body.event == "start":
                self.starts[body.key].append(body)
        self.effects: defaultdict[str, list[Effect]] = defaultdict(list)
        for effect in history.effects:
            self.effects[effect.key].append(effect)
        self.reports: defaultdict[str, list[Report]] = defaultdict(list)
        for report in history.reports:
            self.reports[report.entry].append(report)
        self.found = Verdict()

    def verdict(self) -> Verdict:
        for trouble in self.history.trouble:
            self._find("harness", "-", trouble)
        for struck in self.history.struck:
            if struck.trouble:
                self._find("harness", str(struck.fault), struck.trouble)
        for exit_ in self.history.exits:
            if exit_.name.startswith("worker"):
                # Celery's consumer ends at some errors of its Redis connection ("Unrecoverable error"); it isn't ours.
                self.found.allowed["workers that Celery ended, and that were started again"] += 1
            else:
                self._find("exit", exit_.name, f"it ended with status {exit_.status}")
        self._epochs()
        self._uncalled()
        for called in self.called.values():
            slot = _Slot(self, called)
            end = slot.end()
            if called.must or end != "nothing":
                self.found.slots += 1
                self.found.ends[end] += 1
                self.found.end_of[called.key] = end
            slot.judge(end)
        return self.found

    def _find(self, kind: str, key: str, what: str) -> None:
        self.found.findings.append(Finding(kind, key, what))

    def _epochs(self) -> None:
        # A leader that finds its own lease in Redis after it had lost its trust in it goes on with the same term.
        leaders = defaultdict(set)
        for term in self.history.terms:
            leaders[term.epoch].add((term.beat, term.pid))
        for epoch, who in leaders.items():
            if len(who) > 1:
                self._find("epoch", str(epoch), f"{sorted(who)} led under it")

    def _uncalled(self) -> None:
        """Messages and bodies of slots that no version of the code called for."""
        latest = max((called.slot for called in self.called.values()), default=0.0)
        for key in {*self.arrivals, *self.starts} - self.called.keys():
            slot = _time_of(key)
            if self.history.began < slot <= min(self.history.ended, latest):
                self._find("unexplained", key, "nobody called for this slot")


class _Slot:
    """One slot that was called for, and what was seen of it."""

    def __init__(self, judge: _Judge, called: Called) -> None:
        self.judge_ = judge
        self.called = called
        self.entry = called.entry
        self.key = called.key
        self.faults = judge.faults
        self.arrivals = sorted(judge.arrivals[called.key], key=lambda arrival: arrival.t)
        self.starts = judge.starts[called.key]
        self.effects = [effect for effect in judge.effects[called.key] if effect.accepted]
        self.told = judge.history.ends.get(called.key)
        self.reports = [
            report
            for report in judge.reports[self.entry.name]
            if report.first - 1e-4 <= called.slot <= report.last + 1e-4
        ]

    def end(self) -> str:
        """What became of it, by what was seen, and only then by what was said."""
        if self.effects or (self.starts and not self.entry.fenced):
            return "done"
        if self.starts:
            return "begun"
        if self.arrivals:
            return "sent"
        if self.told is not None and self.told.end in ("missed", "skipped"):
            return self.told.end
        return self.reports[-1].what if self.reports else "nothing"

    def judge(self, end: str) -> None:
        for kind, what in self._violations(end):
            self.judge_._find(kind, self.key, what)

    def _violations(self, end: str) -> Iterator[tuple[str, str]]:
        yield from self._sends()
        if self.entry.fenced:
            yield from self._runs()
        if end == "nothing":
            yield from self._nothing()
        elif end in ("missed", "skipped"):
            yield from self._left_out(end)
        elif self.entry.fenced:
            yield from self._came_to_an_end(end)
        yield from self._contradictions(end)

    # What was sent

    def _sends(self) -> Iterator[tuple[str, str]]:
        if self.arrivals and self.arrivals[0].t < self.called.slot - _CLOCK_ERROR:
            yield "early", f"sent {self.called.slot - self.arrivals[0].t:.3f} s before its slot"
        copies = Counter(arrival.attempt for arrival in self.arrivals)
        several = {attempt: count for attempt, count in copies.items() if count > 1}
        if self.entry.prefer == "missed":
            for attempt, count in several.items():
                yield (
                    "second send",
                    f"attempt {attempt} was handed to the broker {count} times {self._senders()}",
                )
        elif several:
            self._allow(
                "second copies of slots that prefer a duplicate", sum(several.values()) - len(several)
            )
        if len(copies) > 1 and self.entry.on_crash != "rerun":
            kind = "second send" if self.entry.prefer == "missed" else "unexplained"
            yield kind, f"it was sent as attempts {sorted(copies)}, and on_crash isn't rerun"

    def _senders(self) -> str:
        begin = self.judge_.history.began
        return "(" + ", ".join(f"{a.beat} at {a.t - begin:.3f} s" for a in self.arrivals) + ")"

    # What ran

    def _runs(self) -> Iterator[tuple[str, str]]:
        for number, body in enumerate(self.starts):
            before = self.starts[:number]
            newer = [other for other in before if other.fence > body.fence]
            if newer:
                yield from self._superseded(body, newer[0])
                continue
            again = [other for other in before if other.fence == body.fence and other.retries == body.retries]
            if again:
                yield from self._again(again[-1], body)
        for earlier, later in zip(self.effects, self.effects[1:], strict=False):
            yield from self._second_effect(earlier, later)

    def _superseded(self, body: Body, newer: Body) -> Iterator[tuple[str, str]]:
        # Between the ledger's word that it may run and the body's first line a worker can freeze for longer than
        # its run lease; nothing but the guarded write can stop it then.
        written = any(
            effect.pid == body.pid and effect.t > body.t and effect.fence // 1_000_000 == body.epoch
            for effect in self.effects
        )
        if not written and self.faults.of(body.worker, newer.t - _RUN_LEASE, body.t, "pause"):
            self._allow("bodies of thawed workers that had been superseded, without effect")
            return
        if not written and self.faults.lost_data(newer.t - 1, body.t):
            # A message of whose slot there is no record runs, and records itself; only the guarded write is left.
            self._allow("bodies of superseded messages without effect: Redis had lost the record")
            return
        yield (
            "stale",
            f"epoch {body.epoch} attempt {body.attempt} began after epoch {newer.epoch} attempt {newer.attempt}",
        )

    def _again(self, first: Body, second: Body) -> Iterator[tuple[str, str]]:
        """The same attempt began twice."""
        redelivered = self.entry.acks_late and self.entry.on_crash == "auto"
        if redelivered and self.faults.worker_struck(first, second.t):
            # on_crash "auto": what the broker redelivers runs again once the dead run's lease is over.
            self._allow("redeliveries of acks_late tasks whose worker was struck")
        elif self.faults.lost_data(min(first.t, self.faults.asked_at(second)) - 1, second.t):
            # A message of whose slot there is no record runs, and records itself.
            self._allow("bodies that began again because Redis had lost the record")
        else:
            yield (
                "doubled",
                (
                    f"attempt {second.attempt} began on {first.worker} and {second.t - first.t:.2f} s later on"
                    f" {second.worker}"
                ),
            )

    def _second_effect(self, earlier: Effect, later: Effect) -> Iterator[tuple[str, str]]:
        body = next(
            (start for start in reversed(self.starts) if start.pid == earlier.pid and start.t <= earlier.t),
            None,
        )
        if self.entry.on_crash == "rerun" and body and self.faults.worker_struck(body, later.t):
            # on_crash "rerun": a worker that dies between its effect and its word to the ledger has its slot run again.
            self._allow("slots run again (rerun) whose worker was struck between its effect and its word")
        elif self.faults.lost_data(earlier.t - 10, later.t):
            self._allow("effects that came again because Redis had lost the record")
        else:
            yield "doubled", f"its effect counted twice: under the fences {earlier.fence} and {later.fence}"

    # How it ended

    def _nothing(self) -> Iterator[tuple[str, str]]:
        if not self.called.must:
            return
        told = (
            f"the audit says {self.told.end} ({self.told.reason})"
            if self.told
            else "the audit doesn't know it"
        )
        if self.told and self._waits_for_its_turn():
            self._allow("not decided yet, behind others of an entry whose slots queue")
            return
        if self.faults.lost_data(self.called.slot - 5, self.called.slot + 15):
            told += ", and Redis lost its data then"
        yield ("lost" if self.entry.prefer == "duplicate" else "unexplained"), f"no trace of it; {told}"

    def _waits_for_its_turn(self) -> bool:
        """Whether an earlier slot of its entry is unfinished, and slots of it queue."""
        assert self.told is not None
        # One by one: while slots of the entry are sent, the others have their turn to come.
        latest = self.judge_.latest_of.get(self.entry.name, 0.0)
        return (
            self.entry.overlap == "queue"
            and self.told.end in ("returned", "overdue")
            and latest > self.judge_.history.settled - _DELIVERY
        )

    def _left_out(self, end: str) -> Iterator[tuple[str, str]]:
        reasons = [(report.reason, report.t) for report in self.reports]
        if self.told is not None and self.told.end == end:
            reasons.append((self.told.reason, self.told.asked_at))
        if end == "missed" and any(reason.startswith("unconfirmed") for reason, _ in reasons):
            if self.entry.prefer == "duplicate":
                yield "lost", f"missed: {reasons[0][0]}"
            else:
                self._allow("missed: unconfirmed")
            return
        if end == "missed" and any(reason == LOST for reason, _ in reasons):
            doubt = _DOUBT
            if self.entry.prefer == "duplicate":
                doubt = _TAKEN_UP if self.entry.on_crash == "skip" else _LEASE
            if self.faults.lost_data_and_leader(self.called.slot - 15, max(t for _, t in reasons), doubt):
                # docs/data-loss.md: "If it died together with the data, the gap is missed".
                self._allow("missed: Redis lost its data while its leader was struck")
            elif self.entry.prefer == "missed" and self.faults.lost_data_and_stayed_away(
                self.called.slot - 15, max(t for _, t in reasons)
            ):
                # The same: "... and the whole outage where it was away".
                self._allow("missed: Redis lost its data, and was away for longer than its leader's trust")
            else:
                kind = "lost" if self.entry.prefer == "duplicate" else "unexplained"
                yield kind, f"missed: {LOST}, and its leader was well"
            return
        for reason, t in reasons:
            if self._allows(end, reason, t):
                self._allow(f"{end}: {reason.partition(':')[0]}")
                return
        kind = "lost" if self.entry.prefer == "duplicate" and end == "missed" else "unexplained"
        yield kind, f"{end}: {'; '.join(sorted({reason for reason, _ in reasons}))}"

    def _allows(self, end: str, reason: str, t: float) -> bool:
        """Whether the entry's policy lets a slot be left out for this reason, as far as that can be seen from here."""
        entry, slot = self.entry, self.called.slot
        if end == "skipped":
            if reason.startswith("overlap"):
                return entry.overlap != "allow"
            return entry.name in CHANGING and ("changed" in reason or "removed" in reason)
        if reason == REASON_CATCH_UP_NONE:
            return entry.catch_up == "none"
        if reason == REASON_LOOKBACK:
            return self._due_after(slot, t) >= entry.lookback
        if reason.startswith(REASON_DEADLINE):
            deadline = entry.policy.get("deadline")
            return deadline is not None and t - slot > float(deadline)
        if entry.name in CHANGING and "removed" in reason:
            return True
        return ("lost its record" in reason or "record is gone" in reason) and self.faults.lost_data(
            slot - 15, t
        )

    def _due_after(self, slot: float, t: float) -> int:
        if self.entry.every is not None:
            return int(t // self.entry.every) - round(slot / self.entry.every)
        return int((t - slot) // 60)

    def _came_to_an_end(self, end: str) -> Iterator[tuple[str, str]]:
        """A message was sent to a FencedTask: it was done, or something that befell the workers explains why not."""
        if end == "done":
            return
        since = self.arrivals[0].t if self.arrivals else self.starts[0].t
        expired = self.judge_.history.expired.get(self.key)
        if end == "sent" and expired is not None:
            if expired - since > EXPIRES - 1:
                self._allow("sent, and expired before a worker had time for it")
            else:
                yield "unexplained", f"expired {expired - since:.1f} s after it was sent"
            return
        last = max([a.t for a in self.arrivals] + [s.t for s in self.starts])
        if end == "begun" and self._died():
            self._allow("begun, and its worker was struck")
        elif end == "begun" and self._waits_for_its_retry() and self._undelivered(last, last):
            self._allow("begun, and its retry was struck on its way to a worker")
        elif end == "sent" and self._undelivered(since, last):
            self._allow(
                "sent, and struck on its way to a worker, which acknowledges before it runs, or by Redis"
            )
        elif self.told is not None and self.told.state == "refused":
            yield "unexplained", f"refused: {self.told.reason}"
        else:
            refusals = "; ".join(self.judge_.history.refused.get(self.key, ()))
            yield "unexplained", f"{end} and no more (audit: {self.told}; refused: {refusals or 'no'})"

    def _died(self) -> bool:
        may_die = self.entry.on_crash in ("skip", "auto") or (
            self.told is not None and self.told.end == "abandoned"
        )
        return may_die and any(self.faults.worker_struck(body, body.t + _DELIVERY) for body in self.starts)

    def _waits_for_its_retry(self) -> bool:
        return self.told is not None and self.told.end == "retrying"

    def _undelivered(self, since: float, last: float) -> bool:
        # With Redis, a worker takes a message off the list before it notes that it has it; with RabbitMQ, a task that
        # acknowledges early does so before it begins. Who is struck in between loses it.
        at_most_once = not self.entry.acks_late or self.faults.broker_is_redis
        return at_most_once and self.faults.workers_struck(since, last + _DELIVERY)

    def _contradictions(self, end: str) -> Iterator[tuple[str, str]]:
        told = self.told
        if told is None:
            return
        if told.end == "unexplained":
            yield "unexplained", f"the audit says so: {told.reason}"
        elif end in ("nothing", "missed", "skipped") and told.end in ("done", "failed", "sent"):
            yield "unexplained", f"the audit says {told.end}, and no message of it was seen"
        elif told.end == "skipped" and self.starts and told.attempt == 1 and told.asked_at > self.starts[0].t:
            # One that an entry called for before it was removed is sent once the entry is back.
            yield "unexplained", "the audit says skipped, and it ran"
        elif told.end == "done" and self.entry.fenced and not self.effects:
            yield "unexplained", "the audit says done, and there is no effect"

    def _allow(self, what: str, count: int = 1) -> None:
        self.judge_.found.allowed[what] += count


class _Faults:
    """What befell whom when."""

    def __init__(self, history: History) -> None:
        self._struck: defaultdict[str, list[tuple[str, float, float]]] = defaultdict(list)
        for struck in history.struck:
            process = struck.fault.target.partition(":")[0]
            self._struck[process].append((struck.fault.kind, struck.begun, struck.ended))
        self._workers = [name for name in self._struck if name.startswith("worker")]
        self._terms = history.terms
        self._losses = [loss.t for loss in history.losses]
        self.broker_is_redis = history.broker == "redis"

    def of(self, process: str, since: float, until: float, *kinds: str) -> bool:
        """Whether a fault of these kinds, or of any, befell a process in this time."""
        return any(
            begun <= until and ended >= since and (not kinds or kind in kinds)
            for kind, begun, ended in self._struck.get(process, ())
        )

    def worker_struck(self, body: Body, until: float) -> bool:
        """Whether something befell a body's worker, or the ledger that it reports to, before `until`."""
        return self.of(body.worker, body.t - 1, until) or self.of("ledger", body.t - 1, until)

    def asked_at(self, body: Body) -> float:
        """When a body's worker asked whether it may run: before a pause that lay between the answer and the body."""
        return min(
            (
                begun
                for kind, begun, ended in self._struck.get(body.worker, ())
                if kind == "pause" and begun <= body.t <= ended + 1
            ),
            default=body.t,
        )

    def workers_struck(self, since: float, until: float) -> bool:
        """Whether something befell any worker, or Redis, in this time."""
        return any(self.of(name, since - 1, until) for name in (*self._workers, "ledger"))

    def lost_data_and_leader(self, since: float, until: float, doubt: float) -> bool:
        """Whether Redis lost its data in this time, while something befell whoever led.

        Or had led so many seconds before (`doubt`), and was struck as its term ended: so long nobody knows what became
        of its claims.
        """
        for lost in self._losses:
            if since <= lost <= until:
                for led in self._terms:
                    ended = min(led.until, lost)
                    ours = led.since <= lost and ended >= lost - doubt
                    if ours and self.of(led.beat, ended - _LEASE, lost + _LEASE):
                        return True
        return False

    def lost_data_and_stayed_away(self, since: float, until: float) -> bool:
        """Whether Redis lost its data in this time, and was away then, so that whoever led lost its trust."""
        return any(
            since <= lost <= until
            and self.of("ledger", lost + 0.01, lost + _LEASE, "redis pause", "redis restart", "failover")
            for lost in self._losses
        )

    def lost_data(self, since: float, until: float) -> bool:
        """Whether Redis lost its data in this time."""
        return any(since <= t <= until for t in self._losses)


def _time_of(key: str) -> float:
    from celery_leaderbeat.tick import parse_tick_key

    return parse_tick_key(key)[1].timestamp()


def summary(verdict: Verdict) -> Mapping[str, Sequence[str]]:
    """The verdict as lines."""
    return {
        "ends": [f"{count} {end}" for end, count in verdict.ends.most_common()],
        "allowed": [f"{count} {what}" for what, count in verdict.allowed.most_common()],
        "violations": [f"{count} {kind}" for kind, count in verdict.counts.items()],
    }
