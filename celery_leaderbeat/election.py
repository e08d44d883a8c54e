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
from datetime import datetime, timezone
from typing import Any

from celery_leaderbeat.backoff import backoff
from celery_leaderbeat.clock import FleetClock
from celery_leaderbeat.comparison import Comparison
from celery_leaderbeat.desk import Desk
from celery_leaderbeat.errors import StoreError, sentence
from celery_leaderbeat.leader import BACKOFF, Leader, TermEnded
from celery_leaderbeat.lease import GONE, Lease
from celery_leaderbeat.listener import Listener
from celery_leaderbeat.membership import Membership
from celery_leaderbeat.remarks import Remarks
from celery_leaderbeat.server import ServerCheck
from celery_leaderbeat.settings import Settings
from celery_leaderbeat.shadow import Shadow
from celery_leaderbeat.shadow_reader import ShadowReader, decided_in
from celery_leaderbeat.sight import Sight
from celery_leaderbeat.standby import Standby
from celery_leaderbeat.store import Store
from celery_leaderbeat.term import Term

__all__ = ["Elector", "new_holder"]

logger = logging.getLogger(__name__)


def new_holder() -> str:
    """The identity of this replica: `host:pid:random`, new for each process."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:12]}"


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
        self.sight = Sight(
            clock, self._store, self._listener, self.shadow, holder, named_within=3 * settings.renew_interval
        )
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
        self._leader = Leader(
            settings=settings,
            clock=clock,
            desk=self._desk,
            store=self._store,
            listener=self._listener,
            lease=self._lease,
            members=self._members,
            remarks=self._remarks,
            shadow=self.shadow,
            sight=self.sight,
        )
        self._gained: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._lost_its_lease = False
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
        self._leader.proven()

    def term(self) -> Term | None:
        """The term that this replica may trust right now, or None."""
        return self._lease.trusted()

    def trusted_until(self, term: Term) -> datetime | None:
        """Until when, by the fleet's clock, `term` may be trusted; None if it isn't ours."""
        return self._lease.trusted_until(term)

    def trusts(self, term: Term) -> bool:
        """Whether `term` is still ours to act on."""
        return self.term() == term

    def wait(self, timeout: float) -> Term | None:
        """The trusted term, waiting for it at most `timeout` seconds. None also while it is being handed over."""
        term = self.term()
        if term is None or self._leader.handing_over:
            try:
                self._gained.get(timeout=timeout)
            except queue.Empty:
                return None
            term = self.term()
        return None if self._leader.handing_over else term

    @contextlib.contextmanager
    def round(self) -> Iterator[None]:
        """A round of the tick loop, which may send: a hand-over waits for its end."""
        self._desk.working = True
        try:
            yield
        finally:
            self._desk.working = False
            if self._leader.handing_over:
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
        self._leader.step_down(term, reason)

    def is_needed(self, timeout: float, decided: int) -> bool:
        """Whether this replica, which led last, has to lead once more before it stops: Redis may have lost data.

        The sign is that its lease is gone, that its term has begun and it hasn't put back yet what was lost before, or
        that fewer slots are `decided`, by the ledger's totals, as in a failover to a replica that lagged. False as well
        where Redis doesn't answer within about `timeout` seconds: then nothing could be put back. May run inside a
        signal handler.
        """
        leads = self.term() is not None
        if not self.shadow.led_last or not (leads or self._lost_its_lease):
            return False
        # To connect, and for the answer.
        store = Store(self.settings.hurried(timeout / 2), timeout / 2)
        try:
            look = store.look(None)
            if look.value is None:
                return True
            # Just elected again, it may not know that yet.
            knows_all = leads and self.shadow.is_complete and decided_in(look.counts) >= decided
            return Term.read(look.value).holder == self.holder and not knows_all
        except StoreError:
            return False
        finally:
            store.close()

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
        store = Store(self.settings.hurried(timeout / 2), timeout / 2)
        try:
            lease = Lease(self.settings, self.clock, store, self.holder, {})
            return lease.release(term, "its replica stops") != "unheard"
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
                self._desk.wait(backoff(failures, *BACKOFF))
            except Exception:
                failures += 1
                logger.exception("The election failed; trying again.", extra={"action": "election_failed"})
                self._desk.wait(backoff(failures, *BACKOFF))
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
            reason = self._leader.hold(term)
            self._lost_its_lease = False
            self.shadow.ended(self.clock.utcnow())
        except TermEnded as ended:
            reason = str(ended)
            self._lost_its_lease = reason == GONE
            self._lease.drop()
            logger.warning(
                "No longer the leader under epoch %d: %s. Standing by.",
                term.epoch,
                reason,
                extra={"action": "lost", "epoch": term.epoch, "holder": self.holder},
            )
        finally:
            self._lease.drop()
            self._leader.handing_over = False
            while not self._gained.empty():
                self._gained.get_nowait()
            self._tell(term, reason)

    def _tell(self, term: Term, reason: str) -> None:
        if self._changed is not None:
            self._changed(term, reason)
