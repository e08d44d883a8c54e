"""Which Redis an app means, and how the driver connects to it: from our settings, else from Celery's own.

Of Celery's configuration only what says where the broker or the result backend is, and how to get in, is
used: the URL, the credentials, TLS, and the name of a primary with Sentinels. The other transport options are
about messages, and change nothing here.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import redis

from celery_leaderbeat._conf import Source
from celery_leaderbeat._sentinel_conf import SENTINEL_OPTIONS, with_sentinel_options
from celery_leaderbeat._url_options import nearest, tls_options, verifying
from celery_leaderbeat.errors import SettingsError
from celery_leaderbeat.redis_url import RedisTarget, parse_redis_url

__all__ = ["find_redis", "redis_options"]

logger = logging.getLogger("celery_leaderbeat.settings")

#: Where Celery looks for what a URL leaves out.
_BROKER = {"username": "broker_user", "password": "broker_password", "port": "broker_port"}
_BACKEND = {
    "username": "redis_username",
    "password": "redis_password",
    "host": "redis_host",
    "port": "redis_port",
}

#: Options of a connection that say which server it is for. They belong into the URL, which the banner shows.
_IN_URL = frozenset({"host", "port", "path", "db"})
#: Options that the store sets itself, since its answers wouldn't be read right with others, or that are
#: internal to the driver.
_OWN = frozenset(
    {
        "command_packer",
        "decode_responses",
        "encoding",
        "encoding_errors",
        "himport_registry",
        "legacy_responses",
        "maint_notifications_pool_handler",
        "maintenance_notification_hash",
        "maintenance_state",
        "orig_host_address",
        "orig_socket_connect_timeout",
        "orig_socket_timeout",
        "oss_cluster_maint_notifications_handler",
        "parser",
        "parser_class",
        "retry",
        "self",
    }
)


def find_redis(source: Source) -> tuple[str, RedisTarget]:
    """The URL of the server that holds the lease, and its parts.

    `leaderbeat_redis_url`, else the broker if that is Redis, else the result backend if that is Redis.

    Raises:
        SettingsError: there is none, or it can't be used.
    """
    url = source.raw("redis_url")
    if url is not None:
        setting = source.spelling("redis_url")
        target = with_sentinel_options(parse_redis_url(url, setting), setting, source)
        _check_driver(target, setting)
        return url.strip(), target
    conf = source.app.conf
    broker, backend = conf.broker_write_url, conf.result_backend
    for url, setting in (
        (broker, "broker_url" if broker == conf.broker_url else "broker_write_url"),
        (backend, "result_backend"),
    ):
        # Celery takes a list of brokers as well as one text with semicolons.
        text = ";".join(map(str, url)) if isinstance(url, (list, tuple)) else url
        if not _is_redis(text):
            continue
        source.origins["redis_url"] = setting
        names = _BACKEND if setting == "result_backend" else _BROKER
        fallback = {key: conf.get(name) for key, name in names.items()}
        tls = _celery_tls(conf, "redis_backend_use_ssl" if setting == "result_backend" else "broker_use_ssl")
        if setting == "result_backend" and conf.get("redis_backend_credential_provider"):
            raise SettingsError(
                "redis_backend_credential_provider isn't read for the lease; set leaderbeat_redis_url, and "
                "leaderbeat_redis_options = {'credential_provider': <the provider>}."
            )
        given = {key: value for key, value in fallback.items() if isinstance(value, (str, int)) and value}
        target = parse_redis_url(text, setting, fallback=given, tls=tls)
        transport = "result_backend" if setting == "result_backend" else "broker"
        target = with_sentinel_options(target, setting, source, f"{transport}_transport_options")
        _check_driver(target, setting)
        return text.strip(), target
    raise SettingsError(
        f"No Redis for the lease: leaderbeat_redis_url isn't set, broker_url is {_scheme(broker)} and "
        f"result_backend is {_scheme(backend)}. Set leaderbeat_redis_url = 'redis://host:6379/0'."
    )


def _is_redis(url: object) -> bool:
    return isinstance(url, str) and "://" in url and url.lower().startswith(("redis", "valkey", "sentinel"))


def _scheme(url: object) -> str:
    if not url:
        return "not set"
    scheme, found, _ = url.partition("://") if isinstance(url, str) else ("", "", "")
    return f"{scheme}://" if found else "not a URL of Redis"


def _celery_tls(conf: Any, setting: str) -> dict[str, Any] | None:
    value = conf.get(setting)
    if isinstance(value, Mapping) and value:
        return tls_options(value, setting)
    if value:
        # Celery's Redis transport passes over anything but a mapping, and goes by the scheme alone.
        logger.warning(
            "%s has no effect with Redis unless it is a mapping; the scheme of the URL decides about TLS.",
            setting,
            extra={"action": "tls_by_scheme"},
        )
    return None


def redis_options(source: Source, target: RedisTarget) -> dict[str, Any]:
    """`leaderbeat_redis_options`, checked against what the installed driver takes for `target`.

    Raises:
        SettingsError: an option that is unknown, or not the user's to set. No value gets into the message.
    """
    options = dict(source.mapping("redis_options"))
    for name in SENTINEL_OPTIONS:
        options.pop(name, None)
    setting = source.spelling("redis_options")
    accepted = _accepted_options(target)
    for name in options:
        if name in _IN_URL:
            raise SettingsError(f"{setting} has the key {name!r}, which belongs into leaderbeat_redis_url.")
        if name in _OWN:
            raise SettingsError(f"{setting} has the key {name!r}, which leaderbeat sets itself; remove it.")
        if name.startswith("ssl_") and not target.tls:
            raise SettingsError(f"{setting} has the key {name!r}, but {target.display} is without TLS.")
        if name not in accepted:
            raise SettingsError(f"{setting} has the unknown key {name!r}; {nearest(name, accepted)}")
    if options.get("credential_provider") is not None and {"username", "password"} & (
        target.kwargs.keys() | options.keys()
    ):
        raise SettingsError(
            f"{setting} has a credential_provider, and a user name or a password is set too; leave one out."
        )
    tls = {name: value for name, value in options.items() if name.startswith("ssl_")}
    tls = tls_options(tls, setting, accepted)
    if "ssl_cert_reqs" in tls:
        tls["ssl_check_hostname"] = verifying(target.kwargs, tls)["ssl_check_hostname"]
    return options | tls


def _check_driver(target: RedisTarget, setting: str) -> None:
    # What a URL may hold is the same under every release of the driver; what the driver takes isn't.
    for name in sorted(target.kwargs.keys() - _IN_URL - _accepted_options(target) - {"username", "password"}):
        raise SettingsError(
            f"{setting} ({target.display}): the installed redis-py {redis.__version__} has no option {name}; "
            "remove it, or upgrade redis-py."
        )


def _accepted_options(target: RedisTarget) -> frozenset[str]:
    """What the installed driver's connection to such a target takes, and we leave to the user."""
    connection: type = redis.Connection
    if target.unix:
        connection = redis.UnixDomainSocketConnection
    elif target.tls:
        connection = redis.SSLConnection
    names = {"max_connections"}
    for base in connection.__mro__:
        if base is not object and "__init__" in vars(base):
            names |= {
                parameter.name
                for parameter in inspect.signature(vars(base)["__init__"]).parameters.values()
                if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            }
    return frozenset(names - _IN_URL - _OWN)
