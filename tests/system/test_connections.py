"""The ledger over TLS, over Unix sockets and on every kind of server, in all spellings."""

from __future__ import annotations

import ssl
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_leaderbeat.errors import StoreUnavailable
from celery_leaderbeat.settings import Settings
from celery_leaderbeat.store import Store
from tests.support.certificates import Certificates, make_certificates
from tests.support.scene import Scene, keys_of
from tests.support.servers import RedisServer, free_port
from tests.support.waits import wait_for

pytestmark = pytest.mark.matrix("valkey")

#: The machine may be busy with others.
PATIENCE = 40.0
SCHEDULE = {"tick": {"task": "project.fenced", "every": 1.0}}
PASSWORD = "s3cret"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Made once: nobody changes them."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def tls_server(
    start_redis: Callable[..., RedisServer], certificates: Certificates
) -> Callable[..., RedisServer]:
    """A function that starts a server that speaks TLS and nothing else: `tls_server(clients=True)`."""

    def start(clients: bool = False) -> RedisServer:
        port = free_port()
        options: dict[str, Any] = {
            "ssl": True,
            "ssl_ca_certs": str(certificates.ca),
            "ssl_certfile": str(certificates.client),
            "ssl_keyfile": str(certificates.client_key),
            "password": PASSWORD,
        }
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
