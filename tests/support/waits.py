"""Waiting for an event with a deadline, never for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["WaitTimeout", "wait_for", "wait_until_steady"]

T = TypeVar("T")


class WaitTimeout(AssertionError):
    """What was waited for didn't happen in time. Fails a test like any other assertion."""


def wait_for(
    fn: Callable[[], T],
    timeout: float = 10.0,
    what: str | Callable[[], str] = "",
    *,
    interval: float = 0.015,
    ignore: tuple[type[Exception], ...] = (),
) -> T:
    """Call `fn` until it returns something true, and return that.

    `what` says in the failure what was waited for; a callable is asked at the end, so that it can show the
    state of things. The exceptions in `ignore` count as "not yet". The last value goes into the message.
    """
    deadline = time.monotonic() + timeout
    last: Any = None
    while True:
        try:
            last = fn()
            if last:
                return last
        except ignore as exc:
            last = exc
        if time.monotonic() >= deadline:
            break
        time.sleep(interval)
    text = what() if callable(what) else what or getattr(fn, "__qualname__", repr(fn))
    raise WaitTimeout(f"not within {timeout:g} s: {text} (last seen: {last!r:.2000})")


def wait_until_steady(fn: Callable[[], T], quiet: float = 1.0, timeout: float = 10.0, what: str = "") -> T:
    """Call `fn` until what it returns has stayed the same for `quiet` seconds, and return that."""
    deadline = time.monotonic() + timeout
    last, since = fn(), time.monotonic()
    while time.monotonic() < deadline:
        time.sleep(0.02)
        value = fn()
        if value != last:
            last, since = value, time.monotonic()
        elif time.monotonic() - since >= quiet:
            return value
    raise WaitTimeout(
        f"never steady for {quiet:g} s within {timeout:g} s: {what or fn!r} (last seen: {last!r:.2000})"
    )
