"""The lease, as one replica asks for it: elect, renew, release, and until when the answer may be trusted.

Trust ends at `sent + ttl - margin`, where `sent` is the monotonic instant *before* the last successful request
left; see `election`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from celery_leaderbeat.clock import FleetClock
from celery_leaderbeat.errors import StoreError
from celery_leaderbeat.settings import Settings
from celery_leaderbeat.store import Look, Store
from celery_leaderbeat.term import Term

__all__ = ["GONE", "ForeignPrefix", "Lease", "LeftToNewer", "Released"]

logger = logging.getLogger(__name__)

#: Why a lease can't be renewed that nobody holds.
GONE = "the lease is gone"
#: What comes of a release: it was done; another held the lease; nobody did, as where Redis has lost it; no answer.
Released = Literal["released", "held", "gone", "unheard"]


class ForeignPrefix(Exception):
    """The key prefix belongs to another application, whose identity is the argument."""


class LeftToNewer(Exception):
    """The lease is left to a candidate of a newer release; the arguments are its holder and its release."""


@dataclass(frozen=True)
class _Held:
    """A term of ours and the monotonic instant until which it may be trusted."""

    term: Term
    until: float


class Lease:
    """One replica's hold on the lease.

    Parameters:
        settings: lease TTL and application.
        clock: the fleet's clock, which each answer feeds.
        store: the connection of whoever asks.
        holder: the identity of this replica.
        attributes: what else the lease says of its holder (JSON values).

    Attributes:
        highest: the highest epoch that this replica has seen.
        last_leader: the holder that led under it, empty if none was seen.
        led_until: the monotonic instant up to which this replica led last, as far as it could trust.
        at_stake: a lease of this replica may stand in Redis.
        unheard: a release that Redis hasn't answered, as the arguments of `release`; None if there is none.
    """

    def __init__(
        self, settings: Settings, clock: FleetClock, store: Store, holder: str, attributes: Mapping[str, Any]
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._store = store
        self._holder = holder
        self._attributes = attributes
        self._held: _Held | None = None
        self.highest = 0
        self.last_leader = ""
        self.led_until = float("-inf")
        self.at_stake = False
        self.unheard: tuple[Term, str, bool] | None = None

    def trusted(self) -> Term | None:
        """The term that this replica may trust right now, or None. Safe from any thread."""
        held = self._held
        if held is None or self._monotonic() >= held.until:
            return None
        return held.term

    def trusted_until(self, term: Term) -> datetime | None:
        """Until when, by the fleet's clock, `term` may be trusted; None if it isn't ours. Safe from any thread."""
        held = self._held
        left = 0.0 if held is None or held.term != term else held.until - self._monotonic()
        return self._clock.utcnow() + timedelta(seconds=left) if left > 0 else None

    @property
    def until(self) -> float:
        """The monotonic instant at which the trust ends; in the past if there is none."""
        held = self._held
        return float("-inf") if held is None else held.until

    def drop(self) -> None:
        """Trust nothing any more."""
        self._held = None

    def has_outlived(self, term: Term) -> bool:
        """Whether a later term than `term` has been seen: then Redis has gone back, and its lease with it."""
        return 0 < term.epoch < self.highest

    def saw(self, term: Term) -> None:
        """Somebody leads, or led, under `term`."""
        if term.epoch > self.highest:
            self.highest, self.last_leader = term.epoch, term.holder

    def look(self, channel: str | None) -> Look:
        """Look at the lease, and how many subscribe to a channel."""
        sent = self._monotonic()
        look = self._store.look(channel)
        self._clock.observe(look.now, sent, self._monotonic())
        return look

    def elect(self, takes_over: str, watched: bool, insists: bool = False) -> Term | None:
        """Stand for election; None if the lease is held.

        Parameters:
            takes_over: the value of the lease that may be taken over, empty for none.
            watched: whether the others can see by this replica's subscription that it lives.
            insists: stand against candidates of newer releases, too.

        Raises:
            ForeignPrefix: the prefix belongs to another application; nothing was written.
            LeftToNewer: a candidate of a newer release lives; nothing was written.
            StoreError: no answer, or a refusal.
        """
        keys = self._store.keys
        sent = self._monotonic()
        self.at_stake = True
        answer = self._store.run(
            "elect",
            [keys.lease, keys.epoch, keys.app, keys.released, keys.replicas, keys.releases],
            [
                self._holder,
                round(self._settings.lease_ttl * 1000),
                self.highest,
                self._settings.app_identity,
                json.dumps({**self._attributes, "watched": watched, "ttl": self._settings.lease_ttl}),
                takes_over,
                self._settings.release.rank,
                int(insists),
            ],
        )
        self.at_stake = answer[0] == "elected"
        if answer[0] == "foreign":
            raise ForeignPrefix(answer[1])
        if answer[0] == "left":
            raise LeftToNewer(*answer[1:])
        if answer[0] == "held":
            return None
        term = Term.read(answer[1])
        self._observe(answer[2:], sent)
        self._trust(term, sent)
        return term

    def renew(self, term: Term) -> str | None:
        """Extend the lease of `term`; why that isn't possible, or None.

        Raises:
            StoreError: no answer, or a refusal.
        """
        sent = self._monotonic()
        keys = self._store.keys
        args: list[str | int] = [term.value, round(self._settings.lease_ttl * 1000), term.epoch]
        answer = self._store.run("renew", [keys.lease, keys.epoch], args)
        self.at_stake = answer[0] == 1
        if answer[0] != 1:
            other = Term.read(answer[1]) if answer[1] else None
            if other is not None:
                self.saw(other)
            return f"the lease is held by {other.holder}" if other else GONE
        self._observe(answer[1:], sent)
        self._trust(term, sent)
        return None

    def release(self, term: Term, reason: str, newer: bool = False) -> Released:
        """Release the lease of `term`, if it still is that one's. Where Redis doesn't answer it expires by itself.

        `newer`: it is left to a newer release.
        """
        keys = self._store.keys
        sharded = "1" if self._settings.redis.kind == "cluster" else ""
        try:
            outcome: Released = self._store.run(
                "release",
                [keys.lease, keys.released],
                [term.value, keys.wake, term.epoch, reason[:500], sharded, "1" if newer else ""],
            )
        except StoreError as exc:
            logger.warning(
                "Couldn't release the lease of epoch %d (%s); it expires by itself within %.0f s.",
                term.epoch,
                exc,
                self._settings.lease_ttl,
                extra={"action": "release_failed", "epoch": term.epoch},
            )
            self.unheard = (term, reason, newer)
            return "unheard"
        self._held, self.at_stake, self.unheard = None, False, None
        self.led_until = min(self.led_until, self._monotonic())
        if outcome == "released":
            logger.info(
                "Handed over: released the lease of epoch %d (%s).",
                term.epoch,
                reason,
                extra={"action": "released", "epoch": term.epoch},
            )
        return outcome

    def _trust(self, term: Term, sent: float) -> None:
        self.highest, self.last_leader = max(self.highest, term.epoch), self._holder
        self.led_until = sent + self._settings.lease_ttl - self._settings.margin
        self._held = _Held(term, self.led_until)

    def _observe(self, time: list[str], sent: float) -> None:
        self._clock.observe(int(time[0]) + int(time[1]) / 1e6, sent, self._monotonic())

    def _monotonic(self) -> float:
        return self._clock.clock.monotonic()
