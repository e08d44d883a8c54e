"""Workers: the package's own `FencedTask` and run leases, in virtual time; only Celery's message loop is stood in for."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from celery import Celery, Task
from celery.exceptions import Ignore, Reject, Retry

from celery_leaderbeat import FencedTask
from celery_leaderbeat.tick import RUN_HEADER, Stamp
from tests.simulation.broker import VISIBILITY, Delivery, Parcel
from tests.simulation.virtual import Process

if TYPE_CHECKING:
    from tests.simulation.world import World

__all__ = ["TASKS", "Failure", "VirtualApp", "Worker"]

#: The tasks: name -> (base, acks_late).
TASKS: Mapping[str, tuple[type, bool]] = {
    "fenced.late": (FencedTask, True),
    "fenced.early": (FencedTask, False),
    "plain.late": (Task, True),
    "plain.early": (Task, False),
}


class Failure(Exception):
    """A body failed in the ordinary way."""


class VirtualApp(Celery):
    """An application whose messages go to a world's broker. Made once, and given to one world after the other."""

    def __init__(self) -> None:
        super().__init__("simulation", broker="redis://nowhere", set_as_current=False)
        self.world: World | None = None
        self._given: set[str] = set()
        self.conf.broker_transport_options = {"visibility_timeout": VISIBILITY}
        for name, (base, acks_late) in TASKS.items():
            self.task(_body, name=name, base=base, bind=True, acks_late=acks_late, max_retries=8)
        self.finalize()

    def attach(self, world: World, conf: Mapping[str, Any]) -> None:
        """Belong to a world from now on; nothing that another had set stays."""
        self.world = world
        for name in self._given - conf.keys():
            self.conf.pop(name)
        self.conf.update(conf)
        self._given = set(conf)
        self.forget()

    def forget(self) -> None:
        """Be a new process."""
        for name in ("_leaderbeat_runs", "_leaderbeat_ledger"):
            self.__dict__.pop(name, None)

    def send_task(
        self,
        name: str,
        args: Any = None,
        kwargs: Any = None,
        countdown: float | None = None,
        eta: datetime | None = None,
        task_id: str | None = None,
        headers: Mapping[str, Any] | None = None,
        retries: int = 0,
        **options: Any,
    ) -> None:
        """Put the message into the world's broker."""
        world = self.world
        assert world is not None
        if eta is not None:
            countdown = (eta - datetime.fromtimestamp(world.hub.now / 1e6, timezone.utc)).total_seconds()
        parcel = Parcel(
            name, str(task_id), tuple(args or ()), dict(kwargs or {}), dict(headers or {}), retries
        )
        process = world.hub.process
        if process is not None and process.kind == "worker":
            world.note(f"sends {parcel} for in {countdown or 0:g} s")
            world.broker.put_or_fail(parcel, countdown or 0.0)
        else:
            world.broker.put(parcel, countdown or 0.0)


def _body(self: Any) -> None:
    """What all tasks do: what the world says."""
    world = self.app.world
    process = world.hub.process
    stamp = Stamp.from_headers(self.request.headers)
    run = str(self.request.headers.get(RUN_HEADER, "")) if isinstance(self, FencedTask) else ""
    body = world.journal.enter(stamp.key, run, stamp.attempt, process)
    work = world.work(stamp, self)
    for seconds in work.pieces:
        world.hub.pause(seconds)
        world.hub.point("in mid-run")
    if work.end == "done":
        world.journal.leave(body, "done")
        return
    world.journal.leave(body, work.end)
    if work.end == "retrying":
        raise self.retry(countdown=work.countdown)
    if work.end == "requeued":
        raise Reject("not now", requeue=True)
    if work.end == "ignored":
        raise Ignore("never mind")
    raise Failure("as it happens")


class Worker:
    """A worker process with a few threads, started again some time after it has died."""

    def __init__(self, world: World, name: str, app: VirtualApp, concurrency: int) -> None:
        self._world = world
        self._app = app
        self._concurrency = concurrency
        self.name = name
        self.process = Process(name, "worker")
        self.process.alive = False

    def start(self) -> None:
        """Start the process, as a new one."""
        self.process = Process(self.name, "worker")
        self._app.forget()
        self._world.note(f"{self.name} starts")
        self._world.hub.start(self.process, *[self._consume] * self._concurrency)

    def _consume(self) -> None:
        while True:
            self._execute(self._world.broker.get())

    def _execute(self, delivery: Delivery) -> None:
        world, broker, parcel = self._world, self._world.broker, delivery.parcel
        task = self._app.tasks[parcel.task]
        if not task.acks_late:
            world.hub.point("before the acknowledgement")
            broker.ack(delivery)
        world.hub.point("before the task")
        task.push_request(
            id=parcel.task_id,
            args=parcel.args,
            kwargs=parcel.kwargs,
            headers=dict(parcel.headers),
            retries=parcel.retries,
            hostname=self.name,
            called_directly=False,
            is_eager=False,
            delivery_info={"exchange": "", "routing_key": "celery", "redelivered": parcel.redelivered},
        )
        requeue = False
        try:
            task(*parcel.args, **parcel.kwargs)
        except (Ignore, Retry, Failure):
            pass
        except Reject as exc:
            requeue = bool(exc.requeue)
        finally:
            task.pop_request()
        if not task.acks_late:
            return
        world.hub.point("before the late acknowledgement")
        if requeue:
            broker.requeue(delivery)
        else:
            broker.ack(delivery)
