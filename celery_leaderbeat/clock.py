"""The clocks, read here and nowhere else.

`monotonic` is for waits and for the trust in a lease: it never steps. `wall` is this host's wall clock and
serves display. `FleetClock.now` is the time that decides when a slot is due: the time of the Redis server,
carried forward by the monotonic clock from the latest measurement, so that a step of a replica's wall clock
moves nothing and all replicas agree.

The server's answer was true at some moment before it arrived. Counting from the arrival therefore gives a
lower bound of the server's time: at most one round trip late, and never early.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from datetime import datetime, timezone

__all__ = ["Clock", "FleetClock"]

#: A measurement older than this (seconds) gives way to any newer one, however slow its round trip was.
_SAMPLE_LIFETIME = 60.0
#: A server's clock that is off by more than this (seconds) beyond what two round trips explain was stepped.
_STEP = 0.5


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

    def contradicts(self, other: _Sample) -> bool:
        """Whether this one and an earlier one can't both be of one clock that runs on."""
        expected = other.server + (self.monotonic - other.monotonic)
        return not (expected - self.round_trip - _STEP < self.server < expected + other.round_trip + _STEP)


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

        The smallest round trip wins until it is a minute old: it bounds the error. One that can't be true any more
        gives way at once: the server's clock was stepped, or another server answers.
        """
        sample = _Sample(server, received, received - sent)
        with self._lock:
            best = self._sample
            if (
                best is None
                or sample.round_trip <= best.round_trip
                or received - best.monotonic > _SAMPLE_LIFETIME
                or sample.contradicts(best)
            ):
                self._sample = sample

    @property
    def offset(self) -> float:
        """How far the server's clock is ahead of this host's wall clock, in seconds; 0 while not measured."""
        sample = self._sample
        if sample is None:
            return 0.0
        return sample.server + (self.clock.monotonic() - sample.monotonic) - self.clock.wall()

    def at(self, server: float) -> float:
        """What the fleet's clock shows when the server's shows `server`, both in Unix seconds."""
        return server if self.source == "redis" else server - self.offset

    def now(self) -> float:
        """Seconds since the Unix epoch, by the fleet's clock. Before any measurement: by this host's."""
        sample = self._sample
        if self.source != "redis" or sample is None:
            return self.clock.wall()
        return sample.server + (self.clock.monotonic() - sample.monotonic)

    def utcnow(self) -> datetime:
        """`now` as an aware datetime in UTC."""
        return datetime.fromtimestamp(self.now(), tz=timezone.utc)
