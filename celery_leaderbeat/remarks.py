"""What a replica says about elections: each thing once, or once in a while."""

from __future__ import annotations

import logging

from celery_leaderbeat.clock import Clock
from celery_leaderbeat.keys import Keys
from celery_leaderbeat.settings import Settings
from celery_leaderbeat.term import Term

__all__ = ["Remarks"]

logger = logging.getLogger(__name__)

#: The same complaint is logged once in this many seconds.
_COMPLAIN_EVERY = 30.0


class Remarks:
    """The remarks of one replica.

    Parameters:
        settings: the prefix and the application.
        clock: for the time between two complaints.
    """

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._settings = settings
        self._keys = Keys(settings.key_prefix)
        self._clock = clock
        self._standing_by_for = ""
        self._left_to = ""
        self._complained: dict[str, float] = {}

    def complain(self, kind: str, message: str, *args: object, level: int = logging.WARNING) -> None:
        """Say it, unless the same kind of complaint was said in the last half minute."""
        now = self._clock.monotonic()
        if now - self._complained.get(kind, -_COMPLAIN_EVERY) >= _COMPLAIN_EVERY:
            self._complained[kind] = now
            logger.log(level, message, *args, extra={"action": "election_trouble", "trouble": kind})

    def stands_by_for_nobody(self) -> None:
        """What was said of the leader may be said again."""
        self._standing_by_for = self._left_to = ""

    def stands_by(self, term: Term, remaining: int) -> None:
        """Say once for whom this replica stands by; `remaining` is the lease's TTL in ms."""
        if term.value == self._standing_by_for:
            return
        self._standing_by_for = term.value
        if remaining < 0:
            logger.warning(
                "Standing by for %s, but its lease doesn't expire, so this replica would wait for ever. "
                "If nobody of that name leads, delete the key %r.",
                term.holder,
                self._keys.lease,
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
        if term.app and term.app != self._settings.app_identity:
            self.foreign(term.app)

    def leaves_it_to(self, holder: str, release: str) -> None:
        """Say once that a free lease is left to a candidate of a newer release."""
        if holder != self._left_to:
            self._left_to = holder
            logger.info(
                "Leaving the lease to %s, which stands for election with the newer release %s.",
                holder,
                release,
                extra={"action": "left_to_newer", "candidate": holder, "release": release},
            )

    def leads_unseen(self) -> None:
        """The server doesn't show the leader's subscription."""
        self.complain(
            "unseen",
            "The server doesn't show this leader's subscription (PUBSUB NUMSUB). Should its process die, the others wait "
            "for the end of its lease, up to %.0f s, instead of about two seconds.",
            self._settings.lease_ttl,
            level=logging.INFO,
        )

    def came_back(self, term: Term, highest: int) -> None:
        """The lease is an older term's again."""
        self.complain(
            "came back",
            "The lease of epoch %d has come back, though epoch %d has led since: Redis has lost writes, as in a failover "
            "to a replica that lagged. It is taken over. leaderbeat_min_replicas keeps such a loss from mattering.",
            term.epoch,
            highest,
        )

    def foreign(self, identity: str) -> None:
        """The key prefix belongs to another application."""
        self.complain(
            "foreign",
            "The key prefix %r belongs to the application %r, and this one is %r. This replica doesn't lead. Set "
            "leaderbeat_key_prefix to a prefix of its own (or, if the application was renamed, delete the key %r).",
            self._settings.key_prefix,
            identity,
            self._settings.app_identity,
            self._keys.app,
            level=logging.ERROR,
        )
