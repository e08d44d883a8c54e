"""Whether another may have led since this replica, the leader, last saw its own lease.

With fast failover a leader whose subscription is gone is replaced a second later, long before its own trust in the
lease ends. Cut off from Redis it doesn't see that; and if Redis then loses its data, no lease tells it afterwards. What
tells is the subscription: as long as it is the same one, and the server shows it, nobody found this replica gone.

If it was broken, as it is by any restart of Redis, the other replicas tell, by their silence: who has led meanwhile
doesn't wait with its election. Only if all of them are back, and none has taken the lease, nobody has led.

Once the lease is lost with other data the subscription says nothing any more: whoever gets through to Redis may be
elected at once, and Redis may lose its data a second time. So it is with each time in which this replica itself didn't
get through.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from datetime import datetime, timedelta
from math import inf

from celery_leaderbeat.clock import FleetClock
from celery_leaderbeat.listener import Listener
from celery_leaderbeat.shadow import Shadow
from celery_leaderbeat.standing import SILENCE
from celery_leaderbeat.store import Look, Store
from celery_leaderbeat.watch import GONE_AFTER

__all__ = ["Sight"]

#: So long after its lease was seen a leader can't have been replaced, in seconds: two looks are further apart.
_SAFE = timedelta(seconds=0.9 * GONE_AFTER)


class Sight:
    """What one replica can say of the time since it led.

    Parameters:
        clock: the fleet's clock.
        store: the elector's connection.
        listener: whose subscription the others look at.
        shadow: what is known of the ledger.
        holder: the identity of this replica.
        named_within: within so many seconds after their names were lost, others have said them again.
    """

    def __init__(
        self,
        clock: FleetClock,
        store: Store,
        listener: Listener,
        shadow: Shadow,
        holder: str,
        named_within: float,
    ) -> None:
        self._clock = clock
        self._store = store
        self._listener = listener
        self._shadow = shadow
        self._holder = holder
        self._named_within = named_within
        self._lock = threading.Lock()
        self._subscription = 0
        self._others: frozenset[str] = frozenset()
        # Those that were there when all was lost, and until when they count though they may be cut off, and nameless.
        self._before: frozenset[str] = frozenset()
        self._before_until = float("-inf")
        # Others whose names aren't known; there may be some until a look has counted.
        self._unknown = 1
        self._at: datetime | None = None
        # When an answer of Redis was seen last.
        self._touched = float("-inf")
        self._judged = 0
        self._is_judged = True
        self._is_broken = False
        self._back_since: float | None = None

    def before(self) -> tuple[int, int]:
        """What `held` has to be told; asked for before the request whose answer that tells of."""
        return self._listener.subscription, self._judged

    def held(self, at: datetime, before: tuple[int, int], look: Look | None = None) -> None:
        """The lease was seen to be this replica's at `at` or later. May be called from any thread.

        `look` has also counted who listens for wake-ups: the names of the replicas may just have been lost.
        """
        subscription, judged = before
        with self._lock:
            if judged != self._judged:
                # An answer that was late: since then it was seen that the lease is gone.
                return
            self._at, self._subscription, self._is_judged, self._is_broken = at, subscription, False, False
            self._back_since = None
            self._touched = self._clock.clock.monotonic()
            if look is not None:
                listening = (look.subscribers or 0) - self._listener.subscribed
                named = frozenset(look.replicas) - {self._holder}
                self._unknown = max(listening - len(named), 0)
                self._others = named | (self._before if self._touched < self._before_until else frozenset())
        self._shadow.held(at)

    def begins(self, at: datetime) -> None:
        """A term of this replica began at `at`; who else is there isn't known yet."""
        with self._lock:
            if self._shadow.led_last:
                self._before = self._others
                self._before_until = self._clock.clock.monotonic() + self._named_within
            else:
                self._before_until = float("-inf")
        self.held(at, self.before())
        with self._lock:
            self._unknown = 1

    def announced(self, others: Collection[str]) -> None:
        """The leader has said that it lives, and heard of at least these others."""
        with self._lock:
            self._others |= {*others}

    def look_back(self) -> None:
        """A look has shown that the lease isn't this replica's: whether another may have led since it was.

        Raises:
            StoreError: the server doesn't say; look again.
        """
        now = self._clock.clock.monotonic()
        lately = now - self._touched < _SAFE.total_seconds()
        if self._is_judged:
            self._touched = now
            if not lately and self._shadow.led_last:
                with self._lock:
                    self._is_broken, self._back_since = bool(self._others or self._unknown), None
            return
        shown = self._listener.shown(self._store)
        with self._lock:
            stood = shown is None or (shown > 0 and self._listener.subscription == self._subscription)
            self._is_judged, self._touched = True, now
            self._is_broken = not (stood and lately) and bool(self._others or self._unknown)
            self._judged += 1

    def silence(self) -> float:
        """For how many seconds all the others have been back, while the lease is lost with other data.

        Negative while one of them isn't back. Infinite where none of them can have led since; so it is after `SILENCE`,
        in which who has led takes the lease.

        Raises:
            StoreError: the server doesn't say who is there.
        """
        if not self._is_broken:
            return inf
        now, store = self._clock.clock.monotonic(), self._store
        # Newcomers know nothing.
        if self._unknown or not all(store.subscribers(store.keys.alive(other)) for other in self._others):
            self._back_since = None
            return -inf
        if self._back_since is None:
            self._back_since = now
        if now - self._back_since < SILENCE:
            return now - self._back_since
        self._is_broken = False
        return inf

    def stands(self) -> None:
        """This replica stands for election: unless the others' silence says no, another may have led until now."""
        if self._is_broken and self._at is not None:
            self._is_broken = False
            self._shadow.doubts(self._at + _SAFE, self._clock.utcnow())
