"""Election: which replica leads, and until when it may trust that it does.

A *term* is one leadership of one replica: the value of the lease, which carries holder and epoch and stands
under one key in Redis as long as the term lasts. Renewing and releasing act on exactly that value, so a late
request can't touch a newer term.

::

                  elected: lease free, released, expired, or its holder gone
        +----------+ -------------------------------------------------> +--------+
        | standby  |                                                    | leader | --+
        +----------+ <------------------------------------------------- +--------+   | renewed
              ^        released (stop, step down, a newer release), lost      ^      |
              |        (the lease is another's), lapsed (no renewal in time)  +------+
            waits for a wake-up, the lease's end, or two looks at a holder that is gone

Trust. A leader trusts its term until `sent + ttl - margin`, where `sent` is the monotonic instant *before*
the last successful request left, and margin is a tenth of the TTL. The server counts the TTL from a later
moment, so the trust ends first, as long as the two clocks' rates differ by less than a tenth. Nothing relies
on this alone: every claim checks the lease again inside Redis. A lease with a lower epoch than one that was
seen before has come back, because Redis has lost what was written since (a failover to a replica that
lagged): it is taken over at once.

What happens on failure. Redis doesn't answer: the leader tries again with back-off until its trust ends, then
it is a standby. The process dies: its subscription ends with it, and a standby that has seen it gone at two
looks a second apart, under an unchanged lease, takes the lease over. The process is frozen, or its network is
cut: its subscription stands, and the lease expires. Redis doesn't answer a release: the replica, a standby
now, releases the lease again when it sees that it stands. Redis loses its data: the lease is gone, the
replica that led last is woken and let go first, and whoever is elected puts back what it remembers (`shadow`,
`restoring`). The tick loop hangs: after `leaderbeat_stall_timeout` the renewals stop. No end of a term ends
the process.

Releases. A leader that learns of a candidate of a newer release ends the round that is under way and releases
the lease; a standby leaves a free lease to it (see `membership`). Whether a standby stands at all, and if not, why and
for how long, is a table in `standing`.

Authoritative is the lease in Redis; then the trust window, which is never longer; then nothing else.

Two threads: the elector runs the machine above on a connection of its own; the listener waits for wake-ups on
another. Both are started by the process that ticks. They are told what to do through queues whose `put` may
run inside a signal handler.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

from celery_leaderbeat.backoff import backoff
from celery_leaderbeat.clock import FleetClock
from celery_leaderbeat.comparison import Comparison
from celery_leaderbeat.desk import Desk
from celery_leaderbeat.errors import StoreError, sentence
from celery_leaderbeat.handover import Handovers
from celery_leaderbeat.lease import GONE, Lease
from celery_leaderbeat.listener import Listener
from celery_leaderbeat.membership import Candidate, Membership
from celery_leaderbeat.remarks import Remarks
from celery_leaderbeat.server import ServerCheck
from celery_leaderbeat.settings import Settings
from celery_leaderbeat.shadow import Shadow
from celery_leaderbeat.shadow_reader import ShadowReader
from celery_leaderbeat.sight import Sight
from celery_leaderbeat.standby import Standby
from celery_leaderbeat.store import Store
from celery_leaderbeat.term import Term

__all__ = ["Elector", "new_holder"]

logger = logging.getLogger(__name__)

#: Wait before a tick loop that hangs is looked at again, in seconds.
_STALLED = 0.5
#: Wait for a round of the tick loop before the lease is handed over, in seconds, at a time.
_ROUND = 0.05
#: Longest that a replica which stepped down leaves the elections to others, in seconds.
_LONGEST_RETREAT = 300.0
#: Bounds of the wait between two tries while Redis doesn't answer, in seconds.
_BACKOFF = (0.05, 0.3)


def new_holder() -> str:
    """The identity of this replica: `host:pid:random`, new for each process."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:12]}"


class _Ended(Exception):
    """Our term has ended; the message says why."""


class Elector:
    """Standby and leader: the two states of one replica.

    Parameters:
        settings: lease TTL, renewal, and where Redis is.
        clock: the fleet's clock; elections and renewals feed it.
        holder: identity of this replica.
        comparison: knows this replica's schedule, whose fingerprint the lease tells; None for none.
        changed: called with each term when it begins, and with the reason when it has ended.

    Attributes:
        shadow: what this replica remembers of the ledger.
        sight: whether another may have led since this replica saw its own lease.
    """

    def __init__(
        self,
        settings: Settings,
        clock: FleetClock,
        holder: str,
        comparison: Comparison | None = None,
        changed: Callable[[Term, str], None] | None = None,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.holder = holder
        self._changed = changed
        timeout = min(settings.renew_interval, settings.lease_ttl - settings.renew_interval, 2.0)
        self._store = Store(settings, timeout=max(timeout, 0.25))
        self._listener = Listener(settings, clock, holder, self._wake)
        attributes: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid()}
        if settings.release.text:
            attributes["release"] = settings.release.text
        if comparison is not None:
            attributes["fingerprint"] = comparison.fingerprint
        self.shadow = Shadow()
        self._desk = Desk(clock.clock, settings.stall_timeout)
        self._lease = Lease(settings, clock, self._store, holder, attributes)
        self._members = Membership(settings, self._store, holder)
        self._remarks = Remarks(settings, clock.clock)
        self.sight = Sight(clock, self._store, self._listener, self.shadow, holder)
        self._standby = Standby(
            settings=settings,
            clock=clock.clock,
            desk=self._desk,
            store=self._store,
            listener=self._listener,
            lease=self._lease,
            members=self._members,
            remarks=self._remarks,
            server=ServerCheck(settings, self._store),
            comparison=comparison,
            holder=holder,
            reader=ShadowReader(self._store, self.shadow, clock, holder),
            sight=self.sight,
        )
        self._gained: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._handing_over = False
        self._handovers = Handovers(settings.lease_ttl)
        self._stepping_down: tuple[Term, str] | None = None
        self._steps_down = 0
        self._thread = threading.Thread(target=self._run, name="leaderbeat-elector", daemon=True)

    def start(self) -> None:
        """Start both threads in this process."""
        self._listener.start()
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the elector's thread runs."""
        return self._thread.is_alive()

    def progress(self) -> None:
        """The tick loop came round."""
        self._desk.progress()

    def proven(self) -> None:
        """This replica can do a leader's work: the next time it steps down counts as the first."""
        self._steps_down = 0

    def term(self) -> Term | None:
        """The term that this replica may trust right now, or None."""
        return self._lease.trusted()

    def trusted_until(self, term: Term) -> datetime | None:
        """Until when, by the fleet's clock, `term` may be trusted; None if it isn't ours."""
        left = self._lease.trusted_for(term)
        return self.clock.utcnow() + timedelta(seconds=left) if left > 0 else None

    def trusts(self, term: Term) -> bool:
        """Whether `term` is still ours to act on."""
        return self.term() == term

    def wait(self, timeout: float) -> Term | None:
        """The trusted term, waiting for it at most `timeout` seconds. None also while it is being handed over."""
        term = self.term()
        if term is None or self._handing_over:
            try:
                self._gained.get(timeout=timeout)
            except queue.Empty:
                return None
            term = self.term()
        return None if self._handing_over else term

    @contextlib.contextmanager
    def round(self) -> Iterator[None]:
        """A round of the tick loop, which may send: a hand-over waits for its end."""
        self._desk.working = True
        try:
            yield
        finally:
            self._desk.working = False
            if self._handing_over:
                self._desk.put("look")

    def lost(self, term: Term) -> None:
        """A script found that `term` no longer leads."""
        if self.trusts(term):
            self._desk.put("look")

    def step_down(self, term: Term, reason: str) -> None:
        """Release the lease of `term` to another replica, if one is there, and let it be elected for a while.

        A replica that has stepped down and is still in its while doesn't count: where all fail alike, the lead
        doesn't go round in a circle. Each time in a row that this replica steps down, the while is twice as
        long, up to five minutes. It ends early when nobody takes the lease for a TTL: then this replica is as
        good as any.
        """
        self._stepping_down = (term, reason)
        self._desk.put("step down")

    def stop(self, timeout: float) -> bool:
        """Release the lease and end the threads; False if that took longer than about `timeout` seconds.

        May run inside a signal handler: takes no lock, and uses no connection of the interrupted code. The
        elector's thread may wait for a lock that the interrupted code holds, such as that of a log handler. After
        half of the time the lease is released from here.
        """
        self._desk.stopping = True
        self._desk.put("stop")
        self._listener.stop()
        deadline = self._monotonic() + timeout / 2
        while self._thread.is_alive() and self._monotonic() < deadline:
            self.clock.clock.sleep(0.001)
        term = self._lease.trusted()
        if not self._thread.is_alive() or not self._lease.at_stake:
            return True
        if term is None:
            return False
        store = Store(self.settings, timeout / 2)
        try:
            lease = Lease(self.settings, self.clock, store, self.holder, {})
            return lease.release(term, "its replica stops")
        finally:
            store.close()

    def _monotonic(self) -> float:
        return self.clock.clock.monotonic()

    def _wake(self) -> None:
        self._desk.put("look")

    def _run(self) -> None:
        failures = 0
        while not self._desk.stopping:
            try:
                term = self._standby.wait()
                failures = 0
                if term is not None:
                    self._lead(term)
            except StoreError as exc:
                failures += 1
                self._remarks.stands_by_for_nobody()
                self._remarks.complain(
                    "store", "No election: %s Trying again until Redis answers.", sentence(exc)
                )
                self._desk.wait(backoff(failures, *_BACKOFF))
            except Exception:
                failures += 1
                logger.exception("The election failed; trying again.", extra={"action": "election_failed"})
                self._desk.wait(backoff(failures, *_BACKOFF))
        self._members.withdraw()
        self._store.close()

    def _lead(self, term: Term) -> None:
        """Hold `term` until it ends, and say how it ended."""
        self.shadow.begins()
        since = datetime.fromtimestamp(self.clock.at(term.since), timezone.utc)
        self.sight.begins(since)
        self._remarks.stands_by_for_nobody()
        logger.info(
            "Elected: this replica (%s) leads under epoch %d.",
            self.holder,
            term.epoch,
            extra={"action": "elected", "epoch": term.epoch, "holder": self.holder},
        )
        self._tell(term, "")
        self._gained.put(None)
        reason = "it failed"
        try:
            reason = self._hold(term)
            self.shadow.ended(self.clock.utcnow())
        except _Ended as ended:
            reason = str(ended)
            self._lease.drop()
            logger.warning(
                "No longer the leader under epoch %d: %s. Standing by.",
                term.epoch,
                reason,
                extra={"action": "lost", "epoch": term.epoch, "holder": self.holder},
            )
        finally:
            self._lease.drop()
            self._handing_over = False
            while not self._gained.empty():
                self._gained.get_nowait()
            self._tell(term, reason)

    def _hold(self, term: Term) -> str:
        """Renew `term` until it is released, and return the reason; or until it ends otherwise: `_Ended` is raised."""
        self._members.announce(stands=False)
        self.sight.announced(self._members.others)
        due = self._monotonic() + self.settings.renew_interval
        failures = 0
        while True:
            order = self._desk.wait(due - self._monotonic())
            if self._desk.stopping:
                self._lease.release(term, "its replica stops")
                return "its replica stops"
            now = self._monotonic()
            if now >= self._lease.until:
                raise _Ended("its lease could not be renewed in time")
            left_for = self._step_down(term)
            if left_for is not None:
                return left_for
            if order is None and now < due:
                continue
            if self._desk.stalled:
                self._remarks.complain(
                    "stalled",
                    "Not renewing the lease of epoch %d: the tick loop hasn't come round for %.1f s "
                    "(leaderbeat_stall_timeout is %.1f s).",
                    term.epoch,
                    self._desk.idle_for,
                    self.settings.stall_timeout,
                )
                due = now + min(_STALLED, self._lease.until - now)
                continue
            try:
                self._renew(term)
            except StoreError as exc:
                failures += 1
                self._remarks.complain(
                    "renew", "Couldn't renew the lease of epoch %d: %s", term.epoch, sentence(exc)
                )
                due = min(self._monotonic() + backoff(failures, *_BACKOFF), self._lease.until)
            else:
                failures = 0
                due = self._monotonic() + self.settings.renew_interval
                newer = self._members.newer
                if newer is not None and self._handovers.may(newer.holder, self._monotonic()):
                    return self._hand_over(term, newer)

    def _renew(self, term: Term) -> None:
        at, before = self.clock.utcnow(), self.sight.before()
        reason = self._lease.renew(term)
        if reason is not None:
            if reason != GONE:
                self.shadow.another_leads()
            raise _Ended(reason)
        self.sight.held(at, before)
        until = self.trusted_until(term)
        if until is not None:
            self.shadow.renewed(until)
        self._show_life()

    def _show_life(self) -> None:
        # Who leads doesn't stand for election: nobody has to wait for it when it dies.
        self._members.announce(stands=False)
        self.sight.announced(self._members.others)
        self._listener.confirm_visible(self._store)

    def _step_down(self, term: Term) -> str | None:
        """Do what a call of `step_down` has ordered, if there was one; the reason if the lease is released."""
        order, self._stepping_down = self._stepping_down, None
        if order is None or order[0] != term:
            return None
        reason = order[1]
        pause = min(self.settings.lease_ttl * 2.0**self._steps_down, _LONGEST_RETREAT)
        try:
            others_lead = self._members.retreat(pause)
        except StoreError as exc:
            self._remarks.complain(
                "retreat",
                "This replica is to step down (%s), and couldn't say so: %s Trying again with the next renewal.",
                reason,
                sentence(exc),
            )
            if self._stepping_down is None:
                self._stepping_down = order
            return None
        if not others_lead:
            self._remarks.complain(
                "alone", "This replica goes on leading, because no other could do better: %s.", reason
            )
            return None
        self._steps_down += 1
        self._desk.candidate_from = self._monotonic() + pause
        reason = f"it steps down for {pause:.0f} s: {reason}"
        self._lease.release(term, reason)
        return reason

    def _hand_over(self, term: Term, newer: Candidate) -> str:
        """Release the lease to a candidate of a newer release, once the round that is under way has ended."""
        self._handing_over = True
        longest = self._monotonic() + 2 * self.settings.publish_timeout + 0.5
        until = min(longest, self._lease.until - self.settings.margin)
        while self._desk.working and not self._desk.stopping and self._monotonic() < until:
            self._desk.wait(_ROUND)
        reason = f"released for a newer release ({newer.release}, of {newer.holder})"
        if self._lease.release(term, reason, newer=True):
            self._handovers.give(newer.holder, self._monotonic())
        return reason

    def _tell(self, term: Term, reason: str) -> None:
        if self._changed is not None:
            self._changed(term, reason)
