"""Election: which replica leads, and until when it may trust that it does.

A *term* is one leadership of one replica: the value of the lease, which carries holder and epoch and stands
under one key in Redis as long as the term lasts. Renewing and releasing act on exactly that value, so a late
request can't touch a newer term.

::

                  elected: lease free, released, expired, or its holder gone
        +----------+ -------------------------------------------------> +--------+
        | standby  |                                                    | leader | --+
        +----------+ <------------------------------------------------- +--------+   | renewed
              ^        released (stop, step down), lost (the lease            ^      |
              |        holds another value), lapsed (no renewal in time)     +------+
            waits for a wake-up, the lease's end, or two looks at a holder that is gone

Trust. A leader trusts its term until `sent + ttl - margin`, where `sent` is the monotonic instant *before* the
last successful request left, and margin is a tenth of the TTL. The server counts the TTL from a later moment,
so the trust ends first, as long as the two clocks' rates differ by less than a tenth. Nothing relies on this
alone: every claim checks the lease again inside Redis.

What happens on failure. Redis doesn't answer: the leader tries again with back-off until its trust ends, then
it is a standby. The process dies: its subscription ends with it, and a standby that has seen it gone at two
looks a second apart, under an unchanged lease, takes the lease over. The process is frozen, or its network is
cut: its subscription stands, and the lease expires; or, where it outlives its TTL because the server's clock was
set back, a standby that hasn't seen it renewed for a TTL takes it over. Redis loses its data: the lease is gone,
the replica that led last is let go first, and whoever is elected puts back what it remembers (`shadow.py`). The
tick loop hangs: after `leaderbeat_stall_timeout` the renewals stop. No end of a term ends the process.

Authoritative is the lease in Redis; then the trust window, which is never longer; then nothing else.

Two threads: the elector runs the machine above on a connection of its own; the listener waits for wake-ups on
another. Both are started by the process that ticks. They are told what to do through queues whose `put` may
run inside a signal handler.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from celery_leaderbeat.backoff import backoff
from celery_leaderbeat.clock import FleetClock
from celery_leaderbeat.errors import StoreError, sentence
from celery_leaderbeat.listener import Listener
from celery_leaderbeat.settings import Settings
from celery_leaderbeat.shadow import Shadow
from celery_leaderbeat.shadow_reader import ShadowReader
from celery_leaderbeat.store import Store
from celery_leaderbeat.term import Term
from celery_leaderbeat.watch import Watch

__all__ = ["Elector", "new_holder"]

logger = logging.getLogger(__name__)

#: Seconds between two looks of a standby at the leader's subscription.
_LOOK_INTERVAL = 0.5
#: Longest that a replica which stepped down leaves the elections to others, in seconds.
_LONGEST_RETREAT = 300.0
#: Longest that a standby waits for its own subscription before it stands for election, in seconds.
_SUBSCRIBE_FIRST = 0.5
#: So long a lease that was lost with other data is left to the replica that led last, in seconds; and if that is seen
#: to live, which then finds out by itself.
_COURTESY, _PATIENCE = 0.3, 0.7
#: Bounds of the wait between two tries while Redis doesn't answer, in seconds.
_BACKOFF = (0.05, 0.3)
#: The same complaint is logged once in this many seconds.
_COMPLAIN_EVERY = 30.0


def new_holder() -> str:
    """The identity of this replica: `host:pid:random`, new for each process."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:12]}"


@dataclass(frozen=True)
class _Held:
    """A term of ours and the monotonic instant until which it may be trusted."""

    term: Term
    until: float


class _Ended(Exception):
    """Our term has ended; the message says why."""


class Elector:
    """Standby and leader: the two states of one replica.

    Parameters:
        settings: lease TTL, renewal, and where Redis is.
        clock: the fleet's clock; elections and renewals feed it.
        holder: identity of this replica.
        attributes: what else the lease says of its holder (JSON values), such as the schedule's fingerprint.
        changed: called with each term when it begins, and with the reason when it has ended.
    """

    def __init__(
        self,
        settings: Settings,
        clock: FleetClock,
        holder: str,
        attributes: Mapping[str, Any] | None = None,
        changed: Callable[[Term, str], None] | None = None,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.holder = holder
        self._changed = changed
        timeout = min(settings.renew_interval, settings.lease_ttl - settings.renew_interval, 2.0)
        self._store = Store(settings, timeout=max(timeout, 0.25))
        self._listener = Listener(settings, clock, holder, self._wake)
        self._attributes = {"host": socket.gethostname(), "pid": os.getpid(), **(attributes or {})}
        self._orders: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._gained: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._held: _Held | None = None
        self.shadow = Shadow()
        self._highest = self._led = 0
        self._led_last = ""
        self._progress = self._monotonic()
        self._stopping = False
        self._stepping_down: tuple[Term, str] | None = None
        self._steps_down = 0
        self._candidate_from = float("-inf")
        self._others: list[str] = []
        self._standing_by_for = ""
        self._complained: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, name="leaderbeat-elector", daemon=True)

    # -- for the tick loop ---------------------------------------------------------------------------------

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
        self._progress = self._monotonic()

    def proven(self) -> None:
        """This replica can do a leader's work: the next time it steps down counts as the first."""
        self._steps_down = 0

    def term(self) -> Term | None:
        """The term that this replica may trust right now, or None."""
        held = self._held
        if held is None or self._monotonic() >= held.until:
            return None
        return held.term

    def trusted_until(self, term: Term) -> datetime | None:
        """Until when, by the fleet's clock, nobody else can lead; None if `term` isn't ours."""
        held = self._held
        if held is None or held.term != term:
            return None
        return self.clock.utcnow() + timedelta(seconds=held.until - self._monotonic())

    def trusts(self, term: Term) -> bool:
        """Whether `term` is still ours to act on."""
        return self.term() == term

    def wait(self, timeout: float) -> Term | None:
        """The trusted term, waiting for it at most `timeout` seconds."""
        term = self.term()
        if term is not None:
            return term
        try:
            self._gained.get(timeout=timeout)
        except queue.Empty:
            return None
        return self.term()

    def lost(self, term: Term) -> None:
        """A script found that `term` no longer leads."""
        if self._held is not None and self._held.term == term:
            self._orders.put("look")

    def step_down(self, term: Term, reason: str) -> None:
        """Release the lease of `term` to another replica, if one is there, and let it be elected for a while.

        Each time in a row that this replica steps down, the while is twice as long, up to five minutes. It
        ends early when nobody takes the lease for a TTL: then this replica is as good as any.
        """
        self._stepping_down = (term, reason)
        self._orders.put("step down")

    def stop(self, timeout: float) -> bool:
        """Release the lease and end the threads; False if that took longer than `timeout` seconds.

        May run inside a signal handler: takes no lock, and uses no connection of the interrupted code.
        """
        self._stopping = True
        self._orders.put("stop")
        self._listener.stop()
        deadline = self._monotonic() + timeout
        while self._thread.is_alive() and self._monotonic() < deadline:
            self.clock.clock.sleep(0.001)
        return not self._thread.is_alive()

    # -- the machine ---------------------------------------------------------------------------------------

    def _monotonic(self) -> float:
        return self.clock.clock.monotonic()

    def _wake(self) -> None:
        self._orders.put("look")

    def _run(self) -> None:
        failures = 0
        while not self._stopping:
            try:
                term = self._stand_by()
                failures = 0
                if term is not None:
                    self._lead(term)
            except StoreError as exc:
                failures += 1
                self._standing_by_for = ""
                self._complain("store", "No election: %s Trying again until Redis answers.", sentence(exc))
                self._wait(backoff(failures, *_BACKOFF))
            except Exception:
                failures += 1
                logger.exception("The election failed; trying again.", extra={"action": "election_failed"})
                self._wait(backoff(failures, *_BACKOFF))
        self._withdraw()
        self._store.close()

    def _stand_by(self) -> Term | None:
        """Wait until this replica is elected. None when it is told to stop."""
        watch: Watch | None = None
        reader = ShadowReader(self._store, self.shadow, self.clock)
        announced, began = float("-inf"), self._monotonic()
        free_since: float | None = None
        while not self._stopping:
            now = self._monotonic()
            if now - announced >= self.settings.renew_interval:
                self._announce()
                announced = now
            if self._stalled():
                self._complain(
                    "stalled",
                    "Not standing for election: the tick loop hasn't come round for %.1f s.",
                    now - self._progress,
                )
                self._wait(_LOOK_INTERVAL)
                continue
            if not self._listener.subscribed and now - began < _SUBSCRIBE_FIRST:
                self._wait(0.01)
                continue

            channel = None
            if watch is not None and self.settings.fast_failover:
                channel = self._store.keys.alive(watch.term.holder)
            sent = self._monotonic()
            look = self._store.look(channel)
            now = self._monotonic()
            self.clock.observe(look.now, sent, now)
            reader.look(look)
            if look.value is not None:
                free_since = None
            elif free_since is None:
                free_since = now
            if watch is not None and watch.term.value == look.value:
                gone = watch.gone(look.subscribers, now) or watch.outlives(look.remaining, now)
            else:
                watch = None if look.value is None else Watch(Term.read(look.value))
                gone = False
                if watch is not None and 0 < watch.term.epoch < self._highest:
                    # Redis has gone back to a time before others led, or forgotten that they did.
                    term = self._elect(watch.term.value)
                    if term is not None:
                        return term
                    watch = None
                    continue
                if watch is not None and watch.term.holder == self.holder:
                    # The answer to our election was lost. How long ago isn't known: the trust begins now.
                    if self._renew(watch.term, adopting=True):
                        return watch.term
                    watch = None
                    continue
                if watch is not None:
                    self._note(watch.term, look.remaining)
            if (watch is None or gone) and self._may_stand(now, free_since):
                term = self._elect(watch.term.value if watch is not None else "")
                if term is not None:
                    return term
                watch = None
                continue
            pause = look.remaining / 1000 + 0.001 if look.remaining >= 0 else _COURTESY
            self._wait(min(_LOOK_INTERVAL, pause))
        return None

    def _may_stand(self, now: float, free_since: float | None) -> bool:
        """Whether this replica stands for election, or leaves it to another.

        To the one that led last, for a moment, after Redis has lost data: it knows best what was decided. And to
        any, after it has stepped down.
        """
        if self.shadow.lacks and self._led < self._highest and free_since is not None:
            channel = self._store.keys.alive(self._led_last)
            if now - free_since < (_PATIENCE if self._store.subscribers(channel) else _COURTESY):
                return False
        if now >= self._candidate_from or not self._others:
            return True
        return free_since is not None and now - free_since >= self.settings.lease_ttl

    def _lead(self, term: Term) -> None:
        """Hold `term` until it ends, and say how it ended."""
        self._standing_by_for = ""
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
            self._hold(term)
            reason = "released"
        except _Ended as ended:
            reason = str(ended)
            self._held = None
            logger.warning(
                "No longer the leader under epoch %d: %s. Standing by.",
                term.epoch,
                reason,
                extra={"action": "lost", "epoch": term.epoch, "holder": self.holder},
            )
        finally:
            self._held = None
            while not self._gained.empty():
                self._gained.get_nowait()
            self._tell(term, reason)

    def _hold(self, term: Term) -> None:
        """Renew `term` until told to stop (it is released then) or until it ends (`_Ended` is raised)."""
        due = self._monotonic() + self.settings.renew_interval
        failures = 0
        while True:
            order = self._wait(due - self._monotonic())
            if self._stopping:
                self._release(term, "its replica stops")
                return
            now = self._monotonic()
            held = self._held
            if held is None or now >= held.until:
                raise _Ended("its lease could not be renewed in time")
            if self._stepping_down is not None:
                self._step_down(term)
            if order is None and now < due:
                continue
            if self._stalled():
                self._complain(
                    "stalled",
                    "Not renewing the lease of epoch %d: the tick loop hasn't come round for %.1f s "
                    "(leaderbeat_stall_timeout is %.1f s).",
                    term.epoch,
                    now - self._progress,
                    self.settings.stall_timeout,
                )
                due = now + min(_LOOK_INTERVAL, held.until - now)
                continue
            try:
                self._renew(term)
            except StoreError as exc:
                failures += 1
                self._complain("renew", "Couldn't renew the lease of epoch %d: %s", term.epoch, sentence(exc))
                due = min(self._monotonic() + backoff(failures, *_BACKOFF), held.until)
            else:
                failures = 0
                due = self._monotonic() + self.settings.renew_interval

    # -- requests ------------------------------------------------------------------------------------------

    def _elect(self, takes_over: str) -> Term | None:
        keys = self._store.keys
        watched = self.settings.fast_failover and self._listener.visible(self._store)
        sent = self._monotonic()
        answer = self._store.run(
            "elect",
            [keys.lease, keys.epoch, keys.app, keys.released],
            [
                self.holder,
                round(self.settings.lease_ttl * 1000),
                self._highest,
                self.settings.app_identity,
                json.dumps({**self._attributes, "watched": watched, "ttl": self.settings.lease_ttl}),
                takes_over,
            ],
        )
        if answer[0] == "foreign":
            self._foreign(answer[1])
            self._wait(1.0)
            return None
        if answer[0] == "held":
            return None
        term = Term.read(answer[1])
        self._observe(answer[2:], sent)
        self._highest = max(self._highest, term.epoch)
        self._trust(term, sent)
        return term

    def _renew(self, term: Term, adopting: bool = False) -> bool:
        sent = self._monotonic()
        keys = self._store.keys
        args: list[str | int] = [term.value, round(self.settings.lease_ttl * 1000), term.epoch]
        answer = self._store.run("renew", [keys.lease, keys.epoch], args)
        if answer[0] != 1:
            if adopting:
                return False
            other = Term.read(answer[1]) if answer[1] else None
            self._highest = max(self._highest, other.epoch if other else 0)
            raise _Ended(f"the lease is held by {other.holder}" if other else "the lease is gone")
        self._observe(answer[1:], sent)
        self._highest = max(self._highest, term.epoch)
        self._trust(term, sent)
        self._announce()
        self._listener.confirm_visible(self._store)
        return True

    def _release(self, term: Term, reason: str) -> None:
        keys = self._store.keys
        try:
            released = self._store.run(
                "release", [keys.lease, keys.released], [term.value, keys.wake, term.epoch, reason[:500]]
            )
        except StoreError as exc:
            logger.warning(
                "Couldn't release the lease of epoch %d (%s); it expires by itself within %.0f s.",
                term.epoch,
                exc,
                self.settings.lease_ttl,
                extra={"action": "release_failed", "epoch": term.epoch},
            )
            return
        if released:
            logger.info(
                "Handed over: released the lease of epoch %d.",
                term.epoch,
                extra={"action": "released", "epoch": term.epoch},
            )

    def _step_down(self, term: Term) -> None:
        order, self._stepping_down = self._stepping_down, None
        if order is None or order[0] != term:
            return
        reason = order[1]
        if not self._others:
            self._complain("alone", "This replica goes on leading, because no other is there: %s.", reason)
            return
        pause = min(self.settings.lease_ttl * 2.0**self._steps_down, _LONGEST_RETREAT)
        self._steps_down += 1
        self._candidate_from = self._monotonic() + pause
        self._release(term, reason)
        raise _Ended(f"it steps down for {pause:.0f} s: {reason}")

    def _announce(self) -> None:
        try:
            seen = self._store.announce(self.holder, self.clock.now(), 3 * self.settings.renew_interval)
        except StoreError as exc:
            logger.debug("Couldn't announce this replica: %s", exc)
            return
        self._others = [holder for holder in seen if holder != self.holder]

    def _withdraw(self) -> None:
        try:
            self._store.withdraw(self.holder)
        except StoreError as exc:
            logger.debug("Couldn't withdraw from the membership: %s", exc)

    # -- small parts ---------------------------------------------------------------------------------------

    def _trust(self, term: Term, sent: float) -> None:
        self._held = _Held(term, sent + self.settings.lease_ttl - self.settings.margin)
        self._led = term.epoch

    def _observe(self, time: list[str], sent: float) -> None:
        self.clock.observe(int(time[0]) + int(time[1]) / 1e6, sent, self._monotonic())

    def _stalled(self) -> bool:
        return self._monotonic() - self._progress > self.settings.stall_timeout

    def _wait(self, seconds: float) -> str | None:
        """Wait for an order; several that wait are one."""
        if self._stopping:
            return "stop"
        try:
            order = self._orders.get(timeout=max(seconds, 0.0))
            while not self._orders.empty():
                order = self._orders.get_nowait()
        except queue.Empty:
            return None
        return order

    def _foreign(self, identity: str) -> None:
        self._complain(
            "foreign",
            "The key prefix %r belongs to the application %r, and this one is %r. This replica doesn't lead. Set "
            "leaderbeat_key_prefix to a prefix of its own (or, if the application was renamed, delete the key %r).",
            self.settings.key_prefix,
            identity,
            self.settings.app_identity,
            self._store.keys.app,
            level=logging.ERROR,
        )

    def _tell(self, term: Term, reason: str) -> None:
        if self._changed is not None:
            self._changed(term, reason)

    def _note(self, term: Term, remaining: int) -> None:
        """Say once for whom this replica stands by."""
        if term.epoch >= self._highest:
            self._highest, self._led_last = term.epoch, term.holder
        if term.value != self._standing_by_for:
            self._standing_by_for = term.value
            if remaining < 0:
                logger.warning(
                    "Standing by for %s, but its lease doesn't expire, so this replica would wait for ever. "
                    "If nobody of that name leads, delete the key %r.",
                    term.holder,
                    self._store.keys.lease,
                    extra={"action": "standing_by", "epoch": term.epoch, "leader": term.holder},
                )
                return
            logger.info(
                "Standing by for %s, which leads under epoch %d; its lease has %.1f s left.",
                term.holder,
                term.epoch,
                remaining / 1000,
                extra={"action": "standing_by", "epoch": term.epoch, "leader": term.holder},
            )
            own = str(self._attributes.get("fingerprint", ""))
            if term.app and term.app != self.settings.app_identity:
                self._foreign(term.app)
            elif term.fingerprint and own and term.fingerprint != own:
                logger.warning(
                    "The leader's schedule isn't this replica's. That is normal while a new version is rolled "
                    "out; if it lasts, two applications of the same name share the key prefix %r: set "
                    "leaderbeat_key_prefix for one of them.",
                    self.settings.key_prefix,
                    extra={"action": "schedules_differ", "leader": term.holder},
                )

    def _complain(self, kind: str, message: str, *args: object, level: int = logging.WARNING) -> None:
        now = self._monotonic()
        if now - self._complained.get(kind, -_COMPLAIN_EVERY) >= _COMPLAIN_EVERY:
            self._complained[kind] = now
            logger.log(level, message, *args, extra={"action": "election_trouble"})
