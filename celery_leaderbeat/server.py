"""What a Redis server says of itself, and what of that its operator should know when beat starts.

What there is to say is a pure function of the answer; `ServerCheck` asks and logs. Some of what matters can't
be learned from `INFO`, and then nothing is said: whether snapshots are configured, for one. A last snapshot
that is long past, with changes since, is told as what it is.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

from celery_leaderbeat.errors import StoreError, StoreUnavailable
from celery_leaderbeat.settings import Settings
from celery_leaderbeat.store import Store

__all__ = ["ServerCheck", "remarks_on"]

logger = logging.getLogger(__name__)

#: The oldest version that the scripts are tested with. Valkey says which version of Redis it is compatible with.
_OLDEST = (6, 2)
#: Redis saves after an hour where nothing is configured and anything has changed; a quarter of an hour for the rest.
_LATE_SNAPSHOT = 4500


def remarks_on(info: Mapping[str, str], now: float, settings: Settings) -> list[tuple[str, str]]:
    """What is to be warned about: pairs of a stable `action` and a sentence or two.

    Parameters:
        info: the fields of the server's `INFO`.
        now: the server's time, in Unix seconds.
    """
    said = (
        _version(info),
        _eviction(info, settings),
        _persistence(info, now),
        _role(info, settings),
        _cluster(info, settings),
    )
    return [remark for remark in said if remark is not None]


def _number(info: Mapping[str, str], name: str) -> int | None:
    text = info.get(name, "")
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def _version(info: Mapping[str, str]) -> tuple[str, str] | None:
    found = re.match(r"([0-9]{1,4})\.([0-9]{1,4})", info.get("redis_version", ""))
    if found is None or (int(found[1]), int(found[2])) >= _OLDEST:
        return None
    return "server_too_old", (
        f"The server is Redis {info['redis_version']}; celery_leaderbeat needs 6.2 or newer, or Valkey, and may not "
        "work. Upgrade it, or set leaderbeat_redis_url to another one."
    )


def _eviction(info: Mapping[str, str], settings: Settings) -> tuple[str, str] | None:
    policy, bound = info.get("maxmemory_policy", "noeviction"), _number(info, "maxmemory")
    if policy == "noeviction" or not bound:
        return None
    return "server_evicts", (
        f"The server may evict the lease and the records of slots when its memory is full (maxmemory-policy is {policy}, "
        f"maxmemory {bound} bytes): slots would be sent late, or not at all, and their ends be unknown. Set "
        f"maxmemory-policy to noeviction, or leaderbeat_redis_url to another server than {settings.redis.display}."
    )


def _persistence(info: Mapping[str, str], now: float) -> tuple[str, str] | None:
    saved, changes = _number(info, "rdb_last_save_time"), _number(info, "rdb_changes_since_last_save")
    if info.get("aof_enabled") != "0" or not saved or not changes or now - saved < _LATE_SNAPSHOT:
        return None
    return "server_keeps_nothing", (
        f"The server doesn't seem to keep its data: appendonly is off, and {changes} changes since its last snapshot, or "
        f"its start, {(now - saved) / 3600:.1f} h ago would be lost with a restart. Set appendonly to yes, or configure "
        "snapshots (save)."
    )


def _role(info: Mapping[str, str], settings: Settings) -> tuple[str, str] | None:
    if info.get("role") not in ("slave", "replica") or settings.redis.kind != "server":
        return None
    return "server_is_replica", (
        f"{settings.redis.display} ({settings.origins['redis_url']}) is a read-only replica: this replica of beat can "
        "stand by, but never lead. Set leaderbeat_redis_url to the primary, or to the Sentinels that know it "
        "(sentinel://host;host)."
    )


def _cluster(info: Mapping[str, str], settings: Settings) -> tuple[str, str] | None:
    if info.get("cluster_enabled") != "1" or settings.redis.kind == "cluster":
        return None
    return "server_is_node", (
        f"{settings.redis.display} ({settings.origins['redis_url']}) is a node of a cluster, and another one may have the "
        "keys, now or later. Set leaderbeat_redis_url = 'redis+cluster://host:port;host:port', with some of its nodes."
    )


class ServerCheck:
    """One look at the server, once it answers.

    Parameters:
        settings: for the names in what is said.
        store: the connection of whoever asks.
    """

    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings = settings
        self._store = store
        self._done = False

    def once(self, now: float) -> None:
        """Warn of what the operator should know, once the server has said it; `now` is its time."""
        if self._done:
            return
        try:
            info = self._store.info()
        except StoreError as exc:
            # Where INFO isn't allowed, there is nothing to warn about.
            logger.debug("The server doesn't say what it is: %s", exc, extra={"action": "server_unknown"})
            self._done = not isinstance(exc, StoreUnavailable)
            return
        self._done = True
        for action, text in remarks_on(info, now, self._settings):
            logger.warning("%s", text, extra={"action": action})
