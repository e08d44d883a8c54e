"""The text of a URL of Redis or of a broker: its parts, found by one expression, and what of it may be shown.

The standard library's parser isn't used, because its own errors quote pieces of the URL, and a piece of a
malformed URL may be a piece of its password.
"""

from __future__ import annotations

import re

from celery_leaderbeat._url_options import OPTIONS, SECRET

__all__ = ["ADDRESS", "ENCODE", "MASK", "URL", "port_ok", "sanitize"]

URL = re.compile(
    r"(?P<scheme>[A-Za-z][\w.+-]*)://(?P<authority>[^/?#]*)(?P<path>[^?#]*)"
    r"(?:\?(?P<query>[^#]*))?(?P<fragment>#.*)?",
    re.DOTALL,
)
ADDRESS = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+(?:%\w+)?)\]|(?P<host>[\w.%-]*))(?::(?P<port>[0-9]*))?")
MASK = "**"
ENCODE = "in a password, the characters / ? # ; @ : % are written as %2F %3F %23 %3B %40 %3A %25"


def sanitize(url: object) -> str:
    """`url` without anything that may be a password, for messages.

    What stands where a password could stand is masked, also in a URL that is malformed, so the result may
    show less than could be shown, but never more.
    """
    if not isinstance(url, str):
        return f"a value of type {type(url).__name__}"
    if not url.strip():
        return "empty"
    found = URL.fullmatch(url.strip())
    if found is None:
        return "not a URL"
    scheme, authority, path, query = found["scheme"], found["authority"], found["path"], found["query"]
    socket = scheme.lower() == "unix" or scheme.lower().endswith("socket")
    behind = path + (query or "") + (found["fragment"] or "")
    # An unescaped separator inside a password moves the rest of it to where path and query stand.
    if ";" in url or ("@" in behind and not (socket and not authority)):
        return f"{scheme}://{MASK}"
    user, at, address = authority.rpartition("@")
    if at:
        name, _, password = user.partition(":")
        # A lone name may be a password whose colon was forgotten, or is on its wrong side.
        user = f"{name}:{MASK}@" if password and re.fullmatch(r"[\w.%-]*", name) else f"{MASK}@"
    if not port_ok(ADDRESS.fullmatch(address)):
        if not at:
            # `redis://:password` without a host: the password may go on in path and query.
            return f"{scheme}://{MASK}"
        address = MASK
    trusted = (at or not authority) if socket else re.fullmatch(r"/*[0-9]*/*", path)
    shown = path if trusted else f"/{MASK}"
    options = "" if query is None else f"?{_sanitized_query(query)}"
    return f"{scheme}://{user}{address}{shown}{options}{'#' + MASK if found['fragment'] else ''}"


def port_ok(address: re.Match[str] | None) -> bool:
    """Whether an address was found, and its port, if it has one, is from 1 to 65535."""
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
        pairs.append(f"{name}={MASK}" if named else MASK)
        clean = False
    return "&".join(pairs)
