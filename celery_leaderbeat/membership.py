"""Membership: which replicas live, as far as they have said so lately."""

from __future__ import annotations

import logging

from celery_leaderbeat.clock import FleetClock
from celery_leaderbeat.errors import StoreError
from celery_leaderbeat.settings import Settings
from celery_leaderbeat.store import Store

__all__ = ["Membership"]

logger = logging.getLogger(__name__)


class Membership:
    """This replica among the others.

    Parameters:
        settings: how often replicas show themselves.
        clock: the fleet's clock.
        store: the connection of whoever asks.
        holder: the identity of this replica.

    Attributes:
        others: the holders of the other replicas that were seen lately.
    """

    def __init__(self, settings: Settings, clock: FleetClock, store: Store, holder: str) -> None:
        self._settings = settings
        self._clock = clock
        self._store = store
        self._holder = holder
        self.others: list[str] = []

    def announce(self) -> None:
        """Say that this replica lives, and look who else does."""
        lifetime = 3 * self._settings.renew_interval
        try:
            seen = self._store.announce(self._holder, self._clock.now(), lifetime)
        except StoreError as exc:
            logger.debug("Couldn't announce this replica: %s", exc)
            return
        self.others = [holder for holder in seen if holder != self._holder]

    def retreat(self, seconds: float) -> bool:
        """Leave the lead to the others for a while; False if none of them could do better.

        Those that are in retreat themselves couldn't.
        """
        now = self._clock.now()
        try:
            if not set(self.others) - self._store.retreating(now):
                return False
            self._store.retreat(self._holder, now, now + seconds)
        except StoreError as exc:
            logger.debug("Couldn't retreat: %s", exc)
            return False
        return True

    def withdraw(self) -> None:
        """This replica is no longer there."""
        try:
            self._store.withdraw(self._holder)
        except StoreError as exc:
            logger.debug("Couldn't withdraw from the membership: %s", exc)
