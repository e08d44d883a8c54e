"""The desk: what the tick loop and the listener tell the elector, and when the tick loop last came round.

Orders are put in from any thread, also from inside a signal handler: nothing here takes a lock of ours.
"""

from __future__ import annotations

import queue

from celery_leaderbeat.clock import Clock

__all__ = ["Desk"]


class Desk:
    """One elector's desk.

    Parameters:
        clock: for waits.
        stall_timeout: seconds after which a tick loop that hasn't come round counts as one that hangs.

    Attributes:
        stopping: the replica is to stop.
        working: a round of the tick loop is under way, which may send.
        candidate_from: the monotonic instant from which on this replica stands for election again.
    """

    def __init__(self, clock: Clock, stall_timeout: float) -> None:
        self._clock = clock
        self._stall_timeout = stall_timeout
        self._orders: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._progress = clock.monotonic()
        self.stopping = False
        self.working = False
        self.candidate_from = float("-inf")

    def put(self, order: str) -> None:
        """Have the elector look up from what it waits for."""
        self._orders.put(order)

    def wait(self, seconds: float) -> str | None:
        """Wait for an order; several that wait are one."""
        if self.stopping:
            return "stop"
        try:
            order = self._orders.get(timeout=max(seconds, 0.0))
            while not self._orders.empty():
                order = self._orders.get_nowait()
        except queue.Empty:
            return None
        return order

    def progress(self) -> None:
        """The tick loop came round."""
        self._progress = self._clock.monotonic()

    @property
    def idle_for(self) -> float:
        """Seconds since the tick loop came round."""
        return self._clock.monotonic() - self._progress

    @property
    def stalled(self) -> bool:
        """Whether the tick loop hangs."""
        return self.idle_for > self._stall_timeout
