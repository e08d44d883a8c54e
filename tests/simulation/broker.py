"""A broker that delivers at least once: messages, their copies, and what a worker's silence leads to.

An unacknowledged message is delivered again when its worker's connection is gone, or when it has been out for
longer than the visibility timeout, even while its worker still runs it.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kombu.exceptions import OperationalError

from celery_leaderbeat.tick import Stamp

if TYPE_CHECKING:
    from tests.simulation.virtual import Process, Thread
    from tests.simulation.world import World

__all__ = ["VISIBILITY", "Broker", "Delivery", "Parcel"]

#: The visibility timeout in seconds; also what the apps are told.
VISIBILITY = 80.0


@dataclass(frozen=True)
class Parcel:
    """A message in the broker."""

    task: str
    task_id: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    headers: Mapping[str, Any]
    retries: int = 0
    redelivered: bool = False

    def __str__(self) -> str:
        stamp = Stamp.from_headers(self.headers)
        if stamp is None:
            return self.task
        more = [f"after {stamp.run[-6:]}"] if stamp.run else []
        more += [f"put off {stamp.put_off}"] if stamp.put_off else []
        more += ["redelivered"] if self.redelivered else []
        return f"{stamp.key} #{stamp.attempt} e{stamp.epoch}" + "".join(f", {text}" for text in more)


@dataclass
class Delivery:
    """A message that is with a worker."""

    parcel: Parcel
    worker: Process
    open: bool = True


class Broker:
    """The queue."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._hub = world.hub
        self._waiting: list[Thread] = []
        self._ready: list[tuple[int, int, Parcel]] = []
        self._out: list[Delivery] = []
        self._serial = 0
        self.away_until = 0
        #: The tick keys of messages that came again.
        self.came_again: set[str] = set()

    @property
    def away(self) -> bool:
        """Whether nobody reaches it now."""
        return self._hub.now < self.away_until

    @property
    def empty(self) -> bool:
        """Whether nothing waits and nothing is with a worker."""
        return not self._ready and not self._out

    def leave(self, seconds: float) -> None:
        """Be out of reach for a while."""
        self.away_until = max(self.away_until, self._hub.now + round(seconds * 1e6))
        self._hub.at(self.away_until, self._offer)

    def put(self, parcel: Parcel, countdown: float = 0.0) -> None:
        """Take a message, to be delivered after `countdown` seconds."""
        self._serial += 1
        when = self._hub.now + round(countdown * 1e6)
        heapq.heappush(self._ready, (when, self._serial, parcel))
        self._hub.at(when, self._offer)

    def put_or_fail(self, parcel: Parcel, countdown: float = 0.0) -> None:
        """Take a message from a worker.

        Raises:
            OperationalError: the broker is away.
        """
        if self.away:
            raise OperationalError("the broker is away")
        self.put(parcel, countdown)

    def get(self) -> Delivery:
        """Wait for a message."""
        hub = self._hub
        thread = hub.thread
        try:
            while self.away or not self._ready or self._ready[0][0] > hub.now:
                self._waiting.append(thread)
                try:
                    hub.wait(None)
                finally:
                    self._waiting.remove(thread)
        finally:
            # A message that was offered to a thread that has died goes to another.
            if not thread.process.alive:
                hub.at(hub.now, self._offer)
        _, _, parcel = heapq.heappop(self._ready)
        delivery = Delivery(parcel, thread.process)
        self._out.append(delivery)
        hub.at(hub.now, self._offer)
        self._world.note(f"takes {parcel}")
        hub.after(VISIBILITY, lambda: self._restore(delivery))
        return delivery

    def ack(self, delivery: Delivery) -> None:
        """The message is gone, unless the broker doesn't hear it."""
        if self.away:
            self._world.note(f"the acknowledgement of {delivery.parcel} is lost")
            self._hub.at(self.away_until, lambda: self._restore(delivery))
        else:
            self._close(delivery)

    def requeue(self, delivery: Delivery) -> None:
        """The message comes again."""
        self._restore(delivery)

    def lost(self, worker: Process, after: float) -> None:
        """A worker's connection is gone: what was with it comes again after a while."""
        for delivery in list(self._out):
            if delivery.worker is worker:
                self._hub.after(after, lambda delivery=delivery: self._restore(delivery))

    def deliver_again(self) -> None:
        """Take the worker of one of the messages that are out for gone; it lives."""
        if self._out:
            self._restore(self._out[self._world.rng.randrange(len(self._out))])

    def _close(self, delivery: Delivery) -> bool:
        was_open, delivery.open = delivery.open, False
        if was_open:
            self._out.remove(delivery)
        return was_open

    def _restore(self, delivery: Delivery) -> None:
        if self._close(delivery):
            self._world.note(f"the broker delivers {delivery.parcel} again")
            stamp = Stamp.from_headers(delivery.parcel.headers)
            if stamp is not None:
                self.came_again.add(stamp.key)
            self.put(replace(delivery.parcel, redelivered=True))

    def _offer(self) -> None:
        """Wake somebody for the next message."""
        if self.away or not self._ready or self._ready[0][0] > self._hub.now:
            return
        able = [thread for thread in self._waiting if self._able(thread.process)]
        if able:
            self._hub.wake(able[self._world.rng.randrange(len(able))])
        elif self._waiting:
            # All who wait are frozen.
            self._hub.after(1.0, self._offer)

    def _able(self, process: Process) -> bool:
        return process.alive and process.frozen_until <= self._hub.now
