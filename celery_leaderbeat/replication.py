"""Sending only what enough Redis replicas know of (`leaderbeat_min_replicas`).

A claim that too few Redis replicas have might be lost in a failover, and its slot sent twice: it isn't
published, but given back. While that lasts nothing is claimed any more, each try begins with the question
whether the Redis replicas answer again, and the entries' own deadlines go on to decide what is missed.
Another leader would be no better off, since they all write to the same server: nobody steps down for it.
"""

from __future__ import annotations

import logging

from celery_leaderbeat.backoff import backoff
from celery_leaderbeat.clock import Clock
from celery_leaderbeat.errors import StoreError, StoreUnavailable
from celery_leaderbeat.ledger import Ledger

__all__ = ["Replication"]

logger = logging.getLogger(__name__)

#: Bounds of the wait between two tries while too few Redis replicas answer, in seconds.
_AWAY = (0.1, 1.0)


class Replication:
    """Whether claims reach the Redis replicas.

    Parameters:
        ledger: the one that claims: the server answers for its connection.
        wanted: how many Redis replicas there have to be; with 0, all is well.
        clock: for the waits.
    """

    def __init__(self, ledger: Ledger, wanted: int, clock: Clock) -> None:
        self._ledger = ledger
        self._wanted = wanted
        self._clock = clock
        self._failures = 0
        self._until = 0.0

    @property
    def held_for(self) -> float:
        """Seconds until it is worth trying again; 0 or less if it is now."""
        return self._until - self._clock.monotonic()

    def ready(self) -> bool:
        """Whether to claim. Asks the server where the last claim was in vain.

        Raises:
            StoreUnavailable: no answer.
        """
        if not self._failures:
            return True
        try:
            if self._ledger.replicas_answer():
                return True
        except StoreUnavailable:
            raise
        except StoreError as exc:
            logger.debug(
                "No answer to how many Redis replicas there are: %s",
                exc,
                extra={"action": "replication_unknown"},
            )
        self._wait()
        return False

    def failed(self, reason: str) -> None:
        """Too few Redis replicas had a claim. Said once, until one has succeeded."""
        if not self._failures:
            logger.warning(
                "Nothing is sent: %s (leaderbeat_min_replicas is %d). Slots wait until enough Redis replicas "
                "answer, or are missed by their entries' deadlines; are the Redis replicas up, and connected?",
                reason,
                self._wanted,
                extra={"action": "not_replicated"},
            )
        self._wait()

    def succeeded(self) -> None:
        """Enough Redis replicas had a claim."""
        if self._failures:
            self._failures = 0
            logger.info(
                "Enough Redis replicas answer again; what is due is sent.", extra={"action": "replicated"}
            )

    def _wait(self) -> None:
        self._until = self._clock.monotonic() + backoff(self._failures, *_AWAY)
        self._failures += 1
