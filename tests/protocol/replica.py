"""Replicas without a tick loop, on a real server: their elections alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from celery_leaderbeat.clock import Clock, FleetClock
from celery_leaderbeat.election import Elector
from celery_leaderbeat.release import Release
from celery_leaderbeat.term import Term
from tests.protocol.ground import settings_for

__all__ = ["Fleet", "Replica"]

#: Far longer than what is to happen takes, so that no lease expires meanwhile.
TTL = 30.0


class Replica:
    """One elector, and which of its terms began and ended."""

    def __init__(self, url: str, holder: str, release: str | None, **settings: Any) -> None:
        known = {"lease_ttl": TTL, "renew_interval": 0.5, "stall_timeout": TTL, **settings}
        configured = replace(settings_for(url), release=Release.read(release), **known)
        self.began: list[Term] = []
        self.ended: list[Term] = []
        self.elector = Elector(configured, FleetClock(Clock()), holder, changed=self._changed)
        self.elector.start()

    def _changed(self, term: Term, reason: str) -> None:
        (self.ended if reason else self.began).append(term)


#: Starts a replica with this holder, and, if given, release, the URL of its Redis and settings.
Fleet = Callable[..., Replica]
