"""The ledger over TLS, over Unix sockets and on every kind of server, in all spellings."""

from __future__ import annotations

import re
import ssl
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from celery import Celery

from celery_leaderbeat.errors import StoreUnavailable
from celery_leaderbeat.settings import Settings
from celery_leaderbeat.store import Store
from tests.support.certificates import Certificates
from tests.support.scene import Scene, keys_of
from tests.support.servers import RedisServer, free_port, require
from tests.support.topologies import Sentinels, start_cluster, start_sentinels
from tests.support.waits import wait_for

pytestmark = pytest.mark.matrix("valkey")

#: The machine may be busy with others.
PATIENCE = 40.0
SCHEDULE = {"tick": {"task": "project.fenced", "every": 1.0}}
PASSWORD, SENTINEL_PASSWORD = "s3cret", "s3cret-sentinel"


@pytest.fixture
def tls_server(
    start_redis: Callable[..., RedisServer], certificates: Certificates
) -> Callable[..., RedisServer]:
    """A function that starts a server that speaks TLS and nothing else: `tls_server(clients=True)`."""

    def start(clients: bool = False) -> RedisServer:
        port = free_port()
        options = {**certificates.client_options(), "password": PASSWORD}
        args = certificates.server_args(port, clients=clients)
        return start_redis("redis", *args, "--requirepass", PASSWORD, port=port, client_options=options)

    return start


def now(**conf: Any) -> Any:
    """What a server says to an app with these settings."""
    app = Celery("proj", broker="memory://", set_as_current=False)
    app.conf.update(conf)
    store = Store(Settings.from_app(app, warn=False))
    try:
        return store.now()
    finally:
        store.close()
        app.close()


def test_tls_in_all_spellings_of_celery(
    tls_server: Callable[..., RedisServer], certificates: Certificates
) -> None:
    server = tls_server()
    address = f":{PASSWORD}@127.0.0.1:{server.port}/0"
    ca = str(certificates.ca)
    for query in (
        "CERT_NONE",
        "none",
        "ssl.CERT_NONE",
        f"required&ssl_ca_certs={ca}",
        f"CERT_REQUIRED&ssl_ca_certs={ca}",
    ):
        assert now(leaderbeat_redis_url=f"rediss://{address}?ssl_cert_reqs={query}")
    for options in (
        {"ssl_cert_reqs": ssl.CERT_NONE},
        {"ssl_cert_reqs": "none"},
        {"ssl_cert_reqs": None},
        {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_ca_certs": ca},
        {"ssl_ca_certs": ca},
    ):
        assert now(leaderbeat_redis_url=f"valkeys://{address}", leaderbeat_redis_options=options)
        for scheme in ("redis", "rediss"):
            assert now(broker_url=f"{scheme}://{address}", broker_use_ssl=options)
            assert now(result_backend=f"{scheme}://{address}", redis_backend_use_ssl=options)


def test_a_server_that_wants_a_certificate_gets_it(
    tls_server: Callable[..., RedisServer], certificates: Certificates
) -> None:
    url = f"rediss://:{PASSWORD}@127.0.0.1:{tls_server(clients=True).port}/0?ssl_ca_certs={certificates.ca}"
    own = f"&ssl_certfile={certificates.client}&ssl_keyfile={certificates.client_key}"
    assert now(leaderbeat_redis_url=url + own)
    with pytest.raises(StoreUnavailable):
        now(leaderbeat_redis_url=url)
    for wrong in (
        {"ssl_certfile": "/no/where.pem"},
        {"ssl_certfile": str(certificates.ca)},
        {"ssl_keyfile": str(certificates.client_locked_key), "ssl_password": "wr0ng-guess"},
        {"ssl_ca_certs": str(certificates.client_key)},
    ):
        with pytest.raises(StoreUnavailable, match="can't be read: check ssl_ca_certs") as raised:
            now(leaderbeat_redis_url=url + own, leaderbeat_redis_options=wrong)
        assert "wr0ng-guess" not in str(raised.value)


@pytest.fixture
def sentinels(certificates: Certificates, tmp_path: Path) -> Iterator[Callable[..., Sentinels]]:
    """A function that starts servers that speak TLS only, and Sentinels."""
    started: list[Sentinels] = []

    def start(**more: Any) -> Sentinels:
        group = start_sentinels(
            require("redis"),
            tmp_path / "group",
            password=PASSWORD,
            sentinel_password=SENTINEL_PASSWORD,
            certificates=certificates,
            **more,
        )
        started.append(group)
        return group

    yield start
    for group in started:
        group.stop()


def test_tls_to_sentinels_and_to_their_servers_in_all_spellings(
    sentinels: Callable[..., Sentinels], certificates: Certificates
) -> None:
    group, tls = sentinels(), certificates.driver_options()
    login = {"password": SENTINEL_PASSWORD}
    with_tls = {"master_name": group.service, "sentinel_kwargs": {**login, "ssl": True, **tls}}
    plain = {"master_name": group.service, "sentinel_kwargs": login}
    query = "?" + urlencode(tls)
    # One set of options is for the Sentinels and the servers, in the URL or beside it.
    for scheme in ("rediss+sentinel", "valkeys+sentinel"):
        url = group.url(scheme=scheme)
        assert now(leaderbeat_redis_url=url + query, leaderbeat_redis_options=plain)
        assert now(leaderbeat_redis_url=url, leaderbeat_redis_options={**plain, **tls})
    # Or each has its own.
    assert now(leaderbeat_redis_url=url + query, leaderbeat_redis_options=with_tls)
    unverified = {"ssl": True, **tls, "ssl_ca_certs": None, "ssl_cert_reqs": "CERT_NONE"}
    options = {"master_name": group.service, "sentinel_kwargs": {**login, **unverified}}
    assert now(leaderbeat_redis_url=url + query, leaderbeat_redis_options=options)
    # As Celery has it.
    for reqs in (ssl.CERT_REQUIRED, "required", None):
        use_ssl = {**tls, "ssl_cert_reqs": reqs}
        for transport in (with_tls, {**plain, "sentinel_kwargs": {**login, "ssl": True}}):
            assert now(broker_url=group.url(), broker_use_ssl=use_ssl, broker_transport_options=transport)
            assert now(
                result_backend=group.url(),
                redis_backend_use_ssl=use_ssl,
                result_backend_transport_options=transport,
            )
    with pytest.raises(StoreUnavailable, match="no Sentinel knows the primary"):
        now(broker_url=group.url(), broker_use_ssl=tls, broker_transport_options=plain)
    wrong = {**tls, "ssl_ca_certs": str(certificates.other_ca)}
    with pytest.raises(StoreUnavailable, match="isn't trusted: set ssl_ca_certs"):
        now(
            leaderbeat_redis_url=group.url(scheme="rediss+sentinel"),
            leaderbeat_redis_options={**plain, **wrong},
        )


def test_servers_that_sentinels_call_by_name_show_certificates_for_their_names(
    sentinels: Callable[..., Sentinels], certificates: Certificates
) -> None:
    group, tls = sentinels(named=True), certificates.driver_options()
    options = {"master_name": group.service, "sentinel_kwargs": {"password": SENTINEL_PASSWORD}, **tls}
    url = group.url(scheme="rediss+sentinel")
    by_name = url.replace("127.0.0.1", "localhost")
    assert now(leaderbeat_redis_url=by_name, leaderbeat_redis_options=options)
    with pytest.raises(StoreUnavailable, match=r"is for another name: .*ssl_check_hostname"):
        now(leaderbeat_redis_url=url, leaderbeat_redis_options=options)
    unnamed = {**options, "ssl_check_hostname": False}
    assert now(leaderbeat_redis_url=url, leaderbeat_redis_options=unnamed)
    group.fail_over(by_death=False)
    assert now(leaderbeat_redis_url=by_name, leaderbeat_redis_options=options)


def test_servers_with_tls_are_reached_through_sentinels_without_it(
    sentinels: Callable[..., Sentinels], certificates: Certificates
) -> None:
    group, tls = sentinels(plain_sentinels=True), certificates.driver_options()
    plain = {"master_name": group.service, "sentinel_kwargs": {"password": SENTINEL_PASSWORD}}
    without = {**plain, "sentinel_kwargs": {"password": SENTINEL_PASSWORD, "ssl": False}}
    url = group.url(scheme="rediss+sentinel")
    assert now(leaderbeat_redis_url=f"{url}?{urlencode(tls)}", leaderbeat_redis_options=without)
    assert now(leaderbeat_redis_url=url, leaderbeat_redis_options={**without, **tls})
    for transport in (plain, without):
        assert now(broker_url=group.url(), broker_use_ssl=tls, broker_transport_options=transport)
        assert now(
            result_backend=group.url(),
            redis_backend_use_ssl=tls,
            result_backend_transport_options=transport,
        )


@pytest.mark.parametrize("named", [False, True], ids=["by-address", "by-name"])
def test_tls_to_a_cluster_in_all_spellings(certificates: Certificates, tmp_path: Path, named: bool) -> None:
    cluster = start_cluster(require("redis"), tmp_path / "cluster", certificates=certificates, named=named)
    try:
        tls = certificates.driver_options()
        host = "localhost" if named else "127.0.0.1"
        for node in cluster.nodes:
            url = f"rediss+cluster://{host}:{node.port}"
            assert now(leaderbeat_redis_url=url, leaderbeat_redis_options=tls)
        for scheme in ("rediss+cluster", "valkeys+cluster"):
            assert now(leaderbeat_redis_url=f"{scheme}://{host}:{node.port}?{urlencode(tls)}")
        other = {"ssl_ca_certs": str(certificates.other_ca)}
        with pytest.raises(StoreUnavailable, match="isn't trusted: set ssl_ca_certs"):
            now(leaderbeat_redis_url=url, leaderbeat_redis_options={**tls, **other})
        # A certificate is for the name that the node is called by.
        wrong = f"{scheme}://{'127.0.0.1' if named else 'localhost'}:{node.port}"
        with pytest.raises(StoreUnavailable, match=r"is for another name: .*ssl_check_hostname"):
            now(leaderbeat_redis_url=wrong, leaderbeat_redis_options=tls)
        unnamed = {**tls, "ssl_check_hostname": False}
        assert now(leaderbeat_redis_url=wrong, leaderbeat_redis_options=unnamed)
        with pytest.raises(StoreUnavailable, match="isn't trusted: set ssl_ca_certs"):
            now(leaderbeat_redis_url=wrong, leaderbeat_redis_options={**unnamed, **other})
    finally:
        cluster.stop()


@pytest.mark.schedule(SCHEDULE)
def test_a_beat_over_tls_sends_and_one_with_the_wrong_authority_says_so_and_waits(
    scene: Scene, tls_server: Callable[..., RedisServer], certificates: Certificates
) -> None:
    server = tls_server()
    url = f"rediss://:{PASSWORD}@127.0.0.1:{server.port}"
    tls = {"ssl_cert_reqs": "required", "ssl_ca_certs": str(certificates.ca)}
    conf = {"leaderbeat_redis_url": None, "broker_use_ssl": tls}
    wrong = {
        "leaderbeat_redis_url": f"{url}/0",
        "leaderbeat_redis_options": {"ssl_ca_certs": str(certificates.other_ca)},
    }
    waiting = scene.start_beat(conf=wrong)
    line = waiting.wait_for_log("CERTIFICATE_VERIFY_FAILED", PATIENCE)
    assert (
        f"The certificate of rediss://:**@127.0.0.1:{server.port}/0 isn't trusted: set ssl_ca_certs"
        in line.text
    )
    assert server.client().dbsize() == 0
    env = {"CELERY_BROKER_URL": f"{url}/0"}
    beat = scene.start_beat(conf=conf, env=env)
    scene.start_worker(conf=conf, env=env)
    wait_for(lambda: len(scene.runs("end")) >= 2, PATIENCE, "slots are sent and run over TLS")
    assert server.client().exists(scene.key("lease"))
    assert waiting.status == "running"
    for process in (waiting, beat):
        assert PASSWORD not in process.text()
        assert not process.find("Traceback")


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory whose path is short enough for a Unix socket."""
    with tempfile.TemporaryDirectory(prefix="lb") as path:
        yield Path(path)


@pytest.mark.schedule(SCHEDULE)
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("valkey", "redis+socket://{path}?virtual_host=3"),
        ("redis", "unix://{path}?db=3"),
        ("redis62", "valkey://127.0.0.1:{port}/3"),
    ],
)
def test_a_beat_sends_and_a_worker_runs_with_every_kind_of_server_and_address(
    scene: Scene, start_redis: Callable[..., RedisServer], short_path: Path, kind: str, form: str
) -> None:
    path = short_path / "redis.sock"
    server = start_redis(kind, "--unixsocket", str(path))
    conf = {"leaderbeat_redis_url": form.format(path=path, port=server.port)}
    beat = scene.start_beat(conf=conf)
    scene.start_worker(conf=conf)
    wait_for(lambda: len(scene.runs("end")) >= 2, PATIENCE, "slots are sent and run")
    beat.terminate()
    assert beat.wait(PATIENCE)["StatusCode"] == 0
    keys = keys_of(scene.beat_publishes())
    assert len(set(keys)) == len(keys)
    assert not beat.find("WARNING")
    assert server.client(3).exists(scene.key("epoch"))


@pytest.mark.schedule(SCHEDULE)
def test_what_an_operator_should_know_of_the_server_is_said_once_at_the_start(
    scene: Scene, start_redis: Callable[..., RedisServer]
) -> None:
    server = start_redis("valkey", "--maxmemory", "200mb", "--maxmemory-policy", "allkeys-lru")
    beat = scene.start_beat(conf={"leaderbeat_redis_url": server.url()})
    wait_for(lambda: len(scene.publishes()) >= 1, PATIENCE, "slots are sent all the same")
    (line,) = beat.find("maxmemory-policy is allkeys-lru")
    assert line.level == "WARNING"
    # A server that doesn't tell.
    server.client().execute_command("ACL", "SETUSER", "default", "-info")
    quiet = scene.start_beat(conf={"leaderbeat_redis_url": server.url()}, loglevel="DEBUG")
    quiet.wait_for_log("doesn't say what it is", PATIENCE)
    quiet.wait_for_log("Standing by", PATIENCE)
    assert not [line for line in quiet.lines() if line.level in ("WARNING", "ERROR")]


@pytest.mark.schedule(SCHEDULE)
@pytest.mark.conf(
    broker_transport_options={
        "visibility_timeout": 5,
        "global_keyprefix": "x:",
        "max_retries": 1,
        "socket_timeout": 2,
    },
    leaderbeat_redis_url=None,
)
def test_the_broker_s_transport_options_are_the_broker_s_alone(scene: Scene) -> None:
    beat = scene.start_beat()
    scene.start_worker()
    wait_for(lambda: len(scene.runs("end")) >= 2, PATIENCE, "slots are sent and run")
    keys = scene.ledger.client(scene.BROKER_DB).keys("*")
    assert scene.key("lease") in keys, "our keys have no prefix of others"
    assert any(key.startswith("x:") for key in keys)
    assert not beat.find(re.compile("WARNING|Traceback"))
