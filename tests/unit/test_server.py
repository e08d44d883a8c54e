"""What a server says of itself is warned about where an operator has to do something, and else not."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from celery_leaderbeat.server import remarks_on
from celery_leaderbeat.settings import Settings

NOW = 1_800_000_000.0
#: A server with which all is well, as far as `INFO` tells.
SOUND = {
    "redis_version": "7.0.15",
    "maxmemory": "0",
    "maxmemory_policy": "noeviction",
    "aof_enabled": "0",
    "rdb_last_save_time": str(int(NOW) - 60),
    "rdb_changes_since_last_save": "0",
    "role": "master",
    "cluster_enabled": "0",
}
LONG_AGO = str(int(NOW) - 7200)


def remarks(
    url: str = "redis://:hunter2@cache/1", options: dict[str, Any] | None = None, **info: str | None
) -> Any:
    app = Celery("proj", broker="memory://", set_as_current=False)
    app.conf.update(leaderbeat_redis_url=url, leaderbeat_redis_options=options or {})
    found = {key: value for key, value in {**SOUND, **info}.items() if value is not None}
    said = remarks_on(found, NOW, Settings.from_app(app))
    assert all("hunter2" not in text for _, text in said)
    return dict(said)


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"maxmemory": "1000"},
        {"maxmemory_policy": "allkeys-lru"},
        {"maxmemory_policy": "allkeys-lru", "maxmemory": None},
        {"redis_version": "6.2.0"},
        {"redis_version": "10.1"},
        {"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "9.1.2"},
        {"redis_version": None},
        {"redis_version": "unknown"},
        {"rdb_last_save_time": LONG_AGO},
        {"rdb_changes_since_last_save": "100"},
        {"rdb_last_save_time": LONG_AGO, "rdb_changes_since_last_save": "1", "aof_enabled": "1"},
        {"rdb_last_save_time": LONG_AGO, "rdb_changes_since_last_save": "1", "aof_enabled": None},
        {"rdb_last_save_time": None, "rdb_changes_since_last_save": "1"},
        dict.fromkeys(SOUND),
    ],
)
def test_of_a_server_with_which_all_is_well_or_which_doesnt_tell_nothing_is_said(
    info: dict[str, str | None],
) -> None:
    assert remarks(**info) == {}


@pytest.mark.parametrize(
    "policy", ["allkeys-lru", "allkeys-lfu", "allkeys-random", "volatile-ttl", "volatile-lru"]
)
def test_a_server_that_evicts_is_warned_about(policy: str) -> None:
    ((action, text),) = remarks(maxmemory_policy=policy, maxmemory="104857600").items()
    assert action == "server_evicts"
    assert f"maxmemory-policy is {policy}, maxmemory 104857600 bytes" in text
    assert "Set maxmemory-policy to noeviction" in text


def test_a_server_that_has_saved_nothing_for_long_is_warned_about() -> None:
    said = remarks(rdb_last_save_time=LONG_AGO, rdb_changes_since_last_save="42")
    assert "42 changes since its last snapshot, or its start, 2.0 h ago" in said.pop("server_keeps_nothing")
    assert said == {}


@pytest.mark.parametrize("version", ["6.0.16", "5.0.14", "2.8"])
def test_a_server_that_is_too_old_is_warned_about(version: str) -> None:
    said = remarks(redis_version=version)
    assert f"The server is Redis {version}; celery_leaderbeat needs 6.2" in said.pop("server_too_old")
    assert said == {}


@pytest.mark.parametrize("role", ["slave", "replica"])
def test_the_url_of_a_replica_is_warned_about_with_the_remedy(role: str) -> None:
    said = remarks(role=role)
    text = said.pop("server_is_replica")
    assert text.startswith("redis://:**@cache:6379/1 (leaderbeat_redis_url) is a read-only replica")
    assert "Set leaderbeat_redis_url to the primary" in text
    assert said == {}
    # It will be asked for again.
    assert remarks("sentinel://a", {"master_name": "m"}, role=role) == {}


def test_the_plain_url_of_a_cluster_s_node_is_warned_about_with_the_accepted_form() -> None:
    said = remarks(cluster_enabled="1")
    assert "Set leaderbeat_redis_url = 'redis+cluster://host:port" in said.pop("server_is_node")
    assert said == {}
    assert remarks("redis+cluster://a;b", cluster_enabled="1") == {}
