"""Putting a message off: it is sent again for later, and the one at hand ends."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import replace
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from celery.exceptions import Ignore, Reject

from celery_leaderbeat.broker_errors import BrokerErrors
from celery_leaderbeat.clock import Clock
from celery_leaderbeat.records import Verdict
from celery_leaderbeat.tick import Stamp

__all__ = ["put_off", "transport_of"]

#: Lines about a task come from where tasks are.
logger = logging.getLogger("celery_leaderbeat.task")

#: How long a worker tries to put an unacknowledged message off before it leaves it to the broker, in seconds.
_PATIENCE = 10.0
#: What RabbitMQ notes on a message that has been in a quorum queue, or has left one after a delay. It drops a copy that
#: brings this along, without a word, as one that goes round in a circle.
_OF_THE_BROKER = re.compile(r"x-((first-|last-)?death\b|(delivery|acquired)-count$)", re.ASCII)
#: What a delay has put before a routing key: its seconds in 28 bits. Older releases of Kombu put the next one before it.
_DELAY = re.compile(r"^([01]\.){28}", re.ASCII)

#: The kinds of the brokers that were asked for, by app.
_transports: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def put_off(task: Any, stamp: Stamp, verdict: Verdict) -> NoReturn:
    """Send the message that `task` has at hand again for later, and end this one. The task's own retries aren't used up.

    Where the broker doesn't take it either, the worker keeps trying: a message that is acknowledged
    already exists only here. One that isn't goes back to the queue after a while.

    Raises:
        Ignore: it is sent.
        Reject: the broker doesn't take it, and is to deliver the message at hand again.
    """
    request = task.request
    seconds = min(verdict.seconds, _held_at_most(task.app))
    if transport_of(task.app) == "amqp":
        # Quorum queues delay by whole seconds, cut the rest off, and take no delay of less than one.
        seconds = math.ceil(seconds)
    logger.info(
        "Task %s[%s] put off for %.1f s: %s (slot %s).",
        task.name,
        request.id,
        seconds,
        verdict.reason or "the slot's run holds its lease",
        stamp.key,
        extra={"action": "put_off", "tick_key": stamp.key},
    )
    later = replace(stamp, put_off=stamp.put_off + 1)
    own = {name: value for name, value in request.headers.items() if not _OF_THE_BROKER.match(name)}
    copy = task.signature_from_request(
        request, countdown=seconds, retries=request.retries, headers={**own, **later.headers()}
    )
    key = copy.options.get("routing_key")
    if isinstance(key, str):
        copy.options["routing_key"] = _DELAY.sub("", key)
    clock, wait = Clock(), 0.1
    patience = clock.monotonic() + _PATIENCE
    while True:
        try:
            copy.apply_async()
        except Exception as exc:
            if task.acks_late and clock.monotonic() > patience:
                raise Reject(exc, requeue=True) from exc
            logger.warning(
                "Task %s[%s] can't be put off (%s); trying again in %.1f s.",
                task.name,
                request.id,
                BrokerErrors(task.app).said(exc),
                wait,
                extra={"action": "put_off_failed", "tick_key": stamp.key},
            )
            clock.sleep(wait)
            wait = min(wait * 2, 5.0)
        else:
            raise Ignore(f"put off for {seconds:.1f} s")


def transport_of(app: Any) -> str:
    """The kind of the broker; asked once per app, since a connection takes longer to make up than a slot to begin."""
    found = _transports.get(app)
    if found is None:
        found = _transports[app] = str(app.connection_for_read().transport.driver_type)
    return found


def _held_at_most(app: Any) -> float:
    """Longest that a message may wait in a worker before the broker gives it out again, with a margin."""
    timeout = (app.conf.broker_transport_options or {}).get("visibility_timeout")
    return timeout / 2 if isinstance(timeout, (int, float)) and timeout > 0 else float("inf")
