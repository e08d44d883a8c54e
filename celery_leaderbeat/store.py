"""The Redis client: scripts, and every other request that the package makes.

Nothing above this module imports redis; `connections`, `driver_errors` and `subscriptions` serve it alone,
and `_redis_conf` asks the driver, when the settings are read, which options its connections know. A `Store`
belongs to one user (the renewal thread, the tick loop, a publisher, a worker process) and is not handed
around, so that none of them waits for another's answer. It retries nothing: every script can be asked again,
and the caller knows until when that makes sense.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib import resources
from typing import Any

import redis

from celery_leaderbeat.connections import close_client, leave_server, make_client
from celery_leaderbeat.driver_errors import Translator
from celery_leaderbeat.keys import Keys
from celery_leaderbeat.settings import Settings
from celery_leaderbeat.subscriptions import Subscription, subscribe, subscribers
from celery_leaderbeat.tick import slot_from_us

__all__ = ["Look", "Store", "Subscription"]

#: Longest that one answer of the server may take, in seconds, where the caller sets nothing else.
_TIMEOUT = 5.0
#: Longest that may lie between two answers that belong together, in seconds.
_MOMENT = 10.0


@dataclass(frozen=True)
class Look:
    """What a look at the lease has shown.

    Attributes:
        value: the lease's value, None if it is free.
        remaining: its TTL in ms, negative if it doesn't expire.
        now: the server's time, in Unix seconds.
        subscribers: how many subscribe to the channel asked for, None if the server doesn't say.
        counts: the ledger's totals; while they stay the same under one lease, no slot was decided.
        paused: the hash `paused`.
        replicas: the holders of the replicas that were there lately, also of some that no longer are.
    """

    value: str | None
    remaining: int
    now: float
    subscribers: int | None
    counts: Mapping[str, str]
    paused: Mapping[str, str]
    replicas: Sequence[str] = ()


@cache
def _source(name: str) -> str:
    scripts = resources.files("celery_leaderbeat") / "scripts"
    return "\n".join((scripts / f"{part}.lua").read_text("utf-8") for part in ("_prelude", name))


class Store:
    """One user's connection to Redis.

    Parameters:
        settings: where the server is, and the key prefix.
        timeout: longest that connecting, or one answer, may take, in seconds.
    """

    def __init__(self, settings: Settings, timeout: float = _TIMEOUT) -> None:
        self.keys = Keys(settings.key_prefix)
        self._settings = settings
        self._cluster = settings.redis.kind == "cluster"
        self._client = _client(settings, timeout)
        self._translator = Translator(settings, lambda: leave_server(self._client))
        self._scripts: dict[str, Any] = {}
        self._events_kept = settings.events

    def run(self, script: str, keys: Sequence[str], args: Sequence[str | int | float] = ()) -> Any:
        """Run one of `scripts/`, loading it when the server doesn't know it. It writes its own events.

        Raises:
            StoreUnavailable: no answer; the script may or may not have run.
            StoreError: the server refused it.
        """
        call = self._script(script)
        with self._translated(f"the script {script}"):
            return call(keys=[self.keys.events, *keys], args=[self._events_kept, *args])

    def run_replicated(
        self,
        script: str,
        keys: Sequence[str],
        args: Sequence[str | int | float],
        replicas: int,
        within: float,
    ) -> tuple[Any, int, str]:
        """Run a script, and wait until so many `replicas` of the server have what was written before its end.

        Waits `within` seconds at most. Both go over one connection, in one round trip: the server counts for
        the connection that wrote. Returns the script's answer, how many Redis replicas have it, and why the
        server refused to wait, if it did; what is written is written all the same.

        Raises:
            StoreUnavailable: no answer; the script may or may not have run.
            StoreError: the server refused the script.
        """
        call = self._script(script)
        command = [call.sha, len(keys) + 1, self.keys.events, *keys, self._events_kept, *args]
        with self._translated(f"the script {script}"):
            answer, acknowledged = self._pair(command, replicas, within)
            if isinstance(answer, redis.exceptions.NoScriptError):
                self._client.script_load(call.script)
                answer, acknowledged = self._pair(command, replicas, within)
            if isinstance(answer, Exception):
                raise answer
        if isinstance(acknowledged, Exception):
            return answer, 0, str(acknowledged)
        return answer, int(acknowledged), ""

    def _pair(self, command: Sequence[Any], replicas: int, within: float) -> list[Any]:
        with self._client.pipeline(transaction=False) as pipe:
            pipe.execute_command("EVALSHA", *command)
            pipe.execute_command("WAIT", replicas, round(within * 1000))
            answers: list[Any] = pipe.execute(raise_on_error=False)
        return answers

    def replicas(self, wanted: int, within: float) -> int:
        """How many Redis replicas have what this connection wrote last.

        Waits `within` seconds at most for as many as `wanted`.
        """
        with self._translated("WAIT"):
            return int(self._client.execute_command("WAIT", wanted, round(within * 1000)))

    def info(self) -> dict[str, str]:
        """What the server says of itself, as far as `server` reads it.

        Raises:
            StoreError: it isn't allowed to say, or has no such command.
        """
        with self._translated("INFO"), self._client.pipeline(transaction=False) as pipe:
            for section in ("server", "memory", "persistence", "replication", "cluster"):
                pipe.execute_command("INFO", section)
            found: list[Any] = pipe.execute()
        return {str(key): str(value) for part in found for key, value in dict(part).items()}

    def _script(self, name: str) -> Any:
        call = self._scripts.get(name)
        if call is None:
            call = self._scripts[name] = self._client.register_script(_source(name))
        return call

    def look(self, subscribers_of: str | None = None) -> Look:
        """Look at the lease, the server's clock, what the shadow follows, and a channel's subscribers."""
        with self._translated("a look at the lease"), self._client.pipeline(transaction=False) as pipe:
            pipe.get(self.keys.lease).pttl(self.keys.lease).time()
            pipe.hgetall(self.keys.counts).hgetall(self.keys.paused).zrange(self.keys.replicas, 0, -1)
            answers = pipe.execute(raise_on_error=False)
            for answer in answers[:3]:
                if isinstance(answer, Exception):
                    raise answer
        value, remaining, (seconds, microseconds) = answers[:3]
        # What is in the way of the shadow must not be in the way of an election.
        counts, paused = (answer if isinstance(answer, dict) else {} for answer in answers[3:5])
        replicas = answers[5] if isinstance(answers[5], list) else []
        subscribers = self.subscribers(subscribers_of) if subscribers_of else None
        return Look(value, remaining, seconds + microseconds / 1e6, subscribers, counts, paused, replicas)

    def subscribers(self, channel: str) -> int | None:
        """How many connections subscribe to `channel`; None where the server doesn't say."""
        return subscribers(self._client, self._translated, self._cluster, channel)

    def wake(self) -> None:
        """Have all replicas look whether they lead."""
        self.run("wake", [self.keys.lease], [self.keys.wake, int(self._cluster)])

    def now(self) -> datetime:
        """The server's time, in UTC."""
        with self._translated("TIME"):
            seconds, microseconds = self._client.time()
        return slot_from_us(seconds * 1_000_000 + microseconds)

    def text(self, key: str) -> str | None:
        """A string; None where there is none."""
        with self._translated(f"GET {key}"):
            value: str | None = self._client.get(key)
        return value

    def table(self, key: str) -> dict[str, str]:
        """A whole hash."""
        with self._translated(f"HGETALL {key}"):
            found: dict[str, str] = self._client.hgetall(key)
        return found

    def scan_table(self, key: str) -> dict[str, str]:
        """A whole hash, piece by piece, so that a large one keeps nobody waiting."""
        with self._translated(f"HSCAN {key}"):
            return dict(self._client.hscan_iter(key, count=1000))

    def size(self, key: str) -> int:
        """How many fields a hash has."""
        with self._translated(f"HLEN {key}"):
            return int(self._client.hlen(key))

    def tables(self, keys: Iterable[str]) -> list[dict[str, str]]:
        """Many hashes in one round trip; an empty one for each that isn't there."""
        with self._translated("HGETALL"), self._client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.hgetall(key)
            found: list[dict[str, str]] = pipe.execute()
        return found

    def table_of(self, key: str, fields: Sequence[str]) -> dict[str, str]:
        """These fields of a hash, as far as they are there."""
        with self._translated(f"HMGET {key}"):
            values: list[str | None] = self._client.hmget(key, fields)
        return {field: value for field, value in zip(fields, values, strict=True) if value is not None}

    def fields(self, key: str) -> set[str]:
        """The names of a hash's fields."""
        with self._translated(f"HKEYS {key}"):
            return set(self._client.hkeys(key))

    def drop_field(self, key: str, field: str) -> None:
        """Take a field out of a hash."""
        with self._translated(f"HDEL {key}"):
            self._client.hdel(key, field)

    def members(self, key: str, above: float | None = None) -> list[str]:
        """The members of a sorted set, lowest score first, or those with a score higher than `above`."""
        with self._translated(f"ZRANGE {key}"):
            if above is None:
                found: list[str] = self._client.zrange(key, 0, -1)
            else:
                found = self._client.zrangebyscore(key, f"({above}", "+inf")
        return found

    def due_members(self, key: str, at: float | None = None) -> list[str]:
        """The members of a sorted set whose score, in Unix ms, has come as the server answers; lowest score first.

        Parameters:
            at: the server's time a moment ago, in Unix seconds; asked for if it isn't known.
        """
        latest = (self.now().timestamp() if at is None else at) + _MOMENT
        with self._translated(f"ZRANGEBYSCORE {key}"), self._client.pipeline(transaction=False) as pipe:
            # The time after the members: a score that is the time of a write meanwhile has come, too.
            pipe.zrangebyscore(key, "-inf", int(latest * 1000), withscores=True).time()
            members, (seconds, microseconds) = pipe.execute()
        now = seconds * 1000 + microseconds / 1000
        return [str(member) for member, score in members if score <= now]

    def events(self, after: str, most: int) -> list[tuple[str, dict[str, str]]]:
        """Events later than the id `after` (empty: from the oldest), with their ids; `most` of them."""
        with self._translated("XRANGE"):
            found: list[tuple[str, dict[str, str]]] = self._client.xrange(
                self.keys.events, f"({after}" if after else "-", "+", count=most
            )
        return found

    def withdraw(self, holder: str) -> None:
        """Take `holder` out of the membership."""
        with self._translated("the membership"), self._client.pipeline(transaction=False) as pipe:
            pipe.zrem(self.keys.replicas, holder)
            pipe.hdel(self.keys.releases, holder)
            pipe.execute()

    def subscribe(self, *channels: str) -> Subscription:
        """Subscribe to `channels` on a connection of its own."""
        return subscribe(self._client, self._translated, self._cluster, *channels)

    def _translated(self, what: str) -> contextlib.AbstractContextManager[None]:
        return self._translator(what)

    def hurry(self, timeout: float) -> None:
        """From now on, wait for no answer longer than `timeout` seconds. Nothing may be under way."""
        self.close()
        self._scripts.clear()
        self._client = _client(self._settings.hurried(timeout), timeout)

    def close(self) -> None:
        """Close all connections. Never raises."""
        with contextlib.suppress(Exception):
            close_client(self._client)


def _client(settings: Settings, timeout: float) -> Any:
    return make_client(settings.redis, settings.redis_options, timeout, settings.key_prefix)
