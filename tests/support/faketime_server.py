"""A Valkey server whose clock stands still until a test moves it.

`libfaketime` is loaded into the server and answers every question for the time, of the wall clock and of the
monotonic one, from a file. Everything that the server does by time follows: `TIME`, the ends of keys, the ids of
streams. The monotonic clock has to stand still too: the server would otherwise carry its wall clock forward by it
for a millisecond before it asks again.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import pytest

from tests.support.servers import RedisServer, require

__all__ = ["FrozenServer", "SteppedServer", "require_frozen_server", "require_stepped_server"]

#: What costs questions for the time, and tells nothing that a test reads.
_QUICK = (
    *("--latency-tracking", "no", "--hz", "1", "--dynamic-hz", "no"),
    *("--commandlog-execution-slower-than", "-1"),
    *("--commandlog-request-larger-than", "-1", "--commandlog-reply-larger-than", "-1"),
)


class FrozenServer(RedisServer):
    """A Valkey server at the time that `set_time` named last, in µs since the Unix epoch."""

    def __init__(self, directory: Path, now_us: int, library: Path) -> None:
        super().__init__(require("valkey"), directory, *_QUICK, name="frozen-valkey")
        path = directory / "now"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self._now_us = -1
        self._second, self._text = -1, ""
        self.set_time(now_us)
        self.env |= {
            "LD_PRELOAD": str(library),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_TIMESTAMP_FILE": str(path),
            "DONT_FAKE_MONOTONIC": "0",
        }

    def set_time(self, now_us: int) -> None:
        """Set the clock. Back only where all databases are empty."""
        if now_us == self._now_us:
            return
        self._now_us = now_us
        second, fraction = divmod(now_us, 1_000_000)
        if second != self._second:
            self._second = second
            self._text = datetime.fromtimestamp(second, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
        # The library reads a fraction as a float; half a microsecond more keeps it from rounding down. The
        # length never changes, so the server never reads half a time.
        os.pwrite(self._file, f"{self._text}.{fraction:06}500\n".encode(), 0)

    def time(self) -> int:
        """The time that the server tells, in µs since the Unix epoch."""
        seconds, micros = self.client().time()
        return int(seconds) * 1_000_000 + int(micros)

    def stop(self) -> None:
        """Kill the server."""
        super().stop()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class SteppedServer(RedisServer):
    """A Valkey server whose wall clock runs, and can be stepped; its monotonic clock runs on."""

    def __init__(self, directory: Path, library: Path) -> None:
        super().__init__(require("valkey"), directory, name="stepped-valkey")
        self._path = directory / "offset"
        self.step(0)
        self.env |= {
            "LD_PRELOAD": str(library),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_TIMESTAMP_FILE": str(self._path),
            "DONT_FAKE_MONOTONIC": "1",
        }

    def step(self, seconds: int) -> None:
        """Set the clock: by so many seconds ahead of this machine's, or behind it."""
        # The server must never read half a number.
        beside = self._path.with_suffix(".new")
        beside.write_text(f"{seconds:+d}\n")
        beside.replace(self._path)


def require_stepped_server(directory: Path) -> SteppedServer:
    """Start such a server; where that can't be, skip the test, or fail it under `CI=true`."""
    directory.mkdir(parents=True, exist_ok=True)
    server = SteppedServer(directory, _library())
    server.start()
    for seconds in (3600, -3600, 0):
        server.step(seconds)
        if abs(server.client().time()[0] - time.time() - seconds) > 5:
            server.stop()
            _missing("the server's clock can't be stepped", platform.machine() == "x86_64")
    return server


def require_frozen_server(directory: Path, now_us: int) -> FrozenServer:
    """Start such a server; where that can't be, skip the test, or fail it under `CI=true`."""
    server = FrozenServer(directory, now_us, _library())
    server.start()
    for step in (0, 123_456, 9_999_999):
        server.set_time(now_us + step)
        if server.time() != now_us + step:
            server.stop()
            _missing("the server's clock can't be stopped", platform.machine() == "x86_64")
    server.set_time(now_us)
    return server


def _library() -> Path:
    require("valkey")
    spec = importlib.util.find_spec("libfaketime")
    if spec is not None and spec.origin is not None:
        for path in sorted(Path(spec.origin).parent.rglob("libfaketime.so*")):
            return path
    _missing("no libfaketime wheel", sys.platform == "linux")
    raise AssertionError("unreachable")


def _missing(what: str, obtainable: bool) -> None:
    if obtainable and os.environ.get("CI", "").lower() in ("1", "true", "yes"):
        pytest.fail(f"{what}: CI must have it", pytrace=False)
    pytest.skip(what)
