"""The Redis client: connections from the settings, key names, scripts, and the translation of errors.

Nothing above this module imports redis. A `Store` belongs to one user (the renewal thread, the tick loop, a
publisher, a worker process) and is not handed around, so that none of them waits for another's answer. It
retries nothing: every script can be asked again, and the caller knows until when that makes sense.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_leaderbeat.errors import StoreError, StoreUnavailable
from celery_leaderbeat.settings import Settings

__all__ = ["Keys", "Store", "Subscription"]

#: Longest that one answer of the server may take, in seconds, where the caller sets nothing else.
_TIMEOUT = 5.0


@dataclass(frozen=True)
class Keys:
    """The names of the keys and channels; all share the hash tag `{prefix}`."""

    prefix: str

    def _key(self, name: str) -> str:
        return f"{{{self.prefix}}}:{name}"

    @property
    def lease(self) -> str:
        return self._key("lease")

    @property
    def epoch(self) -> str:
        return self._key("epoch")

    @property
    def app(self) -> str:
        return self._key("app")

    @property
    def entries(self) -> str:
        return self._key("entries")

    @property
    def unfinished(self) -> str:
        return self._key("unfinished")

    @property
    def counts(self) -> str:
        return self._key("counts")

    @property
    def observed(self) -> str:
        return self._key("observed")

    @property
    def replicas(self) -> str:
        return self._key("replicas")

    @property
    def wake(self) -> str:
        """Channel: a lease was released."""
        return self._key("wake")

    def alive(self, holder: str) -> str:
        """Channel to which only that replica subscribes: its subscription ends with its process."""
        return self._key(f"alive:{holder}")

    def slot(self, tick_key: str) -> str:
        return self._key(f"slot:{tick_key}")


@cache
def _source(name: str) -> str:
    return (resources.files("celery_leaderbeat") / "scripts" / f"{name}.lua").read_text("utf-8")


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except (
        redis.exceptions.ConnectionError,
        redis.exceptions.TimeoutError,
        redis.exceptions.ReadOnlyError,
        OSError,
    ) as exc:
        raise StoreUnavailable(f"Redis gave no answer to {what}: {exc}") from exc
    except redis.exceptions.RedisError as exc:
        text = str(exc)
        if text.startswith(("MASTERDOWN", "READONLY", "LOADING")):
            raise StoreUnavailable(f"Redis can't serve {what} now: {text}") from exc
        raise StoreError(f"Redis refused {what}: {text}") from exc


class Store:
    """One user's connection to Redis.

    Parameters:
        settings: where the server is, and the key prefix.
        timeout: longest that connecting, or one answer, may take, in seconds.
    """

    def __init__(self, settings: Settings, timeout: float = _TIMEOUT) -> None:
        self.keys = Keys(settings.key_prefix)
        self._client = _client(settings, timeout)
        self._scripts: dict[str, Any] = {}

    def run(self, script: str, keys: Sequence[str], args: Sequence[str | int | float] = ()) -> Any:
        """Run one of `scripts/`, loading it when the server doesn't know it.

        Raises:
            StoreUnavailable: no answer; the script may or may not have run.
            StoreError: the server refused it.
        """
        call = self._scripts.get(script)
        if call is None:
            call = self._scripts[script] = self._client.register_script(_source(script))
        with _translated(f"the script {script}"):
            return call(keys=keys, args=args)

    def look(self, subscribers_of: str | None = None) -> tuple[str | None, int, int | None]:
        """The lease value, its remaining TTL in ms, and how many subscribe to a channel (None: unknown)."""
        with _translated("a look at the lease"), self._client.pipeline(transaction=False) as pipe:
            pipe.get(self.keys.lease).pttl(self.keys.lease)
            value, remaining = pipe.execute()
        return value, remaining, self.subscribers(subscribers_of) if subscribers_of else None

    def subscribers(self, channel: str) -> int | None:
        """How many connections subscribe to `channel`; None where the server doesn't say."""
        try:
            with _translated("PUBSUB NUMSUB"):
                (_, count), *_ = self._client.pubsub_numsub(channel)
        except StoreUnavailable:
            raise
        except StoreError:
            return None
        return int(count)

    def text(self, key: str) -> str | None:
        with _translated(f"GET {key}"):
            value: str | None = self._client.get(key)
        return value

    def table(self, key: str) -> dict[str, str]:
        """A whole hash."""
        with _translated(f"HGETALL {key}"):
            found: dict[str, str] = self._client.hgetall(key)
        return found

    def tables(self, keys: Iterable[str]) -> list[dict[str, str]]:
        """Many hashes in one round trip; an empty one for each that isn't there."""
        with _translated("HGETALL"), self._client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.hgetall(key)
            found: list[dict[str, str]] = pipe.execute()
        return found

    def members(self, key: str) -> list[str]:
        """The members of a sorted set, lowest score first."""
        with _translated(f"ZRANGE {key}"):
            found: list[str] = self._client.zrange(key, 0, -1)
        return found

    def announce(self, holder: str, now: float, lifetime: float) -> list[str]:
        """Note that `holder` lives at `now` (Unix seconds); the holders seen within `lifetime` seconds."""
        with _translated("the membership"), self._client.pipeline(transaction=False) as pipe:
            pipe.zadd(self.keys.replicas, {holder: now})
            pipe.zremrangebyscore(self.keys.replicas, "-inf", now - lifetime)
            pipe.zrange(self.keys.replicas, 0, -1)
            found: list[str] = pipe.execute()[-1]
        return found

    def withdraw(self, holder: str) -> None:
        """Take `holder` out of the membership."""
        with _translated("the membership"):
            self._client.zrem(self.keys.replicas, holder)

    def subscribe(self, *channels: str) -> Subscription:
        """Subscribe to `channels` on a connection of its own."""
        pubsub = self._client.pubsub(ignore_subscribe_messages=True)
        with _translated("SUBSCRIBE"):
            pubsub.subscribe(*channels)
        return Subscription(pubsub)

    def close(self) -> None:
        """Close all connections. Never raises."""
        with contextlib.suppress(Exception):
            self._client.connection_pool.disconnect()


class Subscription:
    """Messages of some channels, one at a time."""

    def __init__(self, pubsub: Any) -> None:
        self._pubsub = pubsub

    def next(self, timeout: float) -> str | None:
        """The channel of the next message, or None after `timeout` seconds.

        Raises:
            StoreUnavailable: the connection is lost; subscribe again.
        """
        with _translated("a subscription"):
            message: Mapping[str, Any] | None = self._pubsub.get_message(timeout=timeout)
        return None if message is None else str(message["channel"])

    def close(self) -> None:
        """Close the connection. Never raises."""
        with contextlib.suppress(Exception):
            self._pubsub.close()


def _client(settings: Settings, timeout: float) -> Any:
    target = settings.redis
    if target.unix:
        connection_class: Any = redis.UnixDomainSocketConnection
    elif target.tls:
        connection_class = redis.SSLConnection
    else:
        connection_class = redis.Connection
    options: dict[str, Any] = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
    if target.unix:
        del options["socket_connect_timeout"]
    else:
        options["socket_keepalive"] = True
    options |= target.kwargs
    options |= settings.redis_options
    options |= {"decode_responses": True, "encoding": "utf-8", "retry": Retry(NoBackoff(), 0)}
    return redis.Redis(connection_pool=redis.ConnectionPool(connection_class=connection_class, **options))
