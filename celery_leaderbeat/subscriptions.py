"""Subscriptions: messages of some channels, and how many listen to one.

In a cluster, the channels are sharded where the server has that (7.0): they live on the node that has our
keys, and that node says so when it no longer is the one. An older cluster carries plain messages to all nodes
and counts the subscribers of each node apart; all replicas subscribe at the same node, so its count will do.
What publishes does both (see `release.lua`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import redis

from celery_leaderbeat.errors import StoreUnavailable

__all__ = ["Subscription", "subscribe", "subscribers"]

#: Translates the driver's errors; its argument says what was asked for.
_Translated = Callable[[str], contextlib.AbstractContextManager[None]]


class Subscription:
    """Messages of some channels, one at a time."""

    def __init__(self, pubsub: Any, translated: _Translated) -> None:
        self._pubsub = pubsub
        self._translated = translated

    def next(self, timeout: float) -> str | None:
        """The channel of the next message, or None after `timeout` seconds, or sooner.

        Raises:
            StoreUnavailable: the connection is lost, or the channels have moved; subscribe again.
        """
        with self._translated("a subscription"):
            message: Mapping[str, Any] | None = self._pubsub.get_message(timeout=timeout)
        if message is None or message["type"] in ("subscribe", "ssubscribe"):
            return None
        if message["type"] not in ("message", "smessage"):
            raise StoreUnavailable(
                "The server has ended the subscription: its channels are with another node."
            )
        return str(message["channel"])

    def close(self) -> None:
        """Close the connection. Never raises."""
        with contextlib.suppress(Exception):
            self._pubsub.close()


def subscribe(client: Any, translated: _Translated, cluster: bool, *channels: str) -> Subscription:
    """Subscribe on a connection of its own."""
    sharded = cluster and _count(client, translated, "SHARDNUMSUB", channels[0]) is not None
    pubsub = client.pubsub()
    with translated("SUBSCRIBE"):
        (pubsub.ssubscribe if sharded else pubsub.subscribe)(*channels)
    return Subscription(pubsub, translated)


def subscribers(client: Any, translated: _Translated, cluster: bool, channel: str) -> int | None:
    """How many connections subscribe to `channel`; None where the server doesn't say."""
    counts = [_count(client, translated, "NUMSUB", channel)]
    if cluster:
        counts.append(_count(client, translated, "SHARDNUMSUB", channel))
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _count(client: Any, translated: _Translated, command: str, channel: str) -> int | None:
    with translated(f"PUBSUB {command}"):
        try:
            # Not by its two words as one: the driver would read the answer in its own way.
            answer: Any = client.execute_command("PUBSUB", command, channel)
        except redis.exceptions.ReadOnlyError:
            raise
        except redis.exceptions.ResponseError:
            # Unknown to this server, or forbidden.
            return None
    return int(answer[channel] if isinstance(answer, Mapping) else answer[1])
