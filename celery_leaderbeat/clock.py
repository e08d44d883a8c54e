"""The clocks, read here and nowhere else.

`monotonic` is for waits and for the trust in a lease: it never steps. `wall` is this host's wall clock and
serves display. `FleetClock.now` is the time that decides when a slot is due: the time of the Redis server,
carried forward by the monotonic clock from the measurements, so that a step of a replica's wall clock
moves nothing and all replicas agree.

The server's answer was true at some moment of its round trip. So each measurement gives two bounds of the
server's time, and the narrowest that follow from all of them are kept; a bound that is carried forward gives
way a little, since clocks run at different rates. The lower one counts: at most one round trip late, and
never early. Where a measurement contradicts the bounds, the server's clock has stepped or this host has
slept, and the measurement alone counts from then on.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from datetime import datetime, timezone

__all__ = ["Clock", "FleetClock"]

#: By how much the rates of two hosts' clocks may differ.
_DRIFT = 2e-4
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
class _Bounds:
    """When the monotonic clock showed `monotonic`, the server's showed `server`, or up to `width` more."""

    server: float
    monotonic: float
    width: float

    def at(self, monotonic: float) -> float:
        """The lower bound, carried forward to a monotonic instant."""
        return self.server + (monotonic - self.monotonic)

    def met_by(self, measured: _Bounds) -> _Bounds:
        """What is known after another measurement."""
        carried = self.at(measured.monotonic)
        slack = abs(measured.monotonic - self.monotonic) * _DRIFT
        lower = max(measured.server, carried - slack)
        upper = min(measured.server + measured.width, carried + self.width + slack)
        return measured if lower > upper else _Bounds(lower, measured.monotonic, upper - lower)


class FleetClock:
    """The time that decides when a slot is due.

    Parameters:
        clock: this host's clocks.
        source: `"redis"` follows the server's `TIME`; `"local"` follows this host's wall clock.
    """

    def __init__(self, clock: Clock, source: str = "redis") -> None:
        self.clock = clock
        self.source = source
        self._bounds: _Bounds | None = None
        self._lock = threading.Lock()

    def observe(self, server: float, sent: float, received: float) -> None:
        """Take a measurement: the server said `server` (Unix seconds) between two monotonic instants."""
        measured = _Bounds(server, received, received - sent)
        with self._lock:
            known = self._bounds
            self._bounds = measured if known is None else known.met_by(measured)

    @property
    def offset(self) -> float:
        """Least by which the server's clock is ahead of this host's wall clock, in seconds; 0 while not measured.

        Negative where it is behind. What a slow round trip may explain doesn't count.
        """
        bounds = self._bounds
        if bounds is None:
            return 0.0
        least = bounds.at(self.clock.monotonic()) - self.clock.wall()
        return least if least > 0 else min(least + bounds.width, 0.0)

    @property
    def shift(self) -> float:
        """How far the fleet's clock is ahead of the monotonic one, in seconds; it changes as the clock steps."""
        bounds = self._bounds
        if self.source == "redis" and bounds is not None:
            return bounds.server - bounds.monotonic
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
        bounds = self._bounds
        if self.source != "redis" or bounds is None:
            return self.clock.wall()
        return bounds.at(self.clock.monotonic())

    def utcnow(self) -> datetime:
        """`now` as an aware datetime in UTC."""
        return datetime.fromtimestamp(self.now(), tz=timezone.utc)
