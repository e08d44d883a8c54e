"""Redis URLs: every form that Celery and redis-py know, read into what a connection pool takes.

One server, the Sentinels that know which server is the primary, or nodes of a cluster. Nothing here connects,
or imports the driver.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal
from urllib.parse import unquote, unquote_plus

from celery_leaderbeat._url_options import OPTIONS, SECRET, count, nearest, verifying
from celery_leaderbeat._url_text import ADDRESS, ENCODE, MASK, URL, port_ok, sanitize
from celery_leaderbeat.errors import SettingsError

__all__ = ["RedisTarget", "parse_redis_url", "sanitize"]

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
#: Scheme of several servers -> (the scheme of one of them, their port unless it is given).
_GROUPS = {
    "sentinel": ("redis", 26379),
    "redis+sentinel": ("redis", 26379),
    "rediss+sentinel": ("rediss", 26379),
    "valkey+sentinel": ("valkey", 26379),
    "valkeys+sentinel": ("valkeys", 26379),
    "redis+cluster": ("redis", 6379),
    "rediss+cluster": ("rediss", 6379),
    "valkey+cluster": ("valkey", 6379),
    "valkeys+cluster": ("valkeys", 6379),
}
_ACCEPTED = (
    "redis://[user:password@]host[:port][/db], rediss:// (the same with TLS), valkey:// and valkeys://, "
    "redis+socket:///path?virtual_host=db, unix:///path?db=db; several hosts: "
    "sentinel://[user:password@]host[:port];host[:port][/db] (rediss+sentinel:// with TLS), "
    "redis+cluster://host[:port];host[:port] (rediss+cluster:// with TLS)"
)


@dataclass(frozen=True)
class RedisTarget:
    """Where Redis is, and how to connect to it.

    Attributes:
        kwargs: the arguments of a connection: `host` and `port`, or `path`, unless there are `nodes`; `db`;
            `username` and `password` where there are any; options of the URL, typed as redis-py wants them.
            Holds the password, and therefore isn't part of the `repr`.
        unix: connect to a Unix domain socket.
        tls: connect with TLS.
        display: the URL for logs, without a password and without options.
        kind: one server; the primary that Sentinels name; or the node of a cluster that holds our keys.
        nodes: host and port of each Sentinel, or of some of the cluster's nodes.
        master_name: what the Sentinels call the primary.
        sentinel: the arguments of a connection to a Sentinel, without its address. May hold a password.
        sentinel_tls: connect to the Sentinels with TLS.
    """

    kwargs: Mapping[str, Any] = field(repr=False)
    unix: bool
    tls: bool
    display: str
    kind: Literal["server", "sentinel", "cluster"] = "server"
    nodes: tuple[tuple[str, int], ...] = ()
    master_name: str = ""
    sentinel: Mapping[str, Any] = field(default_factory=dict, repr=False)
    sentinel_tls: bool = False


def parse_redis_url(
    url: str,
    setting: str,
    *,
    fallback: Mapping[str, Any] | None = None,
    tls: Mapping[str, Any] | None = None,
) -> RedisTarget:
    """Read the URL of a Redis or Valkey server, of Sentinels, or of a cluster.

    Parameters:
        url: in any of the forms that Celery or redis-py take. What the Sentinels call the primary is no part
            of it (see `_sentinel_conf`).
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
    found = URL.fullmatch(url.strip())
    if found is None:
        raise refused("a Redis URL starts with a scheme such as redis://")
    scheme = found["scheme"].lower()
    if scheme in _GROUPS:
        return _group(url.strip(), scheme, fallback, tls, refused)
    if scheme not in _SCHEMES:
        raise refused(f"{scheme}:// is not a scheme of Redis")
    if ";" in url:
        raise refused(f"a list of servers can't hold one lease: name one server; {ENCODE}")
    unix, secure = _SCHEMES[scheme]
    kwargs = _server(found, unix, secure, fallback, tls, refused)
    return RedisTarget(MappingProxyType(kwargs), unix, secure or tls is not None, _display(scheme, kwargs))


def _group(
    url: str,
    scheme: str,
    fallback: Mapping[str, Any] | None,
    tls: Mapping[str, Any] | None,
    refused: Callable[[str], SettingsError],
) -> RedisTarget:
    """Several hosts, parted by semicolons.

    What isn't an address may stand with all of them, as in Celery, or with one.
    """
    single, port = _GROUPS[scheme]
    addresses: list[str] = []
    said: dict[str, set[str]] = {"user": set(), "path": set(), "query": set()}
    for text in filter(None, map(str.strip, url.split(";"))):
        found = URL.fullmatch(text if "://" in text else f"{scheme}://{text}")
        if found is None or found["scheme"].lower() != scheme:
            raise refused(f"each host of the list starts with {scheme}:// or with nothing; {ENCODE}")
        if found["fragment"]:
            raise refused(f"a # stands where a Redis URL has none; {ENCODE}")
        user, _, address = found["authority"].rpartition("@")
        if not address or address.startswith(":"):
            raise refused(f"each host of the list has a name or an address; {ENCODE}")
        if user and addresses and not said["user"]:
            # An unescaped semicolon in a password looks like this.
            raise refused(
                f"user name and password stand with the first host of the list, or with all; {ENCODE}"
            )
        addresses.append(address)
        for name, value in (("user", user), ("path", found["path"].strip("/")), ("query", found["query"])):
            said[name] |= {value} if value else set()
    for name, what in (("user", "user names or passwords"), ("path", "databases"), ("query", "options")):
        if len(said[name]) > 1:
            raise refused(f"its hosts have different {what}; {ENCODE}")
    user, path, query = ("".join(said[name]) for name in ("user", "path", "query"))
    given = {key: value for key, value in (fallback or {}).items() if key in ("username", "password")}
    nodes: list[tuple[str, int]] = []
    kwargs: dict[str, Any] = {}
    for address in addresses:
        found = URL.fullmatch(f"{single}://{user}{'@' if user else ''}{address}/{path}?{query}")
        assert found is not None  # it is made of pieces that fit
        kwargs = _server(found, False, _SCHEMES[single][1], {**given, "port": port}, tls, refused)
        nodes.append((kwargs.pop("host"), kwargs.pop("port")))
    if len(set(nodes)) < len(nodes):
        raise refused("it names a host twice")
    kind: Literal["sentinel", "cluster"] = "sentinel" if "sentinel" in scheme else "cluster"
    if kind == "cluster" and kwargs["db"]:
        raise refused("a cluster has the database 0 only")
    secure = _SCHEMES[single][1]
    return RedisTarget(
        MappingProxyType(kwargs),
        False,
        secure or tls is not None,
        _display(scheme, kwargs, nodes),
        kind,
        tuple(nodes),
        sentinel_tls=secure and kind == "sentinel",
    )


def _server(
    found: re.Match[str],
    unix: bool,
    secure: bool,
    fallback: Mapping[str, Any] | None,
    tls: Mapping[str, Any] | None,
    refused: Callable[[str], SettingsError],
) -> dict[str, Any]:
    """The arguments of a connection to one server."""
    authority, path = found["authority"], found["path"]
    if found["fragment"] or ("@" in path + (found["query"] or "") and not (unix and not authority)):
        raise refused(f"a # or @ stands where a Redis URL has none; {ENCODE}")
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
            raise refused(f"the path is the number of the database, such as /0; {ENCODE}")
        databases.add(number)
    if len(databases) > 1:
        raise refused("it names two databases")
    kwargs["db"] = databases.pop() if databases else 0
    if at:
        name, _, password = user.partition(":")
        if (name and "username" in options) or (password and "password" in options):
            raise refused("it gives the user name or the password twice")
        kwargs |= {key: unquote(text) for key, text in (("username", name), ("password", password)) if text}
    return kwargs | (verifying(tls or {}, options) if secure else options)


def _display(scheme: str, kwargs: Mapping[str, Any], nodes: Iterable[tuple[str, int]] = ()) -> str:
    username, known = kwargs.get("username"), "password" in kwargs
    user = f"{username or ''}:{MASK}@" if known else f"{MASK}@" if username else ""
    if "path" in kwargs:
        option = "db" if scheme == "unix" else "virtual_host"
        return f"{scheme}://{user}{kwargs['path']}?{option}={kwargs['db']}"
    hosts = nodes or [(kwargs["host"], kwargs["port"])]
    shown = ";".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in hosts)
    return f"{scheme}://{user}{shown}/{kwargs['db']}"


def _address(text: str, refused: Callable[[str], SettingsError]) -> dict[str, Any]:
    found = ADDRESS.fullmatch(text)
    if found is None:
        if text.count(":") > 1 and re.fullmatch(r"[0-9A-Fa-f:.]+", text):
            raise refused(f"an IPv6 address stands in brackets, such as redis://[::1]:6379/0; {ENCODE}")
        raise refused(f"host and port are a name or address and a whole number from 1 to 65535; {ENCODE}")
    if not port_ok(found):
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
            shown = name if plain else MASK
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
