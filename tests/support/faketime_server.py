"""A Valkey server whose clock stands still until a test moves it.

A library that is loaded into the server answers every question for the time, of the wall clock and of the monotonic one.
Everything that the server does by time follows: `TIME`, the ends of keys, the ids of streams. The monotonic clock has to
stand still too: the server would otherwise carry its wall clock forward by it for a millisecond before it asks again.
"""

from __future__ import annotations

import platform
import shutil
import tempfile
from pathlib import Path

from tests.support.faketime import missing
from tests.support.quick_client import QuickClient
from tests.support.servers import RedisServer, require
from tests.support.still_clock import StillClock, still_clock

__all__ = ["FrozenServer", "require_frozen_server"]

#: What costs questions for the time, and tells nothing that a test reads.
_QUICK = (
    *("--latency-tracking", "no", "--hz", "1", "--dynamic-hz", "no"),
    *("--commandlog-execution-slower-than", "-1"),
    *("--commandlog-request-larger-than", "-1", "--commandlog-reply-larger-than", "-1"),
)


class FrozenServer(RedisServer):
    """A Valkey server at the time that `set_time` named last, in µs since the Unix epoch."""

    def __init__(self, directory: Path, now_us: int, clock: StillClock) -> None:
        # A path of its own: that of a test's directory may be too long for a socket.
        self._socket = Path(tempfile.mkdtemp()) / "frozen"
        listens = ("--unixsocket", str(self._socket))
        super().__init__(require("valkey"), directory, *_QUICK, *listens, name="frozen-valkey")
        self._quick: QuickClient | None = None
        self._clock = clock
        self._now_us = -1
        self.set_time(now_us)
        self.env |= clock.env

    def set_time(self, now_us: int) -> None:
        """Set the clock; back is a step of it, as a real one may make."""
        if now_us != self._now_us:
            self._now_us = now_us
            self._clock.set(now_us)

    def quick_client(self) -> QuickClient:
        """A client that costs little time, closed when the server is stopped for good."""
        if self._quick is None:
            self._quick = QuickClient(self._socket)
        return self._quick

    def time(self) -> int:
        """The time that the server tells, in µs since the Unix epoch."""
        seconds, micros = self.client().time()
        return int(seconds) * 1_000_000 + int(micros)

    def stop(self) -> None:
        """Kill the server."""
        if self._quick is not None:
            self._quick.close()
            self._quick = None
        super().stop()
        shutil.rmtree(self._socket.parent, ignore_errors=True)
        self._clock.close()


def require_frozen_server(directory: Path, now_us: int) -> FrozenServer:
    """Start such a server; where that can't be, skip the test, or fail it under `CI=true`."""
    server = FrozenServer(directory, now_us, still_clock(directory))
    server.start()
    for step in (0, 123_456, 9_999_999):
        server.set_time(now_us + step)
        if server.time() != now_us + step:
            server.stop()
            missing("the server's clock can't be stopped", platform.machine() == "x86_64")
    server.set_time(now_us)
    return server
