"""Processes whose wall clock a test sets, by `libfaketime`."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

__all__ = ["WallClock", "faketime_library", "missing"]


class WallClock:
    """The wall clock of the processes that are started with its `env`. Their monotonic clock is the real one.

    Parameters:
        directory: for the file that says how far it is off.
        offset: how far it is off at first, in seconds.
    """

    def __init__(self, directory: Path, offset: float = 0.0) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = directory / "offset"
        self.set(offset)
        self.env = {
            "LD_PRELOAD": str(faketime_library()),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }

    def set(self, offset: float) -> None:
        """Step it: from now on it is `offset` seconds off."""
        # In one step, so that nobody reads half a number.
        new = self._file.with_suffix(".new")
        new.write_text(f"{offset:+f}\n")
        new.replace(self._file)


def faketime_library() -> Path:
    """The library; where there is none, the test is skipped, or fails under `CI=true`."""
    spec = importlib.util.find_spec("libfaketime")
    if spec is not None and spec.origin is not None:
        for path in sorted(Path(spec.origin).parent.rglob("libfaketime.so*")):
            return path
    missing("no libfaketime wheel", sys.platform == "linux")
    raise AssertionError("unreachable")


def missing(what: str, obtainable: bool) -> None:
    """Skip the test for want of something, or fail it under `CI=true` where that can be had."""
    if obtainable and os.environ.get("CI", "").lower() in ("1", "true", "yes"):
        pytest.fail(f"{what}: CI must have it", pytrace=False)
    pytest.skip(what)
