"""Replicas: the package's own scheduler, elector and dispatcher, in virtual time; only publishing is stood in for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from celery_leaderbeat.keys import Keys
from celery_leaderbeat.message import Message, Outcome
from celery_leaderbeat.scheduler import Scheduler
from tests.simulation.virtual import Process, VirtualClock

if TYPE_CHECKING:
    from tests.simulation.world import World

__all__ = ["Replica", "sim_listener", "sim_publisher"]

#: Longest that a replica waits before it comes round again, in seconds, at least.
_SHORTEST_PAUSE = 0.001


class Replica:
    """A beat process that is started again some time after it has died."""

    def __init__(self, world: World, name: str, skew: float) -> None:
        self._world = world
        self._clock = VirtualClock(world.hub, skew)
        self.name = name
        self.process = Process(name, "beat")
        self.process.alive = False
        self._stopping = False

    def set_clock(self, ahead: float) -> None:
        """Set the wall clock of its host: so many seconds ahead of the world's."""
        self._clock.skew = ahead

    def start(self) -> None:
        """Start the process, as a new one."""
        self.process = Process(self.name, "beat")
        self._stopping = False
        self._world.note(f"{self.name} starts")
        self._world.hub.start(self.process, self._main)

    def stop(self) -> None:
        """Ask it to stop in order, at the end of its tick."""
        self._stopping = True

    def _main(self) -> None:
        world = self._world
        scheduler = Scheduler(app=world.app, clock=self._clock)
        while not self._stopping:
            pause = scheduler.tick()
            self._look_at_trust(scheduler)
            world.hub.sleep(max(pause, _SHORTEST_PAUSE))
        world.note("stops")
        scheduler.close()
        world.note("has stopped")
        world.kill(self.process)

    def _look_at_trust(self, scheduler: Scheduler) -> None:
        """Whether this replica would still take itself for the leader when its lease is over."""
        lease = scheduler._running.elector._lease if scheduler._running is not None else None
        term = lease.trusted() if lease is not None else None
        if lease is not None and term is not None:
            hub = self._world.hub
            until = hub.now + round((lease.until - self._clock.monotonic()) * 1e6)
            self._world.journal.relied_on(term.value, until, hub.process)


def sim_publisher(world: World) -> type:
    """A `Publisher` that publishes in the tick's own thread, to the world's broker."""

    class SimPublisher:
        def __init__(self, app: Any, timeout: float, clock: Any, listening: Any) -> None:
            self._app = app
            self._listening = listening
            self.patience = timeout + 0.25
            self.usable = True
            self.ready = False

        def abandon(self) -> None:
            self.usable = False

        def _look(self) -> None:
            if self.usable and not world.broker.away:
                self._listening.heard()
            elif self.usable:
                world.hub.after(1.0, self._look)

        def publish(
            self,
            messages: list[Message],
            allowed: Callable[[], bool],
            on_sent: Callable[[Message], None],
        ) -> Iterator[Message]:
            unreachable: Outcome | None = None
            for message in messages:
                if not message.handling.take():
                    continue
                if not self.usable:
                    outcome = Outcome("unsent", "the publish before it didn't come back")
                else:
                    outcome = unreachable or self._publish(message, allowed)
                if outcome.kind == "unreachable":
                    unreachable = outcome
                if outcome.kind in ("unreachable", "unknown"):
                    world.hub.after(1.0, self._look)
                message.settle(outcome)
                if outcome.kind == "sent":
                    on_sent(message)
                yield message

        def _publish(self, message: Message, allowed: Callable[[], bool]) -> Outcome:
            hub = world.hub
            fault = "unreachable" if world.broker.away else world.faults.publish()
            if fault == "unreachable":
                hub.pause(world.faults.unreachable_takes(self.patience))
                return Outcome("unreachable", "no connection")
            if not allowed():
                return Outcome("unsent", "this replica no longer leads")
            world.journal.trusted(message.key, message.stamp.epoch)
            if not message.sending.take():
                return Outcome("unsent", "it was given up")
            takes = world.faults.publish_takes(self.patience)
            due = hub.when(takes)
            hub.pause(takes)
            hub.point(f"before the publish of {message.key}")
            world.journal.published(message.key, due)
            if fault == "unknown, arrives late":
                world.note(f"the publish of {message.key} hangs")
                hub.after(self.patience + world.rng.uniform(0, 30), lambda: self._send(message))
                hub.pause(self.patience)
                self.abandon()
                return Outcome("unknown", "no answer")
            if fault != "unknown":
                self._send(message)
            hub.point(f"after the publish of {message.key}")
            if fault:
                world.note(f"the publish of {message.key} breaks: {fault}")
                return Outcome("unknown", "the connection broke")
            return Outcome("sent")

        def _send(self, message: Message) -> None:
            stamp = message.stamp
            world.journal.arrived(stamp.key, stamp.attempt, stamp.epoch, world.hub.process or "late")
            options = {**message.options, "task_id": message.task_id}
            task = self._app.tasks.get(message.task)
            with contextlib.ExitStack():
                if task is not None:
                    task.apply_async(message.args, message.kwargs, **options)
                else:
                    self._app.send_task(message.task, message.args, message.kwargs, **options)

    return SimPublisher


def sim_listener(world: World) -> type:
    """A `Listener` that hears of released leases at once, and is seen for as long as its process lives."""

    class SimListener:
        def __init__(self, settings: Any, clock: Any, holder: str, wake: Callable[[], None]) -> None:
            self._channel = Keys(settings.key_prefix).alive(holder)
            self.subscribed = False
            self._wake = wake
            self._process: Process | None = None

        def start(self) -> None:
            self.subscribed = True
            process = self._process = world.hub.process
            assert process is not None
            world.listens(process, self._channel, self._wake)

        def stop(self) -> None:
            self.subscribed = False

        @property
        def subscription(self) -> int:
            stands = self.subscribed and self._process is not None
            return world.faults.subscription(self._process) if stands else 0

        def shown(self, store: Any) -> int | None:
            return store.subscribers(self._channel)

        def visible(self, store: Any) -> bool:
            return self.subscribed and (self.shown(store) or 0) > 0

        def confirm_visible(self, store: Any) -> None:
            pass

    return SimListener
