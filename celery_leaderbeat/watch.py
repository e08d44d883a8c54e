"""A standby's watch over one term: whether its holder is gone. Pure."""

from __future__ import annotations

from celery_leaderbeat.term import Term

__all__ = ["GONE_AFTER", "Watch"]

#: A holder is gone when two looks this far apart (seconds) find no subscription.
GONE_AFTER = 1.0


class Watch:
    """What a standby has seen of one value of the lease.

    A holder that nobody has ever seen subscribed may be one whose subscription isn't visible; its lease is
    waited for.
    """

    def __init__(self, term: Term) -> None:
        self.term = term
        self._sighted = term.watched
        self._gone_since: float | None = None
        self._long_since: float | None = None

    def outlives(self, remaining: int, now: float) -> bool:
        """Whether nobody has renewed the lease for a whole TTL, and it hasn't lapsed: `remaining` is in ms.

        So it is when the server's clock, by which leases lapse, was set back, and the holder is dead or
        frozen.
        """
        if not self.term.ttl or remaining <= self.term.ttl * 1000:
            self._long_since = None
            return False
        if self._long_since is None:
            self._long_since = now
        return now - self._long_since >= self.term.ttl

    def gone(self, subscribers: int | None, now: float) -> bool:
        """Take a look: how many subscribe to the holder's channel at `now` (None: the server didn't say)."""
        self._sighted = self._sighted or bool(subscribers)
        if subscribers != 0 or not self._sighted:
            self._gone_since = None
            return False
        if self._gone_since is None:
            self._gone_since = now
        return now - self._gone_since >= GONE_AFTER
