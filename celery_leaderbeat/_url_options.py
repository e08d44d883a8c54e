"""The options that may stand in the query of a Redis URL: their names, their types, and their TLS part.

One table for `redis_url` and for the mappings of TLS options that Celery has (`broker_use_ssl`).
"""

from __future__ import annotations

import difflib
import math
import re
import ssl
from collections.abc import Callable, Collection, Mapping
from typing import Any

from celery_leaderbeat.errors import SettingsError

__all__ = ["OPTIONS", "SECRET", "count", "nearest", "tls_options", "verifying"]

_CERT_REQS = {
    "none": "none", "cert_none": "none", "0": "none",
    "optional": "optional", "cert_optional": "optional", "1": "optional",
    "required": "required", "cert_required": "required", "2": "required",
}  # fmt: skip
_FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def nearest(name: str, names: Collection[str]) -> str:
    """The tail of a message about an unknown `name`: the nearest of `names`, or all of them."""
    close = difflib.get_close_matches(name, sorted(names), n=1)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(names))}"


def tls_options(
    options: Mapping[str, Any], setting: str, known: Collection[str] | None = None
) -> dict[str, Any]:
    """The `ssl_*` options of a mapping such as Celery's `broker_use_ssl`, checked and in redis-py's terms.

    Parameters:
        options: as set by the user; None as a value counts as not set.
        setting: where they come from, for messages.
        known: the accepted names; those that a URL may hold, if None.

    Raises:
        SettingsError: an unknown key, or an impossible `ssl_cert_reqs`. No other value is looked at.
    """
    names = frozenset(name for name in OPTIONS if name.startswith("ssl_")) if known is None else known
    for name in options:
        if name not in names:
            raise SettingsError(f"{setting} has the unknown key {name!r}; {nearest(str(name), names)}")
    # None is what older code passes for "verify nothing"; elsewhere it means the default.
    checked = {name: value for name, value in options.items() if value is not None or name == "ssl_cert_reqs"}
    if "ssl_cert_reqs" in checked:
        checked["ssl_cert_reqs"] = _cert_reqs(checked["ssl_cert_reqs"])
        if checked["ssl_cert_reqs"] is None:
            raise SettingsError(f"{setting}: ssl_cert_reqs takes {OPTIONS['ssl_cert_reqs'][1]}")
    return checked


def verifying(options: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """TLS options with others that win `above` them: certificates and names are verified unless they say otherwise.

    Parameters:
        options, above: in redis-py's terms. The lower ones may have been through here before.
    """
    merged = {"ssl_cert_reqs": "required", **options, **above}
    if merged["ssl_cert_reqs"] == "none":
        # Comparing names fails where certificates aren't verified.
        merged["ssl_check_hostname"] = False
    elif options.get("ssl_cert_reqs") == "none":
        # What the lower ones say of the name is only there because they verify nothing.
        merged["ssl_check_hostname"] = above.get("ssl_check_hostname", True)
    else:
        # The default of redis-py, written out: its older releases don't compare host names by default.
        merged.setdefault("ssl_check_hostname", True)
    return merged


def _cert_reqs(value: object) -> str | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return _CERT_REQS.get(str(int(value)))
    text = str(value).strip().lower()
    return _CERT_REQS.get(text.rpartition(".")[2])


def count(text: str) -> int | None:
    """A whole number from its digits, or None."""
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None


def _positive(text: str) -> int | None:
    return count(text) or None


def _seconds(text: str) -> float | None:
    number = float(text) if re.fullmatch(r"[0-9]+(\.[0-9]*)?|\.[0-9]+", text) else math.inf
    return number if 0 < number < math.inf else None


def _flag(text: str) -> bool | None:
    return _FLAGS.get(text.strip().lower())


def _text(text: str) -> str | None:
    return text or None


def _protocol(text: str) -> int | None:
    return int(text) if text in ("2", "3") else None


def _tls_version(text: str) -> ssl.TLSVersion | None:
    wanted = text.rpartition("TLSVersion.")[2].replace("TLSv1.", "TLSv1_")
    known = {"TLSv1_2": ssl.TLSVersion.TLSv1_2, "TLSv1_3": ssl.TLSVersion.TLSv1_3}
    return known.get(wanted) or {str(int(version)): version for version in known.values()}.get(wanted)


_BOOL = "true or false"
_TIME = "a number of seconds above 0"
_WORD = "a text that isn't empty"
#: Option of a URL -> (its parser, which answers None to a bad value; what it takes).
OPTIONS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "db": (count, "the number of a database"),
    "virtual_host": (lambda text: count(text.strip("/") or "0"), "the number of a database"),
    "username": (_text, _WORD),
    "password": (_text, _WORD),
    "client_name": (_text, _WORD),
    "socket_timeout": (_seconds, _TIME),
    "socket_connect_timeout": (_seconds, _TIME),
    "socket_keepalive": (_flag, _BOOL),
    "socket_read_size": (_positive, "a number of bytes above 0"),
    "health_check_interval": (count, "a whole number of seconds"),
    "retry_on_timeout": (_flag, _BOOL),
    "max_connections": (_positive, "a whole number above 0"),
    "protocol": (_protocol, "2 or 3"),
    "ssl_cert_reqs": (_cert_reqs, "none, optional or required (or CERT_NONE, ssl.CERT_NONE, …)"),
    "ssl_ca_certs": (_text, _WORD),
    "ssl_ca_path": (_text, _WORD),
    "ssl_ca_data": (_text, _WORD),
    "ssl_certfile": (_text, _WORD),
    "ssl_keyfile": (_text, _WORD),
    "ssl_password": (_text, _WORD),
    "ssl_check_hostname": (_flag, _BOOL),
    "ssl_min_version": (_tls_version, "TLSv1_2 or TLSv1_3"),
    "ssl_ciphers": (_text, _WORD),
    "ssl_validate_ocsp": (_flag, _BOOL),
    "ssl_validate_ocsp_stapled": (_flag, _BOOL),
}
#: Options whose values are never shown.
SECRET = frozenset({"username", "password", "ssl_password", "ssl_ca_data", "client_name"})
