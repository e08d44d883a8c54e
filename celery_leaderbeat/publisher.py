"""Publishing within a bound: one thread, one broker connection, and an answer for every message.

Celery's own routing sends the message (`apply_async`, or `send_task` for a task that beat hasn't imported).
What this module adds is that the tick loop never waits longer than the bound, that nothing underneath retries
a publish whose outcome is unknown, and that each message ends with one of these outcomes:

`sent`       the broker took it (RabbitMQ: publisher confirm; Redis: the reply to the push)
`unsent`     it certainly left nothing behind: no connection, refused by the broker, or never tried
`unknown`    the connection broke, or no answer came, after the bytes may have left
`impossible` it can't be sent at all: arguments that can't be serialised, no such queue

Who may decide about a message is settled by its token: whoever takes it publishes the message, or gives the
slot back. Taking is atomic without a lock, because the other side may be a signal handler.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from celery.result import denied_join_result
from celery.utils.log import get_logger
from kombu.exceptions import EncodeError, OperationalError

from celery_leaderbeat.clock import Clock
from celery_leaderbeat.message import Message, Outcome

__all__ = ["Publisher"]

logger = logging.getLogger(__name__)
#: Celery's own line "Sending due task" stays where operators look for it.
beat_logger = get_logger("celery.beat")

#: A broker connection that has been idle for longer (seconds) is asked for a sign of life before it is used.
_IDLE = 5.0


class Publisher:
    """One publishing thread and its broker connection.

    Parameters:
        app: the Celery application.
        timeout: longest that connecting, or one publish, may take, in seconds.
        clock: for the idle time of the connection.
        on_sent: called in the publishing thread right after the broker took a message.
    """

    def __init__(self, app: Any, timeout: float, clock: Clock, on_sent: Callable[[Message], None]) -> None:
        self._app = app
        self._timeout = timeout
        self._clock = clock
        self._on_sent = on_sent
        self._inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._connection: Any = None
        self._producer: Any = None
        self._used = 0.0
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, name="leaderbeat-publisher", daemon=True)
        self._thread.start()

    def publish(self, messages: list[Message], allowed: Callable[[], bool]) -> Iterator[Message]:
        """Publish in order and yield each message with its outcome as soon as it is known.

        `allowed` is asked right before each publish; once it says no, the rest is `unsent`. Where one
        message takes longer than the bound, the rest is `unsent`, that one is `unknown`, and this publisher
        is of no further use (`usable` is False).
        """
        job = _Job(messages, allowed)
        self._inbox.put(job)
        for _ in messages:
            try:
                # Connecting and publishing are bounded by the timeout each.
                yield job.done.get(timeout=2 * self._timeout + 0.5)
            except queue.Empty:
                break
        else:
            return
        self.abandon()
        while True:
            try:
                yield job.done.get_nowait()
            except queue.Empty:
                break
        for message in messages:
            if message.take():
                message.outcome = Outcome("unsent", "the publish before it didn't come back")
                yield message
            elif message.outcome is None:
                message.outcome = Outcome(
                    "unknown", f"no answer from the broker within {2 * self._timeout:g} s"
                )
                yield message

    @property
    def usable(self) -> bool:
        return self._wanted() and self._thread.is_alive()

    def _wanted(self) -> bool:
        return not self._abandoned

    def abandon(self) -> None:
        """Publish nothing more. The thread ends by itself, when what it waits for comes back."""
        self._abandoned = True
        self._inbox.put(None)

    # -- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._wanted():
            job = self._inbox.get()
            if job is None:
                break
            for message in job.messages:
                if not message.take():
                    continue
                if not (self._wanted() and job.allowed()):
                    outcome = Outcome("unsent", "this replica no longer leads")
                else:
                    outcome = self._publish(message)
                    if outcome.kind == "sent":
                        self._on_sent(message)
                # Whoever gave up on this thread has said what became of the message.
                if message.outcome is None:
                    message.outcome = outcome
                    job.done.put(message)
        self._disconnect()

    def _publish(self, message: Message) -> Outcome:
        try:
            producer = self._connected()
        except Exception as exc:  # noqa: BLE001  # whatever a transport raises, nothing was sent
            self._disconnect()
            return Outcome("unsent", f"no connection to the broker: {exc!r}")
        producer.phase = "preparing"
        beat_logger.info("Scheduler: Sending due task %s (%s)", message.entry, message.task)
        try:
            with denied_join_result():
                self._send(message, producer)
        except Exception as exc:  # noqa: BLE001  # the task's own code and any transport; sorted by `_failed`
            return self._failed(exc, producer)
        self._used = self._clock.monotonic()
        return Outcome("sent")

    def _send(self, message: Message, producer: Any) -> None:
        options = {**message.options, "producer": producer, "task_id": message.task_id}
        task = self._app.tasks.get(message.task)
        if task is not None:
            task.apply_async(message.args, message.kwargs, **options)
        else:
            self._app.send_task(message.task, message.args, message.kwargs, **options)

    def _failed(self, exc: Exception, producer: Any) -> Outcome:
        phase, connection = producer.phase, self._connection
        trouble = (
            OperationalError,
            OSError,
            *connection.connection_errors,
            *connection.channel_errors,
        )
        if isinstance(exc, EncodeError) or (phase == "preparing" and not isinstance(exc, trouble)):
            return Outcome("impossible", repr(exc))
        refused = isinstance(exc, connection.channel_errors) and not isinstance(
            exc, connection.connection_errors
        )
        self._disconnect()
        if phase != "sending" or refused:
            return Outcome("unsent", f"the broker didn't take it: {exc!r}")
        return Outcome("unknown", f"the connection to the broker broke during the publish: {exc!r}")

    def _connected(self) -> Any:
        if self._producer is not None and self._clock.monotonic() - self._used > _IDLE:
            self._probe()
        if self._producer is None:
            self._connection = self._app.connection_for_write(
                connect_timeout=self._timeout,
                transport_options=_bounds(self._app, self._timeout),
            )
            self._connection.ensure_connection(max_retries=1, interval_start=0, timeout=self._timeout)
            self._producer = _producer_class(self._app, self._timeout)(self._connection, auto_declare=False)
            self._used = self._clock.monotonic()
        return self._producer

    def _probe(self) -> None:
        """Ask an idle connection for a sign of life; a dead one is thrown away before it can take a message."""
        try:
            # Opening a channel is a round trip on AMQP. The Redis client looks at its socket by itself.
            self._connection.channel().close()
        except Exception as exc:  # noqa: BLE001  # whatever it says, the connection isn't usable
            logger.debug("The idle broker connection was dead: %r", exc)
            self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.collect(socket_timeout=0.1)


@dataclass
class _Job:
    messages: list[Message]
    allowed: Callable[[], bool]
    done: queue.SimpleQueue[Message] = field(default_factory=queue.SimpleQueue)


def _bounds(app: Any, timeout: float) -> dict[str, Any]:
    """Transport options that bound every wait of the connection by `timeout` seconds.

    The Redis client must not repeat a push whose answer didn't come, and RabbitMQ has to say that it took the
    message: a publish alone tells nothing.
    """
    driver = app.connection_for_write().transport.driver_type
    if driver == "redis":
        return {
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            "retry_on_timeout": False,
            "max_connections": 2,
        }
    if driver == "amqp":
        return {"confirm_publish": True, "read_timeout": timeout, "write_timeout": timeout}
    return {}


def _producer_class(app: Any, timeout: float) -> Any:
    """The application's producer, which notes how far a publish has come and tries it only once."""

    class MarkingProducer(app.amqp.Producer):  # type: ignore[misc]  # a class that only the app knows
        phase = "preparing"

        def publish(self, *args: Any, **kwargs: Any) -> Any:
            self.phase = "sending"
            kwargs |= {"retry": False, "timeout": timeout, "confirm_timeout": timeout}
            return super().publish(*args, **kwargs)

        def maybe_declare(self, *args: Any, **kwargs: Any) -> Any:
            self.phase = "declaring"
            declared = super().maybe_declare(*args, **kwargs)
            self.phase = "sending"
            return declared

    return MarkingProducer
