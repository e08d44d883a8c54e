"""The listener: waits for wake-ups, and shows by its own subscription that its process lives."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

from celery_leaderbeat.backoff import backoff
from celery_leaderbeat.clock import FleetClock
from celery_leaderbeat.errors import StoreError, StoreUnavailable
from celery_leaderbeat.settings import Settings
from celery_leaderbeat.store import Store, Subscription

__all__ = ["Listener"]

logger = logging.getLogger(__name__)

#: Bounds of the wait between two tries to subscribe, in seconds.
_BACKOFF = (0.05, 0.3)


class Listener:
    """Waits for wake-ups, and is by its own subscription the sign that this process lives.

    Parameters:
        settings: where Redis is.
        clock: for waits.
        holder: the identity of this replica, which names its channel.
        wake: called, in the listener's thread, when a lease was released or is gone, and at each
            new subscription.

    Attributes:
        subscribed: this process believes that it is subscribed.
        subscription: the number of that subscription, counted from 1; 0 while there is none.
        away_at: the monotonic instant at which Redis was found to be away last.
    """

    def __init__(self, settings: Settings, clock: FleetClock, holder: str, wake: Callable[[], None]) -> None:
        self._store = Store(settings)
        self._clock = clock.clock
        self._channel = self._store.keys.alive(holder)
        self._wake = wake
        self.subscribed = False
        self.subscription = 0
        self.away_at = float("-inf")
        self._stale = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="leaderbeat-listener", daemon=True)

    def start(self) -> None:
        """Start the thread in this process."""
        self._thread.start()

    def stop(self) -> None:
        """Stop listening; the thread ends by itself."""
        self._stopping = True

    def _wanted(self) -> bool:
        return not (self._stopping or self._stale)

    def shown(self, store: Store) -> int | None:
        """How many subscriptions of ours the server shows; None where it doesn't say."""
        return store.subscribers(self._channel)

    def visible(self, store: Store) -> bool:
        """Whether the server shows our subscription; without it nobody can tell that we live."""
        return self.subscribed and (self.shown(store) or 0) > 0

    def confirm_visible(self, store: Store) -> None:
        """Subscribe again if the server no longer shows the subscription that this process believes in."""
        with contextlib.suppress(StoreError):
            if self.subscribed and store.subscribers(self._channel) == 0:
                self._stale = True

    def _run(self) -> None:
        failures = count = 0
        while not self._stopping:
            self._stale = False
            subscription: Subscription | None = None
            try:
                subscription = self._store.subscribe(self._store.keys.wake, self._channel)
                count += 1
                self.subscription = count
                self.subscribed = True
                failures = 0
                # What was published while nobody listened is lost: look once.
                self._wake()
                while self._wanted():
                    if subscription.next(timeout=1.0) == self._store.keys.wake:
                        self._wake()
            except StoreError as exc:
                failures += 1
                if isinstance(exc, StoreUnavailable):
                    self.away_at = self._clock.monotonic()
                logger.debug("No wake-ups for now: %s", exc, extra={"action": "not_listening"})
            except Exception:
                failures += 1
                logger.exception(
                    "Waiting for wake-ups failed; trying again.", extra={"action": "listener_failed"}
                )
            finally:
                self.subscribed = False
                self.subscription = 0
                if subscription is not None:
                    subscription.close()
            if not self._stopping:
                self._clock.sleep(backoff(failures, *_BACKOFF))
        self._store.close()
