"""Publishing within a bound: one thread, one broker connection, and an answer for every message.

Celery's own routing sends the message (`apply_async`, or `send_task` for a task that beat hasn't imported).
What this module adds is that the tick loop never waits longer than the bound, that nothing underneath retries
a publish whose outcome is unknown, and that each message ends with one of these outcomes:

`sent`         the broker took it (RabbitMQ: publisher confirm; Redis: the reply to the push)
`unreachable`  there is no connection to the broker, so nothing left
`blocked`      the broker has said that it takes nothing for now, so nothing left
`unsent`       nothing was left behind: refused by the broker, or not tried because this replica no longer leads or
               because the ledger takes too long to hear of the message before it
`unknown`      the connection broke, or no answer came, after the bytes may have left
`impossible`   it can't be sent at all: arguments that can't be serialised, no such queue

Whoever gives up on the thread, which may hang in a transport for as long as it likes, settles by the message's
two rights (see `message`) what can still happen to it.

Between messages the thread looks after the connection (see `link`), so that one that has died is replaced before
a slot comes due, and the silence of the broker is noticed whether or not there is something to send.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from amqp.exceptions import InternalError, IrrecoverableConnectionError, MessageNacked
from celery.result import denied_join_result
from celery.utils.log import get_logger
from kombu.exceptions import EncodeError, OperationalError

from celery_leaderbeat.backoff import backoff
from celery_leaderbeat.clock import FleetClock
from celery_leaderbeat.expiry import seconds_until, with_instants
from celery_leaderbeat.link import GivenUp, Link
from celery_leaderbeat.message import Message, Outcome
from celery_leaderbeat.tick import slot_text

__all__ = ["Listening", "Publisher"]

logger = logging.getLogger(__name__)
#: Celery's own line "Sending due task" stays where operators look for it.
_beat_logger = get_logger("celery.beat")

#: Longest that the connection is left alone, in seconds; and the share of the timeout, if that is shorter.
_LOOK_EVERY = (1.0, 0.25)
#: Bounds of the wait between two tries to connect, in seconds.
_RECONNECT = (0.1, 2.0)
#: What the tick loop waits longer than the thread may take, so that it hears the thread's own reason.
_SLACK = 0.25
#: A thread that has been in one call for longer than this many timeouts is given up.
_HUNG = 6


class Listening(Protocol):
    """Who wants to know how the broker is."""

    def heard(self) -> None:
        """The broker has answered."""

    def failed(self, since: float, reason: str) -> None:
        """What was asked of the broker at `since` (monotonic) came to nothing."""


class Publisher:
    """One publishing thread and its broker connection.

    Parameters:
        app: the Celery application.
        timeout: longest that one message may take, in seconds, with all that has to be done first.
        clock: the fleet's, for what a message says in seconds from its send, and for the idle time of the connection.
        listening: is told how the broker is, in the publishing thread.
    """

    def __init__(self, app: Any, timeout: float, clock: FleetClock, listening: Listening) -> None:
        self._app = app
        self._timeout = timeout
        self._fleet_clock = clock
        self._clock = clock.clock
        self._listening = listening
        self._link = Link(app, timeout, clock.clock)
        self._inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._failures = 0
        self._why = ""
        self._busy_since: float | None = None
        self._telling = False
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, name="leaderbeat-publisher", daemon=True)
        self._thread.start()

    def publish(
        self, messages: list[Message], allowed: Callable[[], bool], on_sent: Callable[[Message], None]
    ) -> Iterator[Message]:
        """Publish in order and yield each message with its outcome as soon as it is known.

        `allowed` is asked right before the bytes leave; once it says no, the rest is `unsent`. `on_sent` is
        called in the publishing thread right after the broker took a message; it raises nothing. Where one message
        takes longer than the bound, no other is tried; if its outcome is unknown, this publisher is of no further
        use (`usable` is False).
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
        yield from self._given_up(list(waiting.values()))

    def _given_up(self, messages: list[Message]) -> Iterator[Message]:
        """Settle what the thread hasn't settled in time."""
        # Then it is the ledger that gives no answer, and the broker has done nothing wrong.
        telling = self._telling
        blocked = self._link.blocked
        kind: Literal["blocked", "unreachable"] = "blocked" if blocked else "unreachable"
        for message in messages:
            if message.handling.take():
                if telling:
                    message.settle(
                        Outcome("unsent", "Redis hasn't taken the confirmation of the slot before it")
                    )
                else:
                    message.settle(Outcome(kind, "the publish before it didn't come back"))
            elif message.outcome is None:
                what = f"{self._link.broker} gave no answer within {self.patience:g} s"
                if message.sending.take():
                    message.settle(Outcome(kind, what))
                elif message.settle(Outcome("unknown", what)) and not blocked:
                    # The thread waits for an answer on a connection that is to be thrown away.
                    self.abandon()
            yield message

    @property
    def patience(self) -> float:
        """Longest that the tick loop waits for one message, in seconds."""
        return self._timeout + _SLACK

    @property
    def usable(self) -> bool:
        """Whether it can take more messages."""
        busy = self._busy_since
        hangs = busy is not None and self._clock.monotonic() - busy > _HUNG * self._timeout
        return self._wanted() and self._thread.is_alive() and not hangs

    @property
    def ready(self) -> bool:
        """Whether there is a connection, and the broker takes messages over it, as far as that is known."""
        return self._link.producer is not None and not self._link.blocked

    def abandon(self) -> None:
        """Publish nothing more. The thread ends by itself, when what it waits for comes back."""
        self._abandoned = True
        self._inbox.put(None)

    def _wanted(self) -> bool:
        return not self._abandoned

    def _run(self) -> None:
        job: _Job | None = None
        while self._wanted():
            self._busy_since = self._clock.monotonic()
            if job is not None:
                self._do(job)
            else:
                self._look()
            self._busy_since = None
            try:
                job = self._inbox.get(timeout=self._pause())
            except queue.Empty:
                job = None
        self._link.drop()

    def _pause(self) -> float:
        if self._failures:
            return backoff(self._failures, *_RECONNECT)
        return min(_LOOK_EVERY[0], _LOOK_EVERY[1] * self._timeout)

    def _do(self, job: _Job) -> None:
        away: Outcome | None = None
        for message in job.messages:
            if not message.handling.take():
                continue
            self._busy_since = self._clock.monotonic()
            outcome = away or self._publish(message, job)
            if outcome.kind in ("unreachable", "blocked"):
                # The others needn't wait for the same connection one after the other.
                away = outcome
            message.settle(outcome)
            if outcome.kind == "sent":
                self._telling = True
                job.on_sent(message)
                self._telling = False
            job.done.put(message)

    def _look(self) -> Any:
        """The producer of a connection that is alive; None, and `_why` says why, if there is none."""
        began = self._clock.monotonic()
        try:
            producer = self._link.ready()
        except Exception as exc:  # noqa: BLE001  # whatever a transport raises, nothing was sent
            self._failures += 1
            self._why = self._link.no_connection(exc)
            if self._wanted():
                self._listening.failed(began, self._why)
            return None
        self._failures = 0
        if self._wanted():
            self._listening.heard()
        return producer

    def _publish(self, message: Message, job: _Job) -> Outcome:
        producer = self._look()
        if producer is None:
            return Outcome("unreachable", self._why)
        if self._link.blocked:
            return Outcome("blocked", "the broker has blocked the connection: it has a memory or disk alarm")

        def may_leave() -> None:
            if not (self._wanted() and job.allowed()):
                raise GivenUp("this replica no longer leads")
            if not (mine or message.sending.take()):
                raise GivenUp("it was given up")

        task = self._app.tasks.get(message.task)
        # Who sends by means of their own may not pass by the producer, which asks right before the bytes leave.
        mine = False
        try:
            if not (self._wanted() and job.allowed()):
                raise GivenUp("this replica no longer leads")
            producer.may_leave = may_leave
            producer.phase = "preparing"
            # Logging may wait for a lock, so the right to send is taken after it.
            _beat_logger.info(
                "Scheduler: Sending due task %s (%s) for %s",
                message.entry,
                message.task,
                slot_text(message.slot),
                extra={"action": "sending", "tick_key": message.key, "epoch": message.stamp.epoch},
            )
            if not _sends_as_celery(self._app, task):
                may_leave()
                mine = True
            with denied_join_result():
                self._send(message, producer, task)
        except GivenUp as exc:
            return Outcome("unsent", str(exc))
        except Exception as exc:  # noqa: BLE001  # the task's own code and any transport; sorted by `_failed`
            return self._failed(exc, producer.phase)
        except BaseException as exc:  # noqa: BLE001  # a receiver of a signal that exits; the thread goes on
            why = self._link.said(exc)
            self._link.drop()
            return Outcome("unknown" if producer.phase == "sending" else "impossible", why)
        self._link.used()
        return Outcome("sent")

    def _send(self, message: Message, producer: Any, task: Any) -> None:
        now = self._fleet_clock.utcnow()
        counted = with_instants(message.options, now)
        # Celery would tell the broker how long that is by this host's wall clock.
        producer.lifetime = seconds_until(counted.get("expires"), now)
        options = {**counted, "producer": producer, "task_id": message.task_id}
        if task is not None:
            task.apply_async(message.args, message.kwargs, **options)
        else:
            self._app.send_task(message.task, message.args, message.kwargs, **options)

    def _failed(self, exc: Exception, phase: str) -> Outcome:
        link = self._link
        why = link.said(exc)
        # kombu wraps what its transport raised.
        cause = exc.__cause__ if isinstance(exc, OperationalError) and exc.__cause__ else exc
        # RabbitMQ closes the connection over what it can't bear of one message; only that one is to blame.
        faulty = isinstance(cause, IrrecoverableConnectionError) and not (
            isinstance(cause, InternalError) and phase == "sending"
        )
        broken = not faulty and isinstance(cause, (OSError, OperationalError, *link.connection_errors))
        refused = not broken and isinstance(cause, (MessageNacked, *link.channel_errors))
        if isinstance(cause, EncodeError) or (phase != "sending" and not (broken or refused or faulty)):
            # It comes from routing, from serialising, from the task, or from a receiver of a signal.
            return Outcome("impossible", why)
        if link.blocked and phase == "sending" and isinstance(cause, TimeoutError):
            # Kept: it will say when the alarm is over, and a new one would take in the next message, and hang.
            return Outcome("unknown", f"the broker has blocked the connection during the publish: {why}")
        link.drop()
        if faulty or refused:
            return Outcome("unsent", f"the broker refused it: {why}")
        if phase != "sending":
            self._failures += 1
            return Outcome("unreachable", f"the connection to {link.broker} broke before the publish: {why}")
        return Outcome("unknown", f"the connection to {link.broker} broke during the publish: {why}")


def _sends_as_celery(app: Any, task: Any) -> bool:
    """Whether a publish goes through the producer that it is given."""
    send = type(app).send_task if task is None else type(task).apply_async
    return getattr(send, "__module__", "").partition(".")[0] in ("celery", "celery_leaderbeat")


@dataclass
class _Job:
    messages: list[Message]
    allowed: Callable[[], bool]
    on_sent: Callable[[Message], None]
    done: queue.SimpleQueue[Message] = field(default_factory=queue.SimpleQueue)
