"""What goes wrong on the way to the broker, in words: with its URL, the setting it comes from, and the remedy.

No password gets into them. A broker may quote what it was sent, so passwords are taken out of what it says. Of a URL
that may be read in more than one way, where a character in the password isn't encoded, any piece may be one of the
password: such a URL is masked, and of an error only its kind is told.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

from amqp.exceptions import AccessRefused, NotAllowed
from kombu.exceptions import OperationalError
from kombu.transport import TRANSPORT_ALIASES
from kombu.utils.url import url_to_parts

from celery_leaderbeat._url_text import ADDRESS, ENCODE, MASK, URL, port_ok, sanitize
from celery_leaderbeat.redaction import without_secrets

__all__ = ["BrokerErrors"]

#: What Redis says of a login that it refuses.
_NO_LOGIN = re.compile(
    r"WRONGPASS|NOAUTH|invalid username-password|invalid password|Authentication required|AUTH .*without any password"
)
#: Names of a URL's options whose values are kept out.
_SECRET = re.compile(r"pass|secret|token|key|credential|sign", re.IGNORECASE)
#: What RabbitMQ says of a virtual host that isn't there, and of one that the user may not use.
_NO_VHOST = re.compile(r"vhost .* not found")
_NO_RIGHTS = re.compile(r"access to vhost .* refused for user '[^']*'$")


class BrokerErrors:
    """The errors of the broker that one app publishes to.

    Parameters:
        app: the Celery application.

    Attributes:
        setting: where the broker's URL comes from.
    """

    def __init__(self, app: Any) -> None:
        conf = app.conf
        url = conf.broker_write_url
        self.setting = "broker_url" if url == conf.broker_url else "broker_write_url"
        self._texts = list(_texts(url))
        self._clear = all(_is_clear(text, len(self._texts)) for text in self._texts)
        # A lone name may be a password whose colon was forgotten, or is on its wrong side.
        self._lone = {name for text in self._texts for name in _lone_names(text)}
        self._secrets = [
            conf.broker_password,
            *(secret for text in self._texts for secret in _secrets_of(text)),
        ]

    def said(self, exc: BaseException, connection: Any = None) -> str:
        """What an exception says, without the passwords of any of the brokers, should one be quoted."""
        if not self._clear:
            return type(exc).__name__
        secrets = [*self._secrets, *_passwords(connection)]
        return without_secrets(repr(exc), (form for secret in secrets for form in _quoted(secret)))

    def why(self, exc: BaseException, connection: Any = None) -> str:
        """Why there is no connection, and what to do about it where that is known."""
        remedy = self._remedy(exc)
        return f"{self.said(exc, connection)}{': ' if remedy else ''}{remedy}"

    def nowhere(self, failures: Mapping[str, str]) -> str:
        """That there is no connection to any of the brokers that were tried: their URLs as shown, and why."""
        (first, why), *others = failures.items()
        rest = "".join(f"; none to {shown}: {found}" for shown, found in others)
        return f"no connection to the broker {first} ({self.setting}): {why}{rest}"

    def named(self, connection: Any, every: bool = False) -> str:
        """`the broker <URL> (<setting>)`: the one that `connection` is for now, or every one that it may be for.

        `connection` is None where none could be made of the URL.
        """
        shown = self.shown_all(connection) if every else self.shown(connection)
        return f"the broker {shown} ({self.setting})"

    def shown(self, connection: Any) -> str:
        """The URL of the broker that `connection` is for now, without its password and options."""
        if connection is None or not self._clear:
            return self.shown_all(None)
        if connection.transport_cls == "sentinel" and len(self._texts) > 1:
            # It asks all of them, whichever comes first.
            return self.shown_all(connection)
        defaults = _defaults(connection)
        host = connection.hostname or defaults.get("hostname")
        if connection.uri_prefix or "://" in (host or ""):
            return sanitize(f"{connection.uri_prefix}+{host}" if connection.uri_prefix else host)
        user = connection.userid or defaults.get("userid")
        # What was left out, the transport fills in when it connects.
        known = user not in self._lone and (
            connection.password or (not connection.userid and defaults.get("password"))
        )
        port = connection.port or defaults.get("port")
        return _shown(str(connection.transport_cls), host, port, user, bool(known), connection.virtual_host)

    def shown_all(self, connection: Any) -> str:
        """The URLs of all brokers that `connection` may be for, in the setting's order."""
        if self._clear and connection is not None and len(self._texts) < 2:
            return self.shown(connection)
        if self._clear and self._texts:
            return ";".join(map(_shown_text, self._texts))
        found = URL.fullmatch(self._texts[0].strip()) if self._texts else None
        return MASK if found is None else f"{found['scheme']}://{MASK}"

    def _remedy(self, exc: BaseException) -> str:
        if not self._clear:
            return ENCODE
        # kombu wraps what its transport raised.
        cause = exc.__cause__ if isinstance(exc, OperationalError) and exc.__cause__ else exc
        if isinstance(cause, AccessRefused) or _NO_LOGIN.search(str(cause)):
            return f"check the user and the password in {self.setting}"
        if isinstance(cause, NotAllowed):
            text = str(cause.reply_text)
            name = f"or correct its name, the path in {self.setting}"
            if _NO_VHOST.search(text):
                return f"create the virtual host (rabbitmqctl add_vhost), {name}"
            if _NO_RIGHTS.search(text):
                return f"give the user rights on the virtual host (rabbitmqctl set_permissions), {name}"
        return ""


def _texts(url: object) -> Iterator[str]:
    """The URLs of the brokers, one by one."""
    for text in url if isinstance(url, (list, tuple)) else (url,):
        if isinstance(text, str) and text:
            yield from text.split(";")


def _is_clear(text: str, of: int) -> bool:
    """Whether a URL, one `of` so many, can be read in one way only, so that its parts may be shown."""
    text = text.strip()
    found = URL.fullmatch(text)
    if found is None:
        # A mere host. With an @, it is the rest of a password with a semicolon.
        return port_ok(ADDRESS.fullmatch(text))
    if of > 1 and found["scheme"].partition("+")[0] not in TRANSPORT_ALIASES:
        return False
    try:
        # What kombu's parser refuses, it may quote.
        url_to_parts(text)
    except ValueError:
        return False
    if found["fragment"] or "@" in found["path"] + (found["query"] or ""):
        return False
    return port_ok(ADDRESS.fullmatch(found["authority"].rpartition("@")[2]))


def _defaults(connection: Any) -> Mapping[str, Any]:
    """What the transport takes for what the URL leaves out; nothing where there is no such transport."""
    try:
        found: Mapping[str, Any] = connection.transport.default_connection_params
    except Exception:  # noqa: BLE001  # the next attempt to connect will say it
        return {}
    return found


def _shown_text(text: str) -> str:
    if "://" not in text:
        return text
    if "+" in text.partition("://")[0]:
        return sanitize(text)
    parts = url_to_parts(text)
    known = bool(parts.password)
    return _shown(parts.scheme, parts.hostname, parts.port, parts.username, known, parts.path)


def _shown(
    scheme: str, host: str | None, port: int | None, user: str | None, password: bool, vhost: str | None
) -> str:
    who = f"{quote(user or '', safe='')}:{MASK}@" if password else f"{MASK}@" if user else ""
    host = host or ""
    address = f"[{host}]" if ":" in host else quote(host, safe="")
    return f"{scheme}://{who}{address}{f':{port}' if port else ''}/{quote(vhost or '')}"


def _secrets_of(text: str) -> Iterator[str]:
    """What in a clear URL is a secret, or may be one."""
    found = URL.fullmatch(text.strip())
    if found is None:
        return
    password = found["authority"].rpartition("@")[0].partition(":")[2]
    yield from (password, unquote(password), *_lone_names(text))
    for name, value in parse_qsl(found["query"] or ""):
        if _SECRET.search(name):
            yield value


def _lone_names(text: str) -> Iterator[str]:
    """The user name of a URL that has no password, as written and as meant."""
    found = URL.fullmatch(text.strip())
    user, _, password = found["authority"].rpartition("@")[0].partition(":") if found else ("", "", "")
    if user and not password:
        yield from (user, unquote(user))


def _passwords(connection: Any) -> Iterator[object]:
    """The passwords of a connection, of the key of its certificate, and of the Sentinels that it asks."""
    yield getattr(connection, "password", None)
    options = getattr(connection, "transport_options", None)
    sentinels = options.get("sentinel_kwargs") if isinstance(options, Mapping) else None
    for found in (options, sentinels, getattr(connection, "ssl", None)):
        if isinstance(found, Mapping):
            yield found.get("password")
            yield found.get("ssl_password")


def _quoted(secret: object) -> Iterable[str]:
    """A secret as it stands in the `repr` of an exception, which escapes some characters."""
    if not isinstance(secret, str):
        return ()
    plain = repr(secret)[1:-1]
    return dict.fromkeys((secret, plain, plain.replace("'", "\\'")))
