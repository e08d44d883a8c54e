"""Membership: which replicas live, as far as they have said so lately, and which of them stand for election.

A replica that has a release says once a second whether it stands. That is how an older release learns of it:
a leader hands over to it, and a standby leaves a free lease to it. Whoever isn't heard of for three seconds
is no candidate any more (see `announce.lua`, `elect.lua`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from celery_leaderbeat.errors import StoreError
from celery_leaderbeat.settings import Settings
from celery_leaderbeat.store import Store

__all__ = ["Candidate", "Membership"]

logger = logging.getLogger(__name__)

#: How often a replica that has a release shows itself, in seconds.
_SHOWN_EVERY = 1.0
#: How late an announcement may be without its replica counting as gone, in seconds.
_LATE = 1.0


@dataclass(frozen=True)
class Candidate:
    """A replica of a newer release, which stands for election."""

    holder: str
    release: str


class Membership:
    """This replica among the others.

    Parameters:
        settings: this replica's release, and how often replicas show themselves.
        store: the connection of whoever asks.
        holder: the identity of this replica.

    Attributes:
        others: the holders of the other replicas that were seen lately.
        newer: the candidate of the newest release, if that is newer than this replica's.
        interval: seconds from one announcement to the next.
    """

    def __init__(self, settings: Settings, store: Store, holder: str) -> None:
        self._settings = settings
        self._store = store
        self._holder = holder
        self.others: list[str] = []
        self.newer: Candidate | None = None
        self.interval = settings.renew_interval
        if settings.release.rank:
            self.interval = min(self.interval, _SHOWN_EVERY)

    def announce(self, stands: bool) -> None:
        """Say that this replica lives, and whether it stands for election; look who else does."""
        keys, release = self._store.keys, self._settings.release
        self.newer = None
        try:
            answer = self._store.run(
                "announce",
                [keys.replicas, keys.releases, keys.app],
                [
                    self._holder,
                    3 * self._settings.renew_interval,
                    self._settings.app_identity,
                    release.text,
                    release.rank,
                    int(stands),
                    keys.wake,
                    int(self._settings.redis.kind == "cluster"),
                ],
            )
        except StoreError as exc:
            logger.debug("Couldn't announce this replica: %s", exc, extra={"action": "not_announced"})
            return
        if answer[0] == "foreign":
            return
        self.others = [holder for holder in answer[2:] if holder != self._holder]
        self.newer = Candidate(answer[0], answer[1]) if answer[0] else None

    def retreat(self, seconds: float) -> bool:
        """Leave the lead to the others for a while; False if none of them could do better.

        Those that are in retreat themselves couldn't, nor could those that have missed an announcement.

        Raises:
            StoreError: no answer, or a refusal; it may be asked again.
        """
        keys = self._store.keys
        answer = self._store.run(
            "retreat",
            [keys.retreats, keys.replicas],
            [self._holder, round(seconds * 1000), self._settings.renew_interval + _LATE],
        )
        return bool(answer)

    def withdraw(self) -> None:
        """This replica is no longer there."""
        try:
            self._store.withdraw(self._holder)
        except StoreError as exc:
            logger.debug("Couldn't withdraw from the membership: %s", exc, extra={"action": "not_withdrawn"})
