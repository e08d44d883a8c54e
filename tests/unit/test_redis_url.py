"""Every URL that Celery takes for Redis works or is refused with the accepted form, and no password gets out."""

from __future__ import annotations

import ssl
import traceback
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from celery_leaderbeat.errors import SettingsError
from celery_leaderbeat.redis_url import RedisTarget, parse_redis_url, sanitize

SETTING = "leaderbeat_redis_url"


def refusal(url: Any, setting: str = SETTING) -> str:
    with pytest.raises(SettingsError) as caught:
        parse_redis_url(url, setting)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    return str(caught.value)


def tcp(**more: Any) -> dict[str, Any]:
    return {"host": "localhost", "port": 6379, "db": 0} | more


@pytest.mark.parametrize(
    ("url", "kwargs"),
    [
        ("redis://", tcp()),
        ("redis:///", tcp()),
        ("redis:///3", tcp(db=3)),
        ("redis://cache", tcp(host="cache")),
        ("REDIS://cache", tcp(host="cache")),
        (" redis://cache:6380\n", tcp(host="cache", port=6380)),
        ("redis://cache:/1", tcp(host="cache", db=1)),
        ("redis://cache:6380/2/", tcp(host="cache", port=6380, db=2)),
        ("redis://cache//", tcp(host="cache")),
        ("redis://cache/%2F4", tcp(host="cache", db=4)),
        ("redis://cache?db=5", tcp(host="cache", db=5)),
        ("redis://cache/5?db=5", tcp(host="cache", db=5)),
        ("redis://cache?virtual_host=/6", tcp(host="cache", db=6)),
        ("redis://my_cache.internal-net:1", tcp(host="my_cache.internal-net", port=1)),
        ("redis://bücher.example", tcp(host="bücher.example")),
        ("redis://[::1]:7000/1", tcp(host="::1", port=7000, db=1)),
        ("redis://[fe80::1%25eth0]", tcp(host="fe80::1%eth0")),
        ("redis://:secret@cache", tcp(host="cache", password="secret")),
        ("redis://app:secret@cache", tcp(host="cache", username="app", password="secret")),
        ("redis://app:@cache", tcp(host="cache", username="app")),
        ("redis://app@cache", tcp(host="cache", username="app")),
        ("redis://:@cache", tcp(host="cache")),
        ("redis://a%40b:p%2F%3A%40%3Fs%23@cache", tcp(host="cache", username="a@b", password="p/:@?s#")),
        ("redis://app:p@ss@cache", tcp(host="cache", username="app", password="p@ss")),
        ("redis://app:p:ss@cache", tcp(host="cache", username="app", password="p:ss")),
        ("redis://:p%25@cache", tcp(host="cache", password="p%")),
        ("redis://cache?username=app&password=p%26s", tcp(host="cache", username="app", password="p&s")),
        ("valkey://cache/1", tcp(host="cache", db=1)),
    ],
)
def test_a_url_gives_the_address_the_database_and_the_credentials(url: str, kwargs: dict[str, Any]) -> None:
    target = parse_redis_url(url, SETTING)
    assert target.kwargs == kwargs
    assert (target.unix, target.tls) == (False, False)


@pytest.mark.parametrize(
    ("url", "kwargs"),
    [
        ("redis+socket:///run/redis.sock?virtual_host=1", {"path": "/run/redis.sock", "db": 1}),
        ("redis+socket:///run/redis.sock?virtual_host=/", {"path": "/run/redis.sock", "db": 0}),
        ("socket:///run/redis.sock", {"path": "/run/redis.sock", "db": 0}),
        ("unix:///run/redis.sock?db=1", {"path": "/run/redis.sock", "db": 1}),
        ("unix:///run/my%20redis.sock", {"path": "/run/my redis.sock", "db": 0}),
        ("unix:///run/redis@1.sock", {"path": "/run/redis@1.sock", "db": 0}),
        ("unix://app:pw@/run/r.sock", {"path": "/run/r.sock", "db": 0, "username": "app", "password": "pw"}),
        (
            "unix://app@/run/r.sock?password=pw",
            {"path": "/run/r.sock", "db": 0, "username": "app", "password": "pw"},
        ),
    ],
)
def test_a_unix_socket_has_a_path_and_no_host(url: str, kwargs: dict[str, Any]) -> None:
    target = parse_redis_url(url, SETTING)
    assert target.kwargs == kwargs
    assert (target.unix, target.tls) == (True, False)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        *[
            (text, "none")
            for text in ("CERT_NONE", "none", "None", "ssl.CERT_NONE", "VerifyMode.CERT_NONE", "0")
        ],
        *[(text, "optional") for text in ("CERT_OPTIONAL", "optional", "ssl.CERT_OPTIONAL", "1")],
        *[(text, "required") for text in ("CERT_REQUIRED", "required", "ssl.CERT_REQUIRED", "2")],
    ],
)
def test_every_spelling_of_ssl_cert_reqs_is_read(text: str, wanted: str) -> None:
    target = parse_redis_url(f"rediss://cache?ssl_cert_reqs={text}", SETTING)
    assert target.tls
    assert target.kwargs["ssl_cert_reqs"] == wanted
    assert target.kwargs["ssl_check_hostname"] is (wanted != "none")


@pytest.mark.parametrize("scheme", ["rediss", "valkeys"])
def test_tls_verifies_certificate_and_host_name_unless_told_otherwise(scheme: str) -> None:
    assert parse_redis_url(f"{scheme}://cache", SETTING).kwargs == tcp(
        host="cache", ssl_cert_reqs="required", ssl_check_hostname=True
    )
    relaxed = parse_redis_url(f"{scheme}://cache?ssl_check_hostname=false", SETTING)
    assert relaxed.kwargs["ssl_check_hostname"] is False


def test_options_get_the_types_that_the_driver_wants() -> None:
    query = (
        "socket_timeout=2.5&socket_connect_timeout=3&socket_keepalive=true&socket_read_size=1024&"
        "health_check_interval=30&retry_on_timeout=0&max_connections=10&protocol=3&client_name=a+b&"
        "ssl_ca_certs=%2Fetc%2Fca.pem&ssl_min_version=TLSv1_3&ssl_password=x"
    )
    kwargs = parse_redis_url(f"rediss://cache?{query}", SETTING).kwargs
    assert kwargs == tcp(
        host="cache",
        socket_timeout=2.5,
        socket_connect_timeout=3.0,
        socket_keepalive=True,
        socket_read_size=1024,
        health_check_interval=30,
        retry_on_timeout=False,
        max_connections=10,
        protocol=3,
        client_name="a b",
        ssl_ca_certs="/etc/ca.pem",
        ssl_min_version=ssl.TLSVersion.TLSv1_3,
        ssl_password="x",
        ssl_cert_reqs="required",
        ssl_check_hostname=True,
    )
    assert {name: type(value) for name, value in kwargs.items()}["health_check_interval"] is int


@pytest.mark.parametrize(
    ("url", "connection_class"),
    [
        ("redis://app:pw@cache:1/2?socket_timeout=3&protocol=2", redis.Connection),
        ("rediss://cache?ssl_cert_reqs=none&ssl_ca_certs=/ca.pem", redis.SSLConnection),
        ("rediss://cache?ssl_check_hostname=1&ssl_validate_ocsp=0&ssl_ca_path=/etc", redis.SSLConnection),
        ("unix:///run/r.sock?db=1&health_check_interval=5", redis.UnixDomainSocketConnection),
    ],
)
def test_the_driver_takes_what_is_parsed(url: str, connection_class: type) -> None:
    target = parse_redis_url(url, SETTING)
    connection = redis.ConnectionPool(connection_class=connection_class, **target.kwargs).make_connection()
    assert connection.db == target.kwargs["db"]


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("", "is needed"),
        ("  ", "is needed"),
        (None, "is a string"),
        (b"redis://cache", "is a string"),
        (6379, "is a string"),
        ("localhost:6379", "starts with a scheme"),
        ("http://cache", "http:// is not a scheme of Redis"),
        ("rediss+socket:///run/r.sock", "not a scheme of Redis"),
        ("redis://cache:abc", "whole number from 1 to 65535"),
        ("redis://cache:0", "a port is a whole number from 1 to 65535"),
        ("redis://cache:65536", "a port is a whole number from 1 to 65535"),
        ("redis://cache:-1", "whole number from 1 to 65535"),
        ("redis://cache/zero", "the path is the number of the database"),
        ("redis://cache/-1", "the path is the number of the database"),
        ("redis://cache/1/2", "the path is the number of the database"),
        ("redis://cache?db=x", "the option db takes the number of a database"),
        ("redis://cache/1?db=2", "names two databases"),
        ("redis://app:a@cache?password=b", "twice"),
        ("redis://cache?db=1&db=2", "the option db is given twice"),
        ("redis://::1:6379", "stands in brackets"),
        ("redis://[::zz]", "host and port"),
        ("redis://[1:2]", "not an IPv6 address"),
        ("redis://${REDIS_HOST}:6379", "host and port"),
        ("redis://a%20b", "not a name or an address"),
        ("redis://h1:6379,h2:6379", "host and port"),
        ("redis://:p/w@cache", "%2F"),
        ("redis://:p#w@cache", "%23"),
        ("redis://:p?w@cache", "%3F"),
        ("redis://cache#1", "# or @"),
        ("unix://run/redis.sock", "three slashes"),
        ("unix://", "three slashes"),
        ("redis+socket:///", "three slashes"),
        ("unix:///r.sock?socket_keepalive=1", "not for a Unix socket"),
        ("redis://cache?ssl_cert_reqs=none", "needs TLS, that is rediss://"),
        ("rediss://cache?ssl_cert_reqs=maybe", "ssl_cert_reqs takes none, optional or required"),
        ("redis://cache?socket_timeout=0", "socket_timeout takes a number of seconds above 0"),
        ("redis://cache?socket_timeout=nan", "socket_timeout takes a number of seconds above 0"),
        ("redis://cache?socket_timeout=", "socket_timeout takes a number of seconds above 0"),
        ("redis://cache?retry_on_timeout=perhaps", "retry_on_timeout takes true or false"),
        ("redis://cache?health_check_interval=1.5", "health_check_interval takes a whole number"),
        ("redis://cache?protocol=4", "protocol takes 2 or 3"),
        ("redis://cache?socket_timout=1", "unknown option socket_timout; did you mean socket_timeout?"),
        ("redis://cache?visibility_timeout=1", "unknown option visibility_timeout"),
        ("redis://cache?credential_provider=a.B", "leaderbeat_redis_options = {'credential_provider'"),
    ],
)
def test_a_bad_url_is_refused_with_setting_rule_and_accepted_forms(url: Any, rule: str) -> None:
    message = refusal(url)
    assert message.startswith(f"{SETTING} (")
    assert rule in message
    assert "redis://[user:password@]host[:port][/db]" in message


SENTINEL_PORT, PORT = 26379, 6379


@pytest.mark.parametrize(
    ("url", "kind", "nodes", "kwargs"),
    [
        (
            "sentinel://h1:1;sentinel://h2:2",
            "sentinel",
            [("h1", 1), ("h2", 2)],
            {"db": 0},
        ),
        ("sentinel://a;b", "sentinel", [("a", SENTINEL_PORT), ("b", SENTINEL_PORT)], {"db": 0}),
        (" sentinel://a ; sentinel://b:1; ", "sentinel", [("a", SENTINEL_PORT), ("b", 1)], {"db": 0}),
        ("sentinel://:pw@a/3;b", "sentinel", [("a", 26379), ("b", 26379)], {"db": 3, "password": "pw"}),
        # As Celery's documents write it: the database stands with the last one, or with all.
        (
            "sentinel://0.0.0.0:1;sentinel://0.0.0.0:2/3",
            "sentinel",
            [("0.0.0.0", 1), ("0.0.0.0", 2)],
            {"db": 3},
        ),
        (
            "sentinel://u:p%3Bw@a:1/3;sentinel://u:p%3Bw@b:2/3",
            "sentinel",
            [("a", 1), ("b", 2)],
            {"db": 3, "username": "u", "password": "p;w"},
        ),
        (
            "sentinel://[::1]:7;a?socket_timeout=2",
            "sentinel",
            [("::1", 7), ("a", 26379)],
            {"db": 0, "socket_timeout": 2},
        ),
        ("redis+cluster://h1:7000", "cluster", [("h1", 7000)], {"db": 0}),
        (
            "valkey+cluster://u:p@h1;h2:1/0",
            "cluster",
            [("h1", PORT), ("h2", 1)],
            {"db": 0, "username": "u", "password": "p"},
        ),
    ],
)
def test_the_url_of_several_hosts_gives_their_addresses_and_what_holds_for_all(
    url: str, kind: str, nodes: list[tuple[str, int]], kwargs: dict[str, Any]
) -> None:
    target = parse_redis_url(url, SETTING)
    assert (target.kind, list(target.nodes), target.kwargs) == (kind, nodes, kwargs)
    assert (target.tls, target.unix, target.sentinel_tls) == (False, False, False)


@pytest.mark.parametrize(
    ("url", "sentinel_tls"), [("rediss+sentinel://a;b", True), ("rediss+cluster://a;b", False)]
)
def test_tls_for_several_hosts_is_in_the_scheme(url: str, sentinel_tls: bool) -> None:
    target = parse_redis_url(f"{url}?ssl_cert_reqs=CERT_NONE", SETTING)
    assert (target.tls, target.sentinel_tls) == (True, sentinel_tls)
    assert target.kwargs == {"db": 0, "ssl_cert_reqs": "none", "ssl_check_hostname": False}
    celerys = parse_redis_url("sentinel://a", "broker_url", tls={"ssl_cert_reqs": "none"})
    assert (celerys.tls, celerys.sentinel_tls) == (True, False), "as Celery does it"


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("sentinel://a;redis://b", "starts with sentinel:// or with nothing"),
        ("sentinel://:one@a;sentinel://:two@b", "different user names or passwords"),
        ("sentinel://a/1;sentinel://b/2", "different databases"),
        ("sentinel://a?db=1;sentinel://b?db=2", "different options"),
        ("sentinel://a;b:x", "host and port"),
        ("sentinel://a;a", "names a host twice"),
        ("sentinel://a;:pw@b", "stand with the first host"),
        ("sentinel://:1;pw@b", "each host of the list has a name"),
        ("sentinel://", "each host of the list has a name"),
        ("sentinel://a/mymaster", "the path is the number of the database"),
        ("sentinel://a#1;b", "a # stands"),
        ("redis-sentinel://h1", "redis-sentinel:// is not a scheme of Redis"),
        ("rediss-cluster://h1:7000", "not a scheme of Redis"),
        ("redis+cluster://h1/1", "a cluster has the database 0 only"),
    ],
)
def test_several_hosts_that_dont_fit_together_are_refused_with_the_accepted_forms(
    url: str, rule: str
) -> None:
    message = refusal(url)
    assert rule in message
    assert "sentinel://[user:password@]host[:port];host[:port][/db]" in message
    assert "redis+cluster://host[:port];host[:port]" in message


@pytest.mark.parametrize(
    "url", ["redis://h1:6379/0;redis://h2:6379/0", "redis://h1;h2", "redis://:p@h1;redis://:p@h2"]
)
def test_a_failover_list_is_refused(url: str) -> None:
    assert "name one server" in refusal(url)


def test_a_refused_url_of_celery_says_how_to_name_another_server() -> None:
    assert "set leaderbeat_redis_url" in refusal("redis://cache:x", "broker_url")
    assert "To use another server" not in refusal("redis://cache:x", "CELERY_LEADERBEAT_REDIS_URL")


def test_a_fallback_fills_only_what_the_url_leaves_out() -> None:
    fallback = {"host": "other", "port": "7000", "username": "app", "password": "pw"}
    filled = parse_redis_url("redis://", "result_backend", fallback=fallback)
    assert filled.kwargs == tcp(host="other", port=7000, username="app", password="pw")
    kept = parse_redis_url("redis://me:mine@cache:1", "result_backend", fallback=fallback)
    assert kept.kwargs == tcp(host="cache", port=1, username="me", password="mine")
    socket = parse_redis_url("unix:///r.sock", "result_backend", fallback=fallback)
    assert socket.kwargs == {"path": "/r.sock", "db": 0, "username": "app", "password": "pw"}
    with pytest.raises(SettingsError, match="setting of its own"):
        parse_redis_url("redis://", "result_backend", fallback={"port": "x"})


def test_tls_options_from_outside_mean_tls_and_yield_to_the_url() -> None:
    outside = {"ssl_cert_reqs": "none", "ssl_ca_certs": "/a"}
    target = parse_redis_url("redis://cache", "broker_url", tls=outside)
    assert target.tls
    assert target.kwargs["ssl_cert_reqs"] == "none"
    target = parse_redis_url("rediss://cache?ssl_ca_certs=/b", "broker_url", tls=outside)
    assert target.kwargs["ssl_ca_certs"] == "/b"
    with pytest.raises(SettingsError, match="no TLS on a Unix socket"):
        parse_redis_url("unix:///r.sock", "broker_url", tls=outside)


@pytest.mark.parametrize(
    ("url", "display"),
    [
        ("redis://", "redis://localhost:6379/0"),
        ("rediss://app:pw@cache/3?socket_timeout=1&password_typo", None),
        ("rediss://app:pw@cache/3?socket_timeout=1", "rediss://app:**@cache:6379/3"),
        ("redis://:pw@[::1]:1", "redis://:**@[::1]:1/0"),
        ("redis://app@cache", "redis://**@cache:6379/0"),
        ("sentinel://app:pw@a;[::1]:7/2", "sentinel://app:**@a:26379;[::1]:7/2"),
        ("redis+cluster://:pw@a:1;b:2", "redis+cluster://:**@a:1;b:2/0"),
        ("redis://cache?password=pw", "redis://:**@cache:6379/0"),
        ("unix:///run/r.sock?db=2&password=pw", "unix://:**@/run/r.sock?db=2"),
        ("redis+socket:///run/r.sock?virtual_host=2", "redis+socket:///run/r.sock?virtual_host=2"),
    ],
)
def test_the_display_says_where_and_never_with_which_password(url: str, display: str | None) -> None:
    if display is None:
        assert "pw" not in refusal(url)
        return
    target = parse_redis_url(url, SETTING)
    assert target.display == display
    assert display in repr(target)


def test_a_target_cant_be_changed_and_its_repr_has_no_kwargs() -> None:
    target = parse_redis_url("redis://:hunter2@cache", SETTING)
    with pytest.raises(TypeError):
        target.kwargs["host"] = "other"  # type: ignore[index]
    assert "hunter2" not in f"{target!r} {target} {target.display}"
    assert isinstance(target, RedisTarget)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://cache:6379/0", "redis://cache:6379/0"),
        ("amqp://guest:guest@mq:5672//", "amqp://guest:**@mq:5672//"),
        ("redis://secret@cache", "redis://**@cache"),
        ("redis://secret:@cache", "redis://**@cache"),
        ("redis://:secret@cache:port", "redis://:**@**"),
        (
            "redis://cache/0?db=1&password=secret&socket_timeout=2",
            "redis://cache/0?db=1&password=**&socket_timeout=2",
        ),
        ("redis://cache/0?password=sec&ret=1", "redis://cache/0?password=**&**"),
        ("redis://cache/0?socket_timout=1", "redis://cache/0?socket_timout=**"),
        ("rediss://cache?ssl_ca_certs=/etc/ca.pem", "rediss://cache?ssl_ca_certs=/etc/ca.pem"),
        ("redis://:secret", "redis://**"),
        ("secret@cache:6379", "not a URL"),
        ("secret", "not a URL"),
        ("", "empty"),
        (None, "a value of type NoneType"),
        (b"secret", "a value of type bytes"),
    ],
)
def test_sanitize_shows_what_cant_be_a_password(url: Any, shown: str) -> None:
    assert sanitize(url) == shown


LEAKY = st.builds(
    "K1RB{}D0XE".format,
    st.text(alphabet=st.sampled_from(list("aZ0:/?#@;&=%[]. \n\\'\"é+,")), max_size=8),
)
# `redis://:one@two` is a well-formed URL: no reader could know that the host is forgotten, and the password
# has an @; nor that `one:two@host` is a password alone.
WITHOUT_HOST = ["redis://:{}", "redis://:{}/0?db=1", "redis://app:x{}", "redis+socket://:{}/run/r.sock"]
WITHOUT_COLON = ["redis://{}@cache", "redis://{}:@cache", "{}", "sentinel://h1:26379;{}@h2"]
TEMPLATES = [
    *WITHOUT_HOST,
    *WITHOUT_COLON,
    "redis://:{}@cache:6379/0",
    "redis://app:{}@cache:6379/0",
    "rediss://app:{}@cache:x/0?ssl_cert_reqs=none",
    "redis://app:{}@/zero",
    "redis://app:{}@[::1",
    "redis://cache/0?password={}",
    "redis://cache/0?db=1&password={}&socket_timeout=x",
    "redis://cache/0?passwrd={}",
    "rediss://cache/0?ssl_password={}&foo=bar",
    "unix:///run/r.sock?password={}",
    "unix://app:{}@/run/r.sock?db=x",
    "redis+socket://:{}@/run/r.sock",
    "sentinel://:{}@h1:26379;sentinel://:{}@h2:26379",
    "sentinel://h1;sentinel://app:{}@h2/0",
    "redis+cluster://:{}@h1",
    "redis+cluster://:{}@h1;h2/0",
    "redis://:{}@h1;redis://:{}@h2",
    "http://app:{}@cache",
    "app:{}@cache",
]


@pytest.mark.parametrize("template", TEMPLATES)
@given(password=LEAKY)
def test_no_password_gets_out_of_any_url(template: str, password: str) -> None:
    if template in WITHOUT_HOST:
        password = password.replace("@", "")
    if template in WITHOUT_COLON:
        password = password.replace(":", "")
    url = template.replace("{}", password)
    texts = [sanitize(url)]
    try:
        target = parse_redis_url(url, SETTING)
    except SettingsError as error:
        assert error.__context__ is None  # noqa: PT017 - whether it is refused depends on the password
        texts += ["".join(traceback.format_exception_only(error)), repr(error)]
    else:
        texts += [target.display, repr(target), str(target)]
    for text in texts:
        assert "K1RB" not in text
        assert "D0XE" not in text
