"""Who names the server that has the keys may be behind the times: then another is asked."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from celery_leaderbeat import connections
from celery_leaderbeat.connections import close_client, make_client
from celery_leaderbeat.redis_url import parse_redis_url
from tests.support.servers import RedisServer

SETTING = "leaderbeat_redis_url"
GUIDES = [("s1", 26379), ("s2", 26379), ("s3", 26379)]


@pytest.fixture(params=["refuses", "is frozen"])
def dead(request: pytest.FixtureRequest) -> Iterator[int]:
    """The port of a server that refuses connections, or takes them and never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if request.param == "is frozen":
            listener.listen(16)
        yield listener.getsockname()[1]


@pytest.mark.parametrize("kind", ["sentinel", "cluster"])
def test_who_names_a_server_that_is_dead_is_asked_last_the_next_time(
    one_server: RedisServer, dead: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme = "sentinel" if kind == "sentinel" else "redis+cluster"
    target = parse_redis_url(f"{scheme}://{';'.join(f'{host}:{port}' for host, port in GUIDES)}", SETTING)
    asked: list[str] = []

    def answer(_: Any, node: tuple[str, int], *command: Any) -> Any:
        asked.append(node[0])
        port = dead if node[0] == "s1" else one_server.port
        return ["127.0.0.1", port] if kind == "sentinel" else [[0, 16383, ["127.0.0.1", port]]]

    monkeypatch.setattr(connections._Guides, "_question", answer)
    client = make_client(target, {}, 0.3, "prefix")
    try:
        with pytest.raises((redis.exceptions.ConnectionError, redis.exceptions.TimeoutError)):
            client.ping()
        assert client.ping()
        assert asked == ["s1", "s2"]
        close_client(client)
        assert client.ping()
        assert asked[2:] == ["s2"], "who was right is asked first"
    finally:
        close_client(client)


def test_of_the_nodes_of_a_cluster_those_of_the_url_and_of_the_latest_answer_are_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = parse_redis_url("redis+cluster://seed:1;other:1", SETTING)
    guides = connections._Nodes(target, 1.0, "prefix", {})
    asked: list[str] = []
    living: dict[str, list[str]] = {}

    def answer(_: Any, node: tuple[str, int], *command: Any) -> Any:
        asked.append(node[0])
        if node[0] not in living:
            raise redis.exceptions.ConnectionError("gone")
        servers = [[host, 1] for host in living[node[0]]]
        return [[0, 16383, *servers]] if servers else []

    monkeypatch.setattr(connections._Guides, "_question", answer)
    for generation in range(5):
        # The nodes are replaced one by one, and each has the address of the next one.
        older, newer = f"node{generation}", f"node{generation + 1}"
        living = {"other": [], "seed" if generation == 0 else older: [newer, older]}
        assert guides() == (newer, 1)
    living, asked[:] = {"other": []}, []
    with pytest.raises(redis.exceptions.ConnectionError, match="no node of the cluster knows"):
        guides()
    assert sorted(asked) == ["node4", "node5", "other", "seed"]
