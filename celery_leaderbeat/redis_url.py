"""Redis URLs: every form that Celery and redis-py know, read into what a connection pool takes.

Nothing here connects, or imports the driver. The URL is taken apart by one expression instead of the
standard library's parser, because that parser's own errors quote pieces of the URL, and a piece of a
malformed URL may be a piece of its password.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote, unquote_plus

from celery_leaderbeat._url_options import OPTIONS, SECRET, count, nearest
from celery_leaderbeat.errors import SettingsError

__all__ = ["RedisTarget", "parse_redis_url", "sanitize"]

_URL = re.compile(
    r"(?P<scheme>[A-Za-z][\w.+-]*)://(?P<authority>[^/?#]*)(?P<path>[^?#]*)"
    r"(?:\?(?P<query>[^#]*))?(?P<fragment>#.*)?",
    re.DOTALL,
)
_ADDRESS = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+(?:%\w+)?)\]|(?P<host>[\w.%-]*))(?::(?P<port>[0-9]*))?")
_MASK = "**"

#: Scheme -> (a Unix socket, TLS).
_SCHEMES = {
    "redis": (False, False),
    "rediss": (False, True),
    "valkey": (False, False),
    "valkeys": (False, True),
    "unix": (True, False),
    "socket": (True, False),
    "redis+socket": (True, False),
    "valkey+socket": (True, False),
}
_ACCEPTED = (
    "redis://[user:password@]host[:port][/db], rediss:// (the same with TLS), valkey:// and valkeys://, "
    "redis+socket:///path?virtual_host=db, unix:///path?db=db"
)
_ENCODE = "in a password, the characters / ? # ; @ : % are written as %2F %3F %23 %3B %40 %3A %25"


@dataclass(frozen=True)
class RedisTarget:
    """Where a standalone Redis server is, and how to connect to it.

    Attributes:
        kwargs: the arguments of a connection: `host` and `port`, or `path`; `db`; `username` and `password`
            where there are any; options of the URL, typed as redis-py wants them. Holds the password, and
            therefore isn't part of the `repr`.
        unix: connect to a Unix domain socket.
        tls: connect with TLS.
        display: the URL for logs, without a password and without options.
    """

    kwargs: Mapping[str, Any] = field(repr=False)
    unix: bool
    tls: bool
    display: str


def sanitize(url: object) -> str:
    """`url` without anything that may be a password, for messages.

    What stands where a password could stand is masked, also in a URL that is malformed, so the result may
    show less than could be shown, but never more.
    """
    if not isinstance(url, str):
        return f"a value of type {type(url).__name__}"
    if not url.strip():
        return "empty"
    found = _URL.fullmatch(url.strip())
    if found is None:
        return "not a URL"
    scheme, authority, path, query = found["scheme"], found["authority"], found["path"], found["query"]
    socket = scheme.lower() == "unix" or scheme.lower().endswith("socket")
    behind = path + (query or "") + (found["fragment"] or "")
    # An unescaped separator inside a password moves the rest of it to where path and query stand.
    if ";" in url or ("@" in behind and not (socket and not authority)):
        return f"{scheme}://{_MASK}"
    user, at, address = authority.rpartition("@")
    if at:
        name, _, password = user.partition(":")
        # A lone name may be a password whose colon was forgotten, or is on its wrong side.
        user = f"{name}:{_MASK}@" if password and re.fullmatch(r"[\w.%-]*", name) else f"{_MASK}@"
    if not _port_ok(_ADDRESS.fullmatch(address)):
        if not at:
            # `redis://:password` without a host: the password may go on in path and query.
            return f"{scheme}://{_MASK}"
        address = _MASK
    trusted = (at or not authority) if socket else re.fullmatch(r"/*[0-9]*/*", path)
    shown = path if trusted else f"/{_MASK}"
    options = "" if query is None else f"?{_sanitized_query(query)}"
    return f"{scheme}://{user}{address}{shown}{options}{'#' + _MASK if found['fragment'] else ''}"


def _port_ok(address: re.Match[str] | None) -> bool:
    return address is not None and (not address["port"] or 0 < int(address["port"][:6]) < 65536)


def _sanitized_query(query: str) -> str:
    pairs = []
    clean = True
    for pair in query.split("&"):
        name, equals, value = pair.partition("=")
        if name in OPTIONS and name not in SECRET and re.fullmatch(r"[\w.+/-]*", value):
            pairs.append(pair)
            continue
        # Behind a value that may be a secret, another name may be the rest of it, after an unescaped &.
        named = equals and re.fullmatch(r"[A-Za-z_]{1,40}", name) and (clean or name in OPTIONS)
        pairs.append(f"{name}={_MASK}" if named else _MASK)
        clean = False
    return "&".join(pairs)


def parse_redis_url(
    url: str,
    setting: str,
    *,
    fallback: Mapping[str, Any] | None = None,
    tls: Mapping[str, Any] | None = None,
) -> RedisTarget:
    """Read the URL of a standalone Redis (or Valkey) server.

    Parameters:
        url: in any of the forms that Celery or redis-py take.
        setting: the setting that the URL comes from, for messages.
        fallback: `host`, `port`, `username`, `password` for what the URL of a broker leaves out.
        tls: options as returned by `tls_options`. Given (also empty), they mean TLS under any scheme, as
            in Celery's `broker_use_ssl`; options in the URL come first.

    Raises:
        SettingsError: the URL can't be used. The message never holds a password.
    """

    def refused(rule: str) -> SettingsError:
        hint = "" if setting.lower().endswith("leaderbeat_redis_url") else (
            " To use another server than this one, set leaderbeat_redis_url."
        )  # fmt: skip
        return SettingsError(f"{setting} ({sanitize(url)}): {rule}. Accepted: {_ACCEPTED}.{hint}")

    if not isinstance(url, str):
        raise refused("a Redis URL is a string")
    if not url.strip():
        raise refused("a Redis URL is needed")
    found = _URL.fullmatch(url.strip())
    if found is None:
        raise refused("a Redis URL starts with a scheme such as redis://")
    scheme, authority, path = found["scheme"].lower(), found["authority"], found["path"]
    for kind in ("sentinel", "cluster"):
        if kind in scheme:
            raise refused(
                f"Redis {kind.title()} isn't supported in this version; give the address of the primary "
                "instead, leaderbeat_redis_url = 'redis://primary.example:6379/0'"
            )
    if scheme not in _SCHEMES:
        raise refused(f"{scheme}:// is not a scheme of Redis")
    if ";" in url:
        raise refused(f"a list of servers can't hold one lease: name one server; {_ENCODE}")
    unix, secure = _SCHEMES[scheme]
    if found["fragment"] or ("@" in path + (found["query"] or "") and not (unix and not authority)):
        raise refused(f"a # or @ stands where a Redis URL has none; {_ENCODE}")
    if unix and tls is not None:
        raise refused("there is no TLS on a Unix socket")
    secure = secure or tls is not None

    kwargs = dict(fallback or {})
    if "port" in kwargs:
        kwargs["port"] = count(str(kwargs["port"]))
        if not kwargs["port"] or kwargs["port"] > 65535:
            raise refused("its port, which stands in a setting of its own, is not from 1 to 65535")
    user, at, address = authority.rpartition("@")
    if unix:
        if address or path in ("", "/"):
            raise refused("the URL of a Unix socket has three slashes and then a path, and no host")
        kwargs = {name: kwargs[name] for name in ("username", "password") if name in kwargs}
        kwargs["path"] = unquote(path)
    else:
        kwargs = {"host": "localhost", "port": 6379} | kwargs | _address(address, refused)
    options = _options(found["query"] or "", unix, secure, refused)
    databases = {int(options.pop(name)) for name in ("db", "virtual_host") if name in options}
    if not unix and path.strip("/"):
        number = count(unquote(path).strip("/"))
        if number is None:
            raise refused(f"the path is the number of the database, such as /0; {_ENCODE}")
        databases.add(number)
    if len(databases) > 1:
        raise refused("it names two databases")
    kwargs["db"] = databases.pop() if databases else 0
    if at:
        name, _, password = user.partition(":")
        if (name and "username" in options) or (password and "password" in options):
            raise refused("it gives the user name or the password twice")
        kwargs |= {key: unquote(text) for key, text in (("username", name), ("password", password)) if text}
    kwargs |= (dict(tls or {}) | options) if secure else options
    if secure:
        # The default of redis-py, written out: its older releases don't compare host names by default, and
        # fail where names are compared but certificates aren't.
        verify = kwargs.setdefault("ssl_cert_reqs", "required")
        kwargs["ssl_check_hostname"] = verify != "none" and kwargs.get("ssl_check_hostname", True)
    return RedisTarget(MappingProxyType(kwargs), unix, secure, _display(scheme, kwargs))


def _display(scheme: str, kwargs: Mapping[str, Any]) -> str:
    username, known = kwargs.get("username"), "password" in kwargs
    user = f"{username or ''}:{_MASK}@" if known else f"{_MASK}@" if username else ""
    if "path" in kwargs:
        option = "db" if scheme == "unix" else "virtual_host"
        return f"{scheme}://{user}{kwargs['path']}?{option}={kwargs['db']}"
    host = f"[{kwargs['host']}]" if ":" in kwargs["host"] else kwargs["host"]
    return f"{scheme}://{user}{host}:{kwargs['port']}/{kwargs['db']}"


def _address(text: str, refused: Callable[[str], SettingsError]) -> dict[str, Any]:
    found = _ADDRESS.fullmatch(text)
    if found is None:
        if text.count(":") > 1 and re.fullmatch(r"[0-9A-Fa-f:.]+", text):
            raise refused(f"an IPv6 address stands in brackets, such as redis://[::1]:6379/0; {_ENCODE}")
        raise refused(f"host and port are a name or address and a whole number from 1 to 65535; {_ENCODE}")
    if not _port_ok(found):
        raise refused("a port is a whole number from 1 to 65535")
    parts: dict[str, Any] = {"port": int(found["port"])} if found["port"] else {}
    if found["v6"]:
        if not _is_ipv6(found["v6"]):
            raise refused("what stands in brackets is not an IPv6 address")
        parts["host"] = unquote(found["v6"])
    elif found["host"]:
        parts["host"] = unquote(found["host"])
        if not re.fullmatch(r"[\w.-]+", parts["host"]):
            raise refused("the host is not a name or an address")
    return parts


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _options(query: str, unix: bool, secure: bool, refused: Callable[[str], SettingsError]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for pair in filter(None, query.split("&")):
        raw_name, _, raw_value = pair.partition("=")
        name, value = unquote_plus(raw_name), unquote_plus(raw_value)
        if name == "credential_provider":
            raise refused(
                "a credential provider can't be named in the URL; set leaderbeat_redis_url without it and "
                "leaderbeat_redis_options = {'credential_provider': <the provider>}"
            )
        if name not in OPTIONS:
            # Other names aren't typing errors: they may be a piece of a password, as in `_sanitized_query`.
            plain = re.fullmatch(r"[A-Za-z_]{1,40}", name) and not SECRET & options.keys()
            shown = name if plain else _MASK
            raise refused(f"unknown option {shown}; {nearest(shown, OPTIONS)}")
        if name in options:
            raise refused(f"the option {name} is given twice")
        if name.startswith("ssl_") and not secure:
            raise refused(f"the option {name} needs TLS, that is rediss://")
        if name == "socket_keepalive" and unix:
            raise refused(f"the option {name} is not for a Unix socket")
        parse, rule = OPTIONS[name]
        options[name] = parse(value)
        if options[name] is None:
            raise refused(f"the option {name} takes {rule}")
    return options
