"""The link to the broker: one connection of our own, made, looked after and thrown away by one thread.

A connection that looks alive may be dead: its peer was switched off, or a router forgot it while nothing was
sent. So a connection that has been idle is asked for a sign of life before it takes a message, and a dead one
is replaced. Every wait on it is bounded, and nothing underneath repeats a publish by itself.

RabbitMQ takes a message when it says so: the connection uses publisher confirms, whatever
`broker_transport_options` says of `confirm_publish`. A RabbitMQ with a memory or disk alarm goes on accepting
connections, and stops reading from one that publishes. It says so (`connection.blocked`); then the connection is
kept, without publishing on it, until the alarm is over.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
from collections.abc import Callable
from typing import Any

from amqp.exceptions import RecoverableConnectionError

from celery_leaderbeat.broker_errors import BrokerErrors
from celery_leaderbeat.clock import Clock

__all__ = ["GivenUp", "Link"]

logger = logging.getLogger(__name__)

#: A connection that was used within this time (seconds) is taken to be alive.
_FRESH = 0.2
#: Seconds between two heartbeats of AMQP: what a blocked connection, which answers nothing, is judged by.
_HEARTBEAT = 10


class GivenUp(Exception):
    """The message may not leave any more; the text says why."""


class Link:
    """At most one connection to the broker.

    Parameters:
        app: the Celery application.
        timeout: longest that connecting to one host, or one answer, may take, in seconds.
        clock: for the idle time of the connection.

    Attributes:
        producer: publishes on the connection; None while there is none.
        blocked: RabbitMQ has said that it takes nothing over this connection for now.
        broker: `the broker <URL> (<setting>)`, without its password: the one of the last connection, or all that are tried.
    """

    def __init__(self, app: Any, timeout: float, clock: Clock) -> None:
        self._app = app
        self._timeout = timeout
        self._clock = clock
        self._connection: Any = None
        self._used = 0.0
        self._unblocked = False
        self._errors = BrokerErrors(app)
        # Why the brokers that the last attempt to connect has tried can't be reached, by URL.
        self._failures: dict[str, str] = {}
        self.producer: Any = None
        self.blocked = False
        self.broker = self._errors.named(None)

    def ready(self) -> Any:
        """The producer of a connection that is alive, as far as that can be known.

        Raises whatever the transport raises when no connection can be made; the next call tries the next host of
        the broker's URL.
        """
        if self.producer is not None:
            try:
                self._look()
            except Exception as exc:  # noqa: BLE001  # whatever it says, the connection isn't usable
                logger.debug(
                    "The broker connection was dead: %s",
                    self.said(exc),
                    extra={"action": "broker_connection_dead"},
                )
                self.drop()
        if self.producer is None:
            self._connect()
        return self.producer

    def used(self) -> None:
        """The broker has just answered."""
        self._used = self._clock.monotonic()

    def drop(self) -> None:
        """Throw the connection away."""
        self.producer = None
        self.blocked = self._unblocked = False
        if self._connection is not None:
            with contextlib.suppress(Exception):
                self._connection.collect(socket_timeout=0.1)

    def said(self, exc: BaseException) -> str:
        """What an exception says, without the broker's passwords, should a transport quote them."""
        return self._errors.said(exc, self._connection)

    def no_connection(self, exc: BaseException) -> str:
        """Why `ready` has raised `exc`: with the URL of each broker that was tried, and what to do."""
        connection = self._connection
        return self._errors.nowhere(
            self._failures or {self._errors.shown(connection): self._errors.why(exc, connection)}
        )

    @property
    def connection_errors(self) -> tuple[type[Exception], ...]:
        """What the transport raises when the connection is broken."""
        # A transport's own list may hold errors as common as KeyError, which mean nothing.
        return tuple(kind for kind in self._connection.connection_errors if kind.__module__ != "builtins")

    @property
    def channel_errors(self) -> tuple[type[Exception], ...]:
        """What the transport raises when the broker refuses something."""
        return tuple(self._connection.channel_errors)

    def _connect(self) -> None:
        self._failures = {}
        if self._connection is None:
            self._connection = self._app.connection_for_write(
                connect_timeout=self._timeout, heartbeat=_HEARTBEAT, transport_options=self._options()
            )
        connection = self._connection
        self.broker = self._errors.named(connection, every=True)

        def failed(exc: BaseException, _interval: float) -> None:
            # The connection is for the next one right after this.
            self._failures[self._errors.shown(connection)] = self._errors.why(exc, connection)

        try:
            connection.ensure_connection(
                errback=failed, max_retries=1, interval_start=0, interval_step=0, timeout=self._timeout
            )
            # `default_channel` would connect again, without a bound, should the connection break just now.
            channel = connection.channel()
            if self._driver == "redis":
                # The channel has looked over a connection of another pool.
                _ping(channel, self._timeout)
            self.producer = _producer_class(self._app, self._timeout)(channel, auto_declare=False)
        except Exception as exc:
            failed(exc, 0.0)
            self.drop()
            connection.maybe_switch_next()
            raise
        self.broker = self._errors.named(connection)
        self.used()

    def _look(self) -> None:
        """Raise something if the connection is dead, or of no more use."""
        if self._driver == "amqp":
            self._listen()
            if self._unblocked:
                # The confirms of what was published before are still to come: they would be taken for others'.
                raise RecoverableConnectionError("it was blocked")
            if self.blocked:
                self._connection.heartbeat_check()
                return
        if self._clock.monotonic() - self._used <= _FRESH:
            return
        channel = self.producer.channel
        if self._driver == "amqp":
            # The cheapest question of a producer that RabbitMQ answers; it concerns consumers, of which there are none.
            with self._connection.connection.transport.having_timeout(self._patience):
                channel.basic_qos(0, 1, False)
            if self.blocked or self._unblocked:
                return
        elif self._driver == "redis":
            _ping(channel, self._patience)
        self.used()

    def _listen(self) -> None:
        """Take in what RabbitMQ has said meanwhile: a goodbye, or that it takes nothing, or something again."""
        connection = self._connection.connection
        for _ in range(100):
            if not _has_said_something(connection.sock):
                return
            try:
                connection.blocking_read(self._patience)
            except TimeoutError:
                # A part of what is coming, or TLS talking to itself; whether it is alive, a question has to show.
                return

    @property
    def _patience(self) -> float:
        """How long a sign of life may take, in seconds: there has to be time for a new connection and the publish."""
        return self._timeout / 3

    @property
    def _driver(self) -> str:
        return _driver_of(self._connection)

    def _options(self) -> dict[str, Any]:
        """Transport options that bound every wait of the connection.

        The Redis client must not repeat a push whose answer didn't come, and RabbitMQ has to say that it took the
        message: a publish alone tells nothing.
        """
        driver = _driver_of(self._app.connection_for_write())
        timeout = self._timeout
        if driver == "redis":
            return {
                "socket_timeout": timeout,
                "socket_connect_timeout": timeout,
                "retry_on_timeout": False,
                "max_connections": 2,
            }
        if driver == "amqp":
            return {
                "confirm_publish": True,
                "read_timeout": timeout,
                "write_timeout": timeout,
                "on_blocked": self._on_blocked,
                "on_unblocked": self._on_unblocked,
            }
        return {}

    def _on_blocked(self, _: str) -> None:
        if not self.blocked:
            logger.warning(
                "The broker has blocked the connection of this replica (a memory or disk alarm of RabbitMQ): nothing "
                "is sent until the alarm is over.",
                extra={"action": "broker_blocked"},
            )
        self.blocked = True

    def _on_unblocked(self) -> None:
        logger.info("The broker takes messages again.", extra={"action": "broker_unblocked"})
        self._unblocked = True


def _driver_of(connection: Any) -> str:
    """`"redis"`, `"amqp"` (kombu's own driver), or `""`: one of which nothing special is known."""
    transport = connection.transport
    if transport.driver_name == "py-amqp":
        return "amqp"
    return "redis" if transport.driver_type == "redis" else ""


def _has_said_something(sock: Any) -> bool:
    """Whether there is something to read, from the peer or in what TLS has taken in already."""
    pending = getattr(sock, "pending", None)
    if pending is not None and pending():
        return True
    # Not `select`, which knows no descriptor above 1023.
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        return bool(selector.select(0))


def _ping(channel: Any, timeout: float) -> None:
    """Ask the very connection that would take the next message."""
    client = channel.Client(connection_pool=channel.pool, single_connection_client=True)
    try:
        connection = client.connection
        connection.send_command("PING")
        if not connection.can_read(timeout):
            raise TimeoutError(f"no answer to a PING within {timeout:g} s")
        connection.read_response()
    finally:
        client.close()


def _producer_class(app: Any, timeout: float) -> Any:
    """The application's producer, which notes how far a publish has come and tries it only once."""

    class MarkingProducer(app.amqp.Producer):  # type: ignore[misc]  # a class that only the app knows
        """Attributes: phase: `"preparing"`, `"declaring"`, `"sending"` (bytes may have left).

        may_leave: called right before the bytes leave; raises `GivenUp` if they mustn't.
        lifetime: how long the broker is told to keep the message, in seconds; None leaves that to Celery.
        """

        phase = "preparing"
        may_leave: Callable[[], None] | None = None
        lifetime: float | None = None

        def __init__(self, channel: Any, **kwargs: Any) -> None:
            super().__init__(channel, **kwargs)
            basic_publish = channel.basic_publish

            def guarded(*args: Any, **kwargs: Any) -> Any:
                if self.may_leave is not None:
                    self.may_leave()
                self.phase = "sending"
                return basic_publish(*args, **kwargs)

            channel.basic_publish = guarded

        def publish(self, *args: Any, **kwargs: Any) -> Any:
            self.phase = "preparing"
            kwargs |= {"retry": False, "timeout": timeout, "confirm_timeout": timeout}
            if self.lifetime is not None:
                kwargs["expiration"] = max(self.lifetime, 0.0)
            return super().publish(*args, **kwargs)

        def _publish(self, *args: Any, **kwargs: Any) -> Any:
            # kombu calls it once the message is serialised.
            self.phase = "declaring"
            return super()._publish(*args, **kwargs)

    return MarkingProducer
