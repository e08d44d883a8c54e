"""The driver's errors, translated into ours where they enter the package.

What passes by itself is `StoreUnavailable`: the same request may be served later, perhaps by another server.
A server may quote what it was sent, so passwords are taken out of what it says.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

import redis

from celery_leaderbeat.errors import StoreError, StoreUnavailable
from celery_leaderbeat.redaction import without_secrets
from celery_leaderbeat.settings import Settings

__all__ = ["Translator"]

#: Codes of errors that pass, at the beginning, or where Redis 6.2 quotes what a script met.
_FOR_A_WHILE = re.compile(
    r"(?:^|: -)(BUSY|CLUSTERDOWN|LOADING|MASTERDOWN|MISCONF|NOREPLICAS|OOM|READONLY|TRYAGAIN) "
)
#: The same, as far as the driver has classes for them and takes the code away.
_CLASSES = (
    redis.exceptions.BusyLoadingError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.ConnectionError,
    redis.exceptions.MasterDownError,
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.TimeoutError,
    redis.exceptions.TryAgainError,
    OSError,
)
#: What is said where a script uses a command that the user may not use, before Redis 7 and since.
_NO_PERMISSION = re.compile(r"NOPERM|The user executing the script can't ")
#: What is said of a file of TLS that isn't there, isn't one, or doesn't open with the password. No socket has a path.
_UNREADABLE = re.compile(r"No such file or directory|Is a directory|\bPEM[ _]|KEY_VALUES_MISMATCH|CRL_FOUND")
#: Codes after which another server may be the right one.
_WRONG_SERVER = ("CLUSTERDOWN", "MASTERDOWN", "READONLY")


class Translator:
    """Translates what one client's driver raises.

    Parameters:
        settings: for the names in messages, and the passwords that mustn't get into them.
        leave: called when the server turned out to be the wrong one, before the error is raised.
    """

    def __init__(self, settings: Settings, leave: Callable[[], None]) -> None:
        target = settings.redis
        self._target = target
        self._setting = settings.origins["redis_url"]
        self._leave = leave
        self._secrets = [
            secret
            for source in (target.kwargs, target.sentinel, settings.redis_options)
            for name in ("password", "ssl_password")
            if isinstance(secret := source.get(name), str) and secret
        ]

    @contextlib.contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Translate what is raised inside; `what` says what the driver was asked for."""
        try:
            yield
        except (redis.exceptions.RedisError, OSError) as exc:
            raise self._translation(exc, what) from None
        except (TypeError, ValueError) as exc:
            raise StoreError(
                f"redis-py can't be used for {what}: {self._said(exc)}. Check leaderbeat_redis_options."
            ) from None

    def _said(self, exc: BaseException) -> str:
        return without_secrets(str(exc), self._secrets)

    def _translation(self, exc: Exception, what: str) -> StoreError:
        text = self._said(exc)
        if isinstance(exc, redis.exceptions.AskError):
            return self._moved(what, text)
        found = _FOR_A_WHILE.search(text)
        code = found[1] if found else ""
        if isinstance(exc, redis.exceptions.ReadOnlyError):
            code = "READONLY"
        elif isinstance(exc, (redis.exceptions.ClusterDownError, redis.exceptions.MasterDownError)):
            code = "CLUSTERDOWN"
        if code in _WRONG_SERVER:
            self._leave()
        if code == "READONLY":
            return StoreUnavailable(f"Redis can't serve {what} now: {self._read_only()}")
        if code:
            return StoreUnavailable(f"Redis can't serve {what} now: {text}")
        if isinstance(exc, redis.exceptions.AuthenticationError):
            # It may be that the password is just being changed.
            return StoreUnavailable(
                f"Redis refused the login, for {what}: {text.rstrip('.')}. Check the user and the password of "
                f"{self._target.display} ({self._setting})"
            )
        if isinstance(exc, _CLASSES):
            return StoreUnavailable(f"Redis gave no answer to {what}: {text}{self._hint(text)}")
        if isinstance(exc, redis.exceptions.NoPermissionError) or _NO_PERMISSION.search(text):
            return StoreError(
                f"Redis refused {what}: {text.rstrip('.')}. The user of {self._target.display} ({self._setting}) needs "
                "the rules in docs/redis.md"
            )
        return StoreError(f"Redis refused {what}: {text}")

    def _moved(self, what: str, text: str) -> StoreError:
        if self._target.kind == "cluster":
            self._leave()
            return StoreUnavailable(f"Redis can't serve {what} now: its keys are with another node ({text})")
        return StoreError(
            f"Redis refused {what}: {self._target.display} is a node of a cluster. Set leaderbeat_redis_url = "
            "'redis+cluster://host:port;host:port', with some of its nodes"
        )

    def _read_only(self) -> str:
        if self._target.kind != "server":
            return "the primary has become a replica, and is looked for again"
        return (
            f"{self._target.display} ({self._setting}) is a read-only replica. If that lasts, set leaderbeat_redis_url "
            "to the primary, or to the Sentinels that know it (sentinel://host;host)"
        )

    def _hint(self, text: str) -> str:
        where = "in the URL or in leaderbeat_redis_options"
        if self._target.sentinel_tls:
            where += ", or for Sentinels with options of their own in sentinel_kwargs"
        if (self._target.tls or self._target.sentinel_tls) and _UNREADABLE.search(text):
            return (
                " A file that the options of TLS name can't be read: check ssl_ca_certs, ssl_certfile, ssl_keyfile and "
                f"ssl_password, {where}"
            )
        if "CERTIFICATE_VERIFY_FAILED" not in text:
            return ""
        # As OpenSSL says it, of a host name as of an address.
        if "certificate is not valid for" in text:
            return (
                f" A certificate of {self._target.display} is for another name: use the name in it, or set "
                f"ssl_check_hostname to false, {where}. See docs/redis.md, TLS"
            )
        return (
            f" The certificate of {self._target.display} isn't trusted: set ssl_ca_certs to the file of its "
            f"certificate authority, {where}"
        )
