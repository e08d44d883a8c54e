"""Moments at which a leader has nothing half done.

A leader that ends, or loses its broker, between the claim of a slot and its confirmation leaves that slot in doubt: it is
missed or sent a second time, as its entry prefers. What a test says of all other moments holds `at_rest`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from tests.support.waits import WaitTimeout

__all__ = ["at_rest", "in_doubt"]


class _Stage(Protocol):
    """A `Scene` or a `LeaderbeatSetup`."""

    @property
    def redis(self) -> Any: ...

    def key(self, name: str) -> str: ...


class _Beat(Protocol):
    def freeze(self) -> None: ...

    def thaw(self) -> None: ...


def in_doubt(stage: _Stage) -> list[str]:
    """The tick keys of slots that are claimed, and neither confirmed nor begun by a worker."""
    redis = stage.redis
    return [
        key
        for key in redis.zrange(stage.key("unfinished"), 0, -1)
        if redis.hget(stage.key(f"slot:{key}"), "state") == "claimed"
    ]


@contextmanager
def at_rest(
    stage: _Stage, beat: _Beat, also: Callable[[], bool] = lambda: True, timeout: float = 20.0
) -> Iterator[None]:
    """Hold a beat still at a moment at which none of its slots is in doubt, and let it go on afterwards.

    It can be killed, told to stop, or cut off meanwhile.

    Parameters:
        stage: where the ledger is.
        beat: the leader, whose way to the ledger has no proxy.
        also: what else has to hold at that moment.
        timeout: how long such a moment is looked for, in seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        beat.freeze()
        # What it has asked for is done before the second of these: the server takes its clients in turns.
        stage.redis.ping()
        stage.redis.ping()
        doubtful = in_doubt(stage)
        if not doubtful and also():
            break
        beat.thaw()
        if time.monotonic() >= deadline:
            raise WaitTimeout(f"never at rest within {timeout:g} s: {doubtful} in doubt")
        time.sleep(0.01)
    try:
        yield
    finally:
        beat.thaw()
