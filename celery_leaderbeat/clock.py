"""The clocks, read here and nowhere else.

`monotonic` is for waits and for the trust in a lease: it never steps. `wall` is this host's wall clock and
serves display. `FleetClock.now` is the time that decides when a slot is due: the time of the Redis server,
carried forward by the monotonic clock from the latest measurement, so that a step of a replica's wall clock
moves nothing and all replicas agree.

The server's answer was true at some moment before it arrived. Counting from the arrival therefore gives a
lower bound of the server's time: at most one round trip late, and never early. Each measurement also says where
the server's clock can't be: where it contradicts the time carried forward, the server's clock has stepped or this
host has slept, and the new measurement counts from then on.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from datetime import datetime, timezone

__all__ = ["Clock", "FleetClock"]

#: A measurement older than this (seconds) gives way to any newer one, however slow its round trip was.
_SAMPLE_LIFETIME = 60.0
#: Two clocks that are read within this time (seconds) are read at once.
_AT_ONCE = 0.05


class Clock:
    """This host's clocks. Tests pass one of their own."""

    def monotonic(self) -> float:
        """Seconds on a clock that never steps; only differences mean anything."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since the Unix epoch, by this host's wall clock."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""
        time.sleep(seconds)


@dataclass(frozen=True)
class _Sample:
    server: float
    monotonic: float
    round_trip: float

    def at(self, monotonic: float) -> float:
        """The server's time, carried forward to a monotonic instant."""
        return self.server + (monotonic - self.monotonic)


class FleetClock:
    """The time that decides when a slot is due.

    Parameters:
        clock: this host's clocks.
        source: `"redis"` follows the server's `TIME`; `"local"` follows this host's wall clock.
    """

    def __init__(self, clock: Clock, source: str = "redis") -> None:
        self.clock = clock
        self.source = source
        self._sample: _Sample | None = None
        self._lock = threading.Lock()

    def observe(self, server: float, sent: float, received: float) -> None:
        """Take a measurement: the server said `server` (Unix seconds) between two monotonic instants.

        The smallest round trip wins, since it bounds the error, until it is a minute old or is contradicted: when
        the answer arrived, the server's clock showed at least `server`, and at most a round trip more.
        """
        sample = _Sample(server, received, received - sent)
        with self._lock:
            best = self._sample
            if (
                best is None
                or sample.round_trip <= best.round_trip
                or received - best.monotonic > _SAMPLE_LIFETIME
                or not server <= best.at(received) <= server + sample.round_trip
            ):
                self._sample = sample

    @property
    def offset(self) -> float:
        """How far the server's clock is ahead of this host's wall clock, in seconds; 0 while not measured."""
        sample = self._sample
        if sample is None:
            return 0.0
        return sample.at(self.clock.monotonic()) - self.clock.wall()

    @property
    def shift(self) -> float:
        """How far the fleet's clock is ahead of the monotonic one, in seconds: it changes where the clock steps."""
        sample = self._sample
        if self.source == "redis" and sample is not None:
            return sample.server - sample.monotonic
        while True:
            before, wall = self.clock.monotonic(), self.clock.wall()
            # Frozen in between, the two readings don't belong together.
            if self.clock.monotonic() - before < _AT_ONCE:
                return wall - before

    def at(self, server: float) -> float:
        """What the fleet's clock shows when the server's shows `server`, both in Unix seconds."""
        return server if self.source == "redis" else server - self.offset

    def now(self) -> float:
        """Seconds since the Unix epoch, by the fleet's clock. Before any measurement: by this host's."""
        sample = self._sample
        if self.source != "redis" or sample is None:
            return self.clock.wall()
        return sample.at(self.clock.monotonic())

    def utcnow(self) -> datetime:
        """`now` as an aware datetime in UTC."""
        return datetime.fromtimestamp(self.now(), tz=timezone.utc)
