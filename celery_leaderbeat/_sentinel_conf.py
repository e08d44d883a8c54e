"""What Sentinels have to be told besides their addresses: the primary's name, and how to get in.

Celery keeps both in transport options: `{"master_name": …, "sentinel_kwargs": {…}}` in
`broker_transport_options`, or in `result_backend_transport_options`; for `leaderbeat_redis_url` they stand in
`leaderbeat_redis_options`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from celery_leaderbeat._conf import Source
from celery_leaderbeat._url_options import OPTIONS, nearest, tls_options, verifying
from celery_leaderbeat.errors import SettingsError
from celery_leaderbeat.redis_url import RedisTarget

__all__ = ["SENTINEL_OPTIONS", "with_sentinel_options"]

#: The keys that are for Sentinels, and not for the driver's connections.
SENTINEL_OPTIONS = ("master_name", "sentinel_kwargs")
_TLS = frozenset(name for name in OPTIONS if name.startswith("ssl_"))
_KWARGS = _TLS | {
    "password",
    "socket_connect_timeout",
    "socket_keepalive",
    "socket_timeout",
    "ssl",
    "username",
}


def with_sentinel_options(
    target: RedisTarget, setting: str, source: Source, transport_setting: str = ""
) -> RedisTarget:
    """`target` with what its Sentinels have to be told, or as it is where there are none.

    Parameters:
        setting: where the URL comes from, for messages.
        transport_setting: Celery's setting with the options of this connection; empty for a URL of our own.

    Raises:
        SettingsError: the name of the primary is missing, or an option can't be used. It holds no password.
    """
    own = source.mapping("redis_options")
    own_setting = source.spelling("redis_options")
    if target.kind != "sentinel":
        for key in own.keys() & set(SENTINEL_OPTIONS):
            raise SettingsError(f"{own_setting} has the key {key!r}, but {target.display} has no Sentinels.")
        return target
    celerys: Any = source.app.conf.get(transport_setting) if transport_setting else None
    options = {**(celerys if isinstance(celerys, Mapping) else {}), **own}
    name: Any = options.get("master_name")
    if not isinstance(name, str) or not name:
        place = transport_setting or "leaderbeat_redis_options"
        raise SettingsError(
            f"{setting} ({target.display}): Sentinels are asked for a primary by its name. Set {place} = {{'master_name': "
            "'mymaster'}, with the name that the Sentinels' configuration gives it."
        )
    given: Any = options.get("sentinel_kwargs") or {}
    where = own_setting if "sentinel_kwargs" in own else transport_setting
    if not isinstance(given, Mapping):
        raise SettingsError(f"{where}: sentinel_kwargs must be a mapping, not {type(given).__name__}.")
    for key in given if "sentinel_kwargs" in own else ():
        # What stands in Celery's own options and is of no use here may be of use to Celery.
        if key not in _KWARGS:
            raise SettingsError(
                f"{where}: sentinel_kwargs has the unknown key {key!r}; {nearest(str(key), _KWARGS)}"
            )
    kwargs = {key: value for key, value in given.items() if key in _KWARGS and value is not None}
    secure = bool(kwargs.pop("ssl", target.sentinel_tls))
    tls = {key: kwargs.pop(key) for key in _TLS & kwargs.keys()}
    if secure and tls:
        kwargs |= verifying({}, tls_options(tls, f"{where}: sentinel_kwargs"))
    elif secure:
        # Options of TLS that stand for the servers alone are for the Sentinels, too.
        ours = {key: value for key, value in own.items() if key.startswith("ssl_")}
        shared = {key: value for key, value in target.kwargs.items() if key in _TLS}
        kwargs |= verifying(shared, tls_options(ours, own_setting, ours.keys()))
    elif tls and "sentinel_kwargs" in own:
        raise SettingsError(
            f"{where}: sentinel_kwargs has the key {min(tls)!r}, but the Sentinels are without TLS. Add 'ssl': True, or "
            "remove it."
        )
    return replace(
        target,
        master_name=name,
        sentinel=MappingProxyType(kwargs),
        sentinel_tls=secure,
        display=f"{target.display} (the primary {name!r})",
    )
