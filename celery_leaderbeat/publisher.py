"""Publishing within a bound: one thread, one broker connection, and an answer for every message.

Celery's own routing sends the message (`apply_async`, or `send_task` for a task that beat hasn't imported).
What this module adds is that the tick loop never waits longer than the bound, that nothing underneath retries
a publish whose outcome is unknown, and that each message ends with one of these outcomes:

`sent`         the broker took it (RabbitMQ: publisher confirm; Redis: the reply to the push)
`unreachable`  there is no connection to the broker, so nothing left
`unsent`       nothing was left behind: refused by the broker, or not tried because this replica no longer leads
`unknown`      the connection broke, or no answer came, after the bytes may have left
`impossible`   it can't be sent at all: arguments that can't be serialised, no such queue

Whoever gives up on the thread, which may hang in a transport for as long as it likes, settles by the message's
two rights (see `message`) what can still happen to it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import select
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from amqp.exceptions import MessageNacked
from celery.result import denied_join_result
from celery.utils.log import get_logger
from kombu.exceptions import EncodeError, OperationalError

from celery_leaderbeat.clock import FleetClock
from celery_leaderbeat.message import Message, Outcome, with_instants
from celery_leaderbeat.redaction import without_secrets
from celery_leaderbeat.tick import slot_text

__all__ = ["Publisher"]

logger = logging.getLogger(__name__)
#: Celery's own line "Sending due task" stays where operators look for it.
beat_logger = get_logger("celery.beat")

#: A broker connection that was used within this time (seconds) is taken to be alive.
_FRESH = 0.2
#: One that has been idle for longer than this (seconds) is asked for a sign of life, even if it looks alive.
_IDLE = 5.0


class Publisher:
    """One publishing thread and its broker connection.

    Parameters:
        app: the Celery application.
        timeout: longest that connecting, or one publish, may take, in seconds.
        clock: the fleet's, for what a message says in seconds from its send, and for the idle time of the connection.
    """

    def __init__(self, app: Any, timeout: float, clock: FleetClock) -> None:
        self._app = app
        self._timeout = timeout
        self._fleet_clock = clock
        self._clock = clock.clock
        self._inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._connection: Any = None
        self._producer: Any = None
        self._used = 0.0
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, name="leaderbeat-publisher", daemon=True)
        self._thread.start()

    def publish(
        self, messages: list[Message], allowed: Callable[[], bool], on_sent: Callable[[Message], None]
    ) -> Iterator[Message]:
        """Publish in order and yield each message with its outcome as soon as it is known.

        `allowed` is asked right before the bytes leave; once it says no, the rest is `unsent`. `on_sent` is
        called in the publishing thread right after the broker took a message. Where one message takes longer
        than the bound, no other is tried, and this publisher is of no further use (`usable` is False).
        """
        job = _Job(messages, allowed, on_sent)
        self._inbox.put(job)
        waiting = {message.key: message for message in messages}
        while waiting:
            try:
                message = job.done.get(timeout=self.patience)
            except queue.Empty:
                break
            if waiting.pop(message.key, None) is not None:
                yield message
        else:
            return
        self.abandon()
        for message in waiting.values():
            if message.handling.take():
                message.outcome = Outcome("unsent", "the publish before it didn't come back")
            elif message.outcome is None:
                what = f"the broker gave no answer within {self.patience:g} s"
                message.outcome = Outcome("unreachable" if message.sending.take() else "unknown", what)
            yield message

    @property
    def patience(self) -> float:
        """Longest that one message may take, in seconds: connecting and publishing are bounded each."""
        return 2 * self._timeout + 0.5

    @property
    def usable(self) -> bool:
        """Whether it can take more messages."""
        return self._wanted() and self._thread.is_alive()

    def abandon(self) -> None:
        """Publish nothing more. The thread ends by itself, when what it waits for comes back."""
        self._abandoned = True
        self._inbox.put(None)

    def _wanted(self) -> bool:
        return not self._abandoned

    # -- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._wanted():
            job = self._inbox.get()
            if job is None:
                break
            unreachable: Outcome | None = None
            for message in job.messages:
                if not message.handling.take():
                    continue
                outcome = unreachable or self._publish(message, job)
                if outcome.kind == "unreachable":
                    # The others needn't wait for the same connection one after the other.
                    unreachable = outcome
                if message.outcome is None:
                    message.outcome = outcome
                if outcome.kind == "sent":
                    job.on_sent(message)
                job.done.put(message)
        self._disconnect()

    def _publish(self, message: Message, job: _Job) -> Outcome:
        try:
            producer = self._connected()
        except Exception as exc:  # noqa: BLE001  # whatever a transport raises, nothing was sent
            why = self._said(exc)
            self._disconnect()
            return Outcome("unreachable", f"no connection to the broker: {why}")
        if not (self._wanted() and job.allowed()):
            return Outcome("unsent", "this replica no longer leads")
        # Logging may wait for a lock, so the right to send is taken after it.
        beat_logger.info(
            "Scheduler: Sending due task %s (%s) for %s",
            message.entry,
            message.task,
            slot_text(message.slot),
            extra={"action": "sending", "tick_key": message.key, "epoch": message.stamp.epoch},
        )
        if not (self._wanted() and job.allowed()):
            return Outcome("unsent", "this replica no longer leads")
        if not message.sending.take():
            return Outcome("unsent", "it was given up")
        producer.phase = "preparing"
        try:
            with denied_join_result():
                self._send(message, producer)
        except Exception as exc:  # noqa: BLE001  # the task's own code and any transport; sorted by `_failed`
            return self._failed(exc, producer)
        except BaseException as exc:  # noqa: BLE001  # a receiver of a signal that exits; the thread goes on
            why = self._said(exc)
            self._disconnect()
            return Outcome("impossible" if producer.phase == "preparing" else "unknown", why)
        self._used = self._clock.monotonic()
        return Outcome("sent")

    def _send(self, message: Message, producer: Any) -> None:
        counted = with_instants(message.options, self._fleet_clock.utcnow())
        options = {**counted, "producer": producer, "task_id": message.task_id}
        task = self._app.tasks.get(message.task)
        if task is not None:
            task.apply_async(message.args, message.kwargs, **options)
        else:
            self._app.send_task(message.task, message.args, message.kwargs, **options)

    def _failed(self, exc: Exception, producer: Any) -> Outcome:
        phase, connection = producer.phase, self._connection
        why = self._said(exc)
        # kombu wraps what its transport raised.
        cause = exc.__cause__ if isinstance(exc, OperationalError) and exc.__cause__ else exc
        # A transport's own list may hold errors as common as KeyError, which mean nothing.
        network = [kind for kind in connection.connection_errors if kind.__module__ != "builtins"]
        broken = isinstance(cause, (OSError, OperationalError, *network))
        refused = isinstance(cause, (MessageNacked, *connection.channel_errors)) and not broken
        if isinstance(cause, EncodeError) or (phase == "preparing" and not (broken or refused)):
            # It comes from routing, from serialising, from the task, or from a receiver of a signal.
            return Outcome("impossible", why)
        self._disconnect()
        if refused:
            return Outcome("unsent", f"the broker refused it: {why}")
        if phase != "sending":
            return Outcome("unreachable", f"the connection to the broker broke before the publish: {why}")
        return Outcome("unknown", f"the connection to the broker broke during the publish: {why}")

    def _said(self, exc: BaseException) -> str:
        """What an exception says, without the broker's password, should a transport quote it."""
        return without_secrets(repr(exc), [getattr(self._connection, "password", None)])

    def _connected(self) -> Any:
        if self._producer is not None:
            self._probe(self._clock.monotonic() - self._used)
        if self._producer is None:
            self._connection = self._app.connection_for_write(
                connect_timeout=self._timeout,
                transport_options=_bounds(self._app, self._timeout),
            )
            self._connection.ensure_connection(max_retries=1, interval_start=0, timeout=self._timeout)
            self._producer = _producer_class(self._app, self._timeout)(self._connection, auto_declare=False)
            self._used = self._clock.monotonic()
        return self._producer

    def _probe(self, idle: float) -> None:
        """Ask an idle connection for a sign of life; a dead one is thrown away before it can take a message."""
        if idle <= _FRESH:
            return
        connection = self._connection
        try:
            if connection.transport.driver_type == "redis":
                with connection.default_channel.conn_or_acquire() as client:
                    client.ping()
            elif idle > _IDLE or _has_news(connection):
                # Opening a channel is a round trip, and reads what the server has said meanwhile.
                connection.channel().close()
        except Exception as exc:  # noqa: BLE001  # whatever it says, the connection isn't usable
            logger.debug("The idle broker connection was dead: %s", self._said(exc))
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
    on_sent: Callable[[Message], None]
    done: queue.SimpleQueue[Message] = field(default_factory=queue.SimpleQueue)


def _has_news(connection: Any) -> bool:
    """Whether an idle AMQP connection has something to read, such as a goodbye or the end of the stream."""
    sock = getattr(connection.connection, "sock", None)
    return sock is None or bool(select.select([sock], [], [], 0)[0])


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
            self.phase = "preparing" if hasattr(super(), "_publish") else "sending"
            kwargs |= {"retry": False, "timeout": timeout, "confirm_timeout": timeout}
            return super().publish(*args, **kwargs)

        def _publish(self, *args: Any, **kwargs: Any) -> Any:
            # kombu calls it once the message is serialised.
            self.phase = "sending"
            return super()._publish(*args, **kwargs)

        def maybe_declare(self, *args: Any, **kwargs: Any) -> Any:
            self.phase = "declaring"
            declared = super().maybe_declare(*args, **kwargs)
            self.phase = "sending"
            return declared

    return MarkingProducer
