"""A clock that stands still until it is set, for a server in another process.

`still_clock.c` answers the server's questions for the time from memory that both share. It is compiled where there is a C
compiler. Where there is none, `libfaketime` tells the same times, from a file that it opens for each question: a server
asks some twenty for each request, and takes about twice as long for it.
"""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
from abc import ABC, abstractmethod
from datetime import datetime, timezone
from pathlib import Path

from tests.support.faketime import faketime_library

__all__ = ["StillClock", "compiled_clock", "library_clock", "still_clock"]

_SOURCE = Path(__file__).with_name("still_clock.c")


class StillClock(ABC):
    """A clock, for the process that is started with its `env`."""

    env: dict[str, str]

    @abstractmethod
    def set(self, now_us: int) -> None:
        """Set it, in µs since the Unix epoch."""

    @abstractmethod
    def close(self) -> None:
        """Close what it has open."""


class _Shared(StillClock):
    """Tells the time by a page of memory."""

    def __init__(self, path: Path, library: Path) -> None:
        self.env = {"LD_PRELOAD": str(library), "STILL_CLOCK": str(path)}
        path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), 8)
        self._told = memoryview(self._page).cast("q")

    def set(self, now_us: int) -> None:
        self._told[0] = now_us

    def close(self) -> None:
        self._told.release()
        self._page.close()


class _Written(StillClock):
    """Tells the time by a file."""

    def __init__(self, path: Path, library: Path) -> None:
        self.env = {
            "LD_PRELOAD": str(library),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_TIMESTAMP_FILE": str(path),
            "DONT_FAKE_MONOTONIC": "0",
        }
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self._second, self._text = -1, ""

    def set(self, now_us: int) -> None:
        second, fraction = divmod(now_us, 1_000_000)
        if second != self._second:
            self._second = second
            self._text = datetime.fromtimestamp(second, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
        # The library reads a fraction as a float; half a microsecond more keeps it from rounding down. The
        # length never changes, so the server never reads half a time.
        os.pwrite(self._file, f"{self._text}.{fraction:06}500\n".encode(), 0)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def compiled_clock(directory: Path) -> StillClock | None:
    """The quick one; None where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    library = directory / "still_clock.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, _SOURCE], check=True)
    return _Shared(directory / "now", library)


def library_clock(directory: Path) -> StillClock:
    """The slow one; where there is no `libfaketime`, the test is skipped, or fails under `CI=true`."""
    return _Written(directory / "now", faketime_library())


def still_clock(directory: Path) -> StillClock:
    """The quickest that can be had."""
    return compiled_clock(directory) or library_clock(directory)
