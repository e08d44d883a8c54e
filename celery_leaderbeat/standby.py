"""The standby: waits until this replica is elected.

It stands for election when the lease is free, when its holder is gone, or when the lease has outlived its TTL and nobody
has renewed it for a TTL (so it is where the server's clock was set back and the holder is frozen), unless something speaks
against it: `standing` says what, and for how long. Here the facts are gathered, and what follows from the answer is done.

Where the ledger has lost data, or may have as far as a replica knows that has just started, the replica that led last is
woken, and whoever else remembers: they may not know yet that the lease is gone.
"""

from __future__ import annotations

from celery_leaderbeat.clock import Clock
from celery_leaderbeat.comparison import Comparison
from celery_leaderbeat.desk import Desk
from celery_leaderbeat.errors import StoreError, StoreUnavailable, sentence
from celery_leaderbeat.lease import ForeignPrefix, Lease, LeftToNewer
from celery_leaderbeat.listener import Listener
from celery_leaderbeat.membership import Membership
from celery_leaderbeat.remarks import Remarks
from celery_leaderbeat.server import ServerCheck
from celery_leaderbeat.settings import Settings
from celery_leaderbeat.shadow_reader import ShadowReader
from celery_leaderbeat.sight import Sight
from celery_leaderbeat.standing import Itself, Seen, Why, may_announce, may_look, may_stand
from celery_leaderbeat.store import Look, Store
from celery_leaderbeat.term import Term
from celery_leaderbeat.watch import Watch

__all__ = ["Standby"]

#: Seconds between two looks of a standby at the leader's subscription.
_LOOK_INTERVAL = 0.5
#: Seconds between two looks at a lease that is free, or doesn't expire.
_FREE_INTERVAL = 0.3
#: Seconds between two looks at one's own subscription, before it is there.
_DEAF_INTERVAL = 0.01
#: Wait before a lease that was left to a newer release is looked at again, in seconds.
_LEFT = 0.1
#: Wait before the leader's schedule is compared again, in seconds.
_COMPARE_EVERY = 1.0


class Standby:
    """The state of a replica that doesn't lead; its parts are the elector's."""

    def __init__(
        self,
        *,
        settings: Settings,
        clock: Clock,
        desk: Desk,
        store: Store,
        listener: Listener,
        lease: Lease,
        members: Membership,
        remarks: Remarks,
        server: ServerCheck,
        comparison: Comparison | None,
        holder: str,
        reader: ShadowReader,
        sight: Sight,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._desk = desk
        self._store = store
        self._listener = listener
        self._lease = lease
        self._members = members
        self._remarks = remarks
        self._server = server
        self._comparison = comparison
        self._holder = holder
        self._reader = reader
        self._sight = sight
        self._unable_until = self._away_at = float("-inf")
        # Of one wait for an election:
        self._watch: Watch | None = None
        self._free_since: float | None = None
        self._began = float("-inf")
        self._announced = float("-inf")
        self._compared = float("-inf")
        self._said_to_stand = False

    def wait(self) -> Term | None:
        """Wait until this replica is elected. None when it is told to stop."""
        self._watch = None
        self._free_since = None
        self._reader.begin()
        self._began, self._announced = self._clock.monotonic(), float("-inf")
        while not self._desk.stopping:
            self._announce()
            verdict = may_look(self._itself())
            if verdict.why is Why.HANGS:
                self._remarks.complain(
                    "stalled",
                    "Not standing for election: the tick loop hasn't come round for %.1f s.",
                    self._desk.idle_for,
                )
                self._desk.wait(_LOOK_INTERVAL)
            elif verdict.why is Why.DEAF:
                self._desk.wait(_DEAF_INTERVAL)
            else:
                term = self._turn()
                if term is not None:
                    return term
        return None

    def _turn(self) -> Term | None:
        """Look once, and then stand for election or wait; the term if this replica leads."""
        look, watch, gone = self._look()
        if watch is not None and watch.term.holder == self._holder and not gone:
            unheard = self._lease.unheard
            if unheard is not None and unheard[0].value == watch.term.value:
                if self._lease.release(*unheard) == "unheard":
                    self._desk.wait(_LOOK_INTERVAL)
                self._watch = None
                return None
            # The answer to our election was lost. How long ago isn't known: the trust begins now.
            if self._lease.renew(watch.term) is None:
                return watch.term
            self._watch = None
            return None
        if may_stand(self._seen(held=watch is not None and not gone)).may:
            return self._stand(watch.term.value if watch is not None else "")
        pause = look.remaining / 1000 + 0.001 if look.remaining >= 0 else _FREE_INTERVAL
        self._desk.wait(min(_LOOK_INTERVAL, pause))
        return None

    def _announce(self) -> None:
        itself = self._itself()
        stands = may_announce(itself).may
        if itself.now - self._announced >= self._members.interval or stands != self._said_to_stand:
            self._members.announce(stands)
            self._announced, self._said_to_stand = itself.now, stands

    def _itself(self) -> Itself:
        """What is known without a look at the lease."""
        return Itself(
            now=self._clock.monotonic(),
            hangs=self._desk.stalled,
            listens=self._listener.subscribed,
            waits_since=self._began,
            retreats_until=self._desk.candidate_from,
            refused_until=self._unable_until,
        )

    def _seen(self, held: bool) -> Seen:
        """What is known after a look at the lease."""
        return Seen(
            now=self._clock.monotonic(),
            held=held,
            free_since=self._free_since,
            ttl=self._settings.lease_ttl,
            remembers=not self._reader.knows_nothing,
            lacks=self._reader.lacks,
            led_last=self._lease.last_leader == self._holder,
            led_until=self._lease.led_until,
            # The listener notices that even where Redis is back, and empty, before the next look.
            away_at=max(self._away_at, self._listener.away_at),
            has_others=bool(self._members.others),
            retreats_until=self._desk.candidate_from,
            ask_others_listen=self._others_listen,
            ask_last_listens=self._last_listens,
            ask_silence=self._sight.silence,
        )

    def _others_listen(self) -> bool:
        # This replica's own subscription is among them.
        return (self._store.subscribers(self._store.keys.wake) or 0) > self._listener.subscribed

    def _last_listens(self) -> bool:
        return bool(self._store.subscribers(self._store.keys.alive(self._lease.last_leader)))

    def _look(self) -> tuple[Look, Watch | None, bool]:
        """Look at the lease: what was seen, the watch over its holder if it has one, and whether that is gone."""
        channel = None
        if self._watch is not None and self._settings.fast_failover:
            channel = self._store.keys.alive(self._watch.term.holder)
        try:
            look = self._lease.look(channel)
        except StoreError:
            self._away_at = self._clock.monotonic()
            raise
        self._server.once(look.now)
        if look.value is None or Term.read(look.value).holder != self._holder:
            self._sight.look_back()
        self._reader.look(look)
        now = self._clock.monotonic()
        if look.value is not None:
            self._free_since = None
        elif self._free_since is None:
            self._free_since = now
            if self._reader.lacks or self._reader.knows_nothing:
                self._wake_who_led()
        watch = self._watch
        if watch is not None and watch.term.value == look.value:
            self._compare(watch.term)
            gone = watch.gone(look.subscribers, now) or watch.outlives(look.remaining, now)
        else:
            self._watch = watch = None if look.value is None else Watch(Term.read(look.value))
            gone = False
            if watch is not None and watch.term.holder != self._holder:
                self._remarks.stands_by(watch.term, look.remaining)
        if watch is not None and self._lease.has_outlived(watch.term):
            self._remarks.came_back(watch.term, self._lease.highest)
            gone = True
        elif watch is not None and watch.term.holder != self._holder:
            self._lease.saw(watch.term)
        return look, watch, gone

    def _wake_who_led(self) -> None:
        """Redis has lost the lease with other data, or may have: whoever led last may not know yet."""
        try:
            self._store.wake()
        except StoreError as exc:
            # It finds out by itself, a little later.
            self._remarks.complain("wake", "Couldn't wake the other replicas: %s", sentence(exc))

    def _compare(self, term: Term) -> None:
        now = self._clock.monotonic()
        comparison = self._comparison
        if comparison is not None and comparison.wanted(term) and now - self._compared >= _COMPARE_EVERY:
            self._compared = now
            comparison.look(term, self._reader.fingerprints())

    def _stand(self, takes_over: str) -> Term | None:
        """Stand for election; the term if it was won."""
        watched = self._settings.fast_failover and self._listener.visible(self._store)
        if self._reader.lacks:
            self._sight.stands()
        try:
            term = self._lease.elect(takes_over, watched, insists=self._seen(held=False).nobody_takes_it)
        except LeftToNewer as exc:
            self._remarks.leaves_it_to(*exc.args)
            self._desk.wait(_LEFT)
            return None
        except ForeignPrefix as exc:
            self._remarks.foreign(str(exc))
            self._desk.wait(1.0)
            term = None
        except StoreUnavailable:
            raise
        except StoreError:
            # Redis refuses it, and may do so for long: an older release needn't wait for this replica.
            self._unable_until = self._clock.monotonic() + self._settings.lease_ttl
            raise
        if term is None:
            self._watch = None
        elif self._settings.fast_failover and not watched:
            self._remarks.leads_unseen()
        return term
