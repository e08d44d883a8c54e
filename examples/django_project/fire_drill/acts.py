"""The acts of the drill: each does something to the leader, waits, and notes what it found."""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from fire_drill.report import Check, lateness, moment
from fire_drill.stage import Process, Stage, wait_for
from fire_drill.view import View
from fire_drill.watch import Term, Watch

__all__ = ["ACTS", "Drill", "closing_checks", "curtain", "overture"]

#: What the README promises, in seconds.
HANDOVER_ON_SIGTERM = 0.150
HANDOVER_ON_KILL = 2.5
HANDOVER_ON_LAPSE = 0.5
EXIT_ON_SIGTERM = 3.0

#: How long the fleet is watched at least, in seconds.
AT_LEAST = 55.0


@dataclass
class Drill:
    """One drill: who plays, who looks, and what has been found."""

    stage: Stage
    view: View
    app: Any
    watch: Watch
    checks: list[Check] = field(default_factory=list)
    replayed: set[str] = field(default_factory=set)

    def check(self, what: str, expected: str, happened: str, ok: bool) -> None:
        self.checks.append(Check(what, expected, happened, ok))
        self.view.say(
            f"{what}: {happened}" + ("" if ok else f" (expected: {expected})"), "green" if ok else "bold red"
        )

    def server_time(self) -> float:
        """What the server says now."""
        seconds, micros = self.watch.client.time()
        return float(seconds + micros / 1e6)

    def leader(self) -> tuple[Process, Term]:
        """Who leads."""
        held = wait_for("a leader", self.watch.ledger.leader, 20)
        term = wait_for("the term's record", lambda: self.term(held.epoch), 5)
        return next(replica for replica in self.stage.replicas if replica.pid == term.pid), term

    def term(self, epoch: int) -> Term | None:
        self.watch.healthy()
        return next((term for term in list(self.watch.terms) if term.epoch == epoch), None)

    def next_term(self, after: Term, timeout: float) -> Term:
        """The first term after another."""

        def newer() -> Term | None:
            self.watch.healthy()
            return next((term for term in list(self.watch.terms) if term.epoch > after.epoch), None)

        term: Term = wait_for(f"a leader after epoch {after.epoch}", newer, timeout)
        self.view.say(f"{term.leader} leads under epoch {term.epoch}", "bold")
        return term

    def wait_for_log(self, process: Process, *texts: str, after: int = 0) -> None:
        """Wait until a process has logged one of `texts`, after a position in its log."""

        def logged() -> bool:
            if not process.alive:
                raise TimeoutError(f"{process.name} is gone, with exit code {process.exit_code}")
            log = process.log()[after:]
            return any(text in log for text in texts)

        wait_for(f"{process.name} to log {' or '.join(map(repr, texts))}", logged, 30, every=0.1)

    def reinforce(self) -> None:
        """Start a replica in the place of one that is gone, and wait until it stands by."""
        replica = self.stage.add_replica()
        self.wait_for_log(replica, "Standing by for")
        self.view.say(f"{replica.name} (pid {replica.pid}) has started and stands by")

    def lateness(self, since: float, term: Term) -> str:
        """The longest that a slot waited through a handover."""
        return f"its slots ran at most {lateness(since - 0.05, term.since + 0.05):.2f} s late"


def steady_state(drill: Drill) -> None:
    """Three replicas, one leader."""
    drill.view.act("Steady state", "three replicas, one leads and the others stand by")
    time.sleep(8)
    terms = drill.watch.terms
    drill.check("leaders in 8 s", "1", str(len(terms)), len(terms) == 1)
    standing_by = sum("Standing by for" in replica.log() for replica in drill.stage.replicas)
    drill.check("replicas that stand by", "2", str(standing_by), standing_by == 2)


def polite_end(drill: Drill) -> None:
    """SIGTERM, just when two entries are due."""
    from celery_leaderbeat.tick import tick_key

    drill.view.act("SIGTERM", "the leader is told to stop just as it sends")
    leader, term = drill.leader()
    due = drill.watch.clock.next(5, 0.0, at_least=0.5)
    key = tick_key("charge-calls", moment(round(due)))
    drill.watch.clock.sleep_until(due + 0.003)
    record = drill.watch.ledger.slot(key)
    told = drill.server_time()
    leader.signal(signal.SIGTERM)
    drill.view.mark("T")
    drill.view.say(
        f"SIGTERM to {leader.name}, {(told - due) * 1000:.1f} ms after two entries were due; {key} is "
        f"{record.state if record else 'not claimed yet'}",
        "red",
    )
    code = leader.wait(EXIT_ON_SIGTERM)
    exited = f"{drill.server_time() - told:.2f} s"
    exited = f"still there after {exited}" if code is None else f"exit code {code} after {exited}"
    successor = drill.next_term(term, 20)
    handover = successor.since - told
    time.sleep(2)
    drill.check(
        "SIGTERM: until the next election",
        f"<= {HANDOVER_ON_SIGTERM * 1000:.0f} ms",
        f"{handover * 1000:.0f} ms; {drill.lateness(told, successor)}",
        handover <= HANDOVER_ON_SIGTERM,
    )
    drill.check("SIGTERM: the process", f"exit code 0 within {EXIT_ON_SIGTERM:.0f} s", exited, code == 0)
    drill.reinforce()


def sudden_end(drill: Drill) -> None:
    """kill -9."""
    drill.view.act("kill -9", "the leader is gone without a word")
    leader, term = drill.leader()
    drill.watch.clock.sleep_until(drill.watch.clock.next(5, 2.5, at_least=1.0))
    killed = drill.server_time()
    left = drill.watch.lease_left_now()
    leader.signal(signal.SIGKILL)
    drill.view.mark("K")
    drill.view.say(f"SIGKILL to {leader.name}, whose lease has {left:.1f} s left", "red")
    successor = drill.next_term(term, 20)
    handover = successor.since - killed
    time.sleep(3)
    drill.check(
        "kill -9: until the next election",
        f"<= {HANDOVER_ON_KILL:.1f} s",
        f"{handover:.2f} s; {drill.lateness(killed, successor)}",
        handover <= HANDOVER_ON_KILL,
    )
    drill.reinforce()


def freeze_and_thaw(drill: Drill) -> None:
    """SIGSTOP until another leads, then SIGCONT."""
    drill.view.act(
        "SIGSTOP", "the leader is frozen just before a slot; its connections stand, its lease runs out"
    )
    leader, term = drill.leader()
    drill.watch.clock.sleep_until(drill.watch.clock.next(5, 1.85, at_least=1.0))
    frozen = drill.server_time()
    leader.signal(signal.SIGSTOP)
    drill.view.mark("S")
    left = drill.watch.lease_left_now()
    lapse = drill.server_time() + left
    drill.view.say(f"SIGSTOP to {leader.name}, whose lease has {left:.2f} s left", "red")
    successor = drill.next_term(term, 20)
    handover = successor.since - lapse
    time.sleep(3)
    drill.check(
        "SIGSTOP: from the lapse to the next election",
        f"0 to {HANDOVER_ON_LAPSE * 1000:.0f} ms",
        f"{handover * 1000:.0f} ms; {drill.lateness(frozen, successor)}",
        -0.002 <= handover <= HANDOVER_ON_LAPSE,
    )

    drill.view.act("SIGCONT", "the old leader thaws with a slot to send and a term that is over")
    drill.watch.clock.sleep_until(drill.watch.clock.next(1, 0.4))
    before = len(leader.log())
    thawed = drill.server_time()
    leader.signal(signal.SIGCONT)
    drill.view.mark("C")
    drill.view.say(f"SIGCONT to {leader.name}, {thawed - frozen:.1f} s after its SIGSTOP", "red")
    drill.wait_for_log(leader, "Standing by for", after=before)
    for line in leader.log()[before:].splitlines():
        if "No longer the leader" in line:
            drill.view.say(f"{leader.name} says: {line.partition('] ')[2]}")
    time.sleep(4)
    leads = drill.leader()[0] is leader
    state = "gone" if not leader.alive else "leads again" if leads else f"stands by for {successor.leader}"
    drill.check("the thawed replica", "stands by", state, leader.alive and not leads)
    claimed = [
        record
        for cells in drill.watch.cells.values()
        for cell in list(cells)
        if (record := drill.watch.ledger.slot(cell.key)) and record.epoch == term.epoch
        if (record.claimed_at or 0.0) > frozen + 0.1
    ]
    ran = executions_after(thawed, term.epoch)
    drill.check(
        "after the thaw, under its old epoch",
        "0 claimed, 0 executed",
        f"{len(claimed)} claimed, {ran} executed",
        not claimed and not ran,
    )


def executions_after(seconds: float, epoch: int) -> int:
    """How many executions under `epoch` began after a moment."""
    from invoices.models import Execution

    return Execution.objects.filter(epoch=epoch, created_at__gt=moment(seconds)).count()


def stale_message(drill: Drill) -> None:
    """A copy of a message that was dealt with long ago, from the first leader."""
    from celery_leaderbeat.tick import Stamp
    from invoices.models import Execution, Refusal

    drill.view.act(
        "A stale message", "a copy of a finished slot's message, under the epoch of the first leader"
    )
    done = [cell for cell in drill.watch.cells["charge-calls"] if cell.state == "done"][-3]
    record = drill.watch.ledger.slot(done.key)
    old = drill.watch.terms[0].epoch
    drill.replayed.add(done.key)
    drill.app.send_task(
        drill.app.conf.beat_schedule["charge-calls"]["task"],
        task_id=record.task_id,
        headers=Stamp(done.key, done.entry, done.slot, old, record.attempt).headers(),
    )
    drill.view.mark("!")
    drill.view.say(f"sent {done.key} again, under epoch {old} instead of {record.epoch}", "red")
    refusals = Refusal.objects.filter(tick_key=done.key)
    with contextlib.suppress(TimeoutError):
        wait_for("the refusal", refusals.exists, 5, every=0.1)
    time.sleep(1)
    runs = Execution.objects.filter(tick_key=done.key).count()
    reasons = "; ".join(refusals.values_list("reason", flat=True)) or "it was let through"
    drill.check(
        "the stale message",
        "refusals: 1, executions: 1",
        f"refusals: {refusals.count()} ({reasons}), executions: {runs}",
        refusals.count() == 1 and runs == 1,
    )


def stale_write(drill: Drill) -> None:
    """What a worker does that passed all checks, and froze before it wrote."""
    from invoices.fencing import StaleWrite, fenced_update
    from invoices.models import Invoice

    drill.view.act("A stale write", "the same, past all checks: only the database is left to refuse it")
    newest, oldest = (drill.watch.terms[place].epoch * 1_000_000 for place in (-1, 0))
    invoice = Invoice.objects.filter(fence__gt=newest).earliest("slot")
    try:
        fenced_update(Invoice.objects.filter(pk=invoice.pk), oldest + 1, amount=0)
        happened = "written"
    except StaleWrite as refusal:
        drill.view.say(str(refusal))
        happened = "refused"
    amount = Invoice.objects.get(pk=invoice.pk).amount
    drill.check(
        "the stale write",
        f"refused, the amount stays {invoice.amount}",
        f"{happened}, the amount is {amount}",
        happened == "refused" and amount == invoice.amount,
    )


def curtain(drill: Drill) -> float:
    """Go on until a minute has been seen, then stop all beats, and let the workers finish. Returns when."""
    drill.view.act(
        "The end", "a minute goes by, each entry has had a slot; then the beats stop and the queue runs empty"
    )
    time.sleep(max(AT_LEAST - drill.watch.elapsed, 0.0))
    wait_for("a slot of each entry", lambda: all(drill.watch.cells.values()), 70, every=0.1)
    leader, _ = drill.leader()
    for replica in drill.stage.replicas:
        if replica.alive and replica is not leader:
            replica.signal(signal.SIGTERM)
            replica.wait(5)
    drill.watch.clock.sleep_until(drill.watch.clock.next(1, 0.5, at_least=0.5))
    stopped = drill.server_time()
    leader.signal(signal.SIGTERM)
    leader.wait(5)
    drill.view.say("all beats have stopped")
    drill.watch.stop()
    keys = {cell.key for cells in drill.watch.cells.values() for cell in cells if cell.state != "missed"}
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and not executed(keys):
        time.sleep(0.1)
    for worker in drill.stage.workers:
        worker.signal(signal.SIGTERM)
    for worker in drill.stage.workers:
        worker.wait(10)
    return stopped


def executed(keys: set[str]) -> bool:
    from invoices.models import Execution

    return keys <= set(Execution.objects.values_list("tick_key", flat=True))


def closing_checks(drill: Drill, expected_slots: dict[str, int]) -> None:
    """What can be said of the whole."""
    from django.db.models import Sum

    from invoices.models import Account, Invoice
    from invoices.tasks import TARIFFS

    epochs = [term.epoch for term in drill.watch.terms]
    drill.check(
        "epochs of the leaders, in order",
        "4, each higher than the one before",
        ", ".join(map(str, epochs)),
        len(epochs) == 4 and epochs == sorted(set(epochs)),
    )
    owed = sum(TARIFFS[entry.removeprefix("charge-")] * slots for entry, slots in expected_slots.items())
    owed *= Account.objects.count()
    billed = Invoice.objects.aggregate(total=Sum("amount"))["total"]
    drill.check("invoiced in all", f"{owed / 100:.2f}", f"{billed / 100:.2f}", owed == billed)
    broken = [
        process.name
        for process in (*drill.stage.replicas, *drill.stage.workers)
        if "Traceback (most recent call last)" in process.log()
    ]
    drill.check("tracebacks in the logs", "none", ", ".join(broken) or "none", not broken)


def overture(drill: Drill) -> None:
    """Start the workers and three replicas, and wait until all of them take part."""
    drill.stage.add_worker("-P", "prefork", "-c", "2")
    drill.stage.add_worker("-P", "solo")
    for worker in drill.stage.workers:
        drill.wait_for_log(worker, " ready.")
    drill.watch.start()
    for _ in range(3):
        drill.stage.add_replica()
    for replica in drill.stage.replicas:
        drill.wait_for_log(replica, "Elected", "Standing by for")
    leader, term = drill.leader()
    drill.view.say(f"{leader.name} leads under epoch {term.epoch}", "bold")


ACTS = (steady_state, polite_end, sudden_end, freeze_and_thaw, stale_message, stale_write)
